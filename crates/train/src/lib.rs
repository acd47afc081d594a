//! Training: samples in, better parameters out, and reports of each step for display.
//!
//! [`Trainer`] holds one rank's state and makes steps; [`Ranks`] runs all trainers of a run, each on its own thread. This crate
//! opens no files itself (`store` does) and knows no network.

mod balance;
pub mod checkpoint;
mod cost;
mod error;
mod export;
mod foretell;
mod migration;
mod observe;
mod optimizer;
mod probe;
mod prune;
mod ranks;
mod rate;
mod relocation;
mod restage;
mod run;
mod samples;
mod state_kind;
mod trainer;

pub use balance::{Balance, BalanceOptions, Balanced, may_migrate};
pub use cost::{Cost, costs, costs_and_tasks, costs_migrated, in_two_threads};
pub use error::{Error, ErrorText};
pub use export::{save_adapter, save_weights};
pub use foretell::{Candidate, Foretold, Machine, estimate, foretell, preferred, staging};
pub use optimizer::{AdamW, MuonScale, Optimizer, OptimizerOptions, Rule, Update};
pub use probe::{PEAK, Probe, ProductShape, peak_flops_per_s};
pub use prune::Prune;
pub use ranks::{Answer, RankMemory, Ranks, Request, WantedElements};
pub use rate::{Decay, Form, Rate};
pub use restage::{Restage, Restaged};
pub use run::{
    Balancing, Best, EarlyStop, Feed, Limits, Progress, RankReport, Report, RunGoals, RunObserver, StepReport, Stop,
    run,
};
pub use samples::Samples;
pub use state_kind::StateKind;
pub use trainer::{Evaluation, Observe, Prepared, Step, StepOutcome, Trainer, TrainerOptions, program};
