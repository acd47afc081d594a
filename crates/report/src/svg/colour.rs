//! Colours that drawings share. What only one of them tells apart has its colours there.

/// Of pages.
pub const WHITE: &str = "#ffffff";
/// Of text that is read first, and of text beside it.
pub const INK: &str = "#1f1f1f";
pub const FAINT_INK: &str = "#5c5b57";
/// Of an axis, and of lines across a plot.
pub const AXIS: &str = "#8a8984";
pub const GRID: &str = "#e3e1db";
/// Of limits, and of what is wrong.
pub const ALARM: &str = "#b3261e";
