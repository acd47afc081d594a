//! Colours that drawings share. Colours for one drawing's own distinctions are there.

/// Background of pages.
pub const WHITE: &str = "#ffffff";
/// Text that is read first, and text beside it.
pub const INK: &str = "#1f1f1f";
pub const FAINT_INK: &str = "#5c5b57";
/// An axis, and lines across a plot.
pub const AXIS: &str = "#8a8984";
pub const GRID: &str = "#e3e1db";
/// Limits and errors.
pub const ALARM: &str = "#b3261e";
