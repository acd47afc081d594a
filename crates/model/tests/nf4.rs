//! Bases in 4 bits: quantised on loading as bitsandbytes did before saving, cut without changing a number, and computed with as if
//! they had been expanded beforehand. `adapters.rs` compares them with PEFT.

mod support;

use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Device, Queue};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{
    AdapterConfig, AdapterFolder, AdapterValues, Batch, Context, Cut, Error, Gradients, LossOptions, Model, ParamId,
    Parameters, RotaryTables, ZeroSharding,
};
use evenkeel_store::{Folder, SafeTensorsFile};
use safetensors::Dtype;
use serde_json::{Value, json};
use support::changed::{self, Tensors};
use support::golden;

fn nf4() -> Folder {
    Folder::open(golden().join("llama_nf4")).expect("golden folders are sound")
}

fn plain() -> Folder {
    Folder::open(golden().join("llama_nf4/plain")).expect("golden folders are sound")
}

fn saved(case: &str) -> AdapterFolder {
    AdapterFolder::open(&golden().join("adapters").join(case)).expect("golden folders are sound")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn packed_ids(model: &Model) -> impl Iterator<Item = ParamId> {
    (0..model.specs.len()).map(ParamId).filter(|id| model.specs[id.0].is_packed)
}

fn batch(queue: &Queue) -> Batch {
    let ids: Vec<u32> = (0..40).map(|i| i * 37 % 96).collect();
    let labels: Vec<u32> = ids.iter().map(|id| (id + 5) % 96).collect();
    Batch::tokens(queue, &ids, &labels, Segments::new(vec![0, 25, 40]))
}

#[test]
fn a_folder_in_4_bits_has_the_logits_of_transformers() {
    let device = support::device(2, 1 << 28);
    let queue = device.compute();
    let folder = nf4();
    let model = Model::open(&folder).unwrap();
    assert_eq!(packed_ids(&model).count(), 13, "one of the 14 layers was skipped");
    let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
    let file = SafeTensorsFile::open(golden().join("llama_nf4/golden.safetensors")).unwrap();
    let integers = |name: &str| -> Vec<u32> {
        let tensor = file.tensor(name).unwrap();
        let mut values = vec![0i32; tensor.element_count()];
        tensor.read(0..values.len(), &mut values).unwrap();
        values.into_iter().map(|value| value as u32).collect()
    };
    let ids = integers("input_ids");
    let segments = integers("segments").into_iter().map(|end| end as usize).collect();
    let batch = Batch::tokens(queue, &ids, &ids, Segments::new(segments));
    let tables = RotaryTables::new(&model.config, queue, ids.len());
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
    let ours = queue.read(&pass::logits(&model, &context));
    let expected = file.tensor("logits").unwrap();
    let mut theirs = vec![0.0; expected.element_count()];
    expected.read(0..theirs.len(), &mut theirs).unwrap();
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert!((ours - theirs).abs() <= 1e-4, "{ours}, expected {theirs}");
    }
}

#[test]
fn what_is_quantised_on_loading_is_what_bitsandbytes_saved() {
    let device = support::device(2, 1 << 28);
    let queue = device.compute();
    let (before, after) = (plain(), nf4());
    let [ours, theirs] = [Model::open(&before).unwrap().packed(), Model::open(&after).unwrap()];
    let [our_values, their_values] = [(&ours, &before), (&theirs, &after)]
        .map(|(model, folder)| model.load(folder, DType::F32, ZeroSharding::NONE, queue).unwrap());
    assert_eq!(packed_ids(&ours).count(), 14);
    for id in packed_ids(&theirs) {
        let name = &theirs.specs[id.0].name;
        let [ours, theirs] = [&our_values, &their_values].map(|values| queue.read(&values.weight(queue, id)));
        assert!(bits(&ours) == bits(&theirs), "{}", name);
    }
}

struct Outcome {
    losses: Vec<f32>,
    gradients: Vec<f32>,
}

fn outcome(model: &Model, parameters: &Parameters, queue: &Queue, keep: Keep) -> Outcome {
    let batch = batch(queue);
    let tables = RotaryTables::new(&model.config, queue, batch.token_count());
    let context = Context { queue, parameters, tables: &tables, batch: &batch, pruning: None };
    let gradients = Gradients::new(parameters, queue);
    let options = LossOptions { smoothing: 0.0, scale: 1.0 / batch.targets as f32 };
    let losses = queue.read(&pass::losses_and_gradients(model, &context, &gradients, options, keep));
    let read = |id: ParamId| queue.read(&gradients.sum(queue, id));
    Outcome { losses, gradients: parameters.trained().flat_map(read).collect() }
}

/// The same base, expanded beforehand and held in the compute dtype.
#[test]
fn a_packed_base_computes_the_bits_of_its_expansion() {
    let device = support::device(2, 1 << 28);
    let queue = device.compute();
    let folder = plain();
    let adapters = ["llama_qlora", "llama_qdora"].map(saved);
    for (saved, dtype) in adapters.iter().flat_map(|saved| [DType::F32, DType::Bf16].map(|dtype| (saved, dtype))) {
        let packed = Model::open(&folder).unwrap().packed().adapted(saved.config.clone()).unwrap();
        let load = |model: &Model| {
            model.load_adapted(&folder, &AdapterValues::Saved(saved), dtype, ZeroSharding::NONE, queue).unwrap()
        };
        let held = load(&packed);
        let expanded = Model::open(&folder).unwrap().adapted(saved.config.clone()).unwrap();
        let values = load(&expanded);
        let numbers = Parameters::allocate(&expanded, dtype, ZeroSharding::NONE, queue);
        let filled = numbers.fill(queue, |id, spec, whole| -> Result<(), Error> {
            let from = match packed.specs[id.0].is_packed {
                true => queue.read(&held.weight(queue, id)),
                false if spec.is_trained => queue.read(&values.master(id)),
                false => queue.read(&values.kept_value(id)),
            };
            queue.write_rows(whole, |first, rows| {
                let len = rows.len();
                rows.copy_from_slice(&from[first * spec.matrix[1]..][..len]);
                Ok(())
            })
        });
        filled.unwrap();
        expanded.measure_rows(&numbers, queue);
        for keep in [Keep::Everything, Keep::Stream] {
            let [ours, theirs] = [(&packed, &held), (&expanded, &numbers)]
                .map(|(model, parameters)| outcome(model, parameters, queue, keep));
            assert!(ours.gradients.iter().any(|gradient| *gradient != 0.0));
            assert!(bits(&ours.losses) == bits(&theirs.losses), "{dtype:?}");
            assert!(bits(&ours.gradients) == bits(&theirs.gradients), "{dtype:?}");
        }
    }
}

#[test]
fn a_base_in_4_bits_takes_its_share_of_memory_and_a_dry_run_knows() {
    let (folder, saved) = (nf4(), saved("llama_qlora"));
    let model = Model::open(&folder).unwrap().adapted(saved.config.clone()).unwrap();
    let run = |device: &Device, model: &Model| {
        let queue = device.compute();
        let parameters = Parameters::allocate(model, DType::Bf16, ZeroSharding::NONE, queue);
        let held = device.usage().live_bytes;
        outcome(model, &parameters, queue, Keep::Everything);
        (held, device.usage().peak_bytes)
    };
    let (held, peak) = run(&Device::dry(), &model);
    assert_eq!(run(&support::device(1, 1 << 28), &model), (held, peak));
    let wide = Model::from_json(plain().config()).unwrap().adapted(saved.config.clone()).unwrap();
    let numbers: usize = packed_ids(&model).map(|id| model.specs[id.0].len()).sum();
    let saved_bytes = run(&Device::dry(), &wide).0 - held;
    // 16 bits less 4.5, but for the gaps between tensors.
    let expected = numbers as u64 * 23 / 16;
    assert!(saved_bytes.abs_diff(expected) < 16 * 256, "{saved_bytes}, expected about {expected}");
}

/// Llama with fused layers cut by rows and columns; GPT-2, whose matrices are stored transposed and whose c_attn is cut in three;
/// and both kinds of source.
#[test]
fn every_cut_has_the_numbers_of_the_whole() {
    let device = support::device(2, 1 << 28);
    let queue = device.compute();
    let gpt2 = json!({
        "model_type": "gpt2", "n_embd": 256, "n_layer": 1, "n_head": 4, "n_positions": 16, "vocab_size": 50,
        "n_inner": 320,
    });
    type Load<'a> = Box<dyn Fn(&Model) -> Parameters + 'a>;
    let (before, after) = (plain(), nf4());
    let from = |folder| -> Load {
        Box::new(move |model: &Model| model.load(folder, DType::F32, ZeroSharding::NONE, queue).unwrap())
    };
    let random: Load = Box::new(|model: &Model| Parameters::random(model, DType::F32, ZeroSharding::NONE, 3, queue));
    let cases: [(Model, Load, usize); 3] = [
        (Model::open(&before).unwrap().packed(), from(&before), 2),
        (Model::open(&after).unwrap(), from(&after), 2),
        (Model::from_json(&gpt2).unwrap().packed(), random, 4),
    ];
    for (model, load, shards) in cases {
        let whole = load(&model);
        for cut in [Cut::even(shards), Cut::weighted((0..shards).map(|shard| 1.0 + shard as f64).collect())] {
            for shard in model.cut(&cut).unwrap() {
                let part = load(&shard);
                for id in packed_ids(&shard) {
                    let (ours, whole) = (queue.read(&part.weight(queue, id)), queue.read(&whole.weight(queue, id)));
                    let spec = &shard.specs[id.0];
                    let mut expected = vec![0.0; spec.len()];
                    for piece in spec.slice.pieces() {
                        for (row, held_row) in piece.rows.clone().zip(piece.held_rows) {
                            let from = &whole[row * spec.whole[1]..][piece.cols.clone()];
                            expected[held_row * spec.matrix[1]..][piece.held_cols.clone()].copy_from_slice(from);
                        }
                    }
                    assert!(bits(&ours) == bits(&expected), "{} of {cut:?}", spec.name);
                }
            }
        }
    }
}

#[track_caller]
fn cut_is_refused(changes: Value, cut: Cut, expected: &[&str]) {
    let mut config = json!({
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 64,
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let error = Model::from_json(&config).unwrap().packed().cut(&cut).expect_err("it must be refused");
    let told = format!("{error}; {}", error.hint().unwrap_or_default());
    expected.iter().for_each(|part| assert!(told.contains(part), "{told}"));
}

#[test]
fn cuts_through_blocks_are_refused_with_layer_widths_and_remedy() {
    let hint = "use another parallel.tp";
    cut_is_refused(
        json!({}),
        Cut::even(4),
        &["`model.layers.0.self_attn.o_proj.weight` is held in 4 bits, in blocks of 64", "column 32 of 128", hint],
    );
    cut_is_refused(
        json!({ "intermediate_size": 96 }),
        Cut::even(2),
        &["down_proj.weight`", "its 128 rows have 96 numbers, no multiple of 64", hint],
    );
    cut_is_refused(json!({ "hidden_size": 160, "head_dim": 64 }), Cut::even(2), &["its 256 rows have 160 numbers"]);
    cut_is_refused(json!({ "intermediate_size": 64 }), Cut::even(2), &["down_proj.weight`", "column 32 of 64"]);
}

#[test]
fn a_ragged_matrix_is_held_whole() {
    let device = support::device(2, 1 << 28);
    let queue = device.compute();
    let folder = Folder::open(golden().join("llama_odd")).unwrap();
    let model = Model::open(&folder).unwrap().packed();
    let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
    let wide = Model::open(&folder).unwrap();
    let numbers = wide.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
    for id in packed_ids(&model) {
        let [packed, plain] = [&parameters, &numbers].map(|values| queue.read(&values.weight(queue, id)));
        let norm = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>().sqrt();
        let errors: Vec<f32> = packed.iter().zip(&plain).map(|(packed, plain)| packed - plain).collect();
        assert!(norm(&errors) < 0.15 * norm(&plain), "{}", model.specs[id.0].name);
    }
}

#[test]
fn what_is_packed_cannot_be_trained_whole() {
    let model = Model::open(&nf4()).unwrap();
    let config = AdapterConfig { trained_modules: vec!["down_proj".into()], ..AdapterConfig::default() };
    let error = model.adapted(config).expect_err("it must be refused").to_string();
    assert!(error.contains("`model.layers.0.mlp.down_proj.weight` is to be trained whole"), "{error}");
    let config = AdapterConfig { trained_modules: vec!["lm_head".into()], ..AdapterConfig::default() };
    assert!(model.adapted(config).is_ok());
}

fn load_changed(change: impl Fn(&mut Value, &mut Tensors)) -> Result<(), Error> {
    changed::load_changed("llama_nf4", "factor is", change)
}

const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";

fn state(change: impl Fn(&mut Value)) -> (Dtype, Vec<usize>, Vec<u8>) {
    let mut state = json!({
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [192, 64], "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": 0.2,
    });
    change(&mut state);
    let bytes = state.to_string().into_bytes();
    (Dtype::U8, vec![bytes.len()], bytes)
}

#[test]
fn broken_and_hostile_4_bit_weights_are_refused_by_name() {
    assert!(load_changed(|_, _| ()).is_ok());
    let name = |ending: &str| format!("{WEIGHT}{ending}");
    const STATE: &str = ".quant_state.bitsandbytes__nf4";
    let with_state = |change: &'static dyn Fn(&mut Value)| {
        move |_: &mut Value, tensors: &mut Tensors| drop(tensors.insert(name(STATE), state(change)))
    };
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
        (Box::new(removed(".absmax")), "up_proj.weight.absmax` is missing"),
        (Box::new(removed(".quant_map")), "up_proj.weight.quant_map` is missing"),
        (Box::new(removed(".nested_absmax")), "up_proj.weight.nested_absmax` is missing"),
        (Box::new(removed(".nested_quant_map")), "up_proj.weight.nested_quant_map` is missing"),
        (Box::new(removed(STATE)), "does not belong to this model"),
        (Box::new(replaced("", Dtype::U8, &[6143, 1], 0)), "it is U8 [6143, 1], expected U8 [6144, 1]"),
        (Box::new(replaced("", Dtype::BF16, &[3072, 1], 0)), "it is BF16 [3072, 1], expected U8 [6144, 1]"),
        (Box::new(replaced("", Dtype::U8, &[96, 64], 0)), "expected U8 [6144, 1]"),
        (Box::new(replaced(".absmax", Dtype::U8, &[191], 0)), "it is U8 [191], expected U8 [192]"),
        (Box::new(replaced(".absmax", Dtype::F32, &[192], 0)), "it is F32 [192], expected U8 [192]"),
        (Box::new(replaced(".quant_map", Dtype::F32, &[16], 0)), "other numbers than nf4's codes"),
        (Box::new(replaced(".quant_map", Dtype::F32, &[15], 0)), "expected F32 [16]"),
        (Box::new(replaced(".nested_absmax", Dtype::F32, &[2], 0)), "expected F32 [1]"),
        (Box::new(replaced(".nested_absmax", Dtype::F32, &[1], 0xff)), "a block's factor is NaN"),
        (Box::new(replaced(".nested_quant_map", Dtype::F32, &[255], 0)), "expected F32 [256]"),
        (Box::new(replaced(".nested_quant_map", Dtype::F32, &[256], 0xff)), "a block's factor is NaN"),
        (Box::new(replaced(STATE, Dtype::U8, &[5000], b' ')), "expected at most 4096 bytes"),
        (Box::new(replaced(STATE, Dtype::U8, &[100], b'{')), "its JSON cannot be read"),
        (Box::new(replaced(STATE, Dtype::F32, &[10], b'{')), "expected at most 4096 bytes"),
        (Box::new(with_state(&|state| state["quant_type"] = json!("fp4"))), "its codes are fp4, expected nf4"),
        (Box::new(with_state(&|state| state["blocksize"] = json!(128))), "its blocks have 128 numbers, expected 64"),
        (Box::new(with_state(&|state| state["blocksize"] = json!(-1))), "its JSON cannot be read"),
        (Box::new(with_state(&|state| state["shape"] = json!([64, 192]))), "its shape is [64, 192], config.json needs"),
        (
            Box::new(with_state(&|state| state["shape"] = json!([1u64 << 62, 4]))),
            "its shape is [4611686018427387904, 4]",
        ),
        (Box::new(with_state(&|state| state["nested_blocksize"] = json!(512))), "blocks of 512 factors"),
        (Box::new(with_state(&|state| state["nested_dtype"] = json!("float16"))), "factors of float16"),
        (Box::new(with_state(&|state| state["nested_offset"] = json!(1e300))), "less inf"),
        (Box::new(with_state(&|state| state["nested_offset"] = Value::Null)), "a part of the keys"),
        (Box::new(with_state(&|state| state["surprise"] = json!(1))), "its JSON cannot be read: unknown field"),
        (
            Box::new(|_, tensors| {
                let bytes = tensors.remove(&name(STATE)).unwrap();
                tensors.insert(name(".quant_state.bitsandbytes__fp4"), bytes);
            }),
            "its codes are fp4, expected nf4",
        ),
        (
            Box::new(|_, tensors| {
                let once = |state: &mut Value| {
                    ["nested_blocksize", "nested_dtype", "nested_offset"].into_iter().for_each(|key| {
                        state.as_object_mut().unwrap().remove(key);
                    });
                };
                tensors.insert(name(STATE), state(once));
                tensors.insert(name(".absmax"), (Dtype::F32, vec![192], vec![0; 4 * 192]));
            }),
            "nested_absmax` is there, but the weight is quantised once",
        ),
        (
            Box::new(|_, tensors| {
                let map = tensors[&name(".quant_map")].clone();
                tensors.insert("model.layers.1.self_attn.o_proj.weight.quant_map".into(), map);
            }),
            "does not belong to this model",
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
fn other_quantisations_are_refused_by_name() {
    let cases: [(&str, Value, &str); 7] = [
        ("bnb_4bit_quant_type", json!("fp4"), "bitsandbytes, fp4"),
        ("bnb_4bit_quant_type", Value::Null, "bitsandbytes, fp4"),
        ("load_in_8bit", json!(true), "bitsandbytes, 8 bits"),
        ("load_in_4bit", json!(false), "neither 4 nor 8 bits"),
        ("quant_method", json!("gptq"), "(gptq)"),
        ("bnb_4bit_quant_storage", json!("bfloat16"), "nf4 stored as bfloat16"),
        ("surprise", json!(3), "the unknown key surprise: 3"),
    ];
    for (key, value, expected) in cases {
        let error = load_changed(|config, _| {
            let quantization = config["quantization_config"].as_object_mut().unwrap();
            quantization.remove("_load_in_4bit");
            quantization.insert(key.to_owned(), value.clone());
        });
        let told = error.expect_err(expected).to_string();
        assert!(told.contains(expected), "{told}");
    }
    let plain = load_changed(|config, _| drop(config.as_object_mut().unwrap().remove("quantization_config")));
    assert!(matches!(plain, Err(Error::UnexpectedTensor { .. })), "{plain:?}");
    let mut gpt2 =
        json!({ "model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 50 });
    gpt2["quantization_config"] = nf4().config()["quantization_config"].clone();
    let error = Model::of_folder(&gpt2, &nf4()).expect_err("its matrices are transposed");
    assert!(error.to_string().contains("a `gpt2` in 4 bits"), "{error}");
    let mut config = plain_config();
    config["quantization_config"] = nf4().config()["quantization_config"].clone();
    let error = Model::of_folder(&config, &self::plain()).expect_err("no weight is quantised");
    assert!(matches!(error, Error::NothingQuantized { .. }), "{error}");
}

fn plain_config() -> Value {
    plain().config().clone()
}
