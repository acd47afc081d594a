//! The results as bars: what a step takes with slow ranks, where an undisturbed one takes 1.

use std::fmt::Write;

use evenkeel_balance::Mode;

use super::{Case, Outcome};

const LEFT: f64 = 150.0;
const PLOT: f64 = 560.0;
const RIGHT: f64 = 90.0;
const BAR: f64 = 18.0;
const BAR_GAP: f64 = 4.0;
const CASE_GAP: f64 = 22.0;
const TOP: f64 = 82.0;

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
    let x = |value: f64| LEFT + PLOT * value / most;
    let bars: usize = results.iter().map(|(_, outcomes)| outcomes.len()).sum();
    let height = TOP + bars as f64 * (BAR + BAR_GAP) + results.len() as f64 * CASE_GAP + 20.0;
    let width = LEFT + PLOT + RIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height:.0}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"24\" font-size=\"14\" fill=\"#22272b\">A step with slow ranks, where an undisturbed one takes 1</text>\n\
         <text x=\"16\" y=\"42\" fill=\"#5c656c\">{}</text>\n<text x=\"16\" y=\"58\" fill=\"#5c656c\">{}</text>\n",
        escaped(what),
        escaped(how),
    );
    let mut y = TOP;
    for (case, outcomes) in results {
        let _ = writeln!(
            svg,
            "<text x=\"16\" y=\"{:.1}\" font-weight=\"bold\" fill=\"#22272b\">{}</text>",
            y + 6.0,
            case.name()
        );
        y += CASE_GAP - 8.0;
        let begin = y;
        for outcome in outcomes {
            let (value, middle) = (outcome.slowed(), y + BAR / 2.0 + 4.0);
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{middle:.1}\" text-anchor=\"end\" fill=\"#22272b\">{}</text>\
                 <rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{}\"/>\
                 <text x=\"{:.1}\" y=\"{middle:.1}\" fill=\"#22272b\">{value:.2}</text>",
                LEFT - 8.0,
                outcome.mode.name(),
                x(value) - LEFT,
                colour(outcome.mode),
                x(value) + 6.0,
            );
            y += BAR + BAR_GAP;
        }
        let at = x(case.optimum());
        let _ = writeln!(
            svg,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#b3261e\" stroke-width=\"1.5\" \
             stroke-dasharray=\"4 3\"/><text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"10\" \
             fill=\"#b3261e\">optimum {:.2}</text>",
            begin - 2.0,
            begin - 5.0,
            case.optimum(),
        );
        y += 8.0;
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
