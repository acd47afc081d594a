//! What pruning gains and what it costs: one Llama layer, forward and backward, and its update, for several shares of pruned
//! columns. Each kernel's best of some runs, which take turns.
//!
//! ```sh
//! cargo run --release -p evenkeel-train --example resized_layer
//! ```

use evenkeel_balance::{kept_count, random_columns};
use evenkeel_device::kernel::Segments;
use evenkeel_device::{CpuOptions, DType, Device, Tensor};
use evenkeel_model::{
    Batch, Context, Gradients, Imputation, Model, Parameters, PrunedColumns, PrunedMask, PrunedWeights, Pruning,
    RotaryTables, UnitKind, ZeroSharding,
};
use evenkeel_train::{Optimizer, OptimizerOptions, Update};

const TOKENS: usize = 1024;
const HIDDEN: usize = 512;
const RUNS: usize = 30;
const GAMMAS: [f64; 5] = [0.0, 0.1, 0.25, 0.5, 0.75];

struct Layer {
    model: Model,
    device: Device,
    parameters: Parameters,
    gradients: Gradients,
    tables: RotaryTables,
    batch: Batch,
    optimizer: Optimizer,
    /// The layer's input and its output's gradient.
    x: Tensor,
}

/// The kernels of one run in order, with milliseconds: those of the layer, then those of its update.
type Run = [Kernels; 2];
type Kernels = Vec<(&'static str, f64)>;

impl Layer {
    fn new(dtype: DType) -> Layer {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 8,
            "num_key_value_heads": 8, "intermediate_size": 1408, "vocab_size": 64,
        });
        let model = Model::from_json(&config).expect("a sound config");
        let options = CpuOptions { memory_bytes: 1 << 30, ..CpuOptions::with_threads(1) };
        let device = Device::cpu(&options).expect("a CPU device starts");
        let queue = device.compute();
        let parameters = Parameters::random(&model, dtype, ZeroSharding::NONE, 1, queue);
        let numbers: Vec<f32> = (0..TOKENS * HIDDEN).map(|i| (i * 7919 % 1999) as f32 / 1000.0 - 1.0).collect();
        Layer {
            gradients: Gradients::new(&parameters, queue),
            tables: RotaryTables::new(&model.config, queue, TOKENS),
            batch: Batch::tokens(queue, &[0; TOKENS], &[0; TOKENS], Segments::uniform(4, TOKENS / 4)),
            optimizer: Optimizer::new(OptimizerOptions::default(), &model, &parameters, queue),
            x: queue.floats(TOKENS, HIDDEN, dtype, &numbers),
            model,
            parameters,
            device,
        }
    }

    fn pruning(&self, gamma: f64, imputation: Imputation) -> (Pruning, PrunedMask) {
        let mut pruning = Pruning::new(&self.model, imputation, PrunedWeights::Stay);
        for (index, intake) in self.model.intakes().iter().enumerate() {
            let kept = random_columns(1, index as u64, 0, intake.inputs, kept_count(intake.inputs, gamma));
            pruning.keep(self.device.compute(), self.parameters.dtype(), index, &kept);
        }
        let pruned = (0..pruning.intakes().len()).map(|index| pruning.pruned(index)).collect();
        let frozen =
            PrunedMask::new(self.device.compute(), &self.model, &[PrunedColumns { model: &self.model, pruned }]);
        (pruning, frozen)
    }

    fn run(&self, (pruning, frozen): &(Pruning, PrunedMask)) -> Run {
        let Layer { device, parameters, tables, batch, gradients, x, .. } = self;
        let queue = device.compute();
        let times = || {
            let times = device.take_kernel_times().into_iter();
            times.map(|time| (time.kernel.name(), time.duration.as_secs_f64() * 1e3)).collect()
        };
        pruning.begin_step();
        gradients.clear();
        let context = Context { queue, parameters, tables, batch, pruning: Some(pruning) };
        for unit in
            self.model.units.iter().filter(|unit| matches!(unit.kind, UnitKind::Attention(_) | UnitKind::Mlp(_)))
        {
            let (_, _, state) = unit.body().forward(&context, std::slice::from_ref(x));
            let (_, backward) = unit.body().backward_input(&context, gradients, state, None, x);
            unit.body().backward_weight(&context, gradients, backward);
        }
        let layer = times();
        self.optimizer.update(queue, parameters, gradients, Update { lr: 0.0, step: 1 }, Some(frozen));
        [layer, times()]
    }
}

/// Each kernel's best of two runs: on a machine that others use, none of them is undisturbed as a whole.
fn better(a: Run, b: Run) -> Run {
    let better = |(a, b): (Kernels, Kernels)| -> Kernels {
        a.into_iter().zip(b).map(|((name, a), (_, b))| (name, a.min(b))).collect()
    };
    let [[a_layer, a_update], [b_layer, b_update]] = [a, b];
    [(a_layer, b_layer), (a_update, b_update)].map(better)
}

fn main() {
    for (dtype, imputation) in [
        (DType::F32, Imputation::Zero),
        (DType::Bf16, Imputation::Zero),
        (DType::Bf16, Imputation::Average),
        (DType::Bf16, Imputation::Same),
    ] {
        let layer = Layer::new(dtype);
        layer.device.measure_kernels(true);
        let prunings = GAMMAS.map(|gamma| layer.pruning(gamma, imputation));
        let mut best: Vec<Run> = prunings.iter().map(|pruning| layer.run(pruning)).collect();
        // The first runs of the policy that repeats the last values zero them.
        best.iter_mut().zip(&prunings).for_each(|(best, pruning)| *best = layer.run(pruning));
        for _ in 1..RUNS {
            for (pruning, best) in prunings.iter().zip(&mut best) {
                *best = better(std::mem::take(best), layer.run(pruning));
            }
        }
        println!("{dtype:?}, {imputation:?}: milliseconds of {TOKENS} tokens on one core");
        let sum = |kernels: &[(&str, f64)], of: &[&str]| -> f64 {
            kernels.iter().filter(|(name, _)| of.is_empty() || of.contains(name)).map(|(_, time)| time).sum()
        };
        let all = sum(&best[0][0], &[]);
        for (gamma, [layer, update]) in GAMMAS.iter().zip(&best) {
            println!(
                "  γ {gamma:<4}  layer {:6.2} ({:4.2} of all columns)  products {:6.2}  gathers {:5.2}  scatters {:5.2}  \
                 fills and copies {:5.2}  update {:5.2}",
                sum(layer, &[]),
                sum(layer, &[]) / all,
                sum(layer, &["Product"]),
                sum(layer, &["GatherColumns", "GatherRows"]),
                sum(layer, &["ScatterColumns", "ScatterRows"]),
                sum(layer, &["Fill", "Copy"]),
                sum(update, &[]),
            );
        }
    }
}
