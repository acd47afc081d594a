//! The results as bars: a step with slow ranks, as a multiple of an undisturbed one.

use evenkeel_balance::Mode;
use evenkeel_report::svg::colour::{ALARM, FAINT_INK, WHITE};
use evenkeel_report::svg::{Page, Rect, Scale, text};

use super::{Case, Outcome};

const LEFT: f64 = 150.0;
const PLOT: f64 = 560.0;
const RIGHT: f64 = 90.0;
const BAR: f64 = 18.0;
const BAR_GAP: f64 = 4.0;
const CASE_GAP: f64 = 22.0;
const TOP: f64 = 82.0;
const MARGIN: f64 = 16.0;

fn colour(mode: Mode) -> &'static str {
    match mode {
        Mode::Off => "#9aa3ab",
        Mode::Resize => "#c9a227",
        Mode::Migrate => "#4f8fc0",
        Mode::Semi => "#8a6fb0",
        Mode::Reshard => "#2f7d5b",
        Mode::Auto => "#1d5a8a",
    }
}

pub fn svg(title: &str, results: &[(Case, Vec<Outcome>)]) -> String {
    let (what, how) = title.split_once("; ").unwrap_or((title, ""));
    let most = results
        .iter()
        .flat_map(|(case, outcomes)| outcomes.iter().map(Outcome::slowed).chain([case.slowest(), case.optimum()]));
    let most = most.fold(1.0, f64::max);
    let scale = Scale { values: (0.0, most), pixels: (LEFT, LEFT + PLOT) };
    let bars: usize = results.iter().map(|(_, outcomes)| outcomes.len()).sum();
    let height = TOP + bars as f64 * (BAR + BAR_GAP) + results.len() as f64 * CASE_GAP + 20.0;
    let faint = format!("fill=\"{FAINT_INK}\"");
    let heading = "A step with slow ranks, where an undisturbed one takes 1";
    let mut svg = text(MARGIN, 24.0, "font-size=\"14\"", heading);
    svg += &text(MARGIN, 42.0, &faint, what);
    svg += &text(MARGIN, 58.0, &faint, how);
    let mut y = TOP;
    for (case, outcomes) in results {
        svg += &text(MARGIN, y + 6.0, "font-weight=\"bold\"", &case.name());
        y += CASE_GAP - 8.0;
        let begin = y;
        for outcome in outcomes {
            svg += &bar(outcome, y, scale.place(outcome.slowed()));
            y += BAR + BAR_GAP;
        }
        let at = scale.place(case.optimum());
        svg += &format!(
            "<path d=\"M{at:.2} {:.2}V{y:.2}\" stroke=\"{ALARM}\" stroke-width=\"1.5\" stroke-dasharray=\"4 3\"/>\n",
            begin - 2.0
        );
        let style = format!("text-anchor=\"middle\" font-size=\"10\" fill=\"{ALARM}\"");
        svg += &text(at, begin - 5.0, &style, &format!("optimum {:.2}", case.optimum()));
        y += 8.0;
    }
    Page { width: LEFT + PLOT + RIGHT, height, font_size: 12.0, background: WHITE, title: heading }.markup(&svg)
}

/// A mode's name, its bar up to `end`, and the value behind it.
fn bar(outcome: &Outcome, y: f64, end: f64) -> String {
    let baseline = y + BAR / 2.0 + 4.0;
    let place = Rect { x: LEFT, y, width: end - LEFT, height: BAR };
    text(LEFT - 8.0, baseline, "text-anchor=\"end\"", outcome.mode.name())
        + &place.markup(&format!("fill=\"{}\"", colour(outcome.mode)), "")
        + &text(end + 6.0, baseline, "", &format!("{:.2}", outcome.slowed()))
}
