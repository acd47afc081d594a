//! Bars of memory below a timeline: what tensors need on each device, beside what it has for them.

use evenkeel_report::svg::colour::{ALARM, AXIS, FAINT_INK};
use evenkeel_report::svg::{Rect, elided, escaped, text, width};

use super::FONT_SIZE;
use crate::text::{bytes, percent};

/// A device, or several that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBar {
    /// The ranks: `ranks 0–3`.
    pub ranks: String,
    /// What they compute on: `4 × h200`.
    pub devices: String,
    pub used_bytes: u64,
    pub limit_bytes: u64,
}

impl MemoryBar {
    fn fullness(&self) -> f64 {
        self.used_bytes as f64 / self.limit_bytes.max(1) as f64
    }

    fn describe(&self) -> String {
        let (used, limit) = (bytes(self.used_bytes), bytes(self.limit_bytes));
        let devices = if self.devices.is_empty() { String::new() } else { format!(" · {}", self.devices) };
        format!("{used} of {limit} = {}{devices}", percent(self.fullness()))
    }
}

/// More would be a long list of what hardly differs.
const MOST_BARS: usize = 16;
/// The heading's baseline, and the first bar, below the top.
const HEADING: f64 = 14.0;
const FIRST: f64 = 26.0;
const BAR_HEIGHT: f64 = 16.0;
const BAR_GAP: f64 = 7.0;
const BOTTOM: f64 = 20.0;
const LABEL_GAP: f64 = 8.0;
/// From a bar's middle down to the baseline of its text.
const BASELINE: f64 = 4.3;
const LIMIT_WIDTH: f64 = 2.0;
const ROOM_FILL: &str = "#e4e2dc";
const USED_FILL: &str = "#8a7350";

/// Pixels that the bars take; none if there are none.
pub(super) fn height(bars: &[MemoryBar]) -> f64 {
    let lines = bars.len().min(MOST_BARS) + usize::from(bars.len() > MOST_BARS);
    if bars.is_empty() { 0.0 } else { FIRST + (BAR_HEIGHT + BAR_GAP) * lines as f64 + BOTTOM }
}

/// The bars between `left` and `right`, names of ranks to the left from `margin` on, bytes to the right.
pub(super) fn markup(bars: &[MemoryBar], top: f64, margin: f64, left: f64, right: f64) -> String {
    let shown = fullest(bars);
    let Some(most_bytes) = shown.iter().map(|bar| bar.used_bytes.max(bar.limit_bytes)).max() else {
        return String::new();
    };
    let words = shown.iter().map(|bar| width(&bar.describe(), FONT_SIZE)).fold(0.0, f64::max);
    // A pixel of light keeps rounding from cutting the longest text.
    let room = (right - left - words - LABEL_GAP - 1.0).max(0.3 * (right - left));
    let scale = room / most_bytes.max(1) as f64;
    let mut svg = text(margin, top + HEADING, "font-weight=\"bold\"", "memory");
    let about = "what tensors need on each device, of what it has for them";
    svg += &text(left, top + HEADING, &format!("fill=\"{FAINT_INK}\""), about);
    for (index, bar) in shown.iter().enumerate() {
        let y = top + FIRST + (BAR_HEIGHT + BAR_GAP) * index as f64;
        svg += &drawn(bar, y, margin, [left, right], scale);
    }
    if bars.len() > shown.len() {
        let y = top + FIRST + (BAR_HEIGHT + BAR_GAP) * shown.len() as f64 + BAR_HEIGHT / 2.0 + BASELINE;
        let more = format!("and {} more, none of them fuller", bars.len() - shown.len());
        svg += &text(left, y, &format!("fill=\"{FAINT_INK}\""), &more);
    }
    svg
}

fn drawn(bar: &MemoryBar, y: f64, margin: f64, [left, right]: [f64; 2], scale: f64) -> String {
    let [limit, used] = [bar.limit_bytes, bar.used_bytes].map(|bytes| scale * bytes as f64);
    let baseline = y + BAR_HEIGHT / 2.0 + BASELINE;
    let name = elided(&bar.ranks, FONT_SIZE, left - LABEL_GAP - margin);
    let style = format!("text-anchor=\"end\" fill=\"{FAINT_INK}\"");
    let mut svg = text(left - LABEL_GAP, baseline, &style, &name);
    let rect = |width: f64| Rect { x: left, y, width, height: BAR_HEIGHT };
    svg += &rect(limit).markup(&format!("class=\"room\" fill=\"{ROOM_FILL}\""), "");
    let fill = if bar.used_bytes > bar.limit_bytes { ALARM } else { USED_FILL };
    let tooltip = format!("<title>{}: {}</title>", escaped(&bar.ranks), escaped(&bar.describe()));
    svg += &rect(used).markup(&format!("class=\"used\" fill=\"{fill}\""), &tooltip);
    let mark = Rect { x: left + limit - LIMIT_WIDTH / 2.0, y: y - 2.0, width: LIMIT_WIDTH, height: BAR_HEIGHT + 4.0 };
    svg += &mark.markup(&format!("fill=\"{AXIS}\""), "");
    let x = left + used.max(limit) + LABEL_GAP;
    svg + &text(x, baseline, "", &elided(&bar.describe(), FONT_SIZE, right - x))
}

/// As many as are shown, in their order.
fn fullest(bars: &[MemoryBar]) -> Vec<&MemoryBar> {
    let mut places: Vec<usize> = (0..bars.len()).collect();
    places.sort_by(|&one, &other| bars[other].fullness().total_cmp(&bars[one].fullness()));
    places.truncate(MOST_BARS);
    places.sort_unstable();
    places.into_iter().map(|place| &bars[place]).collect()
}
