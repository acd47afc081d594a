//! Pages, text and rectangles as SVG, and how wide text is.

use super::colour::INK;

/// Widths of characters in font sizes, none below that of DejaVu Sans, a wide one of the fonts that "sans-serif" means.
const NARROW: f64 = 0.42;
const USUAL: f64 = 0.64;
const BROAD: f64 = 0.84;
const WIDE: f64 = 1.0;

/// A picture of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Page<'a> {
    pub width: f64,
    pub height: f64,
    pub font_size: f64,
    pub background: &'a str,
    /// Describes the picture for people who cannot see it.
    pub title: &'a str,
}

impl Page<'_> {
    /// `inside` is markup.
    pub fn markup(&self, inside: &str) -> String {
        let Page { width, height, font_size, background, title } = *self;
        let title = escaped(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" font-family=\"sans-serif\" font-size=\"{font_size}\" fill=\"{INK}\" role=\"img\" \
             aria-label=\"{title}\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"{background}\"/>\n{inside}</svg>\n"
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rect {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

impl Rect {
    /// `attributes` and `inside` are markup.
    pub fn markup(&self, attributes: &str, inside: &str) -> String {
        let Rect { x, y, width, height } = self;
        let place = format!("x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\"");
        if inside.is_empty() {
            return format!("<rect {place} {attributes}/>\n");
        }
        format!("<rect {place} {attributes}>{inside}</rect>\n")
    }
}

pub fn text(x: f64, y: f64, attributes: &str, words: &str) -> String {
    format!("<text x=\"{x:.2}\" y=\"{y:.2}\" {attributes}>{}</text>\n", escaped(words))
}

/// Words as they may stand in text and attributes. Characters that XML cannot write become spaces.
pub fn escaped(words: &str) -> String {
    let mut markup = String::with_capacity(words.len());
    for character in words.chars() {
        match character {
            '<' => markup += "&lt;",
            '>' => markup += "&gt;",
            '&' => markup += "&amp;",
            '"' => markup += "&quot;",
            '\u{fffe}' | '\u{ffff}' => markup.push(' '),
            control if control.is_control() && control != '\n' => markup.push(' '),
            other => markup.push(other),
        }
    }
    markup
}

/// The width of text, rather too wide than too narrow.
pub fn width(words: &str, font_size: f64) -> f64 {
    words.chars().map(character_width).sum::<f64>() * font_size
}

fn character_width(character: char) -> f64 {
    match character {
        ' ' | ',' | '.' | '-' | '·' | 'f' | 'i' | 'j' | 'l' | 'r' | 't' => NARROW,
        'm' | 'w' | 'M' | 'W' | '@' | '%' => WIDE,
        'a'..='z' | '0'..='9' => USUAL,
        character if character.is_ascii() => BROAD,
        _ => WIDE,
    }
}

/// As much of the words as fits in the room.
pub fn elided(words: &str, font_size: f64, room: f64) -> String {
    if width(words, font_size) <= room {
        return words.to_owned();
    }
    let mut left = room - width("…", font_size);
    let fits = |character: &char| {
        left -= character_width(*character) * font_size;
        left >= 0.0
    };
    words.chars().take_while(fits).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guess is less than this many times the measured width.
    const MOST: f64 = 1.25;

    #[test]
    fn text_is_guessed_no_narrower_than_it_is() {
        // In DejaVu Sans, by the advances of its glyphs.
        let cases = [
            ("forward attention 3, part 1", 13.33),
            ("attention 3 · 1", 7.11),
            ("backward weight", 8.54),
            ("sum gradients", 7.18),
            ("A3·1", 2.27),
            ("A3", 1.32),
            ("QO4", 2.21),
            ("M3·0", 2.45),
        ];
        for (words, measured) in cases {
            let guess = width(words, 1.0);
            assert!((measured..MOST * measured).contains(&guess), "{words}: {guess} for {measured}");
        }
    }

    #[test]
    fn long_words_are_cut_to_their_room() {
        let cases = [("short", 100.0, "short"), ("much too long", 4.0, "much…"), ("none", 0.0, "…"), ("", 0.0, "")];
        for (words, room, expected) in cases {
            assert_eq!(elided(words, 1.0, room), expected, "{words} in {room}");
        }
    }
}
