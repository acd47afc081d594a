//! The model that a run trains: from a folder, from a config.json, or new.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use evenkeel_balance::Mode;
use evenkeel_data::Tokenizer;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{
    ADAPTER_CONFIG, AdapterConfig, Adapters, Config, Input, Merger, Model, PEFT_PREFIX, ParamId, ParamSpec, Parameters,
    Quantization, ZeroSharding, check_description,
};
use evenkeel_store::{FileDtype, Format, NewFolder, RawTensor, Source, copy_file, exists, read_config};
use evenkeel_train::{save_adapter, save_weights};
use serde_json::{Value, json};

use super::feed::{IMAGE_DEVIATION, IMAGE_MEAN, Text};
use super::model_folder::{ModelFolder, without_keys, without_keys_if_there};
use crate::config::{
    AdapterBase, DORA_DROPOUT_HINT, DataSource, Dtype, ModelSource, PACKED_HINT, PACKED_MOVES, PRUNED_ADAPTERS,
    PRUNED_HINT, RecordFormat, RunConfig, Settings, Sizes,
};
use crate::{Failure, Mistake, warn};

/// A model, the source of its weights, and its config.json.
pub struct ModelInput {
    pub model: Model,
    /// config.json, without the keys that are ignored.
    pub json: Value,
    folder: Option<ModelFolder>,
    /// The names of the classes of the run's images, by label.
    classes: Vec<String>,
    /// Whether the model is trained here; if not, its images are prepared as its folder says.
    is_trained_here: bool,
}

fn check_positions(sequence: usize, positions: usize) -> Result<(), Mistake> {
    if sequence <= positions {
        return Ok(());
    }
    Err(Mistake {
        what: format!("data.sequence is {sequence}, this model has {positions} positions"),
        hint: Some(format!("use data.sequence = {positions} or less")),
    })
}

impl ModelInput {
    /// A digest of the weights that an adapter lies beside; none if the whole model is trained, or if nobody has saved it.
    pub fn base_digest(&self) -> Option<String> {
        let folder = self.folder.as_ref().filter(|_| self.model.config.adapters.is_some())?;
        Some(folder.base.weights_digest().to_string())
    }

    /// For training: refuses adapters that can only be used, and warns of what may not be as the user thinks.
    pub fn open(config: &mut RunConfig, tokenizer: Option<&Tokenizer>) -> Result<ModelInput, Failure> {
        let input = ModelInput::read(config, tokenizer)?;
        if let Some(adapters) = input.model.config.adapters.as_ref().filter(|adapters| adapters.config.is_dora)
            && adapters.config.dropout > 0.0
        {
            let dropout = adapters.config.dropout;
            let what = format!(
                "the adapter has magnitudes (DoRA) and a dropout of {dropout}, with which it cannot be trained"
            );
            let hint = format!("{DORA_DROPOUT_HINT} (`lora_dropout` in its adapter_config.json)");
            return Err(Mistake { what, hint: Some(hint) }.into());
        }
        input.continue_adapter(config)?;
        input.check_adapter(&config.settings)?;
        input.check_packed(&config.settings)?;
        input.check_stages(&config.settings)?;
        input.check_parts(&config.settings)?;
        let head = input.model.config.family.names.head;
        let is_asked = config.settings.model.new_head;
        if is_asked {
            warn(&format!("`{head}` begins anew with random numbers, for {} labels", input.model.config.classes));
        }
        let missing = input.new_modules().into_iter().filter(|module| !(is_asked && *module == head));
        let names: Vec<String> = missing.map(|module| format!("`{module}`")).collect();
        if !names.is_empty() {
            let names = names.join(" and ");
            warn(&format!("the model's folder has no {names}: training begins with random numbers there"));
        }
        input.model.config.warnings(config.settings.data.sequence).iter().for_each(|warning| warn(warning));
        Ok(input)
    }

    /// Compares the given keys of `[adapter]` with a saved adapter that is trained on, and fills in the others.
    fn continue_adapter(&self, config: &mut RunConfig) -> Result<(), Failure> {
        let Some((saved, path)) = self.saved_adapter() else { return Ok(()) };
        let adapter = &config.settings.adapter;
        let differ = adapter.contradictions(saved, &config.adapter_keys).into_iter();
        let mut found: Vec<String> = differ
            .map(|(key, ours, theirs)| format!("`{key}` is {ours}, but the adapter in {path:?} has {theirs}"))
            .collect();
        for (key, variation) in adapter.variations(saved) {
            if !self.trains_the_same(variation, adapter.packs())? {
                found.push(format!("`{key}` describes other parameters than the adapter in {path:?} has"));
            }
        }
        let hint = "leave it out to train that adapter on, or begin a new one with its base as model.path";
        let mistake = |what: String| Mistake { what, hint: Some(hint.to_owned()) };
        if !found.is_empty() {
            return Err(found.into_iter().map(mistake).collect::<Vec<_>>().into());
        }
        config.settings.adapter.describe_saved(saved);
        Ok(())
    }

    /// `None` if no saved adapter is trained on.
    pub fn describe_continued(&self) -> Option<String> {
        self.saved_adapter().map(|(_, path)| format!("continues the adapter in {path:?}"))
    }

    fn saved_adapter(&self) -> Option<(&AdapterConfig, &Path)> {
        let adapter = self.folder.as_ref()?.adapter.as_ref()?;
        Some((&adapter.config, &adapter.path))
    }

    /// Whether an adapter of this configuration on the same base has the parameters and the factors of this one.
    fn trains_the_same(&self, config: AdapterConfig, packs: bool) -> Result<bool, Failure> {
        let Some(folder) = &self.folder else { return Ok(false) };
        // What matches nothing describes another adapter.
        let Ok(model) = folder.base_model(&self.json, packs)?.adapted(config) else { return Ok(false) };
        let trained = |model: &Model| -> Vec<(String, Vec<usize>)> {
            let trained = model.specs.iter().filter(|spec| spec.is_trained);
            trained.map(|spec| (spec.name.clone(), spec.shape.clone())).collect()
        };
        Ok(trained(&model) == trained(&self.model) && model.adapter_scales() == self.model.adapter_scales())
    }

    /// Whether the folder's own weights are in 4 bits.
    pub fn is_saved_packed(&self) -> bool {
        self.model.config.quantization == Some(Quantization::Nf4)
    }

    /// Refuses what the configuration alone does not show: `model.path` may be the folder of an adapter.
    fn check_adapter(&self, settings: &Settings) -> Result<(), Mistake> {
        let is_adapted = self.model.config.adapters.is_some();
        if is_adapted && settings.balance.gamma_max > 0.0 {
            return Err(Mistake { what: PRUNED_ADAPTERS.to_owned(), hint: Some(PRUNED_HINT.to_owned()) });
        }
        if !is_adapted && settings.adapter.base.is_some() {
            let what = "`adapter.base` is set, but there is no adapter".to_owned();
            return Err(Mistake { what, hint: Some("set adapter.kind = \"lora\"".to_owned()) });
        }
        Ok(())
    }

    /// Refuses a pipeline where layers depend on others beside the stream: for the loss of balance among experts, and where they
    /// hand values on.
    fn check_stages(&self, settings: &Settings) -> Result<(), Mistake> {
        let (pp, config) = (settings.parallel.pp, &self.model.config);
        if pp == 1 || config.can_be_in_stages() {
            return Ok(());
        }
        if config.hands_values_on() {
            let keys: Vec<&str> = config.handing_keys().collect();
            let what = format!(
                "parallel.pp is {pp}, but layers of this model hand values to later ones: config.json sets {}",
                keys.join(" and ")
            );
            return Err(Mistake { what, hint: Some("use parallel.pp = 1".to_owned()) });
        }
        Err(balance_forbids("pp", pp, "depends on all layers at once"))
    }

    fn check_parts(&self, settings: &Settings) -> Result<(), Mistake> {
        let parts = settings.parallel.parts.unwrap_or(1);
        match parts == 1 || self.model.config.can_be_in_parts() {
            true => Ok(()),
            false => Err(balance_forbids("parts", parts, "is of whole micro-batches")),
        }
    }

    /// Refuses what cannot be done with weights in 4 bits. The folder may be the first to say that they are.
    fn check_packed(&self, settings: &Settings) -> Result<(), Mistake> {
        let mistake = |what: &str, hint: &str| Err(Mistake { what: what.to_owned(), hint: Some(hint.to_owned()) });
        if !self.model.is_packed() {
            return Ok(());
        }
        if self.model.config.adapters.is_none() {
            return mistake(
                "the model's weights are in 4 bits, which cannot be trained themselves",
                "set adapter.kind = \"lora\" to train an adapter, or use the model's F32, BF16 or F16 weights",
            );
        }
        if settings.adapter.base == Some(AdapterBase::Bf16) {
            return mistake(
                "`adapter.base` is \"bf16\", but the weights of `model.path` are in 4 bits",
                "leave adapter.base out, or use the model's BF16 weights",
            );
        }
        if settings.balance.mode != Mode::Off {
            return mistake(PACKED_MOVES, PACKED_HINT);
        }
        Ok(())
    }

    /// The model limits the length of sequences if the configuration does not give it.
    pub fn read(config: &mut RunConfig, tokenizer: Option<&Tokenizer>) -> Result<ModelInput, Failure> {
        let ignored = &config.settings.model.ignore_keys;
        let adapter = &config.settings.adapter;
        let labels = &config.settings.data.labels;
        let classes = classes(&config.settings)?;
        let without_ignored = |json: &Value| match config.evaluates_folder {
            true => Ok(without_keys_if_there(json, ignored)),
            false => without_keys(json, ignored, "model.ignore_keys"),
        };
        let described = |json: Value, file: Option<&Path>| -> Result<(Model, Value), Failure> {
            let folder = file.and_then(Path::parent).unwrap_or(Path::new(""));
            check_description(&json, folder)?;
            let json = without_ignored(&json)?;
            let model = Model::from_json(&json).map_err(|error| error.with_line(folder))?;
            Ok((if adapter.packs() { model.packed() } else { model }, json))
        };
        let ((model, json), folder) = match &config.source {
            ModelSource::Folder(path) => {
                let folder = ModelFolder::open(path, adapter.path.as_deref())?;
                let has_new_head = config.settings.model.new_head && !config.evaluates_folder;
                if !has_new_head {
                    refuse_other_order(&folder.config(), labels)?;
                }
                let labels = if has_new_head && labels.is_empty() { &classes } else { labels };
                let json = with_labels(without_ignored(&folder.config())?, labels);
                (folder.model_as(json, adapter.packs(), has_new_head)?, Some(folder))
            }
            ModelSource::Config(path) => (described(with_labels(read_config(path)?, labels), Some(path))?, None),
            ModelSource::Sizes(sizes) => {
                let tokenizer = tokenizer.ok_or_else(no_new_classifier)?;
                (described(new_config(sizes, tokenizer, config.settings.data.sequence), None)?, None)
            }
        };
        let is_adapted = model.config.adapters.is_some();
        let model = match adapter.new_adapter().filter(|_| !is_adapted) {
            Some(new) => newly_adapted(&model, new, folder.as_ref())?,
            None => model,
        };
        let labels = labels.len();
        if matches!(model.config.input, Input::Texts { .. }) && labels > 0 && model.config.classes != labels {
            let what = format!("`data.labels` has {labels} labels, the adapter's classifier {}", model.config.classes);
            return Err(Mistake { what, hint: Some("name as many, or none".to_owned()) }.into());
        }
        let kind = config.settings.device.kind;
        model.check_device(kind)?;
        let model = model.for_device(kind);
        config.fit_sequence(model.config.positions);
        if let Some(positions) = model.config.input.most_positions() {
            check_positions(config.settings.data.sequence, positions)?;
        }
        check_classes(&model, &classes)?;
        Ok(ModelInput { model, json, folder, classes, is_trained_here: true })
    }

    /// The modules that begin with random numbers, since neither the folder nor its adapter has them.
    pub fn new_modules(&self) -> Vec<&'static str> {
        let of_base = self.folder.iter().filter(|folder| folder.adapter.is_none());
        of_base.flat_map(|folder| self.model.new_modules(&folder.base)).collect()
    }

    /// A saved model, to be written in another form.
    pub fn saved(folder: ModelFolder, ignored: &[String], packs: bool) -> Result<ModelInput, Failure> {
        let (model, json) = folder.model(ignored, "--ignore-keys", packs)?;
        Ok(ModelInput { model, json, folder: Some(folder), classes: Vec::new(), is_trained_here: false })
    }

    /// The dtype of the weights in the model's folder, as far as it can be written; what config.json says nothing of is f32.
    pub fn saved_dtype(&self) -> Dtype {
        let dtype = ["dtype", "torch_dtype"].iter().find_map(|key| self.json.get(key)?.as_str());
        // Experts in MXFP4 lie beside BF16, and BF16 holds them exactly.
        let is_mxfp4 = self.model.config.quantization == Some(Quantization::Mxfp4);
        if dtype == Some("bfloat16") || is_mxfp4 { Dtype::Bf16 } else { Dtype::F32 }
    }

    /// Writes the model with the adapter of its own folder merged into it.
    pub fn save_saved_merged(
        &self,
        path: &Path,
        dtype: Dtype,
        tokenizer: Option<&SavedTokenizer>,
        replace: bool,
    ) -> Result<(), Failure> {
        let adapter = self.folder.as_ref().and_then(|folder| folder.adapter.as_ref()).expect("an adapter's folder");
        let read_rows = |id: ParamId, rows| Ok(self.model.read_saved_rows(adapter, id, rows)?);
        self.save_merged(path, dtype, tokenizer, read_rows, replace)
    }

    /// The weights that a shard of the model begins with.
    pub fn parameters(
        &self,
        shard: &Model,
        seed: u64,
        dtype: DType,
        split: ZeroSharding,
        queue: &Queue,
    ) -> Result<Parameters, evenkeel_model::Error> {
        Ok(match &self.folder {
            Some(folder) => folder.load(shard, seed, dtype, split, queue)?,
            None => Parameters::random(shard, dtype, split, seed, queue),
        })
    }

    /// Writes the model as a Hugging Face folder: config.json, the tokenizer of a model of text, and the weights from
    /// `read_rows`. Of a model with adapters, only these are written, as PEFT has them. An existing folder is replaced only if `replace` is set.
    pub fn save(
        &self,
        path: &Path,
        settings: &Settings,
        tokenizer: Option<&SavedTokenizer>,
        specs: &[ParamSpec],
        read_rows: impl Fn(ParamId, Range<usize>) -> Result<Vec<f32>, evenkeel_train::Error>,
        replace: bool,
    ) -> Result<(), evenkeel_train::Error> {
        let dtype = settings.save_dtype();
        let new = NewFolder::create(path)?;
        if let Some(tokenizer) = tokenizer {
            save_tokenizer(&new, tokenizer)?;
        }
        match &self.model.config.adapters {
            None => {
                self.save_config(&new, dtype)?;
                save_weights(&new, specs, file_dtype(dtype), &self.carried(), read_rows)?;
            }
            Some(adapters) => {
                new.write_json(ADAPTER_CONFIG, &self.peft_config(adapters))?;
                save_adapter(
                    &new,
                    &self.adapter_names(specs),
                    specs,
                    file_dtype(dtype),
                    self.label_table(),
                    read_rows,
                )?;
            }
        }
        Ok(new.commit(replace)?)
    }

    /// Writes the model with its adapter merged into it, as a plain Hugging Face folder; weights in 4 bits are expanded. `read_rows`
    /// gives what was trained.
    pub fn save_merged(
        &self,
        path: &Path,
        dtype: Dtype,
        tokenizer: Option<&SavedTokenizer>,
        read_rows: impl Fn(ParamId, Range<usize>) -> Result<Vec<f32>, evenkeel_train::Error>,
        replace: bool,
    ) -> Result<(), Failure> {
        let folder = self.folder.as_ref().filter(|_| self.model.config.adapters.is_some());
        let Some(folder) = folder else {
            let what = "there is no adapter to merge: the whole model was trained".to_owned();
            return Err(Mistake { what, hint: Some("leave out --merge".to_owned()) }.into());
        };
        let specs = &self.model.specs;
        let merger = Merger::new(&self.model, &folder.base)?;
        let merger = merger.with_adapters(|id| read_rows(id, 0..specs[id.0].whole[0]))?;
        let of_base: Vec<ParamId> = (0..specs.len()).filter(|&id| !specs[id].is_adapter).map(ParamId).collect();
        let written: Vec<ParamSpec> = of_base.iter().map(|id| specs[id.0].clone()).collect();
        let new = NewFolder::create(path)?;
        if let Some(tokenizer) = tokenizer {
            save_tokenizer(&new, tokenizer)?;
        }
        self.save_config(&new, dtype)?;
        save_weights(&new, &written, file_dtype(dtype), &self.carried(), |id, rows| {
            let id = of_base[id.0];
            if specs[id.0].is_trained { read_rows(id, rows) } else { Ok(merger.read_rows(id, rows)?) }
        })?;
        Ok(new.commit(replace)?)
    }

    /// The tensors that belong to other parts of the model than its text.
    fn carried(&self) -> Vec<RawTensor<'_>> {
        self.folder.as_ref().map_or_else(Vec::new, |folder| self.model.carried(&folder.base))
    }

    /// The names of what an adapter's file has. PEFT writes a trained embedding twice if a head is tied to it.
    fn adapter_names(&self, specs: &[ParamSpec]) -> Vec<(String, ParamId)> {
        let trained = specs.iter().enumerate().filter(|(_, spec)| spec.is_trained);
        let named = |(index, spec): (usize, &ParamSpec)| (self.model.peft_name(spec), ParamId(index));
        let mut names: Vec<(String, ParamId)> = trained.map(named).collect();
        let Config { tied, family, .. } = &self.model.config;
        let embedding = specs.iter().position(|spec| spec.is_trained && spec.name == family.names.embed);
        let head = embedding.filter(|_| *tied).map(ParamId);
        names.extend(head.map(|id| (format!("{PEFT_PREFIX}{}.weight", family.names.head), id)));
        names
    }

    /// `id2label` of a classifier, in JSON.
    fn label_table(&self) -> Option<String> {
        let Config { classes, ref label_names, .. } = self.model.config;
        let names = if self.classes.is_empty() { label_names } else { &self.classes };
        (!names.is_empty()).then(|| label_tables(names, classes).0.to_string())
    }

    fn peft_config(&self, adapters: &Adapters) -> Value {
        let config = &self.model.config;
        let base = self.folder.as_ref().map(|folder| folder.base.path());
        let base = base.map_or_else(String::new, |path| {
            std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string()
        });
        let task = match config.input {
            Input::Tokens { .. } => Some("CAUSAL_LM"),
            Input::Texts { .. } => Some("SEQ_CLS"),
            Input::Images { .. } => None,
        };
        adapters.config.to_peft(&base, task, config.family.is_transposed, &self.model.adapted_names())
    }

    /// Writes config.json and its like.
    pub fn save_config(&self, folder: &NewFolder, dtype: Dtype) -> Result<(), evenkeel_store::Error> {
        let mut json = self.json.clone();
        if let Some(object) = json.as_object_mut() {
            object.remove("torch_dtype");
            object.remove("quantization_config");
            object.insert("dtype".to_owned(), json!(file_dtype_name(dtype)));
            if self.model.config.head_begins_as_embedding {
                object.insert("tie_word_embeddings".to_owned(), json!(false));
            }
            if matches!(self.model.config.input, Input::Texts { .. }) {
                // The folder's own class may be one without labels.
                object.insert("architectures".to_owned(), json!([self.model.config.family.class]));
            }
            if !self.classes.is_empty() {
                let (by_label, by_name) = label_tables(&self.classes, self.model.config.classes);
                object.extend([("id2label".to_owned(), by_label), ("label2id".to_owned(), by_name)]);
                object.remove("num_labels");
            }
        }
        folder.write_json("config.json", &json)?;
        let from = self.folder.as_ref().map(|folder| folder.base.path());
        if let Input::Images { size, channels, .. } = self.model.config.input {
            // The folder's own file describes other pictures than those of a training here.
            let own = from.filter(|_| !self.is_trained_here);
            if !copy_present(folder, own, &["preprocessor_config.json"])?.is_empty() {
                return Ok(());
            }
            return folder.write_json("preprocessor_config.json", &preprocessor(size, channels));
        }
        if self.model.config.input.is_classified() {
            return Ok(());
        }
        copy_present(folder, from, &PROCESSORS)?;
        if copy_present(folder, from, &["generation_config.json"])?.is_empty() {
            let tokens = ["bos_token_id", "eos_token_id", "pad_token_id"];
            let tokens = tokens.iter().filter_map(|&key| Some((key.to_owned(), json.get(key)?.clone())));
            folder.write_json("generation_config.json", &Value::Object(tokens.collect()))?;
        }
        Ok(())
    }
}

/// A number of places or parts that the loss of balance among experts does not allow.
fn balance_forbids(key: &str, number: usize, reason: &str) -> Mistake {
    let what = format!(
        "parallel.{key} is {number}, but with `output_router_logits` in config.json the loss has a term for balance among experts, which {reason}"
    );
    let hint =
        format!("use parallel.{key} = 1, or train without that term: model.ignore_keys = [\"output_router_logits\"]");
    Mistake { what, hint: Some(hint) }
}

fn classes(settings: &Settings) -> Result<Vec<String>, evenkeel_store::Error> {
    let format = match settings.data.source {
        DataSource::Images => Format::Images,
        DataSource::Cifar10 => Format::Cifar10,
        _ => return Ok(Vec::new()),
    };
    Source::classes_of(&format, &settings.data.paths)
}

/// Refuses pictures of more classes than the model has labels.
fn check_classes(model: &Model, classes: &[String]) -> Result<(), Mistake> {
    if classes.len() <= model.config.classes {
        return Ok(());
    }
    Err(Mistake {
        what: format!("the data have {} classes, the model has {} labels", classes.len(), model.config.classes),
        hint: Some("set model.new_head = true to begin its head anew".to_owned()),
    })
}

/// Refuses names of labels that the model has in another order.
fn refuse_other_order(json: &Value, labels: &[String]) -> Result<(), Mistake> {
    let Some(table) = json.get("id2label").and_then(Value::as_object) else { return Ok(()) };
    let of_model = |label: usize| table.get(&label.to_string()).and_then(Value::as_str);
    let found: Vec<&str> = (0..table.len()).filter_map(of_model).collect();
    let given: Vec<&str> = labels.iter().map(String::as_str).collect();
    let [of_given, of_found] = [&given, &found].map(|names| names.iter().copied().collect::<BTreeSet<&str>>());
    if given == found || of_given != of_found {
        return Ok(());
    }
    let what = format!("`data.labels` has the labels of the model in another order: the model's is {found:?}");
    Err(Mistake { what, hint: Some("leave data.labels out, or give that order".to_owned()) })
}

/// config.json with these names of labels, if there are some.
pub fn with_labels(mut json: Value, labels: &[String]) -> Value {
    if let (Some(object), false) = (json.as_object_mut(), labels.is_empty()) {
        let (by_label, by_name) = label_tables(labels, labels.len());
        object.extend([("id2label".to_owned(), by_label), ("label2id".to_owned(), by_name)]);
        object.remove("num_labels");
    }
    json
}

/// The model of a folder with new adapters. Those of a classifier train what begins with random numbers whole, and of texts the head
/// in any case, as PEFT does.
pub fn newly_adapted(
    model: &Model,
    mut adapter: AdapterConfig,
    folder: Option<&ModelFolder>,
) -> Result<Model, evenkeel_model::Error> {
    if model.config.input.is_classified() {
        let begun = folder.map_or_else(Vec::new, |folder| model.new_modules(&folder.base));
        let of_texts = Some("classifier").filter(|_| model.config.input.is_text());
        let trained = &mut adapter.trained_modules;
        for module in of_texts.iter().chain(&begun) {
            if !trained.iter().any(|other| module.starts_with(other.as_str())) {
                trained.push((*module).to_owned());
            }
        }
    }
    model.newly_adapted(adapter)
}

/// `id2label` and `label2id`. Labels without a class in the data keep the names that transformers gives them.
fn label_tables(classes: &[String], labels: usize) -> (Value, Value) {
    let name = |label: usize| classes.get(label).cloned().unwrap_or_else(|| format!("LABEL_{label}"));
    let by_label = (0..labels).map(|label| (label.to_string(), json!(name(label))));
    let by_name = (0..labels).map(|label| (name(label), json!(label)));
    (Value::Object(by_label.collect()), Value::Object(by_name.collect()))
}

/// transformers' settings to prepare a picture as it was prepared in training.
fn preprocessor(size: usize, channels: usize) -> Value {
    const BILINEAR: u32 = 2;
    json!({
        "image_processor_type": "ViTImageProcessor",
        "do_resize": true,
        "size": { "height": size, "width": size },
        "resample": BILINEAR,
        "do_rescale": true,
        "rescale_factor": 1.0 / 255.0,
        "do_normalize": true,
        "image_mean": vec![IMAGE_MEAN; channels],
        "image_std": vec![IMAGE_DEVIATION; channels],
    })
}

/// The parts of the tokenizer that are saved with a trained model.
pub struct SavedTokenizer {
    /// Its tokenizer.json and the folder of the files beside it; `None` for the built-in one, which is written as files.
    pub files: Option<(PathBuf, PathBuf)>,
    /// The run's template, if it is not the tokenizer's own.
    pub chat_template: Option<String>,
    /// Whether texts are read whole, by a classifier.
    wraps_texts: bool,
}

impl SavedTokenizer {
    pub fn of(text: &Text, settings: &Settings) -> Result<SavedTokenizer, Failure> {
        let (files, chat_template) = (text.files.clone(), text.template_to_save(&settings.data)?);
        Ok(SavedTokenizer { files, chat_template, wraps_texts: settings.data.format == RecordFormat::Labelled })
    }

    /// The tokenizer of a saved model, if it has one.
    pub fn of_folder(folder: &ModelFolder) -> Option<SavedTokenizer> {
        let beside = folder.folder_with("tokenizer.json");
        let file = beside.join("tokenizer.json");
        exists(&file).then_some(SavedTokenizer { files: Some((file, beside)), chat_template: None, wraps_texts: false })
    }
}

pub fn save_tokenizer(folder: &NewFolder, tokenizer: &SavedTokenizer) -> Result<(), evenkeel_store::Error> {
    let template = &tokenizer.chat_template;
    match &tokenizer.files {
        Some((file, beside)) => {
            copy_file(file, folder, "tokenizer.json")?;
            let names: Vec<&str> =
                BESIDE_TOKENIZER.into_iter().filter(|name| template.is_none() || !name.starts_with("chat_")).collect();
            copy_present(folder, Some(beside), &names)?;
        }
        None => {
            let (tokenizer, config) = evenkeel_data::byte_tokenizer_files(tokenizer.wraps_texts);
            folder.write_json("tokenizer.json", &tokenizer)?;
            folder.write_json("tokenizer_config.json", &config)?;
        }
    }
    template.as_ref().map_or(Ok(()), |template| folder.write("chat_template.jinja", template.as_bytes()))
}

/// Files of models that also read pictures or sounds.
const PROCESSORS: [&str; 3] = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];

const BESIDE_TOKENIZER: [&str; 8] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];

fn copy_present<'n>(
    folder: &NewFolder,
    from: Option<&Path>,
    names: &[&'n str],
) -> Result<Vec<&'n str>, evenkeel_store::Error> {
    let Some(from) = from else { return Ok(Vec::new()) };
    let present: Vec<&str> = names.iter().copied().filter(|name| exists(from.join(name))).collect();
    for name in &present {
        copy_file(from.join(name), folder, name)?;
    }
    Ok(present)
}

/// A Llama as transformers describes it.
fn new_config(sizes: &Sizes, tokenizer: &Tokenizer, sequence: usize) -> Value {
    let Sizes { architecture: _, hidden, layers, heads, kv_heads, ffn, vocab, tied } = sizes;
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab.unwrap_or(tokenizer.vocabulary()),
        "tie_word_embeddings": tied,
        "max_position_embeddings": sequence,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": tokenizer.end(),
        "pad_token_id": tokenizer.padding(),
    })
}

fn no_new_classifier() -> Mistake {
    Mistake {
        what: "a new model is a Llama, which reads text, and the data are images".to_owned(),
        hint: Some("give model.config, the config.json of a ViT".to_owned()),
    }
}

pub fn file_dtype(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::F32 => FileDtype::F32,
        Dtype::Bf16 => FileDtype::BF16,
    }
}

fn file_dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::Bf16 => "bfloat16",
    }
}
