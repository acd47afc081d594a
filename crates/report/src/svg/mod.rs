//! The basis of all drawings: a page, text and rectangles as markup, scales with round ticks, and shared colours.
//!
//! The loss curve is drawn here; the binary, which knows them, draws timelines of steps and the chart of stragglers.

pub mod colour;
mod markup;
mod scale;
mod ticks;

pub use markup::{Page, Rect, elided, escaped, text, width};
pub use scale::Scale;
pub use ticks::{Ticks, round_step};
