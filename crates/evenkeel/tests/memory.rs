//! The memory of a run: foretold by `inspect` and at its start, told at its end, and as the system counted it.

#![cfg(target_os = "linux")]

mod support;

use std::fs::{File, read_to_string, write};
use std::time::Duration;

use support::Place;

/// Most of it is state: some hundred MB with little to compute.
const NEW: &str = "[model]\nhidden = 256\nlayers = 2\nheads = 4\nffn = 512\nvocab = 40000\ntied = true\n";
const SAVED: &str = "[model]\npath = \"first/model\"\n";

const CONFIG: &str = r#"
[data]
source = "synthetic"
sequence = 128

[train]
steps = 2
batch = 4

[output]
folder = "first"
overwrite = true
checkpoint_every = 0
log_every = 1
"#;

/// MiB.
#[derive(Debug)]
struct Memory {
    /// At the start.
    foretold: f64,
    /// At the end.
    told: f64,
    /// `VmHWM`.
    real: f64,
}

/// Trains, and looks at the process until it ends.
fn train(place: &Place, config: &str, sets: &[&str]) -> Memory {
    let mut arguments = vec!["train", config];
    sets.iter().for_each(|set| arguments.extend(["--set", set]));
    let (out, err) = (place.path("out.txt"), place.path("err.txt"));
    let mut command = place.command(&arguments);
    command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
    let mut process = command.spawn().expect("the binary starts");
    let status = format!("/proc/{}/status", process.id());
    let mut real = 0.0;
    let ended = loop {
        let text = read_to_string(&status).unwrap_or_default();
        let kib = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse().ok());
        real = kib.map_or(real, |kib: f64| kib / 1024.0);
        if let Some(ended) = process.try_wait().unwrap() {
            break ended;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let (said, summary) = (read_to_string(&err).unwrap(), read_to_string(&out).unwrap());
    assert!(ended.success(), "{sets:?}: {said}");
    let told = mib_after(&summary, "peak memory ");
    Memory { foretold: mib_after(&said, "peak memory:"), told, real }
}

/// The number of `TEXT … N MiB`.
fn mib_after(text: &str, begin: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(begin));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.unwrap_or_else(|| panic!("`{begin}` and a number in {text}"))
}

/// What `inspect` says of f32 without recomputation: the peak, and with checkpoints beside it.
fn inspect(place: &Place, options: &[&str]) -> [f64; 2] {
    let text = place.stdout(&[&["inspect", "first/model", "--batch", "4", "--sequence", "128"], options].concat());
    let row = text.lines().find(|line| line.starts_with("f32")).expect("a row of f32").to_owned();
    let numbers: Vec<f64> = row.split(" MiB").filter_map(|cell| cell.split_whitespace().last()?.parse().ok()).collect();
    match numbers[..] {
        [.., peak, copying] => [peak, copying],
        _ => panic!("{text}"),
    }
}

#[test]
fn the_peak_is_foretold_and_told_as_the_system_counts_it() {
    let place = Place::new(&[NEW, CONFIG].concat());
    write(place.path("saved.toml"), [SAVED, CONFIG].concat()).unwrap();
    let other = ["output.folder=\"other\"", "output.save_model=false"];
    type Case<'a> = (&'a str, &'a str, &'a [&'a str], &'a [&'a str], bool);
    let cases: [Case; 5] = [
        ("one rank", "tiny.toml", &[], &[], false),
        ("checkpoints", "tiny.toml", &["output.checkpoint_every=1"], &[], true),
        ("from a folder", "saved.toml", &[], &[], false),
        ("tp 2", "saved.toml", &["parallel.tp=2"], &["--tp", "2"], false),
        (
            "dp 2, ZeRO 2, checkpoints",
            "saved.toml",
            &["parallel.dp=2", "parallel.zero=2", "output.checkpoint_every=1"],
            &["--dp", "2", "--zero", "2"],
            true,
        ),
    ];
    for (number, (name, config, sets, options, checkpoints)) in cases.into_iter().enumerate() {
        let memory = train(&place, config, &[sets, if number > 0 { &other } else { &[] }].concat());
        let inspected = inspect(&place, options)[usize::from(checkpoints)];
        println!("{name}: inspected {inspected}, {memory:?}");
        assert!(memory.real > 200.0, "{name}: {memory:?}: too little to compare");
        for (what, told) in [("inspected", inspected), ("foretold", memory.foretold), ("told", memory.told)] {
            let error = told / memory.real - 1.0;
            assert!(error.abs() < 0.05, "{name}: {what} {told} MiB, it was {:.0}: {error:+.3}", memory.real);
        }
    }
}

#[test]
fn programs_of_thousands_of_micro_batches_are_foretold() {
    let small = "[model]\nhidden = 32\nlayers = 2\nheads = 2\nffn = 48\ntied = true\n";
    let place = Place::new(&[small, CONFIG].concat());
    let sets = ["data.sequence=16", "train.batch=1", "train.steps=1", "device.threads=1", "output.save_model=false"];
    let of = |accumulate: &str| train(&place, "tiny.toml", &[&sets[..], &[accumulate]].concat());
    let [few, many] = ["train.accumulate=1", "train.accumulate=4096"].map(of);
    println!("{few:?}, {many:?}");
    let (foretold, real) = (many.foretold - few.foretold, many.real - few.real);
    assert!(real > 50.0, "too little to compare: {real} MiB");
    assert!((foretold / real - 1.0).abs() < 0.2, "foretold {foretold} MiB, it was {real:.0}");
}

/// New magnitudes are the norms of the base's rows, which are read a second time.
#[test]
fn a_base_is_let_go_of_after_its_norms_are_read() {
    let layers = "[model]\nhidden = 512\nlayers = 10\nheads = 8\nffn = 2048\nvocab = 1000\ntied = true\n";
    let place = Place::new(&[layers, CONFIG].concat());
    place.stdout(&["train", "tiny.toml", "--steps", "1"]);
    let adapter = "save_model = false\n[adapter]\nkind = \"lora\"\nrank = 8\ndora = true\n";
    write(place.path("dora.toml"), [SAVED, CONFIG, adapter].concat()).unwrap();
    for sets in [&["output.folder=\"plain\""][..], &["output.folder=\"packed\"", "adapter.base=nf4"]] {
        let memory = train(&place, "dora.toml", sets);
        println!("{sets:?}: {memory:?}");
        let error = memory.foretold / memory.real - 1.0;
        assert!(error.abs() < 0.05, "{sets:?}: {memory:?}: {error:+.3}");
    }
}
