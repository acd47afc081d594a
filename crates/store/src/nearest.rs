//! The name that was probably meant.

use strsim::osa_distance as distance;

/// Longer names are not misspelt keys, and comparing costs their length times that of every key.
const LONGEST: usize = 64;

/// The candidate that `name` is most likely a misspelling or another form of.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > LONGEST {
        return None;
    }
    let name = name.to_lowercase().replace('-', "_");
    let forgiven = match name.len() {
        0 | 1 => 0,
        // Two wrong letters of three are another word.
        2 | 3 => 1,
        length => (length / 3).max(2),
    };
    let likely = |candidate: &&str| distance(&name, candidate) <= forgiven || is_form(&name, candidate);
    candidates.into_iter().filter(likely).min_by_key(|candidate| distance(&name, candidate))
}

/// `batch_size` for `batch`, `learning_rate` for `lr`.
fn is_form(name: &str, candidate: &str) -> bool {
    let words = || name.split('_').filter(|word| !word.is_empty());
    let initials: String = words().filter_map(|word| word.chars().next()).collect();
    words().any(|word| word == candidate) || initials == candidate
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_and_foreign_names_find_the_key() {
        let keys = ["batch", "steps", "lr", "min_lr", "weight_decay", "warmup_steps"];
        let cases = [
            ("bacth", Some("batch")),
            ("batch_size", Some("batch")),
            ("learning_rate", Some("lr")),
            ("weight-decay", Some("weight_decay")),
            ("max_steps", Some("steps")),
            ("warmup_step", Some("warmup_steps")),
            ("optimizer", None),
            ("stepz", Some("steps")),
            ("rl", Some("lr")),
            ("r", None),
            ("foo", None),
            ("", None),
        ];
        for (name, expected) in cases {
            assert_eq!(nearest(name, keys), expected, "{name}");
        }
        assert_eq!(nearest("foo", ["ffn"]), None);
        assert_eq!(nearest(&"batch_".repeat(1 << 20), keys), None);
    }
}
