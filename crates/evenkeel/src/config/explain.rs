//! `evenkeel config --explain`: every key there is.

use super::Settings;
use super::setting::in_toml;
use super::table::{Key, UnlessGiven};

/// Columns of the type and of the meaning; longer ones go on in the next line.
const KIND_WIDTH: usize = 34;
const MEANING_WIDTH: usize = 47;

pub fn explain() -> String {
    let sections = Settings::sections();
    let width_of = |text: &dyn Fn(&Key) -> String| {
        sections.iter().flat_map(|section| &section.keys).map(|key| text(key).chars().count()).max().unwrap_or(0)
    };
    let widths = [width_of(&|key| key.name.to_owned()), width_of(&unless_given), KIND_WIDTH];
    let mut lines = Vec::new();
    for section in &sections {
        lines.push(format!("[{}]  {}", section.name, section.meaning));
        for key in &section.keys {
            lines.extend(rows(key, widths));
        }
        lines.push(String::new());
    }
    lines.push(
        "Columns: key, default (`-` is not set), type, meaning. Paths are relative to the current folder.".to_owned(),
    );
    lines.join("\n")
}

fn unless_given(key: &Key) -> String {
    match &key.unless_given {
        UnlessGiven::Default(value) => in_toml(value),
        UnlessGiven::Unset => "-".to_owned(),
        UnlessGiven::Required => "required".to_owned(),
    }
}

fn rows(key: &Key, [name_width, default_width, kind_width]: [usize; 3]) -> Vec<String> {
    let (kind, meaning) = (wrap(&key.kind.to_string(), KIND_WIDTH), wrap(&key.meaning, MEANING_WIDTH));
    let cell = |lines: &[String], row: usize| lines.get(row).cloned().unwrap_or_default();
    let row = |row: usize| {
        let (name, default) = if row == 0 { (key.name, unless_given(key)) } else { ("", String::new()) };
        let (kind, meaning) = (cell(&kind, row), cell(&meaning, row));
        format!("  {name:name_width$}  {default:default_width$}  {kind:kind_width$}  {meaning}").trim_end().to_owned()
    };
    (0..kind.len().max(meaning.len())).map(row).collect()
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is always a line");
        if last.is_empty() {
            last.push_str(word);
        } else if last.chars().count() + 1 + word.chars().count() <= width {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}
