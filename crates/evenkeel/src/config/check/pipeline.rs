//! Keys of a pipeline against each other and against the rest of a run.

use evenkeel_balance::Mode;
use evenkeel_step::PipelineOrder;

use super::super::raw::RawConfig;
use super::super::setting::Setting;
use super::super::settings::Settings;

/// Refuses what a pipeline cannot be combined with, and stages that its order does not have.
pub fn check_pipeline(raw: &mut RawConfig, settings: &Settings) {
    let parallel = &settings.parallel;
    let order = parallel.order.write().expect("it has a name");
    if let Some(chunks) = parallel.chunks {
        let wanted = match parallel.order {
            PipelineOrder::ZbV if chunks != 2 => Some("2"),
            PipelineOrder::Interleaved if chunks < 2 => Some("2 or more"),
            order if !order.has_chunks() && chunks != 1 => Some("1"),
            _ => None,
        };
        if let Some(wanted) = wanted {
            let what = format!("`parallel.chunks` is {chunks}, but the order {order} has {wanted}");
            raw.note_contradiction(&["parallel.chunks", "parallel.order"], what, Some("leave parallel.chunks out"));
        }
    }
    let (stages, given) = (parallel.pp * parallel.chunks_or_default(), parallel.stage_layers.len());
    if given > 0 && given != stages {
        let what = format!("`parallel.stage_layers` has {given} numbers, but there are {stages} stages");
        raw.note_contradiction(&["parallel.stage_layers", "parallel.pp"], what, Some("give one for each stage"));
    }
    if parallel.pp == 1 {
        return;
    }
    if parallel.zero > 1 && parallel.dp > 1 {
        let what = format!(
            "`parallel.zero` is {}, but with `parallel.pp` {} it would move gradients for every micro-batch",
            parallel.zero, parallel.pp
        );
        let hint = "parallel.zero = 1 splits the optimizer's state";
        raw.note_contradiction(&["parallel.zero", "parallel.pp"], what, Some(hint));
    }
    if settings.balance.mode != Mode::Off {
        let what = format!("`balance.mode` \"{}\" does not work with `parallel.pp`", settings.balance.mode.name());
        let hint = "leave it out: parallel.stages = \"cost\" gives slow places fewer layers";
        raw.note_contradiction(&["balance.mode", "parallel.pp"], what, Some(hint));
    }
    if parallel.ahead {
        let what = "`parallel.ahead` is true, but micro-batches of a pipeline begin in its own order".to_owned();
        raw.note_contradiction(&["parallel.ahead", "parallel.pp"], what, Some("leave parallel.ahead out"));
    }
}

/// A pipeline with few micro-batches is idle most of the time.
pub fn idle_places(settings: &Settings) -> Option<String> {
    let (pp, micros) = (settings.parallel.pp, settings.train.accumulate);
    (pp > 1 && micros < 2 * pp).then(|| {
        let busy = 100 * micros / (micros + pp - 1);
        format!(
            "`parallel.pp` is {pp}, but a step has {micros} micro-batches (train.accumulate): places compute about {busy} % of the \
             time. {} would be better",
            4 * pp
        )
    })
}
