//! Folders of BERT and RoBERTa that know no labels yet, or that name their tensors as older versions did.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use evenkeel_device::{DType, Queue};
use evenkeel_model::{AdapterConfig, Error, Model, ParamId, Parameters, ZeroSharding};
use evenkeel_store::Folder;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use support::{device, golden};

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn tensors(folder: &Folder) -> Tensors {
    let read = |name: &str| {
        let tensor = folder.tensor(name).unwrap();
        let mut values = vec![0.0; tensor.element_count()];
        tensor.read(0..values.len(), &mut values).unwrap();
        (name.to_owned(), (tensor.shape().to_vec(), values))
    };
    folder.names().map(read).collect()
}

/// A golden folder with other tensors, and of another class.
fn changed(case: &str, class: &str, path: &Path, change: impl Fn(Tensors) -> Tensors) -> Folder {
    let original = Folder::open(golden().join(case)).unwrap();
    let mut config = original.config().clone();
    config["architectures"] = json!([class]);
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    let tensors = change(tensors(&original));
    let bytes: BTreeMap<&String, Vec<u8>> = tensors
        .iter()
        .map(|(name, (_, values))| (name, values.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let view = |name: &String| TensorView::new(Dtype::F32, tensors[name].0.clone(), &bytes[name]).unwrap();
    let views = tensors.keys().map(|name| (name.clone(), view(name)));
    safetensors::serialize_to_file(views, None, &path.join("model.safetensors")).unwrap();
    Folder::open(path).unwrap()
}

fn without(tensors: Tensors, beginnings: &[&str]) -> Tensors {
    tensors.into_iter().filter(|(name, _)| !beginnings.iter().any(|beginning| name.starts_with(beginning))).collect()
}

fn and(mut tensors: Tensors, names: &[&str]) -> Tensors {
    tensors.extend(names.iter().map(|name| ((*name).to_owned(), (vec![3], vec![1.0; 3]))));
    tensors
}

fn older(name: &str) -> String {
    name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
}

fn load(folder: &Folder, queue: &Queue) -> (Model, Parameters) {
    let model = Model::open(folder).unwrap();
    let parameters = model.load(folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
    (model, parameters)
}

#[test]
fn a_network_that_knows_no_labels_gets_a_new_head_and_keeps_all_else() {
    let device = device(1, 1 << 28);
    let queue = device.compute();
    type Change = fn(Tensors) -> Tensors;
    let of_bert: Change = |tensors| {
        let named = without(tensors, &["classifier."]).into_iter().map(|(name, tensor)| (older(&name), tensor));
        and(named.collect(), &["cls.predictions.bias", "bert.embeddings.position_ids"])
    };
    let masked: Change = |tensors| and(without(tensors, &["classifier.", "bert.pooler."]), &["cls.predictions.bias"]);
    let bare: Change = |tensors| {
        let inner = without(tensors, &["classifier."]).into_iter();
        inner.map(|(name, tensor)| (name.strip_prefix("bert.").unwrap().to_owned(), tensor)).collect()
    };
    let of_roberta: Change =
        |tensors| and(without(tensors, &["classifier."]), &["lm_head.bias", "roberta.pooler.dense.bias"]);
    for (case, class, change, new) in [
        ("bert", "BertForPreTraining", of_bert, vec!["classifier"]),
        ("bert", "BertForMaskedLM", masked, vec!["bert.pooler.dense", "classifier"]),
        ("bert", "BertModel", bare, vec!["classifier"]),
        ("roberta", "RobertaForMaskedLM", of_roberta, vec!["classifier.dense", "classifier.out_proj"]),
    ] {
        let place = tempfile::tempdir().unwrap();
        let folder = changed(case, class, place.path(), change);
        let (model, parameters) = load(&folder, queue);
        assert_eq!(model.new_modules(&folder), new, "{class}");
        let original = tensors(&Folder::open(golden().join(case)).unwrap());
        for (index, spec) in model.specs.iter().enumerate() {
            let values = queue.read(&parameters.master(ParamId(index)));
            let is_new = new.iter().any(|module| spec.name.starts_with(&format!("{module}.")));
            assert_eq!(values != original[&spec.name].1, is_new, "{class}: {}", spec.name);
            let is_spread = values.iter().any(|value| *value != 0.0);
            assert_eq!(is_spread, !is_new || spec.name.ends_with("weight"), "{class}: {}", spec.name);
        }
    }
}

#[test]
fn a_folder_with_a_part_of_a_head_is_an_error() {
    let place = tempfile::tempdir().unwrap();
    let folder =
        changed("bert", "BertForSequenceClassification", place.path(), |all| without(all, &["classifier.bias"]));
    let error = Model::open(&folder).unwrap().check(&folder).unwrap_err();
    assert!(matches!(&error, Error::MissingTensor { name, .. } if name == "classifier.bias"), "{error}");
}

#[test]
fn a_new_head_beside_an_adapter_must_be_trained() {
    let place = tempfile::tempdir().unwrap();
    let folder = changed("bert", "BertForMaskedLM", place.path(), |all| without(all, &["classifier.", "bert.pooler."]));
    let model = Model::open(&folder).unwrap();
    let adapted = |modules: &[&str]| {
        let trained_modules = modules.iter().map(|module| (*module).to_owned()).collect();
        model.newly_adapted(AdapterConfig { trained_modules, ..AdapterConfig::default() }).unwrap()
    };
    let error = adapted(&["classifier"]).check(&folder).unwrap_err();
    assert!(matches!(&error, Error::NewButFrozen { name, .. } if name == "bert.pooler.dense.weight"), "{error}");
    assert!(error.hint().unwrap().contains("`bert.pooler.dense` in adapter.modules_to_save"), "{error}");
    adapted(&["classifier", "pooler.dense"]).check(&folder).unwrap();
}
