//! `evenkeel bench stragglers`: compares every mode of balancing, with slow ranks, with doing nothing and with the best possible.

mod draw;
mod overhead;
mod real;
mod simulated;
mod subject;

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use evenkeel_balance::{Mode, Observation, Selection};
use evenkeel_model::{Imputation, Model, Parameters, ZeroStage, even_bounds};
use evenkeel_store::write_file_atomically;
use evenkeel_train::{BalanceOptions, OptimizerOptions, Prune, Ranks};
use serde::Serialize;

use super::between;
use crate::launch::Launch;
use crate::{Failure, Mistake, text};
use subject::Subject;

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    subject: Subject,
    /// Ranks that share every layer (tensor parallelism), each with its cores.
    #[arg(long, default_value_t = 2, value_parser = between::<2, 64>)]
    tp: usize,
    /// Simulate this many ranks from compute times measured on one core, instead of running --tp of them.
    #[arg(long, value_name = "RANKS", conflicts_with = "tp", value_parser = between::<2, 64>)]
    simulate: Option<usize>,
    /// How many times as long each rank takes, such as 1,2; may be given several times. One rank at 2 by default, and with
    /// eight ranks one at 2, 4 and 8, four at 2, and 8-6-4-2.
    #[arg(long = "case", value_name = "FACTORS", value_parser = factors)]
    cases: Vec<Case>,
    /// Modes to compare with "off".
    #[arg(long, value_delimiter = ',', value_parser = mode(), default_value = "reshard,migrate,auto")]
    modes: Vec<Mode>,
    /// The largest fraction that "resize" and "semi" prune.
    #[arg(long, default_value_t = 0.5, value_parser = share)]
    gamma_max: f64,
    /// Steps before a straggler comes, with it, and after it has gone.
    #[arg(long, default_value_t = 40, value_parser = between::<10, 100000>)]
    steps: usize,
    /// Rounds; every mode runs once in each, and its median run is shown.
    #[arg(long, default_value_t = 1, conflicts_with = "simulate", value_parser = between::<1, 99>)]
    rounds: usize,
    /// Slow ranks down with a busy process on their cores instead of an emulated throttle; each then has half of them.
    #[arg(long, conflicts_with = "simulate")]
    neighbour: bool,
    /// Let the straggler change places with the first rank every so many steps instead of leaving.
    #[arg(long, value_name = "STEPS", conflicts_with = "simulate", value_parser = between::<5, 100000>)]
    switch_every: Option<usize>,
    /// Measure the overhead of watching the ranks instead; no rank is slow.
    #[arg(long, conflicts_with_all = ["simulate", "neighbour", "switch_every", "cases", "modes", "rounds", "svg"])]
    overhead: bool,
    /// Draw the results to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// By rank: how many times as long as the fastest it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Case(Vec<f64>);

impl Case {
    /// The shortest possible step, if an undisturbed one takes 1.
    fn optimum(&self) -> f64 {
        self.0.len() as f64 / self.0.iter().map(|factor| 1.0 / factor).sum::<f64>()
    }

    fn slowest(&self) -> f64 {
        self.0.iter().copied().fold(1.0, f64::max)
    }

    /// Whether a process on the cores of some ranks makes it.
    fn is_of_neighbours(&self) -> bool {
        self.0.iter().all(|factor| [1.0, 2.0].contains(factor)) && self.0.contains(&2.0)
    }

    /// In words.
    fn name(&self) -> String {
        let ranks = self.0.len();
        let slow: Vec<(usize, f64)> = self.0.iter().copied().enumerate().filter(|(_, factor)| *factor > 1.0).collect();
        match &slow[..] {
            [] => "all alike".to_owned(),
            [(rank, factor)] => format!("rank {rank} of {ranks} at {factor}"),
            [(_, first), rest @ ..] if rest.iter().all(|(_, factor)| factor == first) => {
                format!("{} of {ranks} at {first}", slow.len())
            }
            _ => format!("{} of {ranks}", slow.iter().map(|(_, slow)| slow.to_string()).collect::<Vec<_>>().join("-")),
        }
    }
}

/// The result of one mode for one case.
#[derive(Clone, Debug)]
struct Outcome {
    mode: Mode,
    /// Seconds of a step: undisturbed, with the stragglers once all is settled, and after they have gone.
    undisturbed_s: f64,
    slowed_s: f64,
    /// `None` if they do not leave.
    recovered_s: Option<f64>,
    /// The standard error of the slowdown, as a share of it, if it is known.
    slowed_error: Option<f64>,
    /// Steps until it was within a tenth of where it settled; `None` if it was so from the beginning or nothing was done.
    settled_after: Option<usize>,
    /// Bytes of state that changed its home while the stragglers were there, and bytes that a step moves for migrated work.
    moved_bytes: u64,
    migrated_bytes: u64,
    /// The share of its products that the worst straggler prunes.
    gamma: f64,
    /// All measured steps; empty if they were simulated.
    steps: Vec<Step>,
}

/// The time of a step: before ranks became slow, while they were, and when they no longer were.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Phase {
    Before,
    Slowed,
    Recovered,
}

/// One step of ranks that may be slow.
#[derive(Clone, Debug, Serialize)]
struct Step {
    phase: Phase,
    /// Its time over that of the undisturbed step next to it, scaled so that it is 1 before anything is slow.
    ratio: f64,
    /// By rank: the columns that it worked on.
    columns: Vec<usize>,
    /// By rank.
    observed: Vec<Observation>,
}

impl Outcome {
    fn slowed(&self) -> f64 {
        self.slowed_s / self.undisturbed_s
    }
}

fn mode() -> impl TypedValueParser<Value = Mode> {
    PossibleValuesParser::new(Mode::NAMES).map(|name| Mode::named(&name).expect("a possible value"))
}

fn factors(text: &str) -> Result<Case, String> {
    let factors: Option<Vec<f64>> = text.split(',').map(|factor| factor.trim().parse().ok()).collect();
    let sound = factors.filter(|factors| factors.iter().all(|factor| (1.0..=1000.0).contains(factor)));
    sound.map(Case).ok_or_else(|| "numbers from 1 to 1000, separated by commas, are needed".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value| (0.0..1.0).contains(value));
    value.ok_or_else(|| "a number from 0 to below 1 is needed".to_owned())
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let ranks = arguments.simulate.unwrap_or(arguments.tp);
    let cases = arguments.cases(ranks)?;
    if arguments.gamma_max == 0.0 && arguments.modes.contains(&Mode::Resize) {
        let what = "\"resize\" has nothing to do where --gamma-max is 0".to_owned();
        return Err(Mistake { what, hint: Some("give it a share that may be left out, such as 0.5".to_owned()) }.into());
    }
    let mut modes = vec![Mode::Off];
    modes.extend(arguments.modes.iter().filter(|mode| **mode != Mode::Off));
    let model = arguments.subject.model()?;
    if arguments.overhead {
        return overhead::run(arguments, &model);
    }
    let curves = arguments.simulate.map(|ranks| simulated::measure(&arguments.subject, &model, ranks)).transpose()?;
    let mut results: Vec<(Case, Vec<Outcome>)> = Vec::new();
    for case in cases {
        let outcome = |&mode: &Mode| match &curves {
            Some(curves) => Ok(simulated::run(arguments, &model, curves, &case, mode)),
            None => real::run(arguments, &model, &case, mode),
        };
        let mut rounds: Vec<Vec<Outcome>> = modes.iter().map(|_| Vec::new()).collect();
        for _ in 0..arguments.rounds {
            for (mode, runs) in modes.iter().zip(&mut rounds) {
                let outcome = outcome(mode)?;
                let slowed = outcome.slowed();
                let error = outcome.slowed_error.map_or(String::new(), |error| format!(" ± {:.2}", error * slowed));
                eprintln!("{}, {}: {slowed:.2}{error} times the undisturbed step", case.name(), mode.name());
                runs.push(outcome);
            }
        }
        results.push((case, rounds.into_iter().map(middle).collect()));
    }
    if let Some(path) = &arguments.svg {
        let drawing = draw::svg(&arguments.title(ranks), &results);
        write_file_atomically(path, |file| file.put(drawing.as_bytes()))?;
    }
    Ok(if arguments.json { in_json(arguments, ranks, &results) } else { in_words(arguments, ranks, &results) })
}

/// Steps before measurements begin: they touch memory for the first time.
const WARM_UP: usize = 3;

impl Arguments {
    fn start(&self, launch: &Launch, shards: Vec<Model>) -> Result<Ranks, Failure> {
        let dtype = self.subject.dtype();
        launch.start(shards, self.subject.options(), move |shard, split, queue| {
            Ok(Parameters::random(shard, dtype, split, 0, queue))
        })
    }

    fn cases(&self, ranks: usize) -> Result<Vec<Case>, Mistake> {
        if let Some(case) = self.cases.iter().find(|case| case.0.len() != ranks) {
            let what = format!("--case has {} factors for {ranks} ranks", case.0.len());
            return Err(Mistake { what, hint: Some("give one for each rank".to_owned()) });
        }
        if self.neighbour && !self.cases.iter().all(Case::is_of_neighbours) {
            let what =
                "a busy neighbour takes half of a rank's cores, so a --case has factors of 1 and 2, and a 2".to_owned();
            return Err(Mistake { what, hint: Some("leave out --neighbour for other factors".to_owned()) });
        }
        if !self.cases.is_empty() {
            return Ok(self.cases.clone());
        }
        let ending = |slow: &[f64]| Case([vec![1.0; ranks - slow.len()], slow.to_vec()].concat());
        Ok(match ranks {
            8 if !self.neighbour => {
                vec![ending(&[2.0]), ending(&[4.0]), ending(&[8.0]), ending(&[2.0; 4]), ending(&[8.0, 6.0, 4.0, 2.0])]
            }
            _ => vec![ending(&[2.0])],
        })
    }

    fn balance(&self, mode: Mode) -> BalanceOptions {
        BalanceOptions {
            mode,
            // "auto" is exact here, so that it can be compared with the exact modes.
            gamma_max: if mode == Mode::Auto { 0.0 } else { self.gamma_max },
            prune: Prune {
                gamma: 0.0,
                imputation: Imputation::Zero,
                freeze: true,
                selection: Selection::Random,
                period_steps: 100,
                seed: 0,
            },
            value_bytes: self.subject.dtype().size_bytes(),
            state_bytes: OptimizerOptions::default().rule.bytes_moved_per_element(),
            zero: ZeroStage::Nothing,
            samples: self.subject.batch(),
        }
    }

    /// The subject, the ranks, and how they are slowed down.
    fn title(&self, ranks: usize) -> String {
        let how = match (self.simulate, self.neighbour) {
            _ if self.overhead => "no rank is slow",
            (Some(_), _) => "slow ranks simulated from compute times measured on one core, exchanges left out",
            (None, true) => "slowed down by a busy process on their cores",
            (None, false) => "slowed down by an emulated throttle",
        };
        format!("{}, tp {ranks}; {how}", self.subject.describe())
    }
}

fn in_words(arguments: &Arguments, ranks: usize, results: &[(Case, Vec<Outcome>)]) -> String {
    let mut lines = vec![arguments.title(ranks), String::new()];
    lines.push(format!(
        "{:<16} {:<8} {:>11} {:>9} {:>12} {:>9} {:>5} {:>10} {:>9} {:>9} {:>11} {:>6}",
        "case",
        "mode",
        "undisturbed",
        "ms/step",
        "/undisturbed",
        "/optimum",
        "±",
        "recovered",
        "settled",
        "moved",
        "moves/step",
        "left"
    ));
    for (case, outcomes) in results {
        for outcome in outcomes {
            let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
            let over_optimum = outcome.slowed() / case.optimum();
            lines.push(format!(
                "{:<16} {:<8} {:>11.1} {:>9.1} {:>12.3} {:>9.3} {:>5} {:>10} {:>9} {:>9} {:>11} {:>6}",
                case.name(),
                outcome.mode.name(),
                1e3 * outcome.undisturbed_s,
                1e3 * outcome.slowed_s,
                outcome.slowed(),
                over_optimum,
                or_dash(outcome.slowed_error.map(|error| format!("{:.3}", error * over_optimum))),
                or_dash(outcome.recovered_s.map(|s| format!("{:.3}", s / outcome.undisturbed_s))),
                or_dash(outcome.settled_after.map(|steps| format!("{steps} steps"))),
                or_dash((outcome.moved_bytes > 0).then(|| text::bytes(outcome.moved_bytes))),
                or_dash((outcome.migrated_bytes > 0).then(|| text::bytes(outcome.migrated_bytes))),
                or_dash((outcome.gamma > 0.0).then(|| format!("{:.0} %", 100.0 * outcome.gamma))),
            ));
        }
        lines.push(format!("{:<16} {:<8} {:>11} {:>9} {:>12.3}", case.name(), "optimum", "", "", case.optimum()));
    }
    lines.join("\n")
}

fn in_json(arguments: &Arguments, ranks: usize, results: &[(Case, Vec<Outcome>)]) -> String {
    let outcome = |outcome: &Outcome| {
        serde_json::json!({
            "mode": outcome.mode.name(),
            "undisturbed_s": outcome.undisturbed_s,
            "slowed_s": outcome.slowed_s,
            "recovered_s": outcome.recovered_s,
            "slowed_error": outcome.slowed_error,
            "settled_after": outcome.settled_after,
            "moved_bytes": outcome.moved_bytes,
            "migrated_bytes": outcome.migrated_bytes,
            "gamma": outcome.gamma,
            "steps": outcome.steps,
        })
    };
    let case = |(case, outcomes): &(Case, Vec<Outcome>)| {
        let outcomes: Vec<_> = outcomes.iter().map(outcome).collect();
        serde_json::json!({ "factors": case.0, "optimum": case.optimum(), "modes": outcomes })
    };
    let cases: Vec<_> = results.iter().map(case).collect();
    serde_json::json!({ "what": arguments.title(ranks), "cases": cases }).to_string()
}

fn middle(mut runs: Vec<Outcome>) -> Outcome {
    runs.sort_by(|a, b| a.slowed().total_cmp(&b.slowed()));
    runs.swap_remove(runs.len() / 2)
}

/// Steps after which all should be settled, and the fewest steps that are looked at.
const SETTLING: usize = 20;
const LEAST_SETTLED: usize = 10;

/// The typical step once all is settled.
fn settled(times: &[f64]) -> f64 {
    typical(when_settled(times))
}

fn when_settled(times: &[f64]) -> &[f64] {
    &times[SETTLING.min(times.len().saturating_sub(LEAST_SETTLED))..]
}

/// The standard error of the typical step, as a share of it, from how much fifths of the steps differ: adjacent steps are alike.
fn error(times: &[f64]) -> f64 {
    const FIFTHS: usize = 5;
    let bounds = even_bounds(times.len(), FIFTHS);
    let fifths: Vec<f64> = bounds.windows(2).map(|ends| typical(&times[ends[0]..ends[1]])).collect();
    let mean = fifths.iter().sum::<f64>() / FIFTHS as f64;
    let variance = fifths.iter().map(|fifth| (fifth / mean - 1.0).powi(2)).sum::<f64>() / (FIFTHS - 1) as f64;
    (variance / FIFTHS as f64).sqrt()
}

/// A trimmed mean: the median of steps on cores that jump between two speeds would be one of the two.
fn typical(times: &[f64]) -> f64 {
    evenkeel_balance::trimmed_mean(times.to_vec()).unwrap_or(f64::NAN)
}

/// Steps until times stay within a tenth of where they end; `None` if they did from the beginning or no mode changed them.
fn settled_after(mode: Mode, times: &[f64]) -> Option<usize> {
    let end = settled(times);
    let is_above = |three: &[f64]| three.iter().all(|time| *time > 1.1 * end);
    times.windows(3).rposition(is_above).filter(|_| mode != Mode::Off).map(|last| last + 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_that_of_what_is_typical() {
        // Every fifth of them is the same.
        assert_eq!(error(&[1.0, 2.0, 3.0].repeat(5)), 0.0);
        let fifths: Vec<f64> = [0.9, 1.0, 1.1, 1.0, 1.0].into_iter().flat_map(|fifth| [fifth; 4]).collect();
        let expected = (0.02f64 / 4.0 / 5.0).sqrt();
        assert!((error(&fifths) - expected).abs() < 1e-12, "{}", error(&fifths));
    }
}
