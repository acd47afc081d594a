//! Chooses the number of parts and whether the stream is split, if the configuration leaves that open: as in an earlier part of
//! the run, or by a simulation of the candidates.

use std::time::Duration;

use evenkeel_comm::Link;
use evenkeel_device::{DType, core_flops_per_s};
use evenkeel_model::{Cut, Model};
use evenkeel_step::schedule::{Arrangement, Units};
use evenkeel_step::simulate::{Contention, Unforeseen};
use evenkeel_step::{Devices, Strategy};
use evenkeel_train::{Candidate, Foretold, Machine, Samples, foretell, preferred};

use crate::config::Settings;
use crate::launch::Launch;
use crate::{Failure, stages, text};

/// Loss of products with few rows: 15 % when six cores shared products of 512 rows instead of 1024.
const HALF_SPEED_ROWS_OF_CORE: f64 = 30.0;
/// Bytes that cores copy and add per second for an exchange.
const MOVED_BYTES_PER_S: f64 = 4e9;
/// More parts make products too small for what they hide.
const MOST_PARTS: usize = 4;

/// Fills in `parallel.parts` and `parallel.sequence_parallel`, and gives the launch its cut. `before` are the earlier settings of
/// a continued run. Of the candidates that a simulation recommends, it takes the best that fits in memory: by rank, `fullness` is
/// what it needs over what it has. Returns lines to print.
pub fn arrange(
    settings: &mut Settings,
    model: &Model,
    launch: &mut Launch,
    before: Option<&Settings>,
    fullness: impl Fn(&Settings, &Strategy) -> Vec<f64>,
) -> Result<Vec<String>, Failure> {
    let mut said = Vec::new();
    said.extend(no_choice_of_units(&launch.strategy, model));
    if settings.parallel.tp > 1 {
        // Estimates need a cut that the model allows.
        model.cut(&launch.strategy.cut)?;
    }
    launch.strategy.pipeline = stages::by_cost(settings, model, launch, |strategy| fullness(settings, strategy));
    said.extend(stages::describe(model, &launch.strategy));
    if settings.parallel.tp == 1 {
        settings.parallel.parts.get_or_insert(1);
        return Ok(said);
    }
    if let Some(before) = before.filter(|before| is_arranged_alike(settings, before)) {
        let parallel = &mut settings.parallel;
        parallel.parts = parallel.parts.or(before.parallel.parts);
        parallel.sequence_parallel = parallel
            .sequence_parallel
            .or(before.parallel.sequence_parallel)
            .or(Some(launch.strategy.cut.split_sequence));
    }
    let candidates = candidates(settings, model, launch);
    if let [only] = candidates[..] {
        apply(only, settings, launch);
        return Ok(said);
    }
    let blank = Samples::blank(model.config.input, settings.train.batch, settings.data.sequence);
    let mut foretold = simulated(&candidates, model, launch, &blank).map_err(Failure::fault)?;
    let all = foretold.clone();
    let mut first = None;
    while let Some(told) = preferred(&foretold) {
        first.get_or_insert(told);
        apply(told.candidate, settings, launch);
        if evenkeel_balance::fits(&fullness(settings, &launch.strategy)) {
            said.push(describe(&told, &all));
            return Ok(said);
        }
        foretold.retain(|other| other.candidate != told.candidate);
    }
    // Nothing fits: the first choice is kept, and the memory check that follows reports it.
    apply(first.expect("there are candidates").candidate, settings, launch);
    Ok(said)
}

/// The predicted step of each candidate.
pub fn simulated(
    candidates: &[Candidate],
    model: &Model,
    launch: &Launch,
    samples: &Samples,
) -> Result<Vec<Foretold>, Unforeseen> {
    simulated_on(&this_machine(launch), candidates, model, launch, samples)
}

fn simulated_on(
    machine: &Machine,
    candidates: &[Candidate],
    model: &Model,
    launch: &Launch,
    samples: &Samples,
) -> Result<Vec<Foretold>, Unforeseen> {
    let told = |&candidate: &Candidate| foretell(model, &with(&launch.strategy, candidate), samples, machine);
    candidates.iter().map(told).collect()
}

/// The open candidates, least memory first: a split stream before a whole one, fewer parts before more.
fn candidates(settings: &Settings, model: &Model, launch: &Launch) -> Vec<Candidate> {
    let parallel = &settings.parallel;
    let streams = match parallel.sequence_parallel {
        Some(split) => vec![split],
        None if launch.strategy.cut.uncut.is_empty() => vec![true, false],
        None => vec![false],
    };
    let parts = match parallel.parts {
        Some(parts) => vec![parts],
        None if !model.config.can_be_in_parts() => vec![1],
        None => parts_to_try(launch.strategy.arrangement, settings.train.batch),
    };
    let candidate = |split_sequence| parts.iter().map(move |&parts| Candidate { parts, split_sequence });
    streams.into_iter().flat_map(candidate).collect()
}

/// Numbers of parts to try. A micro-batch has at least as many documents as sequences, and no more parts than documents.
pub fn parts_to_try(arrangement: Arrangement, sequences: usize) -> Vec<usize> {
    let most = if arrangement.overlaps() { MOST_PARTS.min(sequences).max(1) } else { 1 };
    (1..=most).collect()
}

fn apply(candidate: Candidate, settings: &mut Settings, launch: &mut Launch) {
    settings.parallel.parts = Some(candidate.parts);
    settings.parallel.sequence_parallel = Some(candidate.split_sequence);
    launch.strategy = with(&launch.strategy, candidate);
}

fn with(strategy: &Strategy, Candidate { parts, split_sequence }: Candidate) -> Strategy {
    let cut = Cut { split_sequence, ..strategy.cut.clone() };
    Strategy { cut, arrangement: strategy.arrangement.in_parts(parts), ..strategy.clone() }
}

/// Whether the earlier arrangement of a run suits it now.
fn is_arranged_alike(now: &Settings, before: &Settings) -> bool {
    let of = |settings: &Settings| (settings.parallel.tp, settings.parallel.schedule, settings.train.batch);
    of(now) == of(before)
}

fn describe(told: &Foretold, all: &[Foretold]) -> String {
    let Foretold { candidate, step_s, exposed_share } = told;
    let stream = |split: bool| if split { "stream split" } else { "stream whole" };
    let parts = |parts: usize| if parts == 1 { "1 part".to_owned() } else { format!("{parts} parts") };
    let slowest = all.iter().max_by(|a, b| a.step_s.total_cmp(&b.step_s)).expect("there are candidates");
    let saved = 1.0 - step_s / slowest.step_s;
    let than = format!("{} and a {}", parts(slowest.candidate.parts), stream(slowest.candidate.split_sequence));
    let chosen = format!(
        "chosen by simulation, from estimated costs: {}, {}, {} of a step exposed",
        parts(candidate.parts),
        stream(candidate.split_sequence),
        text::percent(*exposed_share)
    );
    if saved < 0.005 { chosen } else { format!("{chosen}, {} less time than {than}", text::percent(saved)) }
}

/// If attention and MLP are one unit, neither is recomputed without the other.
fn no_choice_of_units(strategy: &Strategy, model: &Model) -> Option<String> {
    let chosen = strategy.arrangement.recompute;
    (chosen != Units::All && model.has_whole_layers()).then(|| {
        "`parallel.recompute_units` has no effect: attention and MLP of this model are computed together".to_owned()
    })
}

/// Approximate speeds of ranks on this machine; see [`machine`].
pub fn this_machine(launch: &Launch) -> Machine {
    machine(launch, core_flops_per_s(launch.strategy.dtype))
}

/// Approximate speeds of ranks. Nothing is measured: the best arrangement depends on the ratio of computing to
/// exchanging, and its exact value matters only if both take about as long.
fn machine(launch: &Launch, core_flops_per_s: f64) -> Machine {
    let strategy = &launch.strategy;
    let (ranks, dtype) = (strategy.ranks(), strategy.dtype);
    match &strategy.devices {
        &Devices::Cpu { cores_per_rank, comm_cores } => {
            let cores = cores_per_rank as f64;
            // An emulated link is a timer behind the cores' work; in memory, cores move the bytes.
            let shares_cores = launch.comm.link.is_none() && comm_cores == 0;
            Machine {
                flops_per_s: vec![cores * core_flops_per_s; ranks],
                bytes_per_s: vec![cores * 1e10; ranks],
                launch: Duration::from_micros(5),
                half_speed_rows: HALF_SPEED_ROWS_OF_CORE * cores,
                link: launch.comm.link.unwrap_or(Link { latency: Duration::from_micros(20), bytes_per_s: 1e10 }),
                moved_bytes_per_s: if launch.comm.link.is_some() { MOVED_BYTES_PER_S } else { f64::INFINITY },
                contention: Contention { compute: if shares_cores { 1.0 } else { 0.0 }, exchange: 0.0 },
            }
        }
        devices @ Devices::Cuda { multiprocessors, .. } => {
            const MULTIPROCESSORS: f64 = 132.0;
            let share = |rank: usize| match multiprocessors.get(rank) {
                Some(&multiprocessors) => f64::from(multiprocessors) / MULTIPROCESSORS,
                None if devices.are_separate_gpus() => 1.0,
                None => 1.0 / ranks as f64,
            };
            let of_card = if dtype == DType::F32 { 4e13 } else { 5e14 };
            let of_ranks = |of_card: f64| (0..ranks).map(|rank| of_card * share(rank)).collect();
            let (latency_us, bytes_per_s) = if devices.are_separate_gpus() { (40, 2e11) } else { (10, 5e11) };
            Machine {
                flops_per_s: of_ranks(of_card),
                bytes_per_s: of_ranks(3e12),
                launch: Duration::from_micros(3),
                half_speed_rows: 0.0,
                moved_bytes_per_s: f64::INFINITY,
                link: Link { latency: Duration::from_micros(latency_us), bytes_per_s },
                contention: Contention { compute: 0.1, exchange: 0.1 },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_step::schedule::{DEFAULT, NONE, OASES};

    use crate::strategy::on_cores;

    fn model(layers: usize) -> Model {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 512, "num_hidden_layers": layers, "num_attention_heads": 8,
            "num_key_value_heads": 4, "intermediate_size": 768, "vocab_size": 4096, "tie_word_embeddings": false,
        });
        Model::from_json(&config).unwrap()
    }

    /// Two ranks of one core each, connected by such a link.
    fn launch(link_gb_per_s: Option<f64>) -> Launch {
        let mut launch = Launch::from(on_cores(1, 2, Some(2)));
        launch.comm.link = link_gb_per_s.map(|rate| Link { latency: Duration::ZERO, bytes_per_s: rate * 1e9 });
        launch
    }

    fn told(arrangement: Arrangement, link_gb_per_s: Option<f64>, sequences: usize) -> Vec<Foretold> {
        told_of(4, arrangement, link_gb_per_s, sequences)
    }

    fn told_of(layers: usize, arrangement: Arrangement, link_gb_per_s: Option<f64>, sequences: usize) -> Vec<Foretold> {
        let parts = parts_to_try(arrangement, sequences);
        let of_stream = |split_sequence| parts.iter().map(move |&parts| Candidate { parts, split_sequence });
        let candidates: Vec<Candidate> = [true, false].into_iter().flat_map(of_stream).collect();
        let (model, mut launch) = (model(layers), launch(link_gb_per_s));
        launch.strategy.arrangement = arrangement;
        let samples = Samples::blank(model.config.input, sequences, 256);
        // The same on every CPU that tests run on.
        simulated_on(&machine(&launch, 5e10), &candidates, &model, &launch, &samples).unwrap()
    }

    #[test]
    fn the_choice_exposes_no_more_than_the_whole_stream_in_two_parts() {
        for (arrangement, rate) in [(OASES, 0.15), (OASES, 0.3), (OASES, 1.0), (NONE, 0.15), (NONE, 0.5)]
            .map(|(of, rate)| (Arrangement::of(of), rate))
        {
            let all = told(arrangement, Some(rate), 8);
            let of = |parts: usize, split_sequence: bool| {
                let candidate = Candidate { parts, split_sequence };
                *all.iter().find(|told| told.candidate == candidate).unwrap()
            };
            let chosen = preferred(&all).unwrap();
            let (whole, split) = (of(2, false), of(2, true));
            assert!(chosen.exposed_share <= whole.exposed_share + 0.03, "{rate} GB/s: {chosen:?}, {whole:?}");
            assert!(split.exposed_share > whole.exposed_share, "{rate} GB/s: {split:?}, {whole:?}");
            assert!(chosen.step_s <= split.step_s && chosen.step_s <= 1.01 * whole.step_s, "{chosen:?}");
        }
    }

    #[test]
    fn nothing_is_cut_where_nothing_is_to_be_hidden_or_nothing_can_be() {
        let chosen = |arrangement, link, sequences| preferred(&told(arrangement, link, sequences)).unwrap().candidate;
        let plain = Candidate { parts: 1, split_sequence: true };
        assert_eq!(chosen(Arrangement::of(OASES), None, 8), plain, "in memory");
        assert_eq!(chosen(Arrangement::of(OASES), Some(1000.0), 8), plain, "over a link that takes no time");
        assert_eq!(chosen(Arrangement::of(DEFAULT), Some(0.3), 8).parts, 1, "a schedule that overlaps nothing");
        assert_eq!(chosen(Arrangement::of(OASES), Some(0.3), 1).parts, 1, "a single sequence");
    }

    #[test]
    fn deep_models_are_arranged_as_their_first_layers_are() {
        for rate in [0.15, 0.5] {
            let chosen = |layers| preferred(&told_of(layers, Arrangement::of(OASES), Some(rate), 8)).unwrap();
            let (few, many) = (chosen(8), chosen(32));
            assert_eq!(few.candidate, many.candidate, "{rate} GB/s");
            assert!((few.exposed_share - many.exposed_share).abs() < 0.02, "{rate} GB/s: {few:?}, {many:?}");
        }
    }

    #[test]
    fn the_same_input_gives_the_same_choice() {
        let [first, second] = [(); 2].map(|()| told(Arrangement::of(OASES), Some(0.2), 4));
        assert_eq!(first, second);
    }
}
