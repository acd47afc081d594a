//! Text from files and from users, made safe to print.

/// The beginning of a text, at most so many characters; control characters, which terminals obey, become spaces.
pub fn shortened(text: &str, most_chars: usize) -> String {
    let mut shown: String = text.chars().take(most_chars).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(most_chars).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_and_control_characters_are_spaces() {
        for (text, expected) in
            [("", ""), ("four", "four"), ("fives", "five…"), ("a\x1b[b", "a [b"), ("äöüßé", "äöüß…")]
        {
            assert_eq!(shortened(text, 4), expected, "{text:?}");
        }
    }
}
