//! A cluster as the text that describes it.

use std::collections::BTreeMap;
use std::fmt::Display;

use crate::cluster::{Cluster, DeviceRates, Host, LinkRates};

/// Comments of a description: lines that are written above what they are about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comments {
    pub whole: Vec<String>,
    pub devices: BTreeMap<String, Vec<String>>,
    pub links: BTreeMap<String, Vec<String>>,
}

impl Cluster {
    /// What [`Cluster::parse`] reads as the same cluster.
    pub fn to_toml(&self, comments: &Comments) -> String {
        let none = Vec::new();
        let mut sections = Vec::new();
        if !comments.whole.is_empty() {
            sections.push(remarks(&comments.whole));
        }
        for (name, device) in &self.devices {
            let about = remarks(comments.devices.get(name).unwrap_or(&none));
            sections.push(about + &section("device", name, &device.keys()));
        }
        for (name, link) in &self.links {
            let about = remarks(comments.links.get(name).unwrap_or(&none));
            sections.push(about + &section("link", name, &link.keys()));
        }
        sections.extend(self.hosts.iter().map(|host| format!("[[host]]\n{}", lines(&host.keys()))));
        sections.join("\n")
    }
}

type Keys = Vec<(&'static str, String)>;

impl DeviceRates {
    fn keys(&self) -> Keys {
        vec![
            ("kind", quoted(self.kind.name())),
            ("source", quoted(&self.source)),
            ("bf16_tflops", number(self.bf16_tflops)),
            ("f32_tflops", number(self.f32_tflops)),
            ("memory_gb", number(self.memory_gb)),
            ("memory_gb_per_s", number(self.memory_gb_per_s)),
            ("efficiency", number(self.efficiency)),
        ]
    }
}

impl LinkRates {
    fn keys(&self) -> Keys {
        vec![
            ("source", quoted(&self.source)),
            ("gb_per_s", number(self.gb_per_s)),
            ("latency_us", number(self.latency_us)),
        ]
    }
}

impl Host {
    fn keys(&self) -> Keys {
        let counts: Vec<String> = self.devices.iter().map(|(name, count)| format!("{} = {count}", key(name))).collect();
        let mut keys = vec![("count", self.count.to_string()), ("devices", format!("{{ {} }}", counts.join(", ")))];
        keys.extend(self.link.as_ref().map(|link| ("link", quoted(link))));
        keys.extend(self.network.as_ref().map(|network| ("network", quoted(network))));
        keys
    }
}

fn section(kind: &str, name: &str, keys: &Keys) -> String {
    format!("[{kind}.{}]\n{}", key(name), lines(keys))
}

fn lines(keys: &Keys) -> String {
    keys.iter().map(|(key, value)| format!("{key} = {value}\n")).collect()
}

/// A line break inside a remark would end the comment.
fn remarks(lines: &[String]) -> String {
    let remark = |line: &String| format!("# {}", line.replace(char::is_control, " ")).trim_end().to_owned() + "\n";
    lines.iter().map(remark).collect()
}

/// A float in TOML has a point or an exponent, as Rust writes it for debugging.
fn number(value: f64) -> String {
    format!("{value:?}")
}

/// A name, between quotes if it needs them.
fn key(name: &str) -> String {
    let is_bare = |character: char| character.is_ascii_alphanumeric() || "-_".contains(character);
    if !name.is_empty() && name.chars().all(is_bare) { name.to_owned() } else { quoted(name) }
}

fn quoted(text: impl Display) -> String {
    let mut quoted = String::from("\"");
    for character in text.to_string().chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control.is_control() => quoted += &format!("\\u{:04X}", u32::from(control)),
            other => quoted.push(other),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_as_the_same_cluster() {
        let examples = [
            include_str!("../../../examples/clusters/8-h200.toml"),
            include_str!("../../../examples/clusters/mixed.toml"),
            include_str!("../../../examples/clusters/1024-h200.toml"),
        ];
        for text in examples {
            let cluster = Cluster::parse(text).unwrap();
            let written = cluster.to_toml(&Comments::default());
            assert_eq!(Cluster::parse(&written).unwrap(), cluster, "{written}");
        }
    }

    #[test]
    fn names_and_remarks_cannot_break_the_text() {
        let strange = "a \"b\" \\ ]\n[x\u{7f}";
        let mut cluster = Cluster::parse(include_str!("../../../examples/clusters/mixed.toml")).unwrap();
        let rates = DeviceRates { source: strange.to_owned(), ..cluster.devices["h200"].clone() };
        cluster.devices.insert(strange.to_owned(), rates);
        cluster.hosts[0].devices.insert(strange.to_owned(), 1);
        let remarks = vec!["two\nlines".to_owned(), String::new()];
        let comments =
            Comments { whole: remarks.clone(), devices: [(strange.to_owned(), remarks)].into(), ..Comments::default() };
        let written = cluster.to_toml(&comments);
        assert_eq!(Cluster::parse(&written).unwrap(), cluster, "{written}");
        assert_eq!(written.matches("# two lines\n#\n").count(), 2, "{written}");
    }
}
