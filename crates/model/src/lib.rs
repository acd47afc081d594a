//! Hugging Face transformers as chains of units over a residual stream.
//!
//! [`Config`] reads a `config.json`; [`Model`] turns it into a chain (`Embed → Attention → Mlp → … → Head`) and the list
//! of its parameters; [`Parameters`] holds their values on a device, loaded from a folder or drawn at random. A unit is
//! an [`Entry`] (residual add and norm) and a [`Body`] (the sublayer): a list of operations, each with its forward and
//! backward written once in `op`. [`pass`] runs the chain plainly on one rank: the reference for every schedule.
//! [`Generator`] runs it on new tokens of sequences whose keys and values it has cached.
//!
//! ```text
//! adapter/     which linear layers are adapted, and how; PEFT's form of it
//! config/      config.json in one form for every architecture, and the tables of architectures and keys
//! chain/       units, their operations with forward and backward, building the chain and running it plainly
//! parameters/  values and gradients on a device, in buckets; loading them
//! sharding/    the cut over shards, layouts and moves between them, plans, migrations
//! nf4/         frozen weights in 4 bits: quantised on loading, or as bitsandbytes saved them
//! lossy/       pruned layers, which compute with some of their columns
//! generation/  new tokens from cached sequences
//! ```
//!
//! This crate knows no ranks, no groups and no communication.

mod adapter;
mod chain;
mod config;
mod error;
mod generation;
mod lossy;
mod nf4;
mod parameters;
mod sharding;

pub use adapter::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig, AdapterFolder, AdapterInit, AdapterScaling, AdapterValues,
    Adapters, ExpertFactor, LABEL_NAMES, Merger, PEFT_PREFIX, Targets,
};
pub use chain::balance::{ExpertLoad, ReadTallies, Tallies};
pub use chain::batch::{Batch, Images};
pub use chain::body::{Body, BodyBackward, BodyState, Context};
pub use chain::dropout::{Dropouts, Noise};
pub use chain::entry::{Entry, EntryState, Join, JoinState};
pub use chain::head::{Classified, Head, LossOptions};
pub use chain::model::{Model, Stage};
pub use chain::pass;
pub use chain::rotary::RotaryTables;
pub use chain::unit::{Sublayer, Unit, UnitKind};
pub use config::{Config, Experts, Input, LinearAttention, Quantization, check_description, model_types};
pub use error::Error;
pub use evenkeel_widths::{Dim, SHARES, Widths};
pub use generation::generate::{Finish, GenerateError, GenerateOptions, Generated, Generator};
pub use generation::sampling::{Sampling, SamplingError};
pub use lossy::intake::Intake;
pub use lossy::prune::{Imputation, PrunedWeights, Pruning};
pub use lossy::pruned_mask::{PrunedColumns, PrunedMask};
pub use parameters::bucket::{Bucket, GRAIN, in_grains};
pub use parameters::load::fill_slice;
pub use parameters::{
    FileTensor, Gradients, Init, ParamId, ParamSpec, Parameters, Stretch, ZeroSharding, ZeroStage, own_stretches,
};
pub use sharding::layout::{
    Held, Move, MoveBlock, Piece, Ranges, Rectangle, Region, Sharing, Slice, as_matrix, blocks, even_bounds, moves,
};
pub use sharding::migration::{MigratedParam, Migration};
pub use sharding::plan::TpPlan;
pub use sharding::shard::{Cut, Part, Shard, widths_of};
pub use sharding::strip::Strip;
