//! A training step is a program: a list of tasks over named values, plain data.
//!
//! [`schedule`] writes programs, [`verify()`] proves one sound before it runs, and an [`Executor`] runs it on a device. A new
//! technique is a new function in `schedule`; the others need not know it.
//!
//! This crate knows no files, no optimizer and no data; it is given batches.

mod execute;
mod groups;
mod program;
pub mod schedule;
mod verify;

pub use execute::Executor;
pub use groups::TensorGroups;
pub use program::{Chunk, Lane, Micro, Program, Task, UnitIdx, Value, ValueKind, Work};
pub use verify::{Unsound, verify};
