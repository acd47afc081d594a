//! Programs as text for people.

use std::fmt::Write;

use crate::program::{Program, Value};
use crate::trace::{Span, Timeline, Words};

/// A line per task: its place, its queue, its work, and the values that it reads, writes and frees. `units` names the chain's
/// units.
pub fn listing(program: &Program, units: &[String]) -> String {
    let spans: Vec<Span> = program.tasks.iter().map(|task| Span::of(task, 0.0, 0.0, 0.0)).collect();
    let timeline = Timeline { ranks: vec![spans] };
    let words = Words::of(&timeline, units);
    let names: Vec<String> = timeline.ranks[0].iter().map(|span| words.name(span)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (index, (task, name)) in program.tasks.iter().zip(&names).enumerate() {
        let lane = task.work.lane().name();
        let mut line = format!("{index:>5}  {lane:<7}  {name:<width$}");
        for (verb, values) in [("reads", &task.reads), ("writes", &task.writes), ("frees", &task.frees)] {
            let values: Vec<String> = values.iter().map(Value::to_string).collect();
            if !values.is_empty() {
                let _ = write!(line, "  {verb} {}", values.join(" "));
            }
        }
        if let Some(exchange) = task.exchange {
            let group = &program.groups[exchange.group.0].name;
            let _ = write!(line, "  {} bytes in `{group}`", exchange.bytes);
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}
