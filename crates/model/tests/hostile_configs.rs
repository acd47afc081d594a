//! Every architecture's config.json with some of its values replaced, again and again: it is understood or refused, but nothing
//! panics, and what is understood is a model of bounded size.

#[path = "../../../golden/cases.rs"]
mod cases;
mod support;

use std::collections::BTreeSet;

use cases::CASES;
use evenkeel_device::DeviceKind;
use evenkeel_model::{Config, Cut, Model, Shard, model_types};
use evenkeel_random::Random;
use serde_json::{Value, json};

/// Changed files of each case.
const ROUNDS: usize = 400;

fn configs() -> Vec<(&'static str, Value)> {
    let read = |case: &&'static str| {
        let text = std::fs::read_to_string(support::golden().join(case).join("config.json")).unwrap();
        (*case, serde_json::from_str(&text).unwrap())
    };
    CASES.iter().map(read).collect()
}

#[test]
fn there_is_a_case_of_every_architecture() {
    let found: BTreeSet<String> =
        configs().iter().map(|(_, config)| config["model_type"].as_str().unwrap().to_owned()).collect();
    let known: BTreeSet<String> = model_types().map(str::to_owned).collect();
    assert_eq!(found, known);
}

fn hostile(random: &mut Random) -> Value {
    let values = [
        json!(0),
        json!(1),
        json!(3),
        json!(-1),
        json!(0.5),
        json!(1e308),
        json!(1e-320),
        json!(1 << 12),
        json!(1 << 24),
        json!((1 << 24) + 1),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(null),
        json!(true),
        json!(false),
        json!(""),
        json!("\u{1b}[2J"),
        json!([]),
        json!([0, 1, "full_attention"]),
        json!({}),
        json!({"rope_type": "yarn", "factor": 0}),
    ];
    values[random.below(values.len() as u64) as usize].clone()
}

/// Places of values: keys, and positions in lists.
fn places(value: &Value, path: &str, found: &mut Vec<String>) {
    let mut visit = |key: &str, inner: &Value| {
        let path = format!("{path}/{key}");
        found.push(path.clone());
        places(inner, &path, found);
    };
    match value {
        Value::Object(object) => object.iter().for_each(|(key, inner)| visit(&key.replace('/', "~1"), inner)),
        Value::Array(list) => list.iter().enumerate().for_each(|(place, inner)| visit(&place.to_string(), inner)),
        _ => (),
    }
}

fn change(config: &mut Value, random: &mut Random) {
    let mut found = Vec::new();
    places(config, "", &mut found);
    let path = &found[random.below(found.len() as u64) as usize];
    let (parent, key) = path.rsplit_once('/').unwrap();
    match config.pointer_mut(parent).unwrap() {
        Value::Object(object) if random.below(4) == 0 => drop(object.remove(key)),
        _ => *config.pointer_mut(path).unwrap() = hostile(random),
    }
}

#[test]
fn no_config_panics_or_describes_a_model_without_bounds() {
    let mut understood = 0;
    for (case, config) in configs() {
        let mut random = Random::new(&case.bytes().map(u64::from).collect::<Vec<_>>());
        for _ in 0..ROUNDS {
            let mut changed = config.clone();
            (0..1 + random.below(3)).for_each(|_| change(&mut changed, &mut random));
            let Ok(config) = Config::from_json(&changed) else { continue };
            understood += 1;
            // What a layer takes to describe is bounded, so fewer layers are as good a test and take less time.
            let config = Config { layers: config.layers[..config.layers.len().min(4)].to_vec(), ..config };
            let model = Model::new(config.clone()).for_device(DeviceKind::Cuda);
            assert!(model.specs.iter().all(|spec| spec.whole[0].checked_mul(spec.whole[1]).is_some()), "{changed}");
            for shards in [2, 3] {
                drop(Shard::cut(&config, &Cut::even(shards)));
            }
        }
    }
    assert!(understood > 20 * CASES.len(), "only {understood} changed files were understood");
}
