//! Requests to ranks and their answers: plain data, so that a rank may run in another process.
//!
//! A new request is a variant of [`Request`], an arm of [`answer`], a variant of [`Answer`] if it returns something, and a method
//! of [`Ranks`](super::Ranks) for its callers. Send them to another host in a binary form: JSON is large, and loses weights and
//! losses that are not finite.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_balance::Observation;
use evenkeel_device::DeviceKind;
use evenkeel_model::{Cut, Held, ParamId, Widths};
use evenkeel_step::trace::{Shares, Timeline};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::checkpoint::{Opened, RankState, load_rank};
use crate::error::ErrorText;
use crate::probe::peak_flops_per_s;
use crate::prune::Prune;
use crate::samples::Samples;
use crate::state_kind::StateKind;
use crate::trainer::{Evaluation, Observe, StepOutcome, Trainer};

/// A request to all ranks together. They share one copy of it.
#[derive(Serialize, Deserialize)]
pub enum Request {
    /// A step on these micro-batches, with each rank's observation if `is_observed`; see [`Trainer::step`].
    Step {
        micros: Vec<Samples>,
        lr: f64,
        is_observed: bool,
    },
    /// A step on these micro-batches whose tasks are timed one by one.
    TimedStep {
        micros: Vec<Samples>,
        lr: f64,
    },
    /// See [`Trainer::evaluate`].
    Evaluate {
        samples: Samples,
    },
    /// See [`Trainer::unit_seconds`].
    UnitSeconds {
        micros: Vec<Samples>,
    },
    /// By rank: the factor by which its kernels take longer; see [`Device::throttle`](evenkeel_device::Device::throttle).
    Throttle {
        factors: Vec<f64>,
    },
    /// Cuts the model into other shards, for good; see [`Trainer::reshard`].
    Reshard {
        cut: Cut,
    },
    /// Cuts the chain in stages that begin elsewhere, for good; see [`Trainer::recut`].
    Recut {
        cuts: Vec<usize>,
    },
    /// Computes with other widths than are kept, or with those again; see [`Trainer::migrate`].
    Migrate {
        work: Option<Widths>,
    },
    /// By shard: how its ranks prune; see [`Trainer::prune`].
    Prune {
        by_shard: Vec<Option<Prune>>,
    },
    /// By rank: the stretches to read of what it keeps of a parameter.
    Read {
        kind: StateKind,
        id: ParamId,
        by_rank: Vec<Vec<WantedElements>>,
    },
    /// Each rank's part of a checkpoint, with a copy of its values or with their places.
    State {
        copies: bool,
    },
    /// Loads a checkpoint. This does not cross hosts: opening a checkpoint compares all its files with their digests, which each
    /// process does once for all of its ranks.
    #[serde(skip)]
    Load(Arc<Opened>),
    /// Has ranks complete the values that they compute with: replicas gather those whose masters others keep, and norms of adapted
    /// rows are measured.
    CompleteValues,
    Memory,
    /// See [`Trainer::exchange_s_per_byte`].
    ExchangeSpeed,
    /// See [`peak_flops_per_s`].
    PeakFlops,
    /// The message of a GPU's driver that refused to go on with graphs.
    GraphRefusal,
}

/// Elements to read of what a rank keeps of a parameter, and where they go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedElements {
    pub elements: Range<usize>,
    pub to_start: usize,
}

/// One rank's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Done, with nothing to return.
    Done,
    Failed(ErrorText),
    Step((StepOutcome, Observation)),
    /// With the rank's time by its use.
    TimedStep((StepOutcome, Shares)),
    Evaluation(Evaluation),
    /// By parameter: the elements that it keeps from here on, if it speaks for them.
    Resharded(Vec<Option<Held>>),
    UnitSeconds(Vec<f64>),
    /// Values, each list with where it goes.
    Values(Vec<(usize, Vec<f32>)>),
    State(Box<RankState>),
    Memory(RankMemory),
    /// Seconds per byte.
    ExchangeSpeed(f64),
    /// Operations per second.
    PeakFlops(f64),
    /// `None` if no driver refused.
    GraphRefusal(Option<String>),
}

/// The memory of a rank's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMemory {
    pub capacity_bytes: u64,
    pub peak_bytes: u64,
    /// True if all ranks on the machine share the capacity.
    pub is_shared: bool,
}

/// Has a rank do its part.
pub(super) fn answer(trainer: &mut Trainer, request: &Request) -> Answer {
    try_answer(trainer, request).unwrap_or_else(|error| Answer::Failed(ErrorText::from(&error)))
}

fn try_answer(trainer: &mut Trainer, request: &Request) -> Result<Answer, Error> {
    Ok(match request {
        Request::Step { micros, lr, is_observed } => {
            let mut prepared = trainer.prepare(micros)?;
            let observe = if *is_observed { Observe::Work } else { Observe::Nothing };
            let step = trainer.step_on(&mut prepared, *lr, observe);
            Answer::Step((step.outcome, step.work))
        }
        Request::TimedStep { micros, lr } => {
            let mut prepared = trainer.prepare(micros)?;
            let step = trainer.step_on(&mut prepared, *lr, Observe::Tasks { epoch: Instant::now() });
            Answer::TimedStep((step.outcome, Timeline { ranks: vec![step.spans] }.shares(0)))
        }
        Request::Evaluate { samples } => Answer::Evaluation(trainer.evaluate(samples)),
        Request::UnitSeconds { micros } => Answer::UnitSeconds(trainer.unit_seconds(micros)?),
        Request::Throttle { factors } => {
            trainer.device.throttle(factors[trainer.rank()]);
            Answer::Done
        }
        Request::Reshard { cut } => {
            let shards = trainer.model.cut(cut).expect("a cut that fits the model");
            trainer.reshard(&shards);
            Answer::Resharded(spoken_for(trainer))
        }
        Request::Recut { cuts } => {
            trainer.recut(cuts.clone());
            Answer::Resharded(spoken_for(trainer))
        }
        Request::Migrate { work } => {
            trainer.migrate(work.clone());
            Answer::Done
        }
        Request::Prune { by_shard } => {
            trainer.prune(by_shard[trainer.model.shard.index]);
            Answer::Done
        }
        Request::Read { kind, id, by_rank } => Answer::Values(read(trainer, *kind, *id, &by_rank[trainer.rank()])),
        Request::State { copies } => Answer::State(Box::new(RankState::of(trainer, *copies))),
        Request::Load(opened) => {
            load_rank(opened, trainer)?;
            Answer::Done
        }
        Request::CompleteValues => {
            trainer.complete_values();
            Answer::Done
        }
        Request::Memory => Answer::Memory(memory(trainer)),
        Request::ExchangeSpeed => Answer::ExchangeSpeed(trainer.exchange_s_per_byte()),
        Request::PeakFlops => Answer::PeakFlops(peak_flops_per_s(&trainer.device, trainer.parameters.dtype())),
        Request::GraphRefusal => Answer::GraphRefusal(trainer.device.replays().refusal),
    })
}

/// By parameter: the elements that a rank keeps, if it speaks for them.
pub(super) fn spoken_for(trainer: &Trainer) -> Vec<Option<Held>> {
    let ids = trainer.parameters.ids();
    ids.map(|id| trainer.held(id).filter(|_| trainer.speaks_for(StateKind::Weight, id))).collect()
}

fn read(trainer: &Trainer, kind: StateKind, id: ParamId, wanted: &[WantedElements]) -> Vec<(usize, Vec<f32>)> {
    let (Some(first), Some(last)) = (
        wanted.iter().map(|stretch| stretch.elements.start).min(),
        wanted.iter().map(|stretch| stretch.elements.end).max(),
    ) else {
        return Vec::new();
    };
    // One transfer for all of them: rows read singly would take many.
    let (_, kept) = trainer.kept(kind, id).expect("it speaks for some");
    let values = trainer.device.compute().read(&kept.col_range(first..last));
    if let [only] = wanted {
        return vec![(only.to_start, values)];
    }
    let stretch = |WantedElements { elements, to_start }: &WantedElements| {
        (*to_start, values[elements.start - first..elements.end - first].to_vec())
    };
    wanted.iter().map(stretch).collect()
}

/// The memory of a GPU is divided among its ranks; ranks on a CPU each reserve the memory that all of them share.
fn memory(trainer: &Trainer) -> RankMemory {
    let usage = trainer.device.usage();
    let is_shared = trainer.device.kind() == DeviceKind::Cpu;
    RankMemory { capacity_bytes: usage.capacity_bytes, peak_bytes: usage.peak_bytes, is_shared }
}
