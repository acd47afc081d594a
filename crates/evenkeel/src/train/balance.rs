//! A run's balancing: from its configuration, and in words.

use evenkeel_balance::{Mode, Selection};
use evenkeel_device::DType;
use evenkeel_model::{Cut, Dim, Model, SHARES, Widths};
use evenkeel_report::BalanceReport;
use evenkeel_train::{Balance, BalanceOptions, Balanced, Prune, Ranks, may_migrate};

use crate::config::Settings;
use crate::launch::Launch;
use crate::{Failure, Mistake};

/// Ranks whose speeds differ by less are alike.
const ALIKE: f64 = 1.1;

/// The balance of a run whose ranks have begun with a cut, and a line to print. With `resumed`, work is divided as it was; else
/// by the measured speeds of the ranks: in either case as far as it `fits` in memory.
pub fn start(
    settings: &Settings,
    model: &Model,
    launch: &Launch,
    ranks: &Ranks,
    resumed: Option<&Widths>,
    flops_per_s: &[f64],
    fits: &dyn Fn(&[Model]) -> bool,
) -> Result<(Option<Balance>, Option<String>), Failure> {
    let mode = settings.balance.mode;
    if mode == Mode::Off {
        return Ok((None, None));
    }
    let mut cut = launch.strategy.cut.clone();
    let mut said = None;
    match resumed {
        Some(widths) if model.config.can_be_cut(widths, cut.weights.len()) && !widths.share_heads_by_samples() => {
            let as_it_was = Cut { widths: Some(widths.clone()), ..cut.clone() };
            match first_that_fits(model, [as_it_was], fits)? {
                Some(as_it_was) => {
                    ranks.reshard(as_it_was.clone())?;
                    cut = as_it_was;
                }
                None => said = Some("the checkpoint's widths do not fit in memory: work is divided anew".to_owned()),
            }
        }
        _ if settings.balance.calibrate && settings.parallel.tp_weights.is_empty() && launch.keeps_ranks_apart() => {
            said = calibrate(model, launch, &mut cut, ranks, flops_per_s, fits)?;
        }
        _ => (),
    }
    let options = BalanceOptions {
        mode,
        gamma_max: settings.balance.gamma_max,
        prune: prune(settings),
        value_bytes: DType::from(settings.train.dtype).size_bytes(),
        state_bytes: settings.train.optimizer_options().rule.bytes_moved_per_element(),
        zero: launch.strategy.zero_sharding(0).stage(),
        samples: settings.train.batch / settings.parallel.parts.unwrap_or(1),
    };
    let only_migrates = mode == Mode::Migrate || (mode == Mode::Semi && options.gamma_max == 0.0);
    if only_migrates && !may_migrate(model, &cut, options.zero) {
        let what = "the work on this model cannot be migrated between these ranks".to_owned();
        let hint = match model.config.hands_values_on() {
            true => "its layers hand values to later ones; \"reshard\" works with that",
            false => {
                "it needs a key and value head for each rank and a plan that leaves nothing whole; \"reshard\" does not"
            }
        };
        return Err(Mistake { what, hint: Some(hint.to_owned()) }.into());
    }
    let mut balance = Balance::new(options, model, &cut, &model.cut(&cut)?, launch.strategy.mesh());
    balance.start(ranks)?;
    Ok((Some(balance), said))
}

/// Whether ranks keep earlier weights to see which columns change least.
pub fn watches_changes(settings: &Settings) -> bool {
    let balance = &settings.balance;
    balance.mode.prunes() && balance.gamma_max > 0.0 && balance.selection == Selection::Priority
}

fn prune(settings: &Settings) -> Prune {
    let balance = &settings.balance;
    Prune {
        gamma: 0.0,
        imputation: balance.imputation,
        freeze: balance.freeze,
        selection: balance.selection,
        period_steps: balance.period,
        seed: settings.train.seed,
    }
}

/// Divides the model by the measured speed of each shard's slowest rank, or as far towards that as memory allows.
fn calibrate(
    model: &Model,
    launch: &Launch,
    cut: &mut Cut,
    ranks: &Ranks,
    flops_per_s: &[f64],
    fits: &dyn Fn(&[Model]) -> bool,
) -> Result<Option<String>, Failure> {
    let mesh = launch.strategy.mesh();
    let of_shard = |shard: usize| {
        let own = (0..mesh.ranks()).filter(|&rank| mesh.shard(rank) == shard);
        own.map(|rank| flops_per_s[rank]).fold(f64::INFINITY, f64::min)
    };
    let speeds: Vec<f64> = (0..mesh.tp).map(of_shard).collect();
    let fastest = speeds.iter().copied().fold(0.0, f64::max);
    if speeds.iter().all(|speed| speed * ALIKE >= fastest) {
        return Ok(None);
    }
    let relative: Vec<f64> = speeds.iter().map(|speed| speed / fastest).collect();
    let Some(fitting) = first_that_fits(model, towards_even(cut, &relative), fits)? else {
        return Ok(Some("ranks are unequal, but memory leaves no room to divide the work by their speeds".to_owned()));
    };
    ranks.reshard(fitting.clone())?;
    *cut = fitting;
    let shown: Vec<String> = cut.weights.iter().map(|weight| format!("{weight:.2}")).collect();
    Ok(Some(format!("ranks are unequal: the work is divided {} by their measured speeds", shown.join(" : "))))
}

/// By these speeds, of which the fastest is 1, and then ever more evenly.
fn towards_even(cut: &Cut, speeds: &[f64]) -> impl Iterator<Item = Cut> {
    [1.0, 0.75, 0.5, 0.25].into_iter().map(|share| {
        let weight = |speed: &f64| ((1.0 - share * (1.0 - speed)) * 100.0).round().max(1.0) / 100.0;
        Cut { weights: speeds.iter().map(weight).collect(), ..cut.clone() }
    })
}

/// The first of these cuts whose shards fit in memory.
fn first_that_fits(
    model: &Model,
    cuts: impl IntoIterator<Item = Cut>,
    fits: &dyn Fn(&[Model]) -> bool,
) -> Result<Option<Cut>, Failure> {
    for cut in cuts {
        if fits(&model.cut(&cut)?) {
            return Ok(Some(cut));
        }
    }
    Ok(None)
}

/// The event that reports a change.
pub fn event(balanced: &Balanced) -> BalanceReport {
    let prospect = &balanced.prospect;
    BalanceReport {
        step: balanced.step,
        slowness: prospect.slowness.clone(),
        before_s: prospect.now_s,
        after_s: balanced.after.as_secs_f64(),
        optimum_s: prospect.optimum_s,
        steps_after: balanced.steps_after as u64,
        line: describe(balanced),
    }
}

/// A change because of slow ranks, and its effect, in a line.
fn describe(balanced: &Balanced) -> String {
    let Balanced { step, prospect, before, now, after, steps_after, mesh } = balanced;
    let who = if mesh.dp == 1 { "rank" } else { "shard" };
    let slow: Vec<String> = prospect
        .stragglers()
        .map(|(rank, slowness)| format!("{who} {rank} computes {slowness:.1}× slower than the fastest"))
        .collect();
    let slow = match &slow[..] {
        [] => format!("all {who}s compute nearly alike"),
        slow => slow.join(", "),
    };
    let [mut moved, mut migrated, mut took_back] = [const { Vec::new() }; 3];
    for (dim, word, unit) in
        [(Dim::Columns, "columns", 1), (Dim::Heads, "head groups", SHARES), (Dim::Classes, "classes", 1)]
    {
        let some = |width: usize| format!("{} of {} {word}", amount(width, unit), now.home.total(dim) / unit);
        let [away_before, away_now] = [before, now].map(|target| target.migrated(dim));
        for (list, width) in [
            (&mut moved, now.home.gained(&before.home, dim)),
            (&mut migrated, away_now.saturating_sub(away_before)),
            (&mut took_back, away_before.saturating_sub(away_now)),
        ] {
            list.extend((width > 0).then(|| some(width)));
        }
    }
    let givers: Vec<usize> = (0..mesh.tp).filter(|&rank| gives(&before.home, &now.home, rank)).collect();
    let from = match givers[..] {
        [giver] => format!(" from {who} {giver}"),
        _ => String::new(),
    };
    moved.last_mut().into_iter().for_each(|last: &mut String| last.push_str(&from));
    let leaves_out = |(rank, gamma): (usize, &f64)| format!("{who} {rank} prunes {:.0} %", 100.0 * gamma);
    let all = [("moved", moved), ("migrated", migrated), ("took back", took_back)];
    let mut done: Vec<String> = all
        .iter()
        .filter(|(_, list)| !list.is_empty())
        .map(|(verb, list)| format!("{verb} {}", in_a_row(list)))
        .collect();
    done.extend(now.gammas.iter().enumerate().filter(|(_, gamma)| **gamma > 0.0).map(leaves_out));
    let stops = |&rank: &usize| before.gammas[rank] > 0.0 && now.gammas[rank] == 0.0;
    done.extend((0..mesh.tp).filter(stops).map(|rank| format!("{who} {rank} prunes nothing any more")));
    let steps = |seconds: f64| (1000.0 * seconds).round();
    format!(
        "{slow} since step {}; after step {step} {}; step {} → {} ms{} (optimum {})",
        prospect.since,
        if done.is_empty() { "work is divided anew".to_owned() } else { done.join(", ") },
        steps(prospect.now_s),
        steps(after.as_secs_f64()),
        if *steps_after == 0 { " as predicted" } else { "" },
        steps(prospect.optimum_s),
    )
}

/// Whether a rank has less of something than it had.
fn gives(before: &Widths, now: &Widths, rank: usize) -> bool {
    Dim::ALL.iter().any(|&dim| now.of(dim)[rank] < before.of(dim)[rank])
}

/// With commas and an "and".
fn in_a_row(parts: &[String]) -> String {
    match parts {
        [first @ .., before, last] if !first.is_empty() => format!("{}, {before} and {last}", first.join(", ")),
        _ => parts.join(" and "),
    }
}

/// Whole units without a fraction, others with a digit behind the point.
fn amount(width: usize, unit: usize) -> String {
    if width.is_multiple_of(unit) { (width / unit).to_string() } else { format!("{:.1}", width as f64 / unit as f64) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use evenkeel_balance::{Prospect, Target};
    use evenkeel_step::Mesh;

    use super::*;

    #[test]
    fn a_change_is_told_with_what_it_was_good_for_or_what_was_foretold_of_it() {
        let home = Widths::new(|dim| if dim == Dim::Columns { vec![704, 704] } else { vec![SHARES, SHARES] });
        let mut work = home.clone();
        work.set(Dim::Columns, vec![1024, 384]);
        let prospect = Prospect { slowness: vec![1.0, 2.13], since: 240, now_s: 0.412, then_s: 0.3, optimum_s: 0.284 };
        let before = Target::at_home(home.clone());
        let now = Target { home, work, gammas: vec![0.0; 2] };
        let line = |[left_out_before, left_out]: [f64; 2], after_ms: u64, steps_after: usize| {
            describe(&Balanced {
                step: 243,
                prospect: prospect.clone(),
                before: Target { gammas: vec![0.0, left_out_before], ..before.clone() },
                now: Target { gammas: vec![0.0, left_out], ..now.clone() },
                after: Duration::from_millis(after_ms),
                steps_after,
                mesh: Mesh::of_shards(2),
            })
        };
        let expected = "rank 1 computes 2.1× slower than the fastest since step 240; after step 243 migrated 320 of 1408 columns, \
                        rank 1 prunes";
        assert_eq!(line([0.0, 0.25], 291, 3), format!("{expected} 25 %; step 412 → 291 ms (optimum 284)"));
        assert_eq!(line([0.0, 0.25], 300, 0), format!("{expected} 25 %; step 412 → 300 ms as predicted (optimum 284)"));
        assert_eq!(line([0.5, 0.0], 291, 3), format!("{expected} nothing any more; step 412 → 291 ms (optimum 284)"));
    }

    #[test]
    fn the_work_is_divided_by_speed_as_far_as_it_fits_in_memory() {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 100, "vocab_size": 64,
        });
        let model = Model::from_json(&config).unwrap();
        for (most_columns, expected) in [
            (100, Some(vec![1.0, 0.25])),
            (79, Some(vec![1.0, 0.44])),
            (65, Some(vec![1.0, 0.63])),
            (60, Some(vec![1.0, 0.81])),
            (50, None),
        ] {
            let fits = |shards: &[Model]| shards.iter().all(|shard| shard.shard.ffn.len() <= most_columns);
            let found = first_that_fits(&model, towards_even(&Cut::even(2), &[1.0, 0.25]), &fits).unwrap();
            assert_eq!(found.map(|cut| cut.weights), expected, "at most {most_columns} columns");
        }
    }
}
