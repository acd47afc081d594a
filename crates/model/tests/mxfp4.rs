//! Folders whose experts are in MXFP4: their numbers are transformers', and what is broken is refused by name.

mod support;

use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{
    Batch, Context, Cut, Error, Model, ParamId, Parameters, Quantization, RotaryTables, ZeroSharding, pass,
};
use evenkeel_store::Folder;
use safetensors::Dtype;
use serde_json::{Value, json};
use support::changed::{self, Tensors, read_tensors, write_tensors};
use support::{expected, floats, golden, indices};

const CASE: &str = "gpt_oss_mxfp4";
const WEIGHT: &str = "model.layers.0.mlp.experts.gate_up_proj";

fn folder() -> Folder {
    Folder::open(golden().join(CASE)).expect("golden folders are sound")
}

fn loaded(model: &Model, dtype: DType, queue: &Queue) -> Parameters {
    model.load(&folder(), dtype, ZeroSharding::NONE, queue).expect("golden weights fit")
}

#[test]
fn experts_in_mxfp4_have_the_numbers_and_the_logits_of_transformers() {
    let device = support::device(2, 1 << 28);
    let queue = device.compute();
    let model = Model::open(&folder()).unwrap();
    assert_eq!(model.config.quantization, Some(Quantization::Mxfp4));
    let parameters = loaded(&model, DType::F32, queue);
    let file = expected(CASE);
    for name in [WEIGHT, "model.layers.0.mlp.experts.down_proj"] {
        let id = model.specs.iter().position(|spec| spec.name == name).unwrap();
        assert!(queue.read(&parameters.value(ParamId(id))) == floats(&file, name), "{name}");
    }
    let ids = indices(&file, "input_ids");
    let segments = indices(&file, "segments").into_iter().map(|end| end as usize).collect();
    let batch = Batch::tokens(queue, &ids, &ids, Segments::new(segments));
    let tables = RotaryTables::new(&model.config, queue, ids.len());
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
    for (ours, theirs) in queue.read(&pass::logits(&model, &context)).iter().zip(floats(&file, "logits")) {
        assert!((ours - theirs).abs() <= 1e-4, "{ours}, expected {theirs}");
    }
}

#[test]
fn experts_in_mxfp4_are_exact_in_bf16_and_every_shard_reads_its_part() {
    let device = support::device(1, 1 << 28);
    let queue = device.compute();
    let model = Model::open(&folder()).unwrap();
    let whole = loaded(&model, DType::F32, queue);
    for cut in [Cut::even(1), Cut::even(2), Cut::weighted(vec![1.0, 2.0, 0.5])] {
        for shard in model.cut(&cut).unwrap() {
            let part = loaded(&shard, DType::Bf16, queue);
            for (id, spec) in shard.specs.iter().enumerate().filter(|(_, spec)| spec.name.ends_with("_proj")) {
                let id = ParamId(id);
                let (ours, whole) = (queue.read(&part.value(id)), queue.read(&whole.value(id)));
                let mut expected = vec![0.0; spec.len()];
                for piece in spec.slice.pieces() {
                    for (row, held_row) in piece.rows.clone().zip(piece.held_rows) {
                        let from = &whole[row * spec.whole[1]..][piece.cols.clone()];
                        expected[held_row * spec.matrix[1]..][piece.held_cols.clone()].copy_from_slice(from);
                    }
                }
                assert!(ours == expected, "{} of {cut:?}", spec.name);
            }
        }
    }
}

fn load_changed(change: impl Fn(&mut Value, &mut Tensors)) -> Result<(), Error> {
    changed::load_changed(CASE, "the scale", change)
}

#[test]
fn broken_and_hostile_weights_in_mxfp4_are_refused_by_name() {
    assert!(load_changed(|_, _| ()).is_ok());
    let name = |ending: &str| format!("{WEIGHT}{ending}");
    let removed =
        |ending: &'static str| move |_: &mut Value, tensors: &mut Tensors| drop(tensors.remove(&name(ending)).unwrap());
    let replaced = |ending: &'static str, dtype: Dtype, shape: &'static [usize], byte: u8| {
        move |_: &mut Value, tensors: &mut Tensors| {
            let bytes = vec![byte; shape.iter().product::<usize>() * dtype.bitsize() / 8];
            tensors.insert(name(ending), (dtype, shape.to_vec(), bytes));
        }
    };
    type Change<'a> = Box<dyn Fn(&mut Value, &mut Tensors) + 'a>;
    let cases: Vec<(Change, &str)> = vec![
        (Box::new(removed("_blocks")), "gate_up_proj` is missing"),
        (Box::new(removed("_scales")), "gate_up_proj_scales` is missing"),
        (Box::new(replaced("_blocks", Dtype::U8, &[3, 128, 1, 15], 0)), "expected U8 [3, 128, 1, 16]"),
        (Box::new(replaced("_blocks", Dtype::U8, &[3, 128, 16], 0)), "it is U8 [3, 128, 16], expected U8"),
        (Box::new(replaced("_blocks", Dtype::BF16, &[3, 128, 1, 16], 0)), "it is BF16 [3, 128, 1, 16]"),
        (Box::new(replaced("_blocks", Dtype::U8, &[0, 128, 1, 16], 0)), "it is U8 [0, 128, 1, 16]"),
        (Box::new(replaced("_scales", Dtype::U8, &[3, 128, 2], 0)), "expected U8 [3, 128, 1]"),
        (Box::new(replaced("_scales", Dtype::F32, &[3, 128, 1], 0)), "it is F32 [3, 128, 1], expected U8"),
        (Box::new(replaced("", Dtype::BF16, &[3, 32, 128], 0)), "does not belong to this model"),
        (
            Box::new(|config, _| config["quantization_config"] = json!({"quant_method": "mxfp4", "surprise": 3})),
            "(mxfp4, with the unknown key surprise: 3)",
        ),
        (
            Box::new(|config, _| drop(config.as_object_mut().unwrap().remove("quantization_config"))),
            "gate_up_proj` is missing",
        ),
        (Box::new(|config, _| config["hidden_size"] = json!(48)), "config.json needs"),
        (
            Box::new(|_, tensors| {
                let [blocks, scales] = ["_blocks", "_scales"].map(|ending| tensors[&name(ending)].clone());
                tensors.remove("lm_head.weight");
                tensors.insert("lm_head.weight_blocks".into(), blocks);
                tensors.insert("lm_head.weight_scales".into(), scales);
            }),
            "`lm_head.weight_blocks`",
        ),
    ];
    for (change, expected) in cases {
        let error = load_changed(|config, tensors| change(config, tensors)).expect_err(expected);
        let told = error.to_string();
        assert!(told.contains(expected), "{told}; expected {expected}");
        assert!(told.len() < 600 && error.hint().is_some(), "{told}");
    }
}

#[test]
fn a_scale_without_finite_numbers_is_refused() {
    let device = support::device(1, 1 << 28);
    let copy = tempfile::tempdir().unwrap();
    let from = golden().join(CASE);
    std::fs::copy(from.join("config.json"), copy.path().join("config.json")).unwrap();
    let mut tensors = read_tensors(CASE);
    tensors.get_mut(&format!("{WEIGHT}_scales")).unwrap().2[5] = 255;
    write_tensors(copy.path(), &tensors);
    let folder = Folder::open(copy.path()).unwrap();
    let loaded = Model::open(&folder).unwrap().load(&folder, DType::Bf16, ZeroSharding::NONE, device.compute());
    let told = loaded.map(drop).expect_err("255 is no number").to_string();
    assert!(told.contains("gate_up_proj_scales") && told.contains("the scale 255"), "{told}");
}

#[test]
fn other_architectures_in_mxfp4_are_refused() {
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 64, "quantization_config": {"quant_method": "mxfp4"},
    });
    let error = Model::from_json(&config).map(drop).expect_err("there are no experts");
    assert!(error.to_string().contains("(mxfp4)"), "{error}");
}
