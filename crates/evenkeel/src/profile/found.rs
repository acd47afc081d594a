//! What was measured, as a cluster of one host and as tables for people.

use std::collections::BTreeMap;

use evenkeel_device::{DType, cpu_report, cuda_memory, cuda_report};
use evenkeel_plan::{Cluster, ClusterKind, Comments, DeviceRates, LinkRates, TimedExchange};
use evenkeel_step::simulate::median;
use evenkeel_step::{Devices, Strategy};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::measure::{DECISIVE_SHAPES, DTYPES, EXCHANGED_BYTES, EXCHANGES, HostRates, RankRates, group_sizes};
use crate::{Failure, device, placement, process, text};

/// The machine that is measured. Its memory is that before anything was started.
pub struct MeasuredHost {
    kind: ClusterKind,
    /// What computes: a CPU, GPUs.
    hardware: String,
    /// `2 ranks of 1 core`
    ranks: String,
    /// By rank.
    places: Vec<Place>,
}

/// The device of a rank.
struct Place {
    /// The name of its kind in the description.
    name: String,
    memory_bytes: u64,
}

impl MeasuredHost {
    pub fn of(strategy: &Strategy) -> Result<MeasuredHost, Failure> {
        let ranks = strategy.ranks();
        match &strategy.devices {
            Devices::Cpu { cores_per_rank, .. } => {
                let report = cpu_report();
                let name = if *cores_per_rank == 1 { "core".to_owned() } else { format!("{cores_per_rank}-cores") };
                let memory_bytes = process::available_bytes().unwrap_or(report.memory_bytes).min(report.memory_bytes);
                let place = |_| Place { name: name.clone(), memory_bytes: memory_bytes / ranks as u64 };
                let products = format!("f32 products by {}, bf16 by {}", report.f32_products, report.bf16_products);
                Ok(MeasuredHost {
                    kind: ClusterKind::Cpu,
                    hardware: format!("{}, {products}", process::cpu_name().unwrap_or_else(|| "a CPU".to_owned())),
                    ranks: format!("{} of {}", text::counted(ranks, "rank", "ranks"), text::cores(*cores_per_rank)),
                    places: (0..ranks).map(place).collect(),
                })
            }
            Devices::Cuda { gpus, multiprocessors, .. } => MeasuredHost::of_gpus(gpus, multiprocessors),
        }
    }

    fn of_gpus(gpus: &[usize], multiprocessors: &[u32]) -> Result<MeasuredHost, Failure> {
        let found = cuda_report().gpus;
        let gpu_name = |gpu: usize| found.get(gpu).map_or_else(|| "gpu".to_owned(), |gpu| gpu.name.clone());
        let place = |(rank, &gpu): (usize, &usize)| {
            let part = multiprocessors.get(rank).map_or_else(String::new, |count| format!(" {count} of its sm"));
            let sharing = gpus.iter().filter(|other| **other == gpu).count() as u64;
            let memory_bytes = cuda_memory(gpu).map_err(device::fault)?.free_bytes / sharing;
            Ok(Place { name: slug(&format!("{}{part}", gpu_name(gpu))), memory_bytes })
        };
        let places = gpus.iter().enumerate().map(place).collect::<Result<Vec<Place>, Failure>>()?;
        let names: Vec<String> = placement::different(gpus).into_iter().map(gpu_name).collect();
        let ranks = match multiprocessors {
            [] => text::counted(gpus.len(), "rank of a GPU", "ranks of a GPU each"),
            parts => {
                let parts: Vec<String> = parts.iter().map(u32::to_string).collect();
                format!("{} of {} multiprocessors", text::counted(gpus.len(), "rank", "ranks"), parts.join(", "))
            }
        };
        Ok(MeasuredHost { kind: ClusterKind::Cuda, hardware: names.join(", "), ranks, places })
    }

    fn source(&self) -> String {
        let date = Timestamp::now().to_zoned(TimeZone::UTC).date();
        format!("measured on {date} by evenkeel {}, {}", env!("CARGO_PKG_VERSION"), self.ranks)
    }

    /// The host with its devices and their link, and the tables behind the figures.
    pub fn cluster(&self, measured: &HostRates) -> (Cluster, Comments) {
        let mut comments = Comments { whole: self.about(), ..Comments::default() };
        let (mut devices, mut counts) = (BTreeMap::new(), BTreeMap::new());
        for (name, ranks) in self.kinds(measured) {
            let places = self.places.iter().filter(|place| place.name == name);
            let memory_bytes = places.map(|place| place.memory_bytes).min().unwrap_or(0);
            let tflops = |dtype: DType| rounded(1e-12 * median(ranks.iter().map(|rank| flops_per_s(rank, dtype))));
            let rates = DeviceRates {
                kind: self.kind,
                source: self.source(),
                bf16_tflops: tflops(DType::Bf16),
                f32_tflops: tflops(DType::F32),
                memory_gb: rounded(1e-9 * memory_bytes as f64),
                memory_gb_per_s: rounded(1e-9 * median(ranks.iter().map(|rank| rank.bytes_per_s))),
                // The rates are those that products reach.
                efficiency: 1.0,
            };
            let what = "Products with all ranks at work, rows × columns × depth. The two largest decide.".to_owned();
            comments.devices.insert(name.to_owned(), [what].into_iter().chain(product_lines(&ranks)).collect());
            counts.insert(name.to_owned(), ranks.len());
            devices.insert(name.to_owned(), rates);
        }
        let link = LinkRates::fitted(self.source(), &measured.exchanges).map(|link| LinkRates {
            gb_per_s: rounded(link.gb_per_s),
            latency_us: rounded(link.latency_us),
            ..link
        });
        let link_name = if self.kind == ClusterKind::Cpu { "memory" } else { "gpus" };
        let mut links = BTreeMap::new();
        if let Some(link) = &link {
            comments.links.insert(link_name.to_owned(), exchange_lines(self.places.len(), &measured.exchanges, link));
            links.insert(link_name.to_owned(), link.clone());
        }
        let link = link.map(|_| link_name.to_owned());
        let host = evenkeel_plan::Host { count: 1, devices: counts, link, network: None };
        (Cluster { devices, links, hosts: vec![host] }, comments)
    }

    fn about(&self) -> Vec<String> {
        vec![
            format!("A host of a cluster, as `evenkeel profile` measured it: {}.", self.hardware),
            "`evenkeel plan FILE --cluster THIS` plans for it; `evenkeel profile --merge` joins several.".to_owned(),
        ]
    }

    /// The same for people who look on.
    pub fn table(&self, measured: &HostRates) -> String {
        let (cluster, comments) = self.cluster(measured);
        let mut lines = vec![format!("{}, {}", self.hardware, self.ranks)];
        for (name, rates) in &cluster.devices {
            let DeviceRates { bf16_tflops, f32_tflops, memory_gb, memory_gb_per_s, .. } = rates;
            lines.push(format!(
                "\n{name}: {bf16_tflops} TFLOP/s in bf16, {f32_tflops} in f32; {memory_gb_per_s} GB/s of copies; {memory_gb} GB"
            ));
            lines.extend(comments.devices[name].iter().cloned());
        }
        for (name, rates) in &cluster.links {
            let LinkRates { gb_per_s, latency_us, .. } = rates;
            lines.push(format!("\n{name}: {gb_per_s} GB/s, {latency_us} µs a message"));
            lines.extend(comments.links[name].iter().cloned());
        }
        lines.join("\n")
    }

    /// The ranks of each kind of device.
    fn kinds<'a>(&self, measured: &'a HostRates) -> BTreeMap<&str, Vec<&'a RankRates>> {
        let mut kinds: BTreeMap<&str, Vec<&RankRates>> = BTreeMap::new();
        for (place, rates) in self.places.iter().zip(&measured.ranks) {
            kinds.entry(&place.name).or_default().push(rates);
        }
        kinds
    }
}

/// Of large products together.
fn flops_per_s(rank: &RankRates, dtype: DType) -> f64 {
    let of_dtype: Vec<_> = rank.products.iter().filter(|product| product.dtype == dtype).collect();
    let decisive = &of_dtype[of_dtype.len().saturating_sub(DECISIVE_SHAPES)..];
    let [flops, seconds] = [
        decisive.iter().map(|product| product.flops).sum::<f64>(),
        decisive.iter().map(|product| product.seconds).sum(),
    ];
    flops / seconds
}

/// A table of rates by shape, of the median rank, and how far the ranks are apart.
fn product_lines(ranks: &[&RankRates]) -> Vec<String> {
    let mut shapes: Vec<[usize; 3]> = Vec::new();
    let all = || ranks.iter().flat_map(|rank| &rank.products);
    all().for_each(|product| {
        if !shapes.contains(&product.dims) {
            shapes.push(product.dims);
        }
    });
    let cell = |dims: [usize; 3], dtype: DType| {
        let of_shape = all().filter(|product| (product.dims, product.dtype) == (dims, dtype));
        let rates: Vec<f64> = of_shape.map(|product| product.flops / product.seconds).collect();
        if rates.is_empty() { "no room".to_owned() } else { format!("{:.1} GFLOP/s", 1e-9 * median(rates)) }
    };
    let row = |dims: &[usize; 3]| {
        let [m, n, k] = *dims;
        [vec![format!("{m}×{n}×{k}")], DTYPES.map(|dtype| cell(*dims, dtype)).to_vec()].concat()
    };
    let rows: Vec<Vec<String>> = shapes.iter().map(row).collect();
    let mut lines: Vec<String> = text::table(&["product", "f32", "bf16"], &rows).lines().map(str::to_owned).collect();
    if ranks.len() > 1 {
        let rates = ranks.iter().map(|rank| flops_per_s(rank, DType::F32));
        let (slowest, fastest) =
            rates.fold((f64::INFINITY, 0.0f64), |(low, high), rate| (low.min(rate), high.max(rate)));
        lines.push(format!(
            "The slowest rank reaches {} of the fastest one's f32 rate.",
            text::percent(slowest / fastest)
        ));
    }
    lines
}

/// A table of what exchanges took by size and group, and how well the link foretells them.
fn exchange_lines(ranks: usize, exchanges: &[TimedExchange], link: &LinkRates) -> Vec<String> {
    let mut rows = Vec::new();
    for members in group_sizes(ranks) {
        for kind in EXCHANGES {
            let of_row = exchanges.iter().filter(|it| (it.members, it.kind) == (members, kind));
            let cells = of_row.map(|it| format!("{:.0} µs", 1e6 * it.seconds));
            rows.push([kind.to_string(), members.to_string()].into_iter().chain(cells).collect());
        }
    }
    let sizes: Vec<String> = EXCHANGED_BYTES.iter().map(|&bytes| text::bytes(bytes as u64)).collect();
    let header: Vec<&str> = ["exchange", "ranks"].into_iter().chain(sizes.iter().map(String::as_str)).collect();
    let off = |it: &TimedExchange| (link.exchange_s(it.kind, it.members, it.bytes) / it.seconds - 1.0).abs();
    let mut lines = vec!["What exchanges took by group and size.".to_owned()];
    lines.extend(text::table(&header, &rows).lines().map(str::to_owned));
    lines.push(format!(
        "These figures foretell them with an error of {} in the median, {} at worst.",
        text::percent(median(exchanges.iter().map(off))),
        text::percent(exchanges.iter().map(off).fold(0.0, f64::max)),
    ));
    lines
}

/// To four digits: more would be noise.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().expect("a number that was just written")
}

/// A name without capitals and with dashes between its words.
fn slug(name: &str) -> String {
    let words = name.split(|character: char| !character.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_lowercase).collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::super::measure::TimedProduct;
    use super::*;

    fn rank(slowness: f64) -> RankRates {
        let product = |dtype: DType, side: usize, tflops: f64| {
            let flops = 2.0 * (side as f64).powi(3);
            TimedProduct { dtype, dims: [side; 3], flops, seconds: slowness * flops / (1e12 * tflops) }
        };
        let products = vec![
            product(DType::F32, 256, 9.0),
            product(DType::F32, 1024, 1.0),
            product(DType::F32, 2048, 1.0),
            product(DType::Bf16, 256, 9.0),
            product(DType::Bf16, 1024, 2.0),
            product(DType::Bf16, 2048, 2.0),
        ];
        RankRates { products, bytes_per_s: 1e10 / slowness }
    }

    fn host(names: &[&str]) -> MeasuredHost {
        let place = |name: &&str| Place { name: (*name).to_owned(), memory_bytes: 8_000_000_000 };
        let places = names.iter().map(place).collect();
        MeasuredHost { kind: ClusterKind::Cuda, hardware: "cards".to_owned(), ranks: "some ranks".to_owned(), places }
    }

    #[test]
    fn large_products_decide_and_each_kind_has_its_own_rates() {
        let measured = HostRates { ranks: vec![rank(1.0), rank(2.0), rank(1.0)], exchanges: Vec::new() };
        let (cluster, comments) = host(&["fast", "slow", "fast"]).cluster(&measured);
        let rates = |name: &str| {
            let rates = &cluster.devices[name];
            [rates.f32_tflops, rates.bf16_tflops, rates.memory_gb, rates.memory_gb_per_s, rates.efficiency]
        };
        assert_eq!(rates("fast"), [1.0, 2.0, 8.0, 10.0, 1.0]);
        assert_eq!(rates("slow"), [0.5, 1.0, 8.0, 5.0, 1.0]);
        assert_eq!(cluster.hosts[0].devices, [("fast".to_owned(), 2), ("slow".to_owned(), 1)].into());
        assert!(comments.devices["fast"].iter().any(|line| line.starts_with("256×256×256")), "{comments:?}");
        assert!(cluster.links.is_empty() && cluster.devices["fast"].source.ends_with("some ranks"));
    }

    #[test]
    fn names_become_keys_and_figures_have_four_digits() {
        assert_eq!(slug("NVIDIA H200 64 of its sm"), "nvidia-h200-64-of-its-sm");
        assert_eq!([0.123456, 98765.4, 2.0].map(rounded), [0.1235, 98770.0, 2.0]);
    }
}
