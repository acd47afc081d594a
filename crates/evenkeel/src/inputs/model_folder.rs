//! The folder of a model: a Hugging Face folder alone, or with an adapter on it.

use std::path::{Path, PathBuf};

use evenkeel_device::{DType, Queue};
use evenkeel_model::{ADAPTER_CONFIG, AdapterFolder, AdapterValues, Model, Parameters, ZeroSharding};
use evenkeel_store::{Folder, exists, nearest, shortened};
use serde_json::Value;

use super::model::with_labels;
use super::run_folder::RUN_MODEL;
use crate::{Failure, Mistake, Mistakes, hub};

pub struct ModelFolder {
    pub base: Folder,
    pub adapter: Option<AdapterFolder>,
}

impl ModelFolder {
    /// Opens a model's folder, with the adapter of another folder if one is given. The folder of an adapter may take the model's
    /// place: its configuration names the base.
    pub fn open(path: &Path, adapter: Option<&Path>) -> Result<ModelFolder, Failure> {
        if adapter.is_none() && is_adapter(path) {
            return ModelFolder::of_adapter(
                path,
                &format!("give the model's folder, and --adapter {path:?} or adapter.path"),
            );
        }
        let adapter = adapter.map(AdapterFolder::open).transpose()?;
        Ok(ModelFolder { base: open_base(path)?, adapter })
    }

    /// An adapter's folder and its base, which its configuration names. `hint` says how to give another base.
    pub fn of_adapter(path: &Path, hint: &str) -> Result<ModelFolder, Failure> {
        let saved = AdapterFolder::open(path)?;
        let base = saved.base.clone().unwrap_or_default();
        if !exists(Path::new(&base).join("config.json")) {
            let what = format!("the adapter in {path:?} belongs to the model {base:?}, which is no folder here");
            return Err(Mistake { what, hint: Some(hint.to_owned()) }.into());
        }
        Ok(ModelFolder { base: open_base(Path::new(&base))?, adapter: Some(saved) })
    }

    /// The model, its adapter included, once the folder's tensors are known to fit; and config.json without the ignored keys.
    /// `option` is where the user named those. `packs` says whether to hold its linear layers in 4 bits; a quantised folder's are.
    pub fn model(&self, ignored: &[String], option: &str, packs: bool) -> Result<(Model, Value), Failure> {
        self.model_as(without_keys(&self.config(), ignored, option)?, packs, false)
    }

    /// config.json of the base, with the labels of the adapter.
    pub fn config(&self) -> Value {
        let labels = self.adapter.as_ref().map_or_else(Vec::new, AdapterFolder::label_names);
        with_labels(self.base.config().clone(), &labels)
    }

    /// The same with this config.json. A classifier's head may begin anew.
    pub fn model_as(&self, mut json: Value, packs: bool, has_new_head: bool) -> Result<(Model, Value), Failure> {
        let mut model = self.base_model(&json, packs)?;
        let labels = self.adapter.as_ref().and_then(|adapter| model.labels_in(adapter));
        if let Some(labels) = labels.filter(|&labels| labels != model.config.classes) {
            // The base may have been saved for other labels, or for none.
            json = with_number_of_labels(json, labels);
            model = self.base_model(&json, packs)?;
        }
        if has_new_head {
            self.check_new_head(&model)?;
        }
        if has_new_head || labels.is_some() {
            model = model.with_new_head();
        }
        model.check(&self.base)?;
        let Some(adapter) = &self.adapter else { return Ok((model, json)) };
        Ok((model.with_adapter(adapter)?, json))
    }

    fn check_new_head(&self, model: &Model) -> Result<(), Mistake> {
        let what = if !model.config.input.is_classified() {
            "`model.new_head` is set, but the model is no classifier"
        } else if self.adapter.is_some() {
            "`model.new_head` is set, but the adapter was trained with its own head"
        } else {
            return Ok(());
        };
        Err(Mistake { what: what.to_owned(), hint: Some("leave it out".to_owned()) })
    }

    /// The model without its adapter, as this config.json describes it.
    pub fn base_model(&self, json: &Value, packs: bool) -> Result<Model, Failure> {
        let model = Model::of_folder(json, &self.base)?;
        Ok(if packs { model.packed() } else { model })
    }

    /// Loads a shard's part of the weights. `seed` is that of a new adapter.
    pub fn load(
        &self,
        shard: &Model,
        seed: u64,
        dtype: DType,
        split: ZeroSharding,
        queue: &Queue,
    ) -> Result<Parameters, evenkeel_model::Error> {
        let values = self.adapter.as_ref().map_or(AdapterValues::New { seed }, AdapterValues::Saved);
        shard.load_adapted(&self.base, &values, dtype, split, queue)
    }

    /// The folder that has this file: the adapter's, or the base's.
    pub fn folder_with(&self, file: &str) -> PathBuf {
        let of_adapter = self.adapter.iter().map(|adapter| &adapter.path).find(|path| exists(path.join(file)));
        of_adapter.cloned().unwrap_or_else(|| self.base.path().to_owned())
    }
}

/// Whether a folder has an adapter and no model of its own.
pub fn is_adapter(path: &Path) -> bool {
    exists(path.join(ADAPTER_CONFIG)) && !exists(path.join("config.json"))
}

/// For a run's folder, the error says where its model is.
fn open_base(path: &Path) -> Result<Folder, Failure> {
    hub::check(path)?;
    let inside = path.join(RUN_MODEL);
    let has_model = exists(inside.join("config.json")) || exists(inside.join(ADAPTER_CONFIG));
    if !exists(path.join("config.json")) && has_model {
        let what = format!("{path:?} is the folder of a run, expected one of a model");
        return Err(Mistake { what, hint: Some(format!("its model is in {inside:?}")) }.into());
    }
    Ok(Folder::open(path)?)
}

/// config.json without the ignored keys; `a.b` is key b of object a. Refuses keys that it does not have: `option` is where the user
/// named them.
pub fn without_keys(json: &Value, ignored: &[String], option: &str) -> Result<Value, Mistakes> {
    let known: Vec<String> = keys_of(json, "").collect();
    let mut without = json.clone();
    let absent = ignored.iter().filter(|key| !take(&mut without, key)).map(|key| Mistake {
        what: format!("`{option}` names `{}`, which config.json does not have", shortened(key, 80)),
        hint: nearest(key, known.iter().map(String::as_str)).map(|meant| format!("did you mean `{meant}`?")),
    });
    let mistakes: Vec<Mistake> = absent.collect();
    if mistakes.is_empty() { Ok(without) } else { Err(mistakes.into()) }
}

/// The same for a saved model, which may be without them already.
pub fn without_keys_if_there(json: &Value, ignored: &[String]) -> Value {
    let mut without = json.clone();
    for key in ignored {
        take(&mut without, key);
    }
    without
}

fn take(json: &mut Value, key: &str) -> bool {
    let Some(object) = json.as_object_mut() else { return false };
    let inside = |(outer, inner)| object.get_mut(outer).is_some_and(|object| take(object, inner));
    key.split_once('.').is_some_and(inside) || object.remove(key).is_some()
}

fn keys_of<'a>(json: &'a Value, before: &'a str) -> Box<dyn Iterator<Item = String> + 'a> {
    let keys = json.as_object().into_iter().flatten();
    Box::new(keys.flat_map(move |(key, value)| {
        let key = format!("{before}{key}");
        let inner: Vec<String> = keys_of(value, &format!("{key}.")).collect();
        std::iter::once(key).chain(inner)
    }))
}

/// config.json with so many labels, which it has no names for.
fn with_number_of_labels(mut json: Value, labels: usize) -> Value {
    if let Some(object) = json.as_object_mut() {
        object.remove("id2label");
        object.remove("label2id");
        object.insert("num_labels".to_owned(), Value::from(labels));
    }
    json
}
