//! Pruning through whole passes: results that it must not change, and memory that it saves. Tests beside the code compare pruned
//! layers with a plain twin.

mod support;

use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Device};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{
    Batch, Context, Cut, Gradients, Images, Imputation, Input, Intake, LossOptions, Model, Parameters, Part,
    PrunedWeights, Pruning, RotaryTables, ZeroSharding,
};
use evenkeel_store::Folder;

const POLICIES: [Imputation; 3] = [Imputation::Zero, Imputation::Average, Imputation::Same];
const CASES: [&str; 5] = ["llama3", "gpt2", "gpt_neox", "bert", "vit"];

fn golden(case: &str) -> Folder {
    Folder::open(support::golden().join(case)).expect("golden folders are sound")
}

fn model(case: &str) -> Model {
    Model::open(&golden(case)).expect("a known architecture")
}

fn device() -> Device {
    support::device(2, 1 << 30)
}

/// A model, two micro-batches, and the rest that passes over them need.
struct Setting {
    model: Model,
    device: Device,
    parameters: Parameters,
    gradients: Gradients,
    tables: RotaryTables,
    batches: [Batch; 2],
}

impl Setting {
    fn new(case: &str, dtype: DType, device: Device) -> Setting {
        let (queue, model) = (device.compute(), model(case));
        let parameters = model.load(&golden(case), dtype, ZeroSharding::NONE, queue).expect("golden weights fit");
        let batches = [0, 1].map(|micro: usize| match model.config.input {
            Input::Tokens { .. } => {
                let ids: Vec<u32> = (0..20).map(|i| i * 7 % 90 + micro as u32).collect();
                Batch::tokens(queue, &ids, &ids, Segments::uniform(2, 10))
            }
            Input::Texts { .. } => {
                let ids: Vec<u32> = (0..20).map(|i| i * 7 % 90 + micro as u32).collect();
                Batch::texts(queue, &ids, &[0; 20], &[1, 0], Segments::uniform(2, 10))
            }
            Input::Images { size, channels, .. } => {
                let pixels: Vec<f32> =
                    (0..2 * channels * size * size).map(|i| ((i + micro) % 17) as f32 / 17.0).collect();
                Batch::images(queue, Images { pixels: &pixels, count: 2 }, &[1, 0], model.config.input, dtype)
            }
        });
        Setting {
            tables: RotaryTables::new(&model.config, queue, 32),
            gradients: Gradients::new(&parameters, queue),
            parameters,
            batches,
            model,
            device,
        }
    }

    /// Keeps every `stride`-th column and the one behind it.
    fn pruning(&self, imputation: Imputation, stride: u32) -> Pruning {
        let mut pruning = Pruning::new(&self.model, imputation, PrunedWeights::Move { repeats: true });
        self.keep(&mut pruning, stride);
        pruning
    }

    fn keep(&self, pruning: &mut Pruning, stride: u32) {
        for (index, intake) in self.model.intakes().iter().enumerate() {
            let kept: Vec<u32> = (0..intake.inputs as u32).filter(|column| column % stride < 2).collect();
            pruning.keep(self.device.compute(), self.parameters.dtype(), index, &kept);
        }
    }

    fn context<'a>(&'a self, micro: usize, pruning: Option<&'a Pruning>) -> Context<'a> {
        let Setting { parameters, tables, batches, .. } = self;
        Context { queue: self.device.compute(), parameters, tables, batch: &batches[micro], pruning }
    }

    /// The bits of losses and gradients of one step over both micro-batches.
    fn step(&self, pruning: Option<&Pruning>, keep: Keep) -> Vec<u32> {
        let queue = self.device.compute();
        self.gradients.clear();
        pruning.iter().for_each(|pruning| pruning.begin_step());
        let options = LossOptions { smoothing: 0.0, scale: 0.05 };
        let mut numbers = Vec::new();
        for micro in [0, 1] {
            let context = self.context(micro, pruning);
            let losses = pass::losses_and_gradients(&self.model, &context, &self.gradients, options, keep);
            numbers.extend(queue.read(&losses));
        }
        numbers.extend(self.parameters.ids().flat_map(|id| queue.read(&self.gradients.sum(queue, id))));
        numbers.into_iter().map(f32::to_bits).collect()
    }
}

#[test]
fn keeping_every_column_is_bit_identical_to_no_resizing() {
    for case in CASES {
        for dtype in [DType::F32, DType::Bf16] {
            let setting = Setting::new(case, dtype, device());
            let plain = setting.step(None, Keep::Everything);
            for imputation in POLICIES {
                let pruning = setting.pruning(imputation, 1);
                assert!(setting.step(Some(&pruning), Keep::Everything) == plain, "{case} {dtype:?} {imputation:?}");
                assert!((0..pruning.intakes().len()).all(|intake| pruning.pruned(intake).is_empty()));
            }
        }
    }
}

#[test]
fn recomputation_keeps_the_same_columns() {
    for case in CASES {
        for imputation in POLICIES {
            let steps = |keep| {
                let setting = Setting::new(case, DType::F32, device());
                let pruning = setting.pruning(imputation, 4);
                [(); 3].map(|()| setting.step(Some(&pruning), keep))
            };
            assert!(steps(Keep::Everything) == steps(Keep::Stream), "{case} {imputation:?}");
        }
    }
}

#[test]
fn evaluations_compute_with_every_column() {
    for case in CASES {
        let setting = Setting::new(case, DType::F32, device());
        let queue = setting.device.compute();
        let pruning = setting.pruning(Imputation::Zero, 4);
        let found = |pruning| {
            let context = setting.context(0, pruning);
            let findings = pass::evaluate(&setting.model, &context, 0.1);
            let mut found = vec![queue.read(&findings.losses), queue.read(&pass::logits(&setting.model, &context))];
            if !setting.model.config.input.is_classified() {
                found.push(queue.read(&pass::next_logits(&setting.model, &context)));
            }
            found
        };
        assert_eq!(found(Some(&pruning)), found(None), "{case}");
        let [plain, pruned_layer] =
            [None, Some(&pruning)].map(|pruning| setting.step(pruning, Keep::Everything)[..20].to_vec());
        assert_ne!(plain, pruned_layer, "{case}: but steps do not");
    }
}

#[test]
fn columns_that_come_back_and_values_that_are_forgotten_leave_no_trace() {
    let setting = Setting::new("llama3", DType::F32, device());
    let keep = |pruning: &mut Pruning, stride: u32| setting.keep(pruning, stride);
    for imputation in POLICIES {
        let plain = setting.step(None, Keep::Everything);
        let first = setting.step(Some(&setting.pruning(imputation, 4)), Keep::Everything);
        // A step with every column leaves values for those that are pruned next.
        let after_another = |forgets: bool| {
            let mut pruning = setting.pruning(imputation, 1);
            setting.step(Some(&pruning), Keep::Everything);
            keep(&mut pruning, 4);
            if forgets {
                pruning.forget();
            }
            (setting.step(Some(&pruning), Keep::Everything), pruning)
        };
        let (repeated, _) = after_another(false);
        assert_eq!(repeated == first, imputation != Imputation::Same, "{imputation:?}: what was there is repeated");
        let (forgotten, mut pruning) = after_another(true);
        assert!(forgotten == first, "{imputation:?}: as in the first step");
        keep(&mut pruning, 1);
        assert!(setting.step(Some(&pruning), Keep::Everything) == plain, "{imputation:?}: as without");
    }
}

#[test]
fn only_the_kept_columns_of_an_input_wait_for_backward() {
    let setting = Setting::new("llama3", DType::F32, Device::dry());
    let (queue, mlp) = (setting.device.compute(), setting.model.units[2].body());
    let input = queue.zeros(setting.batches[0].token_count(), setting.model.config.hidden, DType::F32);
    let held_bytes = |stride: u32| {
        let pruning = setting.pruning(Imputation::Zero, stride);
        let before = setting.device.usage().live_bytes;
        let (_, output, state) = mlp.forward(&setting.context(0, Some(&pruning)), std::slice::from_ref(&input));
        drop(output);
        let held = setting.device.usage().live_bytes - before;
        drop(state);
        held
    };
    // Half of the last matrix's input, and half of the others' input, which belongs to the caller without pruning.
    let (hidden, ffn) = (setting.model.config.hidden as u64, setting.model.config.ffn as u64);
    assert_eq!(held_bytes(1) * (5 * ffn + hidden), held_bytes(4) * 6 * ffn);
}

#[test]
fn a_dry_run_takes_the_same_memory_as_a_real_one() {
    for case in CASES {
        for imputation in POLICIES {
            for keep in [Keep::Everything, Keep::Stream] {
                let peaks = [device(), Device::dry()].map(|device| {
                    let setting = Setting::new(case, DType::Bf16, device);
                    let pruning = setting.pruning(imputation, 4);
                    setting.step(Some(&pruning), keep);
                    setting.step(Some(&pruning), keep);
                    setting.device.usage().peak_bytes
                });
                assert_eq!(peaks[0], peaks[1], "{case} {imputation:?} {keep:?}");
            }
        }
    }
}

#[test]
fn all_three_products_shrink_and_weights_are_gathered_once_a_step() {
    for case in CASES {
        let counted = |stride: u32| {
            let setting = Setting::new(case, DType::F32, Device::dry());
            let pruning = setting.pruning(Imputation::Zero, stride);
            setting.step(Some(&pruning), Keep::Everything);
            let counts = setting.device.take_counts();
            let launches = |name| counts.0.get(name).map_or(0, |count| count.launches);
            let gathers = launches("GatherColumns") + launches("GatherRows");
            (counts.flops(), gathers, setting)
        };
        let ((all, none, setting), (half, gathers, _)) = (counted(1), counted(4));
        let intakes = setting.model.intakes();
        let elements = |intake: &Intake| -> usize {
            intake.weights.iter().map(|weight| setting.model.specs[weight.0].len()).sum()
        };
        let tokens: usize = setting.batches.iter().map(Batch::token_count).sum();
        let saved = 3 * tokens * intakes.iter().map(elements).sum::<usize>();
        assert_eq!(all - half, saved as u128, "{case}: half of each product, a multiply-add counted as two");
        let weights: usize = intakes.iter().map(|intake| intake.weights.len()).sum();
        assert_eq!(none, 0, "{case}: nothing is gathered where everything is kept");
        assert_eq!(gathers as usize, weights + 2 * intakes.len(), "{case}: each weight, and the inputs twice");
    }
}

#[test]
fn layers_that_read_the_same_are_one_intake() {
    let names = |model: &Model| -> Vec<Vec<String>> {
        let name = |name: &str| name.trim_end_matches(".weight").rsplit('.').next().unwrap_or(name).to_owned();
        let of = |intake: &Intake| intake.weights.iter().map(|id| name(&model.specs[id.0].name)).collect();
        model.intakes().iter().map(of).collect()
    };
    let per_layer = |layer: &[&[&str]]| -> Vec<Vec<String>> {
        let layer: Vec<Vec<String>> =
            layer.iter().map(|names| names.iter().map(|&name| name.to_owned()).collect()).collect();
        [layer.clone(), layer].concat()
    };
    for (case, layer) in [
        (
            "llama3",
            per_layer(&[&["q_proj", "k_proj", "v_proj"], &["o_proj"], &["gate_proj", "up_proj"], &["down_proj"]]),
        ),
        ("gpt2", per_layer(&[&["c_attn"], &["c_proj"], &["c_fc"], &["c_proj"]])),
        ("gpt_neox", per_layer(&[&["query_key_value"], &["dense"], &["dense_h_to_4h"], &["dense_4h_to_h"]])),
        ("vit", per_layer(&[&["query", "key", "value"], &["dense"], &["dense"], &["dense"]])),
    ] {
        assert_eq!(names(&model(case)), layer, "{case}");
    }
    let whole_attention = Cut { uncut: [Part::Attention(0), Part::Attention(1)].into(), ..Cut::even(2) };
    let shards = model("llama3").cut(&whole_attention).expect("enough heads");
    let mlp = per_layer(&[&["gate_proj", "up_proj"], &["down_proj"]]);
    assert_eq!(names(&shards[1]), mlp, "what every shard computes whole stays whole");
    assert_eq!(shards[1].intakes()[1].inputs, shards[1].shard.ffn.len(), "inputs of the shard");
}

#[test]
#[should_panic(expected = "in ascending order")]
fn columns_out_of_order_are_refused() {
    let setting = Setting::new("llama3", DType::F32, Device::dry());
    setting.pruning(Imputation::Zero, 4).keep(setting.device.compute(), DType::F32, 0, &[3, 2]);
}
