//! Hugging Face transformers as chains of units over a residual stream.
//!
//! [`Config`] reads a `config.json`; [`Model`] turns it into a chain (`Embed → Attention → Mlp → … → Head`) and the list
//! of its parameters; [`Parameters`] holds their values on a device, loaded from a folder or drawn at random. A unit is
//! an [`Entry`] (residual add and norm) and a [`Body`] (the sublayer): a list of operations, each with its forward and
//! backward written once in `op`. [`pass`] runs the chain plainly on one rank: the reference for every schedule.
//! [`Generator`] runs it on new tokens of sequences whose keys and values it has cached.
//!
//! This crate knows no ranks, no groups and no communication.

mod batch;
mod body;
mod bucket;
mod build;
mod cache;
mod config;
mod dropout;
mod entry;
mod error;
mod family;
mod frozen;
mod generate;
mod head;
mod intake;
mod known_keys;
mod layout;
mod load;
mod loan;
mod norm;
mod on_rows;
mod op;
mod parameters;
pub mod pass;
mod plan;
mod resize;
mod rotary;
mod sampling;
mod selected;
mod shard;
mod strip;

pub use batch::{Batch, Images};
pub use body::{Body, BodyBackward, BodyState, Context};
pub use bucket::{Bucket, GRAIN, in_grains};
pub use build::{Model, Unit, UnitKind};
pub use config::{Config, Input};
pub use dropout::{Dropouts, Noise};
pub use entry::{Entry, EntryState};
pub use error::Error;
pub use frozen::{Frozen, LeftOut};
pub use generate::{Finish, GenerateError, GenerateOptions, Generated, Generator};
pub use head::{Head, LossOptions};
pub use intake::Intake;
pub use layout::{
    Block, Held, Move, Piece, Ranges, Rectangle, Region, Sharing, Slice, as_matrix, blocks, even_bounds, moves,
};
pub use load::fill_slice;
pub use loan::{Loan, Migration};
pub use parameters::{
    Gradients, Init, ParamId, ParamSpec, Parameters, Stretch, ZeroSharding, ZeroStage, own_stretches,
};
pub use plan::Plan;
pub use resize::{Imputation, Resizing};
pub use rotary::RotaryTables;
pub use sampling::{Sampling, SamplingError};
pub use shard::{Cut, Part, SHARES, Shard, Widths};
pub use strip::Strip;
