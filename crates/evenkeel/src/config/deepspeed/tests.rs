//! Every key is understood or refused, whatever its value, and nothing breaks.

use serde_json::{Value as Json, json};

use super::keys::{self, Fate, Keys};
use super::{RawConfig, add};

fn mistakes(file: &Json) -> Vec<String> {
    let mut raw = RawConfig::new();
    raw.read_file("run.toml", "[model]\npath = \"m\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\n");
    add(&mut raw, "ds.json", file);
    let mistakes = raw.check().err().map_or(Vec::new(), |mistakes| mistakes.0);
    mistakes.into_iter().map(|mistake| mistake.what).collect()
}

/// Every key there is, by its section's names.
fn paths(section: &[&'static str], keys: Keys) -> Vec<Vec<&'static str>> {
    let all = keys.iter().flat_map(|(key, fate)| {
        let path = [section, &[*key]].concat();
        match fate {
            Fate::Section(keys) => [paths(&path, keys), vec![path]].concat(),
            _ => vec![path],
        }
    });
    all.collect()
}

fn nested(path: &[&str], value: Json) -> Json {
    path.iter().rev().fold(value, |value, key| json!({ *key: value }))
}

#[test]
fn no_value_of_any_key_breaks_anything() {
    let deep = (0..100).fold(json!(1), |value, _| json!([value]));
    let numbers = [json!(0), json!(-1), json!(1), json!(7), json!(0.5), json!(-0.0), json!(1e300), json!(1e16)];
    let large = [json!(u64::MAX), json!(i64::MIN), json!(i64::MAX), deep];
    let others =
        [json!(null), json!(true), json!(false), json!(""), json!("auto"), json!("\u{0}\n"), json!([]), json!({})];
    let values = [&numbers[..], &large, &others, &[json!([1, 2]), json!(["a", {}]), json!({"enabled": 3})]].concat();
    let mut all = paths(&[], keys::KEYS);
    all.extend([vec!["optimizer", "type"], vec!["optimizer", "params"], vec!["scheduler", "type"]]);
    all.extend([vec!["scheduler", "params"], vec!["unheard_of"], vec!["zero_optimization", "unheard_of"]]);
    for value in &values {
        for path in &all {
            mistakes(&nested(path, value.clone()));
        }
        for (key, _) in keys::OPTIMIZER {
            mistakes(&json!({"optimizer": {"type": "Adam", "params": {*key: value}}}));
        }
        let schedulers = [
            ("WarmupLR", keys::WARMUP),
            ("WarmupDecayLR", keys::WARMUP_DECAY),
            ("WarmupCosineLR", keys::WARMUP_COSINE),
        ];
        for (name, keys) in schedulers {
            for (key, _) in keys {
                mistakes(&json!({"scheduler": {"type": name, "params": {*key: value}}}));
            }
        }
        mistakes(value);
        let [total, other] = [value.clone(), value.clone()];
        mistakes(&json!({"train_batch_size": total, "train_micro_batch_size_per_gpu": other}));
    }
    let [micro, accumulated] = [1e15, 1e15];
    let mut sizes = json!({"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulated});
    assert_eq!(mistakes(&sizes).len(), 2);
    sizes["train_batch_size"] = json!(8);
    assert_eq!(mistakes(&sizes).len(), 3);
}

#[test]
fn null_and_auto_leave_every_key_to_the_rest() {
    for value in [json!(null), json!("auto")] {
        for path in paths(&[], keys::KEYS) {
            let file = nested(&path, value.clone());
            assert_eq!(mistakes(&file), Vec::<String>::new(), "{file}");
        }
    }
}

#[test]
fn every_key_that_is_a_setting_names_one() {
    fn check(keys: Keys) {
        for (key, fate) in keys {
            match fate {
                Fate::Section(keys) => check(keys),
                Fate::Is(setting) => {
                    let sections = super::super::Settings::sections();
                    let mut known = sections.iter().flat_map(|section| {
                        section.keys.iter().map(move |key| format!("{}.{}", section.name, key.name))
                    });
                    assert!(known.any(|known| known == *setting), "{key}: {setting}");
                }
                _ => (),
            }
        }
    }
    let parameters = [keys::OPTIMIZER, keys::WARMUP, keys::WARMUP_DECAY, keys::WARMUP_COSINE];
    [keys::KEYS].into_iter().chain(parameters).for_each(check);
}
