//! Profiles through the binary: a machine is measured, and what is written is a host that plans are made for.

mod support;

use std::fs;

use evenkeel_plan::{Cluster, ClusterKind};
use serde_json::Value;
use support::{Place, TINY, stderr};

/// A profile of this machine in the place, with what it told on the way.
fn measured(place: &Place, name: &str) -> (Cluster, String) {
    let output = place.run(&["profile", "--output", name]);
    assert!(output.status.success(), "{}", stderr(&output));
    let written = fs::read_to_string(place.path(name)).unwrap();
    (Cluster::parse(&written).unwrap_or_else(|error| panic!("{error}\n{written}")), stderr(&output))
}

/// A host of two cores.
fn host(f32_tflops: f64) -> String {
    format!(
        "[device.core]\nkind = \"cpu\"\nsource = \"a test\"\nbf16_tflops = 0.4\nf32_tflops = {f32_tflops:?}\n\
         memory_gb = 4.0\nmemory_gb_per_s = 10.0\nefficiency = 1.0\n\n[link.memory]\nsource = \"a test\"\n\
         gb_per_s = 5.0\nlatency_us = 10.0\n\n[[host]]\ndevices = {{ core = 2 }}\nlink = \"memory\"\n"
    )
}

fn plan(place: &Place, cluster: &str) -> Value {
    let text = place.stdout(&["plan", "tiny.toml", "--cluster", cluster, "--json", "--show", "1000"]);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_machine_is_a_host_with_plausible_figures_that_plans_are_made_for() {
    let place = Place::new(TINY);
    let (cluster, told) = measured(&place, "here.toml");
    let cores = cluster.places().len();
    assert_eq!((cluster.host_count(), cluster.devices.len()), (1, 1), "{cluster:?}");
    let rates = &cluster.devices["core"];
    assert_eq!((rates.kind, rates.efficiency), (ClusterKind::Cpu, 1.0));
    for (what, found, most) in [
        ("bf16", rates.bf16_tflops, 100.0),
        ("f32", rates.f32_tflops, 100.0),
        ("GB", rates.memory_gb, 1e5),
        ("GB/s", rates.memory_gb_per_s, 1e4),
    ] {
        assert!(found > 0.0 && found < most, "{what}: {found}");
    }
    let ranks = if cores == 1 { "1 rank of 1 core".to_owned() } else { format!("{cores} ranks of 1 core") };
    assert!(rates.source.starts_with("measured on 20") && rates.source.ends_with(&ranks), "{}", rates.source);
    for words in ["2048×1024×1024", "GFLOP/s", &ranks] {
        assert!(told.contains(words), "{words}: {told}");
    }
    if cores > 1 {
        let link = &cluster.links["memory"];
        assert!(link.gb_per_s > 0.0 && link.gb_per_s < 1e4 && link.latency_us < 1e5, "{link:?}");
        for words in ["all-reduce", "reduce-scatter", "all-gather", "32.0 MiB", "in the median"] {
            assert!(told.contains(words), "{words}: {told}");
        }
    }
    let written = fs::read_to_string(place.path("here.toml")).unwrap();
    assert!(written.contains("# 2048×1024×1024"), "the table is kept as a comment: {written}");
    let fitting = plan(&place, "here.toml")["fitting"].as_array().unwrap().clone();
    assert!(fitting.iter().all(|judged| judged["step_s"].as_f64().unwrap() > 0.0) && !fitting.is_empty());
    let table = place.stdout(&["plan", "tiny.toml", "--cluster", "here.toml"]);
    assert!(!table.contains("GPU"), "the devices are cores: {table}");
}

#[test]
fn several_files_are_one_cluster_with_names_of_their_own_and_a_network() {
    let place = Place::new(TINY);
    fs::write(place.path("first.toml"), host(0.1)).unwrap();
    fs::write(place.path("second.toml"), host(0.2)).unwrap();
    let network = ["--network", "ethernet=1.25,30"];
    let merge = |files: &[&str]| {
        let arguments = [&["profile", "--merge"], files, &network, &["--output", "all.toml", "--overwrite"]].concat();
        place.stdout(&arguments);
        Cluster::parse(&fs::read_to_string(place.path("all.toml")).unwrap()).unwrap()
    };
    let alike = merge(&["first.toml", "first.toml"]);
    assert_eq!((alike.host_count(), alike.devices.len(), alike.links.len()), (2, 1, 2), "{alike:?}");
    let both = merge(&["first.toml", "second.toml"]);
    assert_eq!(both.devices.keys().collect::<Vec<_>>(), ["core-first", "core-second"]);
    assert_eq!(both.links.keys().collect::<Vec<_>>(), ["ethernet", "memory"]);
    assert_eq!(both.links["ethernet"].source, "given on the command line");
    assert_eq!(both.devices["core-second"].f32_tflops, 0.2);
    // Both hosts together, and each alone.
    let plan = plan(&place, "all.toml");
    let counts: Vec<usize> = { plan["fitting"].as_array().unwrap().iter() }
        .map(|judged| judged["strategy"]["devices"]["gpus"].as_array().unwrap().len())
        .collect();
    assert!([2, 4].iter().all(|count| counts.contains(count)), "{counts:?}");
}

#[test]
fn files_are_not_replaced_unasked_and_mistakes_are_told_before_anything_is_measured() {
    let place = Place::new(TINY);
    fs::write(place.path("host.toml"), host(0.1)).unwrap();
    let wrong = host(0.1).replace("memory_gb = 4.0", "memory_gb = -4.0");
    fs::write(place.path("wrong.toml"), wrong).unwrap();
    let merge = ["profile", "--merge", "host.toml", "host.toml"];
    let with = |more: &[&'static str]| [&merge, more].concat();
    let cases: [(Vec<&str>, &[&str]); 11] = [
        (vec!["profile", "--output", "host.toml"], &["`host.toml` exists already", "--overwrite it"]),
        (with(&["--network", "a=1,2", "--output", "host.toml"]), &["`host.toml` exists already"]),
        (with(&[]), &["host 1 is one of 2: say which network joins them", "--network NAME=GB_PER_S,LATENCY_US"]),
        (with(&["--network", "ethernet"]), &["--network is `ethernet`", "such as --network ethernet=1.25,30"]),
        (with(&["--network", "a=-1,30"]), &["link.a.gb_per_s is -1, and must be above 0"]),
        (with(&["--network", "a=nan,30"]), &["link.a.gb_per_s is NaN"]),
        (with(&["--network", "a=1,-30"]), &["link.a.latency_us is -30"]),
        (with(&["--network", "memory=1,30"]), &["the name of the network is memory"]),
        (vec!["profile", "--merge", "host.toml", "wrong.toml"], &["`wrong.toml`: device.core.memory_gb is -4"]),
        (vec!["profile", "--cores-per-rank", "60000"], &["--cores-per-rank is 60000, but there"]),
        (vec!["profile", "--virtual-gpus", "64,56"], &["--virtual-gpus are parts of a GPU", "--device cuda"]),
    ];
    for (arguments, expected) in cases {
        place.refused(&arguments, expected);
    }
    place.refused(&["profile", "--network", "a=1,2"], &["--merge"]);
    place.refused(&["profile", "--merge", "host.toml", "--cores-per-rank", "2"], &["cannot be used with"]);
    assert_eq!(fs::read_to_string(place.path("host.toml")).unwrap(), host(0.1));
}
