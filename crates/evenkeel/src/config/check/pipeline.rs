//! Keys of a pipeline against each other and against the rest of a run.

use evenkeel_balance::Mode;
use evenkeel_step::PipelineOrder;

use super::super::raw::RawConfig;
use super::super::setting::Setting;
use super::super::settings::Settings;
use crate::text;

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
            let hint = "leave parallel.chunks out, or set parallel.order = \"interleaved\"";
            raw.note_contradiction(&["parallel.chunks", "parallel.order"], what, Some(hint));
        }
    }
    let (chunks, given) = (parallel.chunks_or_default(), parallel.stage_layers.len());
    if given > 0 && given != parallel.pp * chunks {
        let stages = match (parallel.pp, chunks) {
            (1, 1) => "`parallel.pp` is 1".to_owned(),
            (pp, 1) => format!("there are {pp} stages"),
            (pp, chunks) => format!("there are {} stages, {chunks} at each of {pp} places", pp * chunks),
        };
        let what = format!("`parallel.stage_layers` has {}, but {stages}", text::counted(given, "number", "numbers"));
        raw.note_contradiction(&["parallel.stage_layers", "parallel.pp"], what, Some("give one for each stage"));
    }
    if parallel.pp == 1 {
        return;
    }
    if parallel.zero > 1 && parallel.dp > 1 {
        let what = format!(
            "`parallel.zero` is {}, but with `parallel.pp` {} it would move {} for every micro-batch",
            parallel.zero,
            parallel.pp,
            if parallel.zero == 2 { "gradients" } else { "gradients and parameters" }
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
    let (parallel, micros) = (&settings.parallel, settings.train.accumulate);
    (parallel.pp > 1 && micros < 2 * parallel.pp).then(|| {
        // Each place waits for the others once, or for one stage of theirs.
        let waits = (parallel.pp - 1) as f64 / parallel.chunks_or_default() as f64;
        format!(
            "`parallel.pp` is {}, but a step has {} (train.accumulate): places compute about {:.0} % of the time. {} would be \
             better",
            parallel.pp,
            text::counted(micros, "micro-batch", "micro-batches"),
            100.0 * micros as f64 / (micros as f64 + waits),
            4 * parallel.pp
        )
    })
}
