//! A training step is a program: a list of tasks over named values, plain data.
//!
//! A [`Strategy`] says how a model is run. [`schedule`] writes programs, [`verify()`] proves those of all ranks sound before they
//! run, an [`Executor`] runs one on a device, [`simulate`] runs them on a table of costs, and [`trace`] tells the time of each
//! task. A new technique is a new function in `schedule`; the other modules need not know it.
//!
//! This crate knows no files, no optimizer and no data; callers give it batches.

mod execute;
mod gather;
mod groups;
mod listing;
mod meetings;
mod mesh;
mod pipeline;
mod program;
mod rows;
pub mod schedule;
pub mod simulate;
mod strategy;
pub mod trace;
mod verify;
mod waits;
mod work;

pub use execute::Executor;
pub use gather::gather_values;
pub use groups::join;
pub use listing::listing;
pub use mesh::Mesh;
pub use pipeline::{Keeping, Pipeline, PipelineOrder};
pub use program::{
    Exchange, GroupIdx, Members, Micro, Program, ProgramView, ROOMS, Task, UnitIdx, Value, ValueKind, Values,
};
pub use rows::measure_rows;
pub use strategy::{Devices, Strategy};
pub use verify::{Unsound, verify};
pub use work::{BucketIdx, Chunk, Lane, Scope, Work, WorkFamily, WorkRow};
