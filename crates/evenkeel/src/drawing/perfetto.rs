//! Timelines as Chrome trace events, which ui.perfetto.dev opens.

use evenkeel_step::Lane;
use evenkeel_step::trace::{Span, Timeline, Words};
use serde_json::{Value, json};

use super::sensible::sensible;

const MICROSECONDS: f64 = 1e6;
/// Processes are so many numbers apart, so that no thread has the number of a process or of another rank's thread.
const PROCESS_STRIDE: usize = 10;

/// One process per rank with a thread for each lane. `units` names the chain's units. An exchange that waited for its peers is
/// two events.
pub fn perfetto(timeline: &Timeline, units: &[String]) -> String {
    let timeline = sensible(timeline);
    let words = Words::of(&timeline, units);
    let mut events = Vec::new();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        events.extend(titles(rank));
        events.extend(spans.iter().flat_map(|span| drawn(rank, span, &words)));
    }
    let lines: Vec<String> = events.iter().map(Value::to_string).collect();
    format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n"))
}

/// Zero is the idle process to Perfetto.
fn process(rank: usize) -> usize {
    PROCESS_STRIDE * (rank + 1)
}

fn thread(rank: usize, lane: Lane) -> usize {
    process(rank) + 1 + lane as usize
}

/// The names of a rank and of its lanes, and their order.
fn titles(rank: usize) -> Vec<Value> {
    let pid = process(rank);
    let meta =
        |name: &str, tid: usize, args: Value| json!({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args});
    let mut titles = vec![
        meta("process_name", pid, json!({"name": format!("rank {rank}")})),
        meta("process_sort_index", pid, json!({"sort_index": rank})),
    ];
    for lane in Lane::ALL {
        let tid = thread(rank, lane);
        titles.push(meta("thread_name", tid, json!({"name": lane.name()})));
        titles.push(meta("thread_sort_index", tid, json!({"sort_index": tid})));
    }
    titles
}

fn drawn(rank: usize, span: &Span, words: &Words) -> Vec<Value> {
    let event = |name: &str, category: &str, start_s: f64, end_s: f64| {
        json!({
            "ph": "X", "pid": process(rank), "tid": thread(rank, span.lane), "name": name, "cat": category,
            "ts": start_s * MICROSECONDS, "dur": (end_s - start_s) * MICROSECONDS,
            "args": {
                "unit": words.unit(span.unit), "micro": span.micro.index, "part": span.micro.part, "bytes": span.bytes,
            },
        })
    };
    let name = words.name(span);
    if !span.lane.exchanges() {
        return vec![event(&name, "compute", span.start_s, span.end_s)];
    }
    let waited = span.came_s > span.start_s;
    let waiting = waited.then(|| event("waiting for peers", "waiting", span.start_s, span.came_s));
    waiting.into_iter().chain([event(&name, "transfer", span.came_s, span.end_s)]).collect()
}
