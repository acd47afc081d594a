//! Simulated ranks, from the times that one core really takes for shards of different widths.

use evenkeel_balance::{Class, Mode, Observation};
use evenkeel_comm::Communicator;
use evenkeel_device::{CpuOptions, Device};
use evenkeel_model::{Cut, Dim, Model, Parameters, SHARES, Widths, ZeroSharding, widths_of};
use evenkeel_step::Mesh;
use evenkeel_train::{Balance, Observe, Trainer};

use super::subject::Subject;
use super::{Arguments, Case, Outcome, settled, settled_after};
use crate::{Failure, Mistake};

/// By class: seconds at some widths, rising.
pub struct Curves([Vec<(f64, f64)>; Class::ALL.len()]);

impl Curves {
    /// Linear between the two nearest widths; width 0 takes no time.
    fn seconds(&self, class: Class, width: f64) -> f64 {
        let points = &self.0[class as usize];
        if width == 0.0 || points.is_empty() {
            return 0.0;
        }
        let above = points.iter().position(|(at, _)| *at >= width).unwrap_or(points.len() - 1);
        let (w1, t1) = if above == 0 { (0.0, 0.0) } else { points[above - 1] };
        let (w2, t2) = points[above];
        t1 + (t2 - t1) * (width - w1) / (w2 - w1)
    }
}

/// Widths that are measured, as shares of an even one.
const SHARES_OF_EVEN: [f64; 6] = [0.125, 0.25, 0.5, 1.0, 1.25, 1.75];
/// Rounds over all widths, and timed steps in a round, after a first one that touches memory for the first time.
const ROUNDS: usize = 4;
const STEPS: usize = 2;

/// Times the first of `ranks` shards at several widths, alone on one core: without others to exchange with, it computes nonsense
/// in the usual time.
pub fn measure(subject: &Subject, model: &Model, ranks: usize) -> Result<Curves, Failure> {
    let all: Vec<Widths> = SHARES_OF_EVEN.iter().map(|&share| widths(model, ranks, share)).collect();
    let mut fastest = vec![[f64::INFINITY; Class::ALL.len()]; all.len()];
    // In turn, so that changes of the machine's speed affect all of them.
    for _ in 0..ROUNDS {
        for (widths, fastest) in all.iter().zip(&mut fastest) {
            let cut = Cut { widths: Some(widths.clone()), split_sequence: true, ..Cut::even(ranks) };
            let observed = time(subject, &model.cut(&cut)?, ranks)?;
            let both = fastest.iter_mut().zip(observed.compute_s);
            both.for_each(|(fastest, seconds)| *fastest = fastest.min(seconds));
        }
    }
    let mut curves = Curves(Class::ALL.map(|_| Vec::new()));
    for (widths, fastest) in all.iter().zip(&fastest) {
        for class in Class::ALL {
            let width = widths.of(class.dim())[0];
            let points = &mut curves.0[class as usize];
            let (last_width, last_s) = points.last().copied().unwrap_or((0.0, 0.0));
            if width as f64 > last_width {
                // More work that takes less time is noise.
                points.push((width as f64, fastest[class as usize].max(last_s)));
            }
        }
    }
    Ok(curves)
}

/// The first shard gets this share of an even width, the others the rest.
fn widths(model: &Model, ranks: usize, share: f64) -> Widths {
    let divided = |total: usize, grain: usize| -> Vec<usize> {
        let even = total as f64 / ranks as f64;
        let first = ((share * even / grain as f64).round() as usize * grain).clamp(grain.min(total), total);
        let (each, left) = ((total - first) / (ranks - 1), (total - first) % (ranks - 1));
        [first].into_iter().chain((0..ranks - 1).map(|rank| each + usize::from(rank < left))).collect()
    };
    let config = &model.config;
    let whole = widths_of([&model.shard]);
    let groups = if config.kv_heads >= ranks { divided(config.kv_heads, 1) } else { vec![0; ranks] };
    Widths::new(|dim| match dim {
        Dim::Heads => groups.iter().map(|groups| SHARES * groups).collect(),
        Dim::Columns => divided(config.ffn, 8),
        Dim::Classes | Dim::Inputs => divided(whole.total(dim), 1),
        Dim::Tokens => divided(SHARES * ranks, 1),
    })
}

fn time(subject: &Subject, shards: &[Model], ranks: usize) -> Result<Observation, Failure> {
    let device = Device::cpu(&CpuOptions::with_threads(1)).map_err(|error| {
        Failure::Fault(Mistake { what: format!("a device cannot be started: {error}"), hint: None })
    })?;
    let parameters = Parameters::random(&shards[0], subject.dtype(), ZeroSharding::NONE, 0, device.compute());
    let strategy = subject.strategy(ranks);
    let mut trainer =
        Trainer::new(shards, &strategy, &Communicator::dry(0, ranks), device, parameters, subject.options());
    let samples = subject.samples(0);
    let mut observed = Vec::new();
    for _ in 0..=STEPS {
        let mut prepared = trainer.prepare(&samples)?;
        observed.push(trainer.step_on(&mut prepared, 0.0, Observe::Work).work);
    }
    // The first step touched its memory for the first time; the fastest of the others had the core most to itself.
    let fastest =
        |class: usize| observed[1..].iter().map(|observed| observed.compute_s[class]).fold(f64::INFINITY, f64::min);
    Ok(Observation { compute_s: std::array::from_fn(fastest), ..Observation::default() })
}

pub fn run(arguments: &Arguments, model: &Model, curves: &Curves, case: &Case, mode: Mode) -> Outcome {
    let ranks = case.0.len();
    let cut = Cut { split_sequence: true, ..Cut::even(ranks) };
    let shards = model.cut(&cut).expect("measured in as many");
    let mut balance = Balance::new(arguments.balance(mode), model, &cut, &shards, Mesh::of_shards(ranks));
    let mut step = 0;
    let mut phase = |balance: &mut Balance, factors: &[f64]| -> Vec<f64> {
        let simulate = |_| {
            step += 1;
            let (step_s, observed) = simulated_step(curves, &balance.target().work, &balance.target().gammas, factors);
            balance.simulate_step(step, step_s, &observed);
            step_s
        };
        (0..arguments.steps).map(simulate).collect()
    };
    let undisturbed = phase(&mut balance, &vec![1.0; ranks]);
    let before = balance.target().home.clone();
    let slowed = phase(&mut balance, &case.0);
    let then = balance.target().clone();
    let recovered = phase(&mut balance, &vec![1.0; ranks]);
    let bytes = |of: &dyn Fn(Dim) -> f64| Dim::ALL.iter().map(|&dim| of(dim)).sum::<f64>() as u64;
    Outcome {
        mode,
        undisturbed_s: settled(&undisturbed),
        slowed_s: settled(&slowed),
        recovered_s: Some(settled(&recovered)),
        slowed_error: None,
        settled_after: settled_after(mode, &slowed),
        moved_bytes: bytes(&|dim| then.home.gained(&before, dim) as f64 * balance.state_bytes(dim)),
        migrated_bytes: bytes(&|dim| then.migrated(dim) as f64 * balance.work_bytes(dim)),
        gamma: then.gammas.iter().copied().fold(0.0, f64::max),
        steps: Vec::new(),
    }
}

/// A reduction separates the classes, so the slowest rank of each counts.
fn simulated_step(curves: &Curves, work: &Widths, gammas: &[f64], factors: &[f64]) -> (f64, Vec<Observation>) {
    let mut observed: Vec<Observation> =
        gammas.iter().map(|&gamma| Observation { gamma, ..Observation::default() }).collect();
    let mut step_s = 0.0;
    for class in Class::ALL {
        for (rank, factor) in factors.iter().enumerate() {
            let left = if class.is_prunable() { 1.0 - gammas[rank] } else { 1.0 };
            let width = left * work.of(class.dim())[rank] as f64;
            observed[rank].compute_s[class as usize] = factor * curves.seconds(class, width);
        }
        step_s += observed.iter().map(|rank| rank.of(class)).fold(0.0, f64::max);
    }
    (step_s, observed)
}
