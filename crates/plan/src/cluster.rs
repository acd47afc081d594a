//! Devices, hosts and the links between them, as a file describes them:
//!
//! ```toml
//! [device.h200]
//! source = "NVIDIA H200 data sheet"
//! bf16_tflops = 989.5
//! f32_tflops = 66.9
//! memory_gb = 141.0
//! memory_gb_per_s = 4800.0
//!
//! [link.nvlink4]
//! source = "NVIDIA H200 data sheet: 900 GB/s both ways together"
//! gb_per_s = 450.0
//! latency_us = 3.0
//!
//! [[host]]
//! count = 4
//! devices = { h200 = 8 }
//! link = "nvlink4"
//! network = "infiniband"
//! ```
//!
//! GB are 10⁹ bytes. A device's link and a host's network carry so much each way, for each device. A device of kind `cpu` is some
//! cores with their share of the host's memory; others are GPUs.

use std::collections::BTreeMap;

use evenkeel_device::CudaMemory;
use serde::Deserialize;

/// Devices of a cluster, at most: numbers in a file bound no allocation before they are checked against it.
const MOST_DEVICES: usize = 1 << 16;
/// Rates above are mistakes: an exaflop of a device, a petabyte per second.
const MOST: f64 = 1e6;

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    #[serde(rename = "device")]
    pub devices: BTreeMap<String, DeviceRates>,
    #[serde(rename = "link", default)]
    pub links: BTreeMap<String, LinkRates>,
    #[serde(rename = "host")]
    pub hosts: Vec<Host>,
}

/// The speed of a kind of device, as published or measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRates {
    #[serde(default)]
    pub kind: ClusterKind,
    /// The origin of the figures.
    pub source: String,
    pub bf16_tflops: f64,
    pub f32_tflops: f64,
    pub memory_gb: f64,
    pub memory_gb_per_s: f64,
    /// The share of the peak that large products reach.
    #[serde(default = "usual_efficiency")]
    pub efficiency: f64,
}

/// The hardware that a cluster's device is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClusterKind {
    Cpu,
    #[default]
    Cuda,
}

impl ClusterKind {
    pub fn name(self) -> &'static str {
        match self {
            ClusterKind::Cpu => "cpu",
            ClusterKind::Cuda => "cuda",
        }
    }
}

impl DeviceRates {
    /// What a rank's tensors can have of its memory.
    pub fn arena_bytes(&self) -> u64 {
        /// Of a host's memory: its system and kernels' working memory have the rest.
        const SHARE_OF_CORES: f64 = 0.95;
        let bytes = 1e9 * self.memory_gb;
        match self.kind {
            ClusterKind::Cpu => (SHARE_OF_CORES * bytes) as u64,
            ClusterKind::Cuda => {
                let bytes = bytes as u64;
                CudaMemory { name: String::new(), free_bytes: bytes, total_bytes: bytes }.arena_bytes_of(1)
            }
        }
    }
}

/// A kind of connection, each way.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkRates {
    /// The origin of the figures.
    pub source: String,
    pub gb_per_s: f64,
    pub latency_us: f64,
}

/// Hosts that are alike.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    #[serde(default = "one")]
    pub count: usize,
    /// The number of devices of each kind.
    pub devices: BTreeMap<String, usize>,
    /// Between its devices; none is needed for one.
    pub link: Option<String>,
    /// To other hosts; none is needed for a single host.
    pub network: Option<String>,
}

/// A device of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterDevice<'a> {
    /// Its kind.
    pub device: &'a str,
    /// The number of its host.
    pub host: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    #[error("{0}")]
    Unreadable(String),
    #[error("{what} is {found}, and must be {expected}")]
    Absurd { what: String, found: String, expected: String },
    #[error("{user} names {kind} `{name}`, which is not described; there are {known}")]
    Unknown { user: String, kind: &'static str, name: String, known: String },
    #[error("{what}: say which {kind} joins them")]
    Apart { what: String, kind: &'static str },
}

impl Cluster {
    /// Reads a description and checks it whole.
    pub fn parse(text: &str) -> Result<Cluster, ClusterError> {
        let cluster: Cluster = toml::from_str(text).map_err(|error| ClusterError::Unreadable(error.to_string()))?;
        cluster.check()?;
        Ok(cluster)
    }

    pub(crate) fn check(&self) -> Result<(), ClusterError> {
        for (name, device) in &self.devices {
            let rates = [
                ("bf16_tflops", device.bf16_tflops, MOST),
                ("f32_tflops", device.f32_tflops, MOST),
                ("memory_gb", device.memory_gb, MOST),
                ("memory_gb_per_s", device.memory_gb_per_s, MOST),
                ("efficiency", device.efficiency, 1.0),
            ];
            rates
                .into_iter()
                .try_for_each(|(key, found, most)| is_rate(&format!("device.{name}.{key}"), found, most))?;
        }
        for (name, link) in &self.links {
            is_rate(&format!("link.{name}.gb_per_s"), link.gb_per_s, MOST)?;
            let what = format!("link.{name}.latency_us");
            within(&what, link.latency_us, (0.0..=MOST).contains(&link.latency_us), "from 0 to 1000000")?;
        }
        self.check_hosts()
    }

    fn check_hosts(&self) -> Result<(), ClusterError> {
        let mut devices = 0usize;
        for (index, host) in self.hosts.iter().enumerate() {
            let here = format!("host {}", index + 1);
            within(&format!("{here}: count"), host.count, host.count > 0, "at least 1")?;
            for (name, count) in &host.devices {
                self.known(&here, "device", name, &self.devices)?;
                within(&format!("{here}: devices.{name}"), count, *count > 0, "at least 1")?;
            }
            for (kind, name) in [("link", &host.link), ("network", &host.network)] {
                name.iter().try_for_each(|name| self.known(&here, kind, name, &self.links))?;
            }
            let own = host.devices.values().fold(0, |sum: usize, count| sum.saturating_add(*count));
            within(&format!("{here}: the number of devices"), own, own > 0, "at least 1")?;
            devices = devices.saturating_add(own.saturating_mul(host.count));
            if own > 1 && host.link.is_none() {
                return Err(ClusterError::Apart { what: format!("{here} has {own} devices"), kind: "link" });
            }
        }
        let allowed = 1..=MOST_DEVICES;
        within("the number of devices", devices, allowed.contains(&devices), &format!("from 1 to {MOST_DEVICES}"))?;
        match self.hosts.iter().position(|host| host.network.is_none()) {
            Some(apart) if self.host_count() > 1 => {
                let what = format!("host {} is one of {}", apart + 1, self.host_count());
                Err(ClusterError::Apart { what, kind: "network" })
            }
            _ => Ok(()),
        }
    }

    fn known<T>(
        &self,
        user: &str,
        kind: &'static str,
        name: &str,
        all: &BTreeMap<String, T>,
    ) -> Result<(), ClusterError> {
        if all.contains_key(name) {
            return Ok(());
        }
        let known = all.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let known = if known.is_empty() { "none".to_owned() } else { known };
        Err(ClusterError::Unknown { user: user.to_owned(), kind, name: name.to_owned(), known })
    }

    pub fn host_count(&self) -> usize {
        self.hosts.iter().map(|host| host.count).sum()
    }

    /// All devices, host by host.
    pub fn places(&self) -> Vec<ClusterDevice<'_>> {
        let alike = |host: &Host| std::iter::repeat_n(host.devices.clone(), host.count).collect::<Vec<_>>();
        let counts = self.hosts.iter().flat_map(alike).enumerate();
        let mut places = Vec::new();
        for (host, kinds) in counts {
            for (name, count) in kinds {
                let (device, _) = self.devices.get_key_value(&name).expect("checked");
                places.extend(std::iter::repeat_n(ClusterDevice { device, host }, count));
            }
        }
        places
    }

    /// The same cluster with so many devices, host by host, if it has as many.
    pub fn first(&self, count: usize) -> Option<Cluster> {
        let (mut hosts, mut left) = (Vec::new(), count);
        for host in self.hosts.iter().flat_map(|host| std::iter::repeat_n(host, host.count)) {
            let mut devices = BTreeMap::new();
            for (name, there) in &host.devices {
                let taken = left.min(*there);
                left -= taken;
                if taken > 0 {
                    devices.insert(name.clone(), taken);
                }
            }
            if !devices.is_empty() {
                hosts.push(Host { count: 1, devices, ..host.clone() });
            }
        }
        (left == 0).then(|| Cluster { hosts, ..self.clone() })
    }

    /// The connection that a group of devices exchanges over: the slowest between any two of them, which decides how long a ring
    /// takes. None for a single device.
    pub fn link_among(&self, places: &[ClusterDevice]) -> Option<&LinkRates> {
        let first = places.first()?;
        let across = places.iter().any(|place| place.host != first.host);
        let groups = self.group_of_hosts();
        let names = places.iter().map(|place| {
            let host = &self.hosts[groups[place.host]];
            if across { &host.network } else { &host.link }
        });
        let links = names.flatten().map(|name| &self.links[name]).filter(|_| places.len() > 1);
        links.min_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s))
    }

    /// By host: the place of its description.
    fn group_of_hosts(&self) -> Vec<usize> {
        self.hosts.iter().enumerate().flat_map(|(index, host)| std::iter::repeat_n(index, host.count)).collect()
    }
}

fn one() -> usize {
    1
}

/// The share of a data sheet's peak that large bf16 products reach on the GPUs measured so far.
fn usual_efficiency() -> f64 {
    0.7
}

fn is_rate(what: &str, found: f64, most: f64) -> Result<(), ClusterError> {
    within(what, found, found > 0.0 && found <= most, &format!("above 0, and at most {most}"))
}

fn within(what: &str, found: impl ToString, holds: bool, expected: &str) -> Result<(), ClusterError> {
    let absurd =
        || ClusterError::Absurd { what: what.to_owned(), found: found.to_string(), expected: expected.to_owned() };
    if holds { Ok(()) } else { Err(absurd()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED: &str = include_str!("../../../examples/clusters/mixed.toml");

    #[test]
    fn a_file_gives_devices_host_by_host_and_the_slowest_link_among_them() {
        let cluster = Cluster::parse(MIXED).unwrap();
        let places = cluster.places();
        let kinds: Vec<(&str, usize)> = places.iter().map(|place| (place.device, place.host)).collect();
        assert_eq!(kinds.len(), 8);
        assert_eq!((kinds[0], kinds[7]), (("h200", 0), ("rtx4090", 2)));
        let gb_per_s = |range: std::ops::Range<usize>| cluster.link_among(&places[range]).map(|link| link.gb_per_s);
        assert_eq!([0..1, 0..2, 2..6, 0..8].map(gb_per_s), [None, Some(450.0), Some(300.0), Some(1.25)]);
    }

    #[test]
    fn the_first_devices_of_a_cluster_are_a_cluster() {
        let cluster = Cluster::parse(MIXED).unwrap();
        for count in 1..=8 {
            assert_eq!(cluster.first(count).unwrap().places(), cluster.places()[..count]);
        }
        assert_eq!(cluster.first(9), None);
    }

    #[test]
    fn the_examples_have_the_devices_that_they_promise() {
        let files = [
            (include_str!("../../../examples/clusters/8-h200.toml"), 8, 1),
            (include_str!("../../../examples/clusters/4x8-h200.toml"), 32, 4),
            (MIXED, 8, 3),
            (include_str!("../../../examples/clusters/1024-h200.toml"), 1024, 128),
        ];
        for (text, devices, hosts) in files {
            let cluster = Cluster::parse(text).unwrap();
            assert_eq!((cluster.places().len(), cluster.host_count()), (devices, hosts));
        }
    }

    #[test]
    fn absurd_files_are_refused_with_what_is_wrong() {
        let cases = [
            ("bf16_tflops = 989.5", "bf16_tflops = -1.0", "device.h200.bf16_tflops is -1, and must be above 0"),
            ("bf16_tflops = 989.5", "bf16_tflops = nan", "device.h200.bf16_tflops is NaN"),
            ("memory_gb = 141.0", "memory_gb = 1e300", "device.h200.memory_gb is 1"),
            ("memory_gb = 141.0", "memory = 141.0", "unknown field `memory`"),
            (
                "{ h200 = 2 }",
                "{ h100 = 2 }",
                "names device `h100`, which is not described; there are a100, h200, rtx4090",
            ),
            ("{ h200 = 2 }", "{ h200 = 0 }", "host 1: devices.h200 is 0"),
            ("{ h200 = 2 }", "{}", "host 1: the number of devices is 0"),
            ("{ h200 = 2 }", "{ h200 = 1000000 }", "the number of devices is 1000006, and must be from 1 to 65536"),
            ("link = \"nvlink4\"\n", "", "host 1 has 2 devices: say which link joins them"),
            ("network = \"ethernet\"\n", "", "host 1 is one of 3: say which network joins them"),
            ("link = \"nvlink4\"", "link = \"nvlink9\"", "names link `nvlink9`"),
        ];
        for (from, to, expected) in cases {
            let error = Cluster::parse(&MIXED.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(expected), "{to}: {error}");
        }
    }
}
