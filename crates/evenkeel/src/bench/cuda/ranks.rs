//! The same steps by several ranks: each on a GPU, or on one that they share, whole or in parts.

use std::time::{Duration, Instant};

use evenkeel_model::Parameters;
use evenkeel_step::{Devices, Strategy};
use evenkeel_train::{Observe, Samples, Trainer, costs};
use serde_json::json;

use super::{LR, Options, Workload};
use crate::bench::median;
use crate::launch::Launch;
use crate::memory::{Beside, check_steps};
use crate::strategy::on_gpus;
use crate::{Failure, placement, text};

const SPARE_BYTES: u64 = 256 << 20;
const HINT: &str = "use fewer ranks, or a smaller model";

pub fn measure(workload: &Workload, options: &Options) -> Result<String, Failure> {
    let (model, tp) = (workload.model(&options.adapters)?, options.cut.weights.len());
    let dtype = options.precision.into();
    let (micro_batch, cut) = (workload.count, options.cut.clone());
    let strategy = Strategy { micro_batch, dtype, ..Strategy::of(cut) };
    let mut launch = Launch::from(on_gpus(strategy, &options.virtual_gpus, options.graph));
    let strategy = launch.strategy.clone();
    let shards = model.cut(&strategy.cut)?;
    let micros = [workload.samples(&model, 0)];
    let costs = costs(&shards, &strategy, workload.trainer_options(), &micros);
    check_steps(&strategy, &costs, Beside::default(), HINT)?;
    // Each rank takes only what a step needs, and room for a second batch that is kept ready: others may need the rest.
    launch.arena_bytes = costs.iter().map(|cost| cost.arena_bytes + SPARE_BYTES).collect();
    let ranks = launch.start(shards, workload.trainer_options(), move |shard, split, queue| {
        Ok(Parameters::random(shard, dtype, split, 0, queue))
    })?;
    let (warmup, steps) = (options.warmup, options.steps);
    let samples = [0, 1].map(|step| workload.samples(&model, step));
    let ran = ranks.with_trainers(move |trainer| run(trainer, &samples, warmup, steps))?;
    let ran = ran.into_iter().collect::<Result<Vec<Ran>, _>>()?;
    // A step has ended when it has on every rank.
    let slowest = |step: usize| ran.iter().map(|ran| ran.times[step]).max().expect("there are ranks").as_secs_f64();
    let times: Vec<f64> = (0..steps).map(slowest).collect();
    let median = median(times.iter().copied());
    let (per_s, unit) = (workload.units() / median, workload.unit());
    let peaks: Vec<u64> = ran.iter().map(|ran| ran.peak_bytes).collect();
    let [first_loss, last_loss] = ran[0].losses;
    let gpus = match &strategy.devices {
        Devices::Cuda { gpus, .. } => placement::different(gpus),
        Devices::Cpu { .. } => unreachable!("they were put on GPUs"),
    };
    if options.json {
        let fastest = times.iter().copied().fold(f64::INFINITY, f64::min);
        let json = json!({
            "model": workload.name, "dtype": options.precision.name(), "tp": tp, "tp_weights": strategy.cut.weights,
            "virtual_gpus": options.virtual_gpus, "cards": gpus, "median_step_s": median,
            "min_step_s": fastest, "per_s": per_s, "unit": unit, "peak_bytes": peaks, "first_loss": first_loss, "last_loss": last_loss,
        });
        return Ok(json.to_string());
    }
    let parts = match &options.virtual_gpus[..] {
        [] if gpus.len() > 1 => format!("GPUs {gpus:?}"),
        [] => "the whole GPU".to_owned(),
        parts => format!("{parts:?} multiprocessors"),
    };
    let peaks: Vec<String> = peaks.into_iter().map(text::bytes).collect();
    Ok(format!(
        "{:8} {:9.2} ms/step {per_s:10.0} {unit}/s  tp {tp} by {:?} on {parts}  peak {}  loss {first_loss:.3} → {last_loss:.3}",
        workload.name,
        median * 1e3,
        strategy.cut.weights,
        peaks.join(" + "),
    ))
}

/// One rank's measurements.
struct Ran {
    times: Vec<Duration>,
    /// First and last.
    losses: [f64; 2],
    peak_bytes: u64,
}

fn run(
    trainer: &mut Trainer,
    samples: &[Samples; 2],
    warmup: usize,
    steps: usize,
) -> Result<Ran, evenkeel_train::Error> {
    let prepared = samples.each_ref().map(|samples| trainer.prepare(std::slice::from_ref(samples)));
    let mut prepared = prepared.into_iter().collect::<Result<Vec<_>, _>>()?;
    let (mut times, mut losses) = (Vec::new(), [0.0; 2]);
    for number in 0..warmup + steps {
        let start = Instant::now();
        let outcome = trainer.step_on(&mut prepared[number % 2], LR, Observe::Nothing).outcome;
        // The update is still on its way when the loss is known.
        trainer.device.compute().finish();
        times.push(start.elapsed());
        losses[usize::from(number > 0)] = outcome.loss;
    }
    Ok(Ran { times: times.split_off(warmup), losses, peak_bytes: trainer.device.usage().peak_bytes })
}
