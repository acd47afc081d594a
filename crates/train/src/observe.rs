//! A rank's observation of a step, from the times of its tasks.

use std::ops::Range;

use evenkeel_balance::{Class, Observation};
use evenkeel_model::{Model, UnitKind};
use evenkeel_step::trace::Span;
use evenkeel_step::{Lane, UnitIdx, Work, WorkFamily};

pub(crate) fn observation(model: &Model, spans: &[Span]) -> Observation {
    let mut observed = Observation::default();
    let (mut first_s, mut last_s) = (f64::INFINITY, 0.0f64);
    for span in spans {
        if span.lane == Lane::Compute {
            observed.compute_s[class(model, span.work, span.unit) as usize] += span.duration_s();
        }
        if matches!(span.work, Work::Migrate | Work::Return) {
            observed.migrated_bytes += span.bytes;
            observed.migration_s += span.end_s - span.came_s;
            observed.exposed_s += idle_s(spans, span.came_s..span.end_s);
        }
        (first_s, last_s) = (first_s.min(span.start_s), last_s.max(span.end_s));
    }
    observed.late_s = late_s(spans);
    observed.wait_s = (last_s - first_s - observed.total_s() - observed.late_s).max(0.0);
    observed
}

/// By unit of so many: the seconds that a rank computed for it.
pub(crate) fn unit_seconds(units: usize, spans: &[Span]) -> Vec<f64> {
    let mut seconds = vec![0.0; units];
    for span in spans.iter().filter(|span| span.lane == Lane::Compute) {
        seconds[span.unit.0] += span.duration_s();
    }
    seconds
}

/// Seconds in which tasks were ready to compute, since nothing was exchanged, and none of them ran. A rank that shares its cores
/// loses them whenever it waits for others, and then has to wait for its turn. Short tasks run at full speed once that has come.
fn late_s(spans: &[Span]) -> f64 {
    let on = |lane: Lane| spans.iter().filter(move |span| span.lane == lane);
    let (mut exchanges, mut free_s) = (on(Lane::Comm).peekable(), f64::INFINITY);
    let late_s = |span: &Span| {
        let mut late_s = span.start_s - free_s;
        while let Some(exchange) = exchanges.next_if(|exchange| exchange.end_s <= span.start_s) {
            late_s -= (exchange.end_s - exchange.start_s.max(free_s)).max(0.0);
        }
        if let Some(exchange) = exchanges.peek() {
            late_s -= (span.start_s - exchange.start_s.max(free_s)).max(0.0);
        }
        free_s = span.end_s;
        late_s.max(0.0)
    };
    on(Lane::Compute).map(late_s).sum()
}

/// Seconds of an interval in which nothing was computed.
fn idle_s(spans: &[Span], interval: Range<f64>) -> f64 {
    let computing = spans.iter().filter(|span| span.lane == Lane::Compute);
    let within = |span: &Span| (span.end_s.min(interval.end) - span.start_s.max(interval.start)).max(0.0);
    (interval.end - interval.start - computing.map(within).sum::<f64>()).max(0.0)
}

fn class(model: &Model, work: Work, unit: UnitIdx) -> Class {
    if work.row().family == WorkFamily::Entry {
        return Class::Stream;
    }
    match model.unit(unit.0).kind {
        UnitKind::Attention(_) => Class::Attention,
        UnitKind::Mlp(_) | UnitKind::TokenInput(_) => Class::Mlp,
        UnitKind::Layer(_) => Class::Layer,
        UnitKind::Embedding | UnitKind::Head => Class::Head,
    }
}

#[cfg(test)]
mod tests {
    use evenkeel_step::Micro;

    use super::*;

    type Task = (Work, f64, f64);

    fn span((work, start_s, end_s): Task) -> Span {
        let (unit, micro) = (UnitIdx(0), Micro { index: 0, part: 0 });
        Span { work, unit, micro, lane: work.lane(), start_s, came_s: start_s, end_s, bytes: 0 }
    }

    #[test]
    fn exposed_is_what_nothing_is_computed_beside() {
        let spans = [(Work::Forward, 0.0, 1.0), (Work::Forward, 3.0, 4.0), (Work::AllReduce, 1.0, 3.0)].map(span);
        for (interval, expected) in [(0.25..0.75, 0.0), (0.5..3.5, 2.0), (4.0..6.0, 2.0), (2.0..2.0, 0.0)] {
            assert_eq!(idle_s(&spans, interval.clone()), expected, "{interval:?}");
        }
    }

    #[test]
    fn late_is_what_neither_runs_nor_waits_for_an_exchange() {
        let (computes, exchanges) = (Work::Forward, Work::AllReduce);
        let cases: [(&str, &[Task], f64); 7] = [
            ("nothing", &[], 0.0),
            ("the first", &[(exchanges, 0.0, 1.0), (computes, 5.0, 7.0)], 0.0),
            ("one behind the other", &[(computes, 0.0, 1.0), (computes, 1.0, 3.0)], 0.0),
            ("one late", &[(computes, 0.0, 1.0), (computes, 4.0, 5.0)], 3.0),
            (
                "an exchange late, and one after it",
                &[(computes, 0.0, 1.0), (exchanges, 2.0, 5.0), (computes, 7.0, 8.0)],
                3.0,
            ),
            (
                "exchanges beside tasks",
                &[(computes, 1.0, 3.0), (exchanges, 2.0, 6.0), (computes, 4.0, 5.0), (computes, 6.5, 7.0)],
                0.5,
            ),
            (
                "two exchanges",
                &[(computes, 0.0, 1.0), (exchanges, 1.0, 2.0), (exchanges, 4.0, 5.0), (computes, 6.0, 7.0)],
                3.0,
            ),
        ];
        for (what, tasks, expected) in cases {
            let spans: Vec<Span> = tasks.iter().copied().map(span).collect();
            assert_eq!(late_s(&spans), expected, "{what}");
        }
    }
}
