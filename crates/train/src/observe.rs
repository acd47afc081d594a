//! What a rank computed in a step, from the times of its tasks.

use evenkeel_balance::{Class, Observation};
use evenkeel_model::{Model, UnitKind};
use evenkeel_step::trace::Span;
use evenkeel_step::{Lane, UnitIdx, Work};

pub(crate) fn observation(model: &Model, spans: &[Span]) -> Observation {
    let mut observed = Observation::default();
    let (mut first_s, mut last_s) = (f64::INFINITY, 0.0f64);
    for span in spans {
        if span.lane == Lane::Compute {
            observed.compute_s[class(model, span.work, span.unit) as usize] += span.duration_s();
        }
        if matches!(span.work, Work::Borrow | Work::Return) {
            observed.migrated_bytes += span.bytes;
            observed.migration_s += span.end_s - span.came_s;
        }
        (first_s, last_s) = (first_s.min(span.start_s), last_s.max(span.end_s));
    }
    observed.wait_s = (last_s - first_s - observed.total_s()).max(0.0);
    observed
}

fn class(model: &Model, work: Work, unit: UnitIdx) -> Class {
    match (work, model.units.get(unit.0).map(|unit| unit.kind)) {
        (Work::Enter | Work::Normalise | Work::BackwardEnter, _) => Class::Stream,
        (_, Some(UnitKind::Attention(_))) => Class::Attention,
        (_, Some(UnitKind::Mlp(_))) => Class::Mlp,
        (_, Some(UnitKind::Layer(_))) => Class::Layer,
        (_, Some(UnitKind::Embedding) | None) => Class::Head,
    }
}
