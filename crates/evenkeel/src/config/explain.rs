//! `evenkeel config --explain`: all keys, as a table for the terminal or as docs/configuration.md.

use super::Settings;
use super::setting::in_toml;
use super::table::{Key, UnlessGiven};

/// Columns of the type and of the meaning; longer ones go on in the next line.
const KIND_WIDTH: usize = 34;
const MEANING_WIDTH: usize = 47;

/// Columns of a line of Markdown.
const PAGE_WIDTH: usize = 130;

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

/// docs/configuration.md, without the newline at its end.
pub fn explain_in_markdown() -> String {
    let sections = Settings::sections();
    let names: Vec<String> = sections
        .iter()
        .flat_map(|section| section.keys.iter().map(move |key| format!("{}.{}", section.name, key.name)))
        .collect();
    let mut lines = wrap(MARKDOWN_HEAD, PAGE_WIDTH);
    lines.splice(0..0, ["# Configuration".to_owned(), String::new()]);
    for section in &sections {
        lines.extend([String::new(), format!("## [{}]", section.name), String::new()]);
        lines.extend(wrap(&mark_keys(&section.meaning, &names), PAGE_WIDTH));
        lines.push(String::new());
        for key in &section.keys {
            lines.extend(item(section.name, key, &names));
        }
    }
    lines.join("\n")
}

const MARKDOWN_HEAD: &str = "`evenkeel config --explain --markdown` writes this page from the table of keys in the program. \
    A configuration is a TOML file; each heading below is one of its sections. Every key can also be set on the command line: \
    `--set section.key=value`. Paths are relative to the current folder. `evenkeel config FILE` prints a configuration with \
    every default filled in, or all of its mistakes.";

/// `` - `section.key` = `default` (type): meaning ``
fn item(section: &str, key: &Key, names: &[String]) -> Vec<String> {
    let (default, note) = match &key.unless_given {
        UnlessGiven::Default(value) => (format!(" = `{}`", in_toml(value)), ""),
        UnlessGiven::Unset => (String::new(), ", optional"),
        UnlessGiven::Required => (String::new(), ", required"),
    };
    let meaning = mark_keys(&key.meaning, names);
    let text = format!("- `{section}.{}`{default} ({}{note}): {meaning}", key.name, key.kind);
    let indented = |(row, line): (usize, String)| if row == 0 { line } else { format!("  {line}") };
    wrap(&text, PAGE_WIDTH - 2).into_iter().enumerate().map(indented).collect()
}

/// Sets the names of keys in a text as code.
fn mark_keys(text: &str, names: &[String]) -> String {
    let mark = |word: &str| {
        let name = word.trim_end_matches([',', '.', ';', ':', ')']);
        let is_key = names.iter().any(|known| known == name);
        if is_key { format!("`{name}`{}", &word[name.len()..]) } else { word.to_owned() }
    };
    text.split(' ').map(mark).collect::<Vec<_>>().join(" ")
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
