//! A folder that Evenkeel wrote, which transformers loaded unchanged (`golden/check_saved.py`), against both.

#[path = "../../../golden/cases.rs"]
mod cases;
mod support;

use std::collections::BTreeMap;
use std::path::Path;

use cases::CASES;
use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{DType, Queue};
use evenkeel_model::{Batch, Context, Model, Parameters, RotaryTables, ZeroSharding, pass};
use evenkeel_store::{FileDtype, Folder, NewFolder, SafeTensorsFile, TensorEntry, save_model};
use evenkeel_train::save_weights;

const LOGIT_TOLERANCE: f32 = 1e-4;

#[test]
fn a_saved_model_has_the_logits_that_transformers_finds_in_it_and_is_saved_again_byte_for_byte() {
    let golden = support::golden("saved");
    let device = support::device(2);
    let queue = device.compute();
    let folder = Folder::open(&golden).unwrap();
    let model = Model::open(&folder).unwrap();
    let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();

    let recorded = SafeTensorsFile::open(golden.join("logits.safetensors")).unwrap();
    let ids = recorded.tensor("input_ids").unwrap();
    let mut tokens = vec![0i32; ids.element_count()];
    ids.read(0..tokens.len(), &mut tokens).unwrap();
    let tokens: Vec<u32> = tokens.into_iter().map(|token| token as u32).collect();
    let mut expected = vec![0f32; tokens.len() * model.config.classes];
    recorded.tensor("logits").unwrap().read(0..expected.len(), &mut expected).unwrap();

    let batch = Batch::tokens(queue, &tokens, &vec![IGNORE; tokens.len()], Segments::uniform(1, tokens.len()));
    let tables = RotaryTables::new(&model.config, queue, tokens.len());
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
    let logits = queue.read(&pass::logits(&model, &context));
    assert_eq!(logits.len(), expected.len());
    for (ours, theirs) in logits.iter().zip(&expected) {
        assert!((ours - theirs).abs() <= LOGIT_TOLERANCE, "{ours}, transformers has {theirs}");
    }

    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("again");
    let new = NewFolder::create(&path).unwrap();
    let read = |id, rows| Ok(queue.read(&parameters.master(id).row_range(rows)));
    save_weights(&new, &model.specs, FileDtype::F32, &[], read).unwrap();
    new.commit(false).unwrap();
    let bytes = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(bytes(&golden) == bytes(&path), "the weights are written as they were read");
}

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

fn load(folder: &Folder, queue: &Queue) -> (Model, Parameters) {
    let model = Model::open(folder).unwrap();
    let parameters = model.load(folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
    (model, parameters)
}

/// The folder that a model is saved in, with the config.json of `original` and what a model carries over from there.
fn saved(model: &Model, parameters: &Parameters, queue: &Queue, original: &Folder, path: &Path) -> Folder {
    let new = NewFolder::create(path).unwrap();
    let read = |id, rows| Ok(queue.read(&parameters.master(id).row_range(rows)));
    save_weights(&new, &model.specs, FileDtype::F32, &model.carried(original), read).unwrap();
    new.commit(false).unwrap();
    std::fs::copy(original.path().join("config.json"), path.join("config.json")).unwrap();
    Folder::open(path).unwrap()
}

#[test]
fn every_architecture_is_written_with_the_names_shapes_and_numbers_that_transformers_wrote() {
    let (device, temporary) = (support::device(2), tempfile::tempdir().unwrap());
    let queue = device.compute();
    for case in CASES {
        let folder = Folder::open(support::golden(case)).unwrap();
        let (model, parameters) = load(&folder, queue);
        let again = saved(&model, &parameters, queue, &folder, &temporary.path().join(case));
        assert!(tensors(&again) == tensors(&folder), "{case}");
    }
}

/// As transformers expands them, under the names that it gives them.
#[test]
fn experts_in_mxfp4_are_written_as_bf16() {
    let (device, temporary) = (support::device(2), tempfile::tempdir().unwrap());
    let queue = device.compute();
    let golden = support::golden("gpt_oss_mxfp4");
    let folder = Folder::open(&golden).unwrap();
    let (model, parameters) = load(&folder, queue);
    let path = temporary.path().join("plain");
    let new = NewFolder::create(&path).unwrap();
    let read = |id, rows| Ok(queue.read(&parameters.master(id).row_range(rows)));
    save_weights(&new, &model.specs, FileDtype::BF16, &model.carried(&folder), read).unwrap();
    new.commit(false).unwrap();
    let mut config = folder.config().clone();
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();

    let again = Folder::open(&path).unwrap();
    let expanded = SafeTensorsFile::open(golden.join("golden.safetensors")).unwrap();
    for name in again.names() {
        let tensor = again.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), FileDtype::BF16, "{name}");
        let expected = folder.tensor(name).or_else(|| expanded.tensor(name)).unwrap();
        assert!((tensor.shape(), tensor.bytes()) == (expected.shape(), expected.bytes()), "{name}");
    }
    let (_, same) = load(&again, queue);
    for id in parameters.ids() {
        assert!(queue.read(&parameters.master(id)) == queue.read(&same.master(id)), "{}", model.specs[id.0].name);
    }
}

#[test]
fn experts_in_one_tensor_are_the_same_as_in_a_tensor_each_and_are_written_as_they_were_read() {
    let (device, temporary) = (support::device(2), tempfile::tempdir().unwrap());
    let queue = device.compute();
    let golden = support::golden("qwen3_moe");
    let apart = Folder::open(&golden).unwrap();
    let (model, parameters) = load(&apart, queue);

    let mut stacked = tensors(&apart);
    for spec in model.specs.iter().filter(|spec| !spec.tensors.is_empty()) {
        let parts = spec.in_files().map(|(tensor, _)| stacked.remove(&tensor.name).unwrap().1).collect::<Vec<_>>();
        let experts = model.config.experts.unwrap().count;
        let shape = vec![experts, spec.shape[0] / experts, spec.shape[1]];
        stacked.insert(spec.name.clone(), (shape, parts.concat()));
    }
    let path = temporary.path().join("stacked");
    let new = NewFolder::create(&path).unwrap();
    let entry = |(name, (shape, _)): (&String, &(Vec<usize>, Vec<f32>))| TensorEntry {
        name: name.clone(),
        dtype: FileDtype::F32,
        shape: shape.clone(),
    };
    let entries: Vec<TensorEntry> = stacked.iter().map(entry).collect();
    save_model(&new, &entries, &[], &BTreeMap::new(), u64::MAX, |name, put| -> Result<(), evenkeel_store::Error> {
        put(&stacked[name].1)
    })
    .unwrap();
    new.commit(false).unwrap();
    std::fs::copy(golden.join("config.json"), path.join("config.json")).unwrap();

    let folder = Folder::open(&path).unwrap();
    let (of_stacked, same) = load(&folder, queue);
    for id in parameters.ids() {
        assert!(queue.read(&parameters.master(id)) == queue.read(&same.master(id)), "{}", model.specs[id.0].name);
    }
    let again = saved(&of_stacked, &same, queue, &apart, &temporary.path().join("again"));
    assert!(tensors(&again) == stacked);
}
