//! From a checked configuration to the [`Strategy`] of a run.

use std::collections::BTreeSet;
use std::path::Path;

use evenkeel_device::{DType, DeviceKind, cpu_report};
use evenkeel_model::{Cut, Model, Part, TpPlan, ZeroStage};
use evenkeel_step::schedule::{Arrangement, NONE};
use evenkeel_step::{Devices, Strategy};
use evenkeel_store::read_json;
use serde_json::Value;

use crate::config::{Parallel, Settings};
use crate::{Failure, Mistake, placement, stages};

/// The strategy of a configuration, for this model with this config.json. Without a value, `parallel.parts` is 1 and
/// `parallel.sequence_parallel` as the plan allows: [`arrange`](crate::arrange) chooses better ones.
pub fn strategy(settings: &Settings, model: &Model, config: &Value) -> Result<Strategy, Failure> {
    let parallel = &settings.parallel;
    let uncut = match parallel.tp {
        1 => BTreeSet::new(),
        _ => plan(parallel.tp_plan.as_deref(), config)?.uncut(model, parallel.tp)?,
    };
    let ranks = parallel.ranks();
    let devices = match settings.device.kind {
        DeviceKind::Cpu => cores(ranks, parallel.cores_per_rank, parallel.comm_cores, settings.device.threads),
        DeviceKind::Cuda => gpus(ranks, settings, &uncut)?,
    };
    let cut = cut(parallel.tp, &parallel.tp_weights, uncut, parallel.sequence_parallel);
    let cut = cut_experts(cut, parallel.whole_experts, "`parallel.whole_experts`", model)?;
    Ok(Strategy {
        pp: parallel.pp,
        dp: parallel.dp,
        micro_batch: settings.train.batch,
        accumulate: settings.train.accumulate,
        zero: zero_stage(parallel.zero),
        dtype: DType::from(settings.train.dtype),
        cut,
        arrangement: arrangement(parallel),
        pipeline: stages::pipeline(parallel, model, settings.train.accumulate)?,
        devices,
    })
}

/// Equal ranks that share the machine's cores, or so many of them, and split the stream.
pub fn on_cores(dp: usize, tp: usize, threads: Option<usize>) -> Strategy {
    let devices = cores(dp * tp, None, 0, threads);
    Strategy { dp, devices, ..Strategy::of(cut(tp, &[], BTreeSet::new(), None)) }
}

/// The same ranks on GPUs: on one each if there are as many, else on one that all share, whole or in parts.
pub fn on_gpus(strategy: Strategy, multiprocessors: &[u32], graph: bool) -> Strategy {
    let gpus = placement::gpus(strategy.ranks(), &[], !multiprocessors.is_empty(), found_gpus());
    let devices = Devices::Cuda { gpus, multiprocessors: multiprocessors.to_vec(), graph };
    Strategy { devices, ..strategy }
}

/// The cut over `tp` shards: by weights, if there are any, and with a split stream if that is possible and not refused.
pub fn cut(tp: usize, weights: &[f64], uncut: BTreeSet<Part>, split_sequence: Option<bool>) -> Cut {
    let weights = if weights.is_empty() { vec![1.0; tp] } else { weights.to_vec() };
    assert_eq!(weights.len(), tp, "the configuration or command line was checked");
    Cut { split_sequence: split_sequence.unwrap_or(uncut.is_empty()), uncut, ..Cut::weighted(weights) }
}

/// The same cut, which leaves experts whole if this option says so.
pub fn cut_experts(cut: Cut, whole_experts: bool, option: &str, model: &Model) -> Result<Cut, Mistake> {
    if whole_experts && model.config.experts.is_none() {
        let what = format!("{option} is set, but the model has no experts");
        return Err(Mistake { what, hint: Some("leave it out".to_owned()) });
    }
    Ok(Cut { whole_experts, ..cut })
}

/// A stage that was checked to be one of ZeRO's.
pub fn zero_stage(number: usize) -> ZeroStage {
    ZeroStage::ALL[number]
}

pub fn arrangement(parallel: &Parallel) -> Arrangement {
    let schedule = parallel.schedule.unwrap_or(NONE);
    let arrangement = Arrangement::of(schedule).in_parts(parallel.parts.unwrap_or(1));
    Arrangement { ahead: parallel.ahead, ..arrangement.recomputing(parallel.recompute_units) }
}

/// The plan for cutting layers: a file's, else config.json's.
pub fn plan(file: Option<&Path>, config: &Value) -> Result<TpPlan, Failure> {
    const MOST_BYTES: u64 = 16 << 20;
    let own = match file {
        Some(path) => TpPlan::from_json(&read_json(path, MOST_BYTES)?)?,
        None => TpPlan::default(),
    };
    Ok(own.or(TpPlan::of_config(config)?))
}

fn cores(ranks: usize, per_rank: Option<usize>, comm_cores: usize, threads: Option<usize>) -> Devices {
    let shared_out = || (threads.unwrap_or_else(|| cpu_report().cores) / ranks).max(1);
    Devices::Cpu { cores_per_rank: per_rank.unwrap_or_else(shared_out), comm_cores }
}

fn gpus(ranks: usize, settings: &Settings, uncut: &BTreeSet<Part>) -> Result<Devices, Failure> {
    let (wanted, multiprocessors) = (&settings.device.cards, settings.device.virtual_gpus.clone());
    if let Ok(found) = evenkeel_device::cuda_gpus()
        && let Some(gpu) = wanted.iter().find(|gpu| **gpu as usize >= found)
    {
        let what = format!("`device.cards` names GPU {gpu}, but the driver shows {found}, counted from 0");
        return Err(Mistake { what, hint: Some("see `nvidia-smi` and CUDA_VISIBLE_DEVICES".to_owned()) }.into());
    }
    let gpus = placement::gpus(ranks, wanted, !multiprocessors.is_empty(), found_gpus());
    check_alike(uncut, &multiprocessors, &names_of(&gpus), evenkeel_device::cuda_attention_repeats())?;
    Ok(Devices::Cuda { gpus, multiprocessors, graph: settings.device.graph.unwrap_or(true) })
}

/// 0 on a machine without a driver, which starting a device reports.
fn found_gpus() -> usize {
    evenkeel_device::cuda_gpus().unwrap_or(0)
}

/// The names of the ranks' GPUs, as far as the driver shows them; empty if there is one.
fn names_of(gpus: &[usize]) -> Vec<String> {
    let different = placement::different(gpus);
    if different.len() == 1 {
        return Vec::new();
    }
    let found = evenkeel_device::cuda_report().gpus;
    different.into_iter().filter_map(|gpu| Some(found.get(gpu)?.name.clone())).collect()
}

/// Ranks that compute the same must get the same bits, or their copies would drift apart.
fn check_alike(
    uncut: &BTreeSet<Part>,
    multiprocessors: &[u32],
    names: &[String],
    attention_repeats: bool,
) -> Result<(), Mistake> {
    let has_attention = uncut.iter().any(|part| matches!(part, Part::Attention(_)));
    let (why, hint) = if !uncut.is_empty() && multiprocessors.iter().any(|size| *size != multiprocessors[0]) {
        ("`device.virtual_gpus` of different sizes round differently", "make them equal, or cut the whole model")
    } else if !uncut.is_empty() && names.iter().any(|name| *name != names[0]) {
        ("GPUs of different kinds round differently", "choose equal ones with device.cards, or cut the whole model")
    } else if has_attention && !attention_repeats {
        let hint = "set EVENKEEL_CUDA_ATTENTION=repeatable in the environment, or cut attention, too";
        ("cuDNN's gradients of attention are rounded differently each time", hint)
    } else {
        return Ok(());
    };
    let what = format!("the plan leaves {} parts of the model whole on every rank, but {why}", uncut.len());
    Err(Mistake { what, hint: Some(hint.to_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_every_rank_computes_whole_needs_parts_and_attention_that_come_out_alike() {
        type Case<'a> = (&'a [Part], &'a [u32], &'a [&'a str], bool, Option<&'a str>);
        let cases: [Case; 10] = [
            (&[], &[40, 24], &[], false, None),
            (&[Part::Mlp(0)], &[], &[], false, None),
            (&[Part::Mlp(0)], &[24, 24], &[], false, None),
            (&[Part::Mlp(0)], &[40, 24], &[], true, Some("different sizes")),
            (&[Part::Attention(1)], &[24, 24], &[], false, Some("cuDNN's gradients")),
            (&[Part::Attention(1)], &[24, 24], &[], true, None),
            (&[Part::Attention(1), Part::Head], &[], &[], false, Some("the plan leaves 2 parts")),
            (&[Part::Mlp(0)], &[], &["H200", "H200"], false, None),
            (&[Part::Mlp(0)], &[], &["H200", "A100"], true, Some("GPUs of different kinds")),
            (&[], &[], &["H200", "A100"], true, None),
        ];
        for (uncut, virtual_gpus, cards, repeats, expected) in cases {
            let cards: Vec<String> = cards.iter().map(|name| (*name).to_owned()).collect();
            let found = check_alike(&uncut.iter().copied().collect(), virtual_gpus, &cards, repeats);
            let said = found.err().map(|mistake| mistake.what);
            let is_expected = match expected {
                Some(words) => said.as_ref().is_some_and(|said| said.contains(words)),
                None => said.is_none(),
            };
            assert!(is_expected, "{uncut:?} on {virtual_gpus:?}: {said:?}");
        }
    }
}
