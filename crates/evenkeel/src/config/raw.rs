//! The given values and their origins, and the mistakes in each key by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;

use evenkeel_store::nearest;
use toml::Value;
use toml::de::{DeTable, DeValue};

use super::setting::{Bounds, Setting, SettingKind, in_toml};
use super::table::{Section, Source, UnlessGiven};
use super::{RUN_CONFIG, RUN_STRATEGY, Settings, foreign};
use crate::Mistake;

/// Values as they were given, not yet checked against each other. Later ones replace earlier ones.
pub struct RawConfig {
    sections: Vec<Section>,
    /// `section.key` → value.
    given: BTreeMap<String, Given>,
    /// Keys whose value could not be read; placeholders stand for them.
    unread: BTreeSet<String>,
    findings: Vec<Finding>,
    /// A file that could not be read whole may hold keys that were not seen, so a missing key proves nothing.
    pub(super) incomplete: bool,
    /// Settings that may not be as the user thinks.
    pub(super) notes: Vec<String>,
    /// The model is only evaluated, so keys about training may be missing.
    pub(super) evaluates: bool,
}

struct Given {
    value: Value,
    place: Origin,
}

/// The origin of a value. Ordered as mistakes are reported.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    File {
        name: String,
        line: usize,
    },
    /// A key of a file that is not the run's own.
    Key {
        file: String,
        key: String,
    },
    Flag(&'static str),
    Nowhere,
}

struct Finding {
    place: Origin,
    what: String,
    hint: Option<String>,
}

/// Whether a run wrote this section of its run.toml to show what followed from the others.
fn is_run_strategy(file: &str, section: &str) -> bool {
    section == RUN_STRATEGY && Path::new(file).file_name().is_some_and(|name| name == RUN_CONFIG)
}

impl RawConfig {
    pub fn new() -> RawConfig {
        let (given, unread) = (BTreeMap::new(), BTreeSet::new());
        let (findings, notes) = (Vec::new(), Vec::new());
        let sections = Settings::sections();
        RawConfig { sections, given, unread, findings, incomplete: false, notes, evaluates: false }
    }

    /// Takes everything from a file that can be understood and notes the rest. `name` is for messages.
    pub fn read_file(&mut self, name: &str, text: &str) {
        let (document, errors) = DeTable::parse_recoverable(text);
        if let Some((form, hint)) = other_form(name, text).filter(|_| !errors.is_empty()) {
            self.incomplete = true;
            let place = Origin::File { name: name.to_owned(), line: 1 };
            return self.note(place, format!("is {form}, expected TOML"), Some(hint.to_owned()));
        }
        let line_ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
        let line_of = |span: Range<usize>| line_ends.partition_point(|&end| end < span.start) + 1;
        let mut broken_lines = BTreeSet::new();
        for error in errors {
            let line = line_of(error.span().unwrap_or(0..0));
            // One slip often has several consequences on its line; the first names it best.
            if broken_lines.insert(line) {
                let place = Origin::File { name: name.to_owned(), line };
                self.note(place, format!("is not TOML: {}", printable(error.message())), None);
            }
        }
        self.incomplete |= !broken_lines.is_empty();
        for (section, content) in document.get_ref() {
            let place_of = |span: Range<usize>| Origin::File { name: name.to_owned(), line: line_of(span) };
            let section_place = place_of(section.span());
            let section_name: &str = section.get_ref();
            let known = self.sections.iter().any(|section| section.name == section_name);
            match content.get_ref() {
                DeValue::Table(keys) if known => {
                    for (key, value) in keys {
                        let place = place_of(key.span());
                        let broken = matches!(place, Origin::File { line, .. } if broken_lines.contains(&line));
                        let value = Some(value.get_ref()).filter(|_| !broken).map(owned);
                        self.give(section_name, key.get_ref(), place, value);
                    }
                }
                DeValue::String(word) if section_name == "parallel" && word == "auto" => {
                    self.give(section_name, "auto", section_place, Some(Value::Boolean(true)));
                }
                DeValue::Table(_) if is_run_strategy(name, section_name) => (),
                DeValue::Table(_) => self.note_unknown_section(section_place, section_name),
                _ if matches!(&section_place, Origin::File { line, .. } if broken_lines.contains(line)) => (),
                value if known => {
                    let found = show(&owned(value));
                    self.note(section_place, format!("`{section_name}` is {found}, expected a section"), None);
                }
                _ => self.note_unknown_key(section_place, None, section_name),
            }
        }
    }

    /// `section.key=value` from the command line. Texts need no quotes, and a list of one no brackets.
    pub fn set(&mut self, flag: &'static str, assignment: &str) {
        let place = Origin::Flag(flag);
        let parts = assignment.split_once('=').and_then(|(name, words)| Some((name.trim().split_once('.')?, words)));
        let Some(((section, key), words)) = parts else {
            let what = format!("`{}` is no assignment, expected section.key=value", printable(assignment));
            return self.note(place, what, Some("for example --set train.lr=1e-4".to_owned()));
        };
        let Some(known) = self.sections.iter().find(|known| known.name == section) else {
            return self.note_unknown_section(place, section);
        };
        let kind = known.keys.iter().find(|known| known.name == key).map(|known| known.kind);
        let value = kind.map(|kind| from_words(kind, words));
        self.give(section, key, place, value);
    }

    /// Adds the value of a setting from a file beside the run's own. Flags win over it; another file must have the same value.
    pub(super) fn give_also(&mut self, place: Origin, setting: &str, value: Value) {
        match self.given.get(setting) {
            None if self.unread.contains(setting) => (),
            None => drop(self.given.insert(setting.to_owned(), Given { value, place })),
            Some(Given { place: Origin::Flag(_), .. }) => (),
            Some(given) if is_same(&given.value, &value) => (),
            Some(given) => {
                let (other, found) = (&given.place, show(&given.value));
                let what = format!("`{setting}` is {} by this, but {found} in {other}", show(&value));
                let hint = format!("leave one of them out, write \"auto\", or decide with --set {setting}=…");
                self.note(place, what, Some(hint));
            }
        }
    }

    /// Replaces the given value.
    pub(super) fn give_by_flag(&mut self, flag: &'static str, setting: &str, value: Value) {
        self.unread.remove(setting);
        self.given.insert(setting.to_owned(), Given { value, place: Origin::Flag(flag) });
    }

    /// Treats a setting as not given.
    pub(super) fn forget(&mut self, setting: &str) {
        self.given.remove(setting);
    }

    pub(super) fn names_a_model(&self) -> bool {
        self.given.keys().any(|key| describes_a_model(key))
    }

    /// Treats the settings that say which model it is as not given.
    pub(super) fn forget_model(&mut self) {
        self.given.retain(|key, _| !describes_a_model(key));
    }

    /// Whether the command line gives it; no file can change it then.
    pub(super) fn is_given_by_flag(&self, setting: &str) -> bool {
        matches!(self.given.get(setting), Some(Given { place: Origin::Flag(_), .. }))
    }

    /// The given value of a setting, or its default, if it is a number.
    pub(super) fn number(&self, setting: &str) -> Option<f64> {
        let of_section = |section: &Section| {
            let key = setting.strip_prefix(section.name)?.strip_prefix('.')?;
            let known = section.keys.iter().find(|known| known.name == key)?;
            let UnlessGiven::Default(value) = &known.unless_given else { return None };
            as_number(value)
        };
        match self.given.get(setting) {
            Some(given) => as_number(&given.value),
            None => self.sections.iter().find_map(of_section),
        }
    }

    /// The same if it is a whole number, and not 0.
    pub(super) fn whole(&self, setting: &str) -> Option<u64> {
        let number = self.number(setting).filter(|number| number.fract() == 0.0 && (1.0..=1e15).contains(number))?;
        Some(number as u64)
    }

    /// A file that could not be read at all.
    pub fn note_unreadable(&mut self, error: &evenkeel_store::Error, hint: &str) {
        self.incomplete = true;
        self.note(Origin::Nowhere, error.to_string(), Some(hint.to_owned()));
    }

    /// Notes that the values of these keys contradict each other, unless one of them could not be read. The first given one of
    /// them is the place of the mistake.
    pub(super) fn note_contradiction(&mut self, keys: &[&str], what: String, hint: Option<&str>) {
        if keys.iter().any(|&key| self.unread.contains(key)) {
            return;
        }
        let place =
            keys.iter().find_map(|&key| self.given.get(key)).map_or(Origin::Nowhere, |given| given.place.clone());
        self.note(place, what, hint.map(str::to_owned));
    }

    pub(super) fn is_given(&self, key: &str) -> bool {
        self.given.contains_key(key)
    }

    pub(super) fn given_in(&self, section: &str) -> Vec<String> {
        let is_inside = |key: &&String| key.split_once('.').is_some_and(|(of, _)| of == section);
        self.given.keys().filter(is_inside).cloned().collect()
    }

    /// All mistakes: in the order of the file, then of the command line, then missing keys.
    pub(super) fn into_mistakes(mut self) -> Vec<Mistake> {
        self.findings.sort_by(|a, b| a.place.cmp(&b.place));
        let mistake = |finding: Finding| Mistake {
            what: match &finding.place {
                Origin::Nowhere => finding.what,
                place => format!("{place}: {}", finding.what),
            },
            hint: finding.hint,
        };
        self.findings.into_iter().map(mistake).collect()
    }

    /// `value` is `None` if the file is broken or the key is unknown.
    fn give(&mut self, section: &str, key: &str, place: Origin, value: Option<Value>) {
        let known = self.sections.iter().find(|known| known.name == section);
        if !known.is_some_and(|known| known.keys.iter().any(|known| known.name == key)) {
            return self.note_unknown_key(place, Some(section), key);
        }
        let name = format!("{section}.{key}");
        match value {
            Some(value) => {
                self.unread.remove(&name);
                self.given.insert(name, Given { value, place });
            }
            None => {
                self.unread.insert(name);
            }
        }
    }

    pub(super) fn note(&mut self, place: Origin, what: String, hint: Option<String>) {
        self.findings.push(Finding { place, what, hint });
    }

    fn note_unknown_section(&mut self, place: Origin, section: &str) {
        let names: Vec<&str> = self.sections.iter().map(|known| known.name).collect();
        let hint = match nearest(section, names.iter().copied()) {
            Some(meant) => format!("did you mean [{meant}]?"),
            None => format!("the sections are {}", names.join(", ")),
        };
        self.note(place, format!("unknown section `{}`", printable(section)), Some(hint));
    }

    fn note_unknown_key(&mut self, place: Origin, section: Option<&str>, key: &str) {
        let of = |wanted: Option<&str>| {
            let sections = self.sections.iter().filter(move |known| wanted.is_none_or(|wanted| known.name == wanted));
            sections.flat_map(|known| known.keys.iter().map(|key| (known.name, key.name))).collect::<Vec<_>>()
        };
        let meant = |wanted: Option<&str>| {
            let keys = of(wanted);
            let name = nearest(key, keys.iter().map(|&(_, key)| key))?;
            keys.into_iter().find(|&(_, key)| key == name)
        };
        let elsewhere = of(None).into_iter().find(|&(_, name)| name == key);
        let ours = meant(section).filter(|_| section.is_some()).or(elsewhere).or_else(|| meant(None));
        let ours = ours.map(|(section, key)| format!("{section}.{key}"));
        let hint = match (key, foreign::key(key).map(str::to_owned).or(ours)) {
            ("warmup_ratio", Some(meant)) => format!("set `{meant}` to the ratio times the steps of the run"),
            (_, Some(meant)) => format!("did you mean `{meant}`?"),
            (_, None) => "`evenkeel config --explain` lists every key".to_owned(),
        };
        let name = section.map_or(key.to_owned(), |section| format!("{section}.{key}"));
        self.note(place, format!("unknown key `{}`", printable(&name)), Some(hint));
    }
}

impl Source for RawConfig {
    fn take<T: Setting>(&mut self, section: &'static str, key: &'static str, default: Option<T>, bounds: Bounds) -> T {
        let name = format!("{section}.{key}");
        let kind = T::kind(bounds);
        let Some(given) = self.given.get(&name) else {
            if let Some(value) = default.or_else(T::absent) {
                return value;
            }
            if !self.incomplete {
                let what = format!("`{name}` is missing, expected {}", kind.expected());
                let hint = self.evaluates && name == "data.source";
                self.note(Origin::Nowhere, what, hint.then(|| "name a file to evaluate on: --data FILE".to_owned()));
            }
            self.unread.insert(name);
            return T::placeholder();
        };
        if let Some(value) = T::read(&given.value, bounds) {
            return value;
        }
        let what = format!("`{name}` is {}, expected {}", show(&given.value), kind.expected());
        let (place, hint) = (given.place.clone(), misreading(kind, &given.value));
        self.note(place, what, hint);
        self.unread.insert(name);
        T::placeholder()
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File { name, line } => write!(out, "{name}:{line}"),
            Origin::Key { file, key } => write!(out, "{file}: `{key}`"),
            Origin::Flag(flag) => out.write_str(flag),
            Origin::Nowhere => Ok(()),
        }
    }
}

/// The key that an unknown flag such as `--max-length` probably stands for.
pub fn key_of_flag(flag: &str) -> Option<String> {
    let name = flag.trim_start_matches('-').replace('-', "_");
    let sections = Settings::sections();
    let keys = || sections.iter().flat_map(|section| section.keys.iter().map(move |key| (section.name, key.name)));
    let ours = || {
        let meant = nearest(&name, keys().map(|(_, key)| key))?;
        keys().find(|&(_, key)| key == meant).map(|(section, key)| format!("{section}.{key}"))
    };
    foreign::key(&name).map(str::to_owned).or_else(ours)
}

/// The format of a file that is no TOML, and what to do with it.
fn other_form(name: &str, text: &str) -> Option<(&'static str, &'static str)> {
    let is_named = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    let first =
        text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#') && *line != "---")?;
    let is_key = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
    let begins_as_yaml = first
        .split_once(':')
        .is_some_and(|(key, value)| is_key(key.trim()) && (value.is_empty() || value.starts_with(' ')));
    if first.starts_with('{') {
        Some(("JSON", "a DeepSpeed configuration goes behind --deepspeed, beside the run's own"))
    } else if is_named(&[".yaml", ".yml"]) || begins_as_yaml {
        Some((
            "YAML",
            "write `[train]` for `train:` and `lr = 1e-4` for `lr: 1e-4`; `evenkeel config --explain` lists every key",
        ))
    } else {
        None
    }
}

/// How a value of the wrong type or name may have come about.
fn misreading(kind: SettingKind, value: &Value) -> Option<String> {
    if let (SettingKind::Numbers(_), Some([Value::String(text)])) = (kind, value.as_array().map(Vec::as_slice)) {
        return text.contains(',').then(|| format!("write [{text}]"));
    }
    let text = value.as_str()?;
    match kind {
        SettingKind::Choice(names) => {
            let meant = foreign::value(text, names).or_else(|| nearest(text, names.iter().copied()));
            meant.map(|meant| format!("did you mean \"{meant}\"?"))
        }
        SettingKind::Flag if text.parse::<bool>().is_ok() => Some("write it without quotes".to_owned()),
        SettingKind::Whole(_) | SettingKind::Number(_) if text.parse::<f64>().is_ok() => {
            Some("write it without quotes".to_owned())
        }
        SettingKind::Texts | SettingKind::Paths | SettingKind::Numbers(_) => Some("put it in brackets".to_owned()),
        _ => None,
    }
}

fn from_words(kind: SettingKind, words: &str) -> Value {
    let trimmed = words.trim();
    let quoted = trimmed.starts_with(['"', '\'']);
    let text = || Value::String(words.to_owned());
    if kind.is_text() && !quoted {
        return text();
    }
    let value = DeValue::parse(trimmed).map_or_else(|_| text(), |value| owned(value.get_ref()));
    if !kind.is_list() || value.is_array() {
        return value;
    }
    Value::Array(vec![if quoted { value } else { text() }])
}

fn owned(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::String(text.clone().into_owned()),
        // Numbers that do not fit an i64 are out of every key's bounds; as a float they can still be shown.
        DeValue::Integer(whole) => i64::from_str_radix(whole.as_str(), whole.radix())
            .map_or_else(|_| Value::Float(whole.as_str().parse().unwrap_or(f64::NAN)), Value::Integer),
        DeValue::Float(number) => Value::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => Value::Boolean(*flag),
        DeValue::Datetime(time) => Value::Datetime(*time),
        DeValue::Array(values) => Value::Array(values.iter().map(|value| owned(value.get_ref())).collect()),
        DeValue::Table(table) => Value::Table(
            table.iter().map(|(key, value)| (key.get_ref().clone().into_owned(), owned(value.get_ref()))).collect(),
        ),
    }
}

fn as_number(value: &Value) -> Option<f64> {
    value.as_float().or(value.as_integer().map(|whole| whole as f64))
}

/// Whether a key says which model it is.
fn describes_a_model(key: &str) -> bool {
    const OF_ANY_MODEL: [&str; 3] = ["model.seed", "model.ignore_keys", "model.new_head"];
    key.starts_with("model.") && !OF_ANY_MODEL.contains(&key)
}

/// Computed numbers may differ by rounding.
fn is_same(a: &Value, b: &Value) -> bool {
    match (as_number(a), as_number(b)) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-12 * a.abs(),
        _ => a == b,
    }
}

pub(super) fn show(value: &Value) -> String {
    match value {
        Value::String(text) => format!("\"{}\"", printable(text)),
        Value::Table(_) => "a table".to_owned(),
        value => printable(&in_toml(value)),
    }
}

/// The beginning of a text, without control characters.
pub(super) fn printable(text: &str) -> String {
    evenkeel_store::shortened(text, 80)
}
