//! What a run does about slow ranks: from the configuration, and in words.

use evenkeel_balance::{Dim, Mode, Selection};
use evenkeel_model::{Cut, Imputation, Model, SHARES, Widths};
use evenkeel_train::{Balance, BalanceOptions, Balanced, Ranks, Resize, may_migrate};

use super::model::device_dtype;
use crate::config::{self, BalanceMode, Settings};
use crate::launch::Launch;
use crate::{Failure, Mistake};

/// Ranks whose speeds differ by less are alike.
const ALIKE: f64 = 1.1;

/// The balance of a run whose ranks have begun with a cut, and what there is to say of it. With `resumed`, work is divided as
/// it was; else, by what the ranks were measured at.
pub fn start(
    settings: &Settings,
    model: &Model,
    launch: &Launch,
    ranks: &Ranks,
    resumed: Option<&Widths>,
    flops_per_s: &[f64],
) -> Result<(Option<Balance>, Option<String>), Failure> {
    let mode = match settings.balance.mode {
        BalanceMode::Off => return Ok((None, None)),
        BalanceMode::Resize => Mode::Resize,
        BalanceMode::Migrate => Mode::Migrate,
        BalanceMode::Semi => Mode::Semi,
        BalanceMode::Reshard => Mode::Reshard,
        BalanceMode::Auto => Mode::Auto,
    };
    let mut cut = launch.cut.clone();
    let mut said = None;
    match resumed {
        Some(widths) if widths.fit(&model.config, cut.weights.len()) && !widths.is_shared_by_samples() => {
            cut.widths = Some(widths.clone());
            ranks.reshard(model.cut(&cut)?)?;
        }
        _ if settings.balance.calibrate && settings.parallel.tp_weights.is_empty() => {
            said = calibrate(model, launch, &mut cut, ranks, flops_per_s)?;
        }
        _ => (),
    }
    let options = BalanceOptions {
        mode,
        gamma_max: settings.balance.gamma_max,
        resize: resize(settings),
        value_bytes: device_dtype(settings.train.dtype).size_bytes(),
        zero: if settings.parallel.dp > 1 { settings.parallel.zero } else { 0 },
        samples: settings.train.batch / settings.parallel.parts.unwrap_or(1),
    };
    let only_migrates = mode == Mode::Migrate || (mode == Mode::Semi && options.gamma_max == 0.0);
    if only_migrates && !may_migrate(model, &cut, options.zero) {
        let what = "the work on this model cannot be migrated between these ranks".to_owned();
        let hint =
            "it needs a key and value head for each rank and a plan that leaves nothing whole; \"reshard\" does not";
        return Err(Mistake { what, hint: Some(hint.to_owned()) }.into());
    }
    let balance = Balance::new(options, model, &cut, &model.cut(&cut)?, launch.mesh());
    balance.start(ranks)?;
    Ok((Some(balance), said))
}

fn resize(settings: &Settings) -> Resize {
    let balance = &settings.balance;
    Resize {
        gamma: 0.0,
        imputation: match balance.imputation {
            config::Imputation::Zero => Imputation::Zero,
            config::Imputation::Average => Imputation::Average,
            config::Imputation::Same => Imputation::Same,
        },
        selection: match balance.selection {
            config::Selection::Priority => Selection::Priority,
            config::Selection::Random => Selection::Random,
        },
        period_steps: balance.period,
        seed: settings.train.seed,
    }
}

/// Divides the model by what each shard's slowest rank was measured at.
fn calibrate(
    model: &Model,
    launch: &Launch,
    cut: &mut Cut,
    ranks: &Ranks,
    flops_per_s: &[f64],
) -> Result<Option<String>, Failure> {
    let mesh = launch.mesh();
    let of_shard = |shard: usize| {
        let own = (0..mesh.ranks()).filter(|&rank| mesh.shard(rank) == shard);
        own.map(|rank| flops_per_s[rank]).fold(f64::INFINITY, f64::min)
    };
    let speeds: Vec<f64> = (0..mesh.tp).map(of_shard).collect();
    let fastest = speeds.iter().copied().fold(0.0, f64::max);
    if speeds.iter().all(|speed| speed * ALIKE >= fastest) {
        return Ok(None);
    }
    let weights: Vec<f64> = speeds.iter().map(|speed| (speed / fastest * 100.0).round() / 100.0).collect();
    cut.weights = weights.iter().map(|weight| weight.max(0.01)).collect();
    ranks.reshard(model.cut(cut)?)?;
    let shown: Vec<String> = cut.weights.iter().map(|weight| format!("{weight:.2}")).collect();
    Ok(Some(format!("ranks are unequal: the work is divided {} by their measured speeds", shown.join(" : "))))
}

/// What was done about slow ranks and what it was good for, in a line.
pub fn describe(balanced: &Balanced) -> String {
    let Balanced { step, prospect, before, now, after, .. } = balanced;
    let slow: Vec<String> = prospect
        .stragglers()
        .map(|(rank, slowness)| format!("rank {rank} computes {slowness:.1}× slower than the fastest"))
        .collect();
    let slow = match &slow[..] {
        [] => "all ranks compute alike".to_owned(),
        slow => slow.join(", "),
    };
    let mut done: Vec<String> = Vec::new();
    for (dim, word, unit) in
        [(Dim::Columns, "columns", 1), (Dim::Heads, "head groups", SHARES), (Dim::Classes, "classes", 1)]
    {
        let moved = now.home.gained(&before.home, dim);
        if moved > 0 {
            done.push(format!("moved {} of {} {word}", amount(moved, unit), now.home.total(dim) / unit));
        }
        let lent = now.migrated(dim);
        if lent > 0 {
            done.push(format!("lends {} of {} {word}", amount(lent, unit), now.home.total(dim) / unit));
        }
    }
    for (rank, gamma) in now.gammas.iter().enumerate().filter(|(_, gamma)| **gamma > 0.0) {
        done.push(format!("rank {rank} leaves out {:.0} %", 100.0 * gamma));
    }
    let steps = |seconds: f64| (1000.0 * seconds).round();
    format!(
        "{slow} since step {}; after step {step} {}; step {} → {} ms (optimum {})",
        prospect.since,
        if done.is_empty() { "work is divided anew".to_owned() } else { done.join(" and ") },
        steps(prospect.now_s),
        steps(after.as_secs_f64()),
        steps(prospect.optimum_s),
    )
}

/// Whole units as such, others with a digit behind the point.
fn amount(width: usize, unit: usize) -> String {
    if width.is_multiple_of(unit) { (width / unit).to_string() } else { format!("{:.1}", width as f64 / unit as f64) }
}
