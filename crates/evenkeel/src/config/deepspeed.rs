//! `--deepspeed FILE`: a DeepSpeed configuration beside the run's own.
//!
//! Its values are added to the run's file and count as much: if both set one thing, they must agree. Flags and `--set` win over
//! both. `"auto"` and missing keys leave a thing to the rest of the configuration, except the missing parameters of an optimizer
//! or scheduler that the file has: these get DeepSpeed's defaults unless the rest sets them. `keys.rs` says what happens to each
//! key, `optimizer.rs` reads keys that belong together.

mod keys;
mod optimizer;
#[cfg(test)]
mod tests;

use evenkeel_store::nearest;
use serde_json::{Map, Value as Json};
use toml::Value;

use self::keys::{Fate, KEYS, Keys, is_asked_for};
use super::raw::{Origin, RawConfig, printable, show};

/// The largest file that is read. Files that people write have a few kilobytes.
pub const MOST_BYTES: u64 = 1 << 16;

/// Adds the file's values to those given so far. `name` is for messages.
pub fn add(raw: &mut RawConfig, name: &str, file: &Json) {
    let mut reader = Reader { raw, name, file, idle: Vec::new(), defaults: Vec::new() };
    let Json::Object(keys) = file else {
        let place = Origin::File { name: name.to_owned(), line: 1 };
        return reader.raw.note(place, format!("is {}, expected an object", show(&in_toml(file))), None);
    };
    reader.walk("", KEYS, keys);
    reader.dtype();
    optimizer::read(&mut reader);
    reader.batch();
    reader.tensor_parallel();
    reader.recompute();
    reader.saved_model();
    reader.tell();
}

/// The file's value for a key.
enum Said<'a> {
    Nothing,
    Auto,
    This(&'a Json),
}

struct Reader<'a> {
    raw: &'a mut RawConfig,
    name: &'a str,
    file: &'a Json,
    /// Keys that are understood and change nothing.
    idle: Vec<String>,
    /// Settings that are DeepSpeed's defaults.
    defaults: Vec<String>,
}

impl<'a> Reader<'a> {
    /// Does what its table says with every key.
    fn walk(&mut self, section: &str, table: Keys, keys: &Map<String, Json>) {
        for (key, value) in keys {
            let full = within(section, key);
            match table.iter().find(|(known, _)| known == key).map(|(_, fate)| fate) {
                None => self.note_unknown(section, key, table.iter().map(|&(known, _)| known)),
                Some(_) if value.is_null() || value == "auto" => (),
                Some(Fate::Is(setting)) => self.give(&full, setting, in_toml(value)),
                Some(Fate::Read) => (),
                Some(Fate::Idle) if !is_asked_for(value) => (),
                Some(Fate::Idle) => self.idle.push(format!("`{full}`")),
                Some(Fate::Refused { unless, why, hint }) => {
                    if !unless(value) {
                        self.note(&full, format!("is not supported: {why}"), hint);
                    }
                }
                Some(Fate::Section(table)) => {
                    if let Some(keys) = self.object(&full, value) {
                        self.walk(&full, table, keys);
                    }
                }
            }
        }
    }

    fn dtype(&mut self) {
        let keys = [
            ("bf16.enabled", "bf16", Some("f32")),
            ("bfloat16.enabled", "bf16", Some("f32")),
            ("fp32.enabled", "f32", None),
        ];
        for (key, on, off) in keys {
            if let Some(dtype) = self.flag(key).and_then(|flag| if flag { Some(on) } else { off }) {
                self.give(key, "train.dtype", Value::String(dtype.to_owned()));
            }
        }
    }

    /// The global batch is micro-batch × accumulation × data-parallel ranks; two of them give the third.
    fn batch(&mut self) {
        const KEY: &str = "train_batch_size";
        let Said::This(given) = self.said(KEY) else { return };
        let Some(total) = whole(given).filter(|&total| total > 0) else {
            return self.note(KEY, format!("is {}, expected a whole number from 1", show(&in_toml(given))), "");
        };
        let Some(ranks) = self.raw.whole("parallel.dp") else { return };
        let said = |setting: &str| self.raw.is_given(setting).then(|| self.raw.whole(setting));
        let (micro, accumulated) = match (said("train.batch"), said("train.accumulate")) {
            // Given, but no number: reading it later gives the message.
            (Some(None), _) | (_, Some(None)) => return,
            (micro, accumulated) => (micro.flatten(), accumulated.flatten()),
        };
        let (missing, factors) = match (micro, accumulated) {
            (Some(_), Some(_)) => (None, vec![("train.batch", micro), ("train.accumulate", accumulated)]),
            (Some(_), None) => (Some("train.accumulate"), vec![("train.batch", micro)]),
            (None, Some(_)) => (Some("train.batch"), vec![("train.accumulate", accumulated)]),
            (None, None) => (Some("train.batch"), Vec::new()),
        };
        let factors: Vec<(&str, u64)> = factors
            .into_iter()
            .filter_map(|(setting, factor)| Some((setting, factor?)))
            .chain([("parallel.dp", ranks)])
            .collect();
        let product = factors.iter().fold(1_u64, |product, &(_, factor)| product.saturating_mul(factor));
        let shown: Vec<String> = factors.iter().map(|(setting, factor)| format!("{factor} ({setting})")).collect();
        let shown = format!("{} = {product}", shown.join(" × "));
        match missing {
            None if product == total => (),
            None => {
                let hint = "leave one of them out, and it is computed from the others";
                self.note(KEY, format!("is {total}, but {shown}"), hint);
            }
            Some(missing) if total.is_multiple_of(product) => {
                self.give(KEY, missing, in_toml(&Json::from(total / product)));
            }
            Some(_) => self.note(KEY, format!("is {total}, which is no multiple of {shown}"), ""),
        }
    }

    fn tensor_parallel(&mut self) {
        const KEY: &str = "tensor_parallel.autotp_size";
        if let Said::This(size) = self.said(KEY) {
            // With 0, DeepSpeed does not cut the model.
            let size = if whole(size) == Some(0) { Value::Integer(1) } else { in_toml(size) };
            self.give(KEY, "parallel.tp", size);
        }
    }

    /// DeepSpeed's section only sets up a function that the model's own code may call; a user who partitions or counts
    /// checkpoints has code that does.
    fn recompute(&mut self) {
        let partitioned = "activation_checkpointing.partition_activations";
        if self.flag(partitioned) == Some(true) {
            self.give(partitioned, "train.recompute", Value::Boolean(true));
        }
        let counted = "activation_checkpointing.number_checkpoints";
        if let Said::This(number) = self.said(counted) {
            match whole(number) {
                Some(0) => (),
                Some(_) => self.give(counted, "train.recompute", Value::Boolean(true)),
                None => self.note(counted, format!("is {}, expected a whole number", show(&in_toml(number))), ""),
            }
        }
    }

    /// Models are always saved whole, in the compute dtype: in 16 bits if DeepSpeed would have 16 to gather.
    fn saved_model(&mut self) {
        let names = [
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ];
        for key in names.map(|name| within("zero_optimization", name)) {
            if self.flag(&key) == Some(true) {
                self.give(&key, "output.save_model", Value::Boolean(true));
            }
        }
    }

    /// Notes what a user may not expect.
    fn tell(&mut self) {
        // Another crate decides whether JSON keeps the order of its keys.
        self.idle.sort_unstable();
        for (what, list) in [("has no effect here", &self.idle), ("DeepSpeed's defaults are taken", &self.defaults)] {
            if !list.is_empty() {
                self.raw.notes.push(format!("{}: {what}: {}", self.name, list.join(", ")));
            }
        }
    }

    fn said(&self, key: &str) -> Said<'a> {
        match key.split('.').try_fold(self.file, |value, key| value.get(key)) {
            None | Some(Json::Null) => Said::Nothing,
            Some(value) if value == "auto" => Said::Auto,
            Some(value) => Said::This(value),
        }
    }

    /// `None` if the file does not have the key, or has something else than true or false for it.
    fn flag(&mut self, key: &str) -> Option<bool> {
        let Said::This(value) = self.said(key) else { return None };
        if !value.is_boolean() {
            self.note(key, format!("is {}, expected true or false", show(&in_toml(value))), "");
        }
        value.as_bool()
    }

    fn object<'v>(&mut self, key: &str, value: &'v Json) -> Option<&'v Map<String, Json>> {
        if !value.is_object() {
            self.note(key, format!("is {}, expected an object", show(&in_toml(value))), "");
        }
        value.as_object()
    }

    fn give(&mut self, key: &str, setting: &str, value: Value) {
        self.raw.give_also(self.place(key), setting, value);
    }

    /// For DeepSpeed's behaviour if the file does not say.
    fn give_default(&mut self, key: &str, setting: &str, value: Value) {
        if !self.raw.is_given(setting) {
            self.defaults.push(format!("{setting} = {}", show(&value)));
            self.give(key, setting, value);
        }
    }

    fn place(&self, key: &str) -> Origin {
        Origin::Key { file: self.name.to_owned(), key: printable(key) }
    }

    /// `hint` is empty if there is none.
    fn note(&mut self, key: &str, what: String, hint: &str) {
        self.raw.note(self.place(key), what, Some(hint.to_owned()).filter(|hint| !hint.is_empty()));
    }

    fn note_unknown(&mut self, section: &str, key: &str, known: impl Iterator<Item = &'static str>) {
        // A comment, as LLaMA-Factory's files have them.
        if key.starts_with('_') {
            return;
        }
        let here = nearest(key, known).map(|meant| within(section, meant));
        let meant = here.or_else(|| keys::elsewhere(key));
        let hint = meant.map_or(String::new(), |meant| format!("did you mean `{meant}`?"));
        self.note(&within(section, key), "unknown key".to_owned(), &hint);
    }
}

fn within(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// A whole number, also one that is written as 5e8.
fn whole(value: &Json) -> Option<u64> {
    in_toml(value).as_integer().and_then(|whole| whole.try_into().ok())
}

fn in_toml(value: &Json) -> Value {
    const EXACT: f64 = (1_u64 << 53) as f64;
    match value {
        // TOML has no null.
        Json::Null => Value::String("null".to_owned()),
        Json::Bool(flag) => Value::Boolean(*flag),
        Json::String(text) => Value::String(text.clone()),
        Json::Array(values) => Value::Array(values.iter().map(in_toml).collect()),
        Json::Object(keys) => Value::Table(keys.iter().map(|(key, value)| (key.clone(), in_toml(value))).collect()),
        Json::Number(number) => match (number.as_i64(), number.as_f64().unwrap_or(f64::NAN)) {
            (Some(whole), _) => Value::Integer(whole),
            (None, number) if number.fract() == 0.0 && number.abs() <= EXACT => Value::Integer(number as i64),
            (None, number) => Value::Float(number),
        },
    }
}
