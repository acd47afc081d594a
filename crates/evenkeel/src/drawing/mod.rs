//! Timelines of steps for people to look at: as pictures, and as events for a viewer.
//!
//! They speak of programs, which `evenkeel_report` does not know, and are made of its markup, which `evenkeel_step` need not know.

mod memory;
mod perfetto;
mod pipeline;
mod sensible;
#[cfg(test)]
mod tests;
mod timeline;

pub use memory::MemoryBar;
pub use perfetto::perfetto;
pub use pipeline::{pipeline_and_memory_svg, pipeline_svg};
pub use timeline::{svg, timeline_and_memory_svg};

const TITLE_SIZE: f64 = 18.0;
const FONT_SIZE: f64 = 12.0;
const BACKGROUND: &str = "#f5f4f1";
