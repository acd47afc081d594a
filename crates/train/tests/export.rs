//! A folder that Evenkeel wrote, which transformers loaded unchanged (`golden/check_saved.py`), against both.

mod support;

use std::path::Path;

use evenkeel_device::DType;
use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_model::{Batch, Context, Model, RotaryTables, ZeroSharding, pass};
use evenkeel_store::{FileDtype, Folder, NewFolder, SafeTensorsFile};
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
    save_weights(&new, &model.specs, FileDtype::F32, read).unwrap();
    new.commit(false).unwrap();
    let bytes = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(bytes(&golden) == bytes(&path), "the weights are written as they were read");
}
