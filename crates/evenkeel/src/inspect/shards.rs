//! The parts of a cut model that each rank holds.

use std::collections::BTreeMap;
use std::ops::Range;

use evenkeel_model::{Model, ParamSpec, Sharing};
use evenkeel_train::Cost;

use crate::text;

/// A line for each rank, and one for each kind of parameter.
pub fn describe(shards: &[Model], costs: &[Cost]) -> String {
    let whole = shards[0].parameter_count() as f64;
    let rank = |(model, cost): (&Model, &Cost)| {
        let shard = &model.shard;
        let held: usize = model.specs.iter().filter(|spec| !spec.is_derived).map(ParamSpec::len).sum();
        let mut row = vec![shard.index.to_string()];
        row.extend([&shard.heads, &shard.kv_heads, &shard.ffn].map(span));
        row.extend(shard.experts.as_ref().map(span));
        row.push(span(&shard.classes));
        row.push(format!("{} ({:.0} %)", text::count(held as u64), 100.0 * held as f64 / whole));
        row.extend([cost.state_bytes, cost.arena_bytes].map(text::bytes));
        row.extend([text::bytes(cost.exchanged_bytes as u64), text::flops(cost.flops)]);
        row
    };
    let ranks: Vec<Vec<String>> = shards.iter().zip(costs).map(rank).collect();
    let classes = if shards[0].config.input.is_classified() { "labels" } else { "vocabulary" };
    let experts = shards[0].shard.experts.is_some().then_some("experts");
    let header = ["rank", "heads", "kv heads", "FFN columns"].into_iter().chain(experts);
    let header = header.chain([classes, "parameters", "state", "tensors", "exchanged", "work"]).collect::<Vec<&str>>();
    format!("{}\n\n{}", text::table(&header, &ranks), parameters(shards))
}

fn span(range: &Range<usize>) -> String {
    match range.len() {
        1 => range.start.to_string(),
        _ => format!("{}–{}", range.start, range.end - 1),
    }
}

/// Layers that are cut alike share a line.
fn parameters(shards: &[Model]) -> String {
    let mut lines: Vec<(String, Vec<String>)> = Vec::new();
    let mut seen: BTreeMap<(String, Vec<String>), usize> = BTreeMap::new();
    for id in (0..shards[0].specs.len()).filter(|&id| !shards[0].specs[id].is_derived) {
        let specs: Vec<&ParamSpec> = shards.iter().map(|shard| &shard.specs[id]).collect();
        let mut cells = vec![how(&specs).to_owned()];
        cells.extend(specs.iter().map(|spec| format!("{}×{}", spec.matrix[0], spec.matrix[1])));
        let name = without_numbers(&specs[0].name);
        if seen.insert((name.clone(), cells.clone()), id).is_none() {
            lines.push((name, cells));
        }
    }
    let rows: Vec<Vec<String>> = lines.into_iter().map(|(name, cells)| [vec![name], cells].concat()).collect();
    let ranks: Vec<String> = (0..shards.len()).map(|rank| format!("rank {rank}")).collect();
    let header: Vec<&str> = ["parameter", "cut by"].into_iter().chain(ranks.iter().map(String::as_str)).collect();
    text::table(&header, &rows)
}

fn how(specs: &[&ParamSpec]) -> &'static str {
    let spec = specs.iter().find(|spec| spec.matrix != spec.whole).unwrap_or(&specs[0]);
    let is_shared = specs.iter().any(|spec| matches!(spec.sharing, Sharing::Summed(_)));
    match (spec.matrix[0] < spec.whole[0], spec.matrix[1] < spec.whole[1]) {
        (false, false) if is_shared => "nothing, gradients summed",
        (false, false) => "nothing",
        (true, _) if is_shared => "rows, some shared",
        (true, _) => "rows",
        (_, true) if is_shared => "columns, some shared",
        (_, true) => "columns",
    }
}

/// `layers.3.` becomes `layers.*.`
fn without_numbers(name: &str) -> String {
    let part =
        |part: &str| if part.bytes().all(|byte| byte.is_ascii_digit()) { "*".to_owned() } else { part.to_owned() };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}
