//! Timelines as trace events and as pictures.

use evenkeel_step::trace::{Span, Timeline};
use evenkeel_step::{BucketIdx, Chunk, Lane, Micro, UnitIdx, Work};
use roxmltree::{Document, Node};
use serde_json::Value;

use super::{MemoryBar, perfetto, svg, timeline_and_memory_svg};

const LAYERS: usize = 4;
const PARTS: usize = 2;
/// The second rank is slower, so the first one waits.
const SPEEDS: [f64; 2] = [1.0, 0.8];
const EXCHANGE_BYTES: u64 = 4 << 20;
/// For sums of times, relative.
const TOLERANCE: f64 = 1e-9;
/// Pixels by which writing two decimals may move an edge.
const ROUNDING: f64 = 0.011;

fn units(layers: usize) -> Vec<String> {
    let layer = |index| [format!("attention {index}"), format!("mlp {index}")];
    [vec!["embedding".to_owned()], (0..layers).flat_map(layer).collect(), vec!["head".to_owned()]].concat()
}

/// Ranks whose parts compute in turn, each while the other's sums travel.
struct MadeUp {
    speeds: Vec<f64>,
    compute_free: Vec<f64>,
    comm_free: Vec<f64>,
    /// When the last exchange of a part arrived.
    arrived: Vec<f64>,
    timeline: Timeline,
}

impl MadeUp {
    fn step(speeds: &[f64], layers: usize, parts: usize) -> Timeline {
        let ranks = speeds.len();
        let mut made_up = MadeUp {
            speeds: speeds.to_vec(),
            compute_free: vec![0.0; ranks],
            comm_free: vec![0.0; ranks],
            arrived: vec![0.0; parts],
            timeline: Timeline { ranks: vec![Vec::new(); ranks] },
        };
        let head = 2 * layers + 1;
        (0..head).for_each(|unit| (0..parts).for_each(|part| made_up.forward(unit, part)));
        (0..parts).for_each(|part| made_up.losses(head, part));
        (0..head).rev().for_each(|unit| (0..parts).for_each(|part| made_up.backward(unit, part)));
        made_up.exchange(Work::SumGradients(BucketIdx(0)), 0, parts - 1, 0.3);
        made_up.timeline
    }

    fn forward(&mut self, unit: usize, part: usize) {
        if unit > 0 {
            self.compute(Work::Enter, unit, part, 0.06);
        }
        self.compute(Work::Forward, unit, part, body_ms(unit));
        self.exchange(Work::AllReduce, unit, part, 0.8);
    }

    fn losses(&mut self, head: usize, part: usize) {
        self.compute(Work::Enter, head, part, 0.06);
        for chunk in (0..2).map(Chunk) {
            self.compute(Work::Logits(chunk), head, part, 0.9);
            self.exchange(Work::AllGather, head, part, 0.1);
            self.compute(Work::Loss(chunk), head, part, 1.4);
        }
        self.exchange(Work::ReduceScatter, head, part, 0.7);
    }

    fn backward(&mut self, unit: usize, part: usize) {
        self.compute(Work::Recompute, unit, part, body_ms(unit));
        self.compute(Work::BackwardInput, unit, part, 1.2 * body_ms(unit));
        self.exchange(Work::AllReduce, unit, part, 0.8);
        self.compute(Work::BackwardWeight, unit, part, body_ms(unit));
    }

    fn compute(&mut self, work: Work, unit: usize, part: usize, ms: f64) {
        for rank in 0..self.speeds.len() {
            let waits = work != Work::BackwardWeight;
            let start_s = self.compute_free[rank].max(if waits { self.arrived[part] } else { 0.0 });
            let end_s = start_s + ms / 1e3 / self.speeds[rank];
            self.compute_free[rank] = end_s;
            self.timeline.ranks[rank].push(span(work, unit, part, (start_s, start_s, end_s)));
        }
    }

    fn exchange(&mut self, work: Work, unit: usize, part: usize, ms: f64) {
        let starts: Vec<f64> = self.compute_free.iter().zip(&self.comm_free).map(|(a, b)| a.max(*b)).collect();
        let came_s = starts.iter().copied().fold(0.0, f64::max);
        let end_s = came_s + ms / 1e3;
        for (rank, start_s) in starts.into_iter().enumerate() {
            self.comm_free[rank] = end_s;
            self.timeline.ranks[rank].push(span(work, unit, part, (start_s, came_s, end_s)));
        }
        self.arrived[part] = end_s;
    }
}

fn body_ms(unit: usize) -> f64 {
    match unit {
        0 => 0.2,
        attention if attention % 2 == 1 => 1.0,
        _ => 1.5,
    }
}

fn span(work: Work, unit: usize, part: usize, (start_s, came_s, end_s): (f64, f64, f64)) -> Span {
    let lane = work.lane();
    let bytes = if lane == Lane::Comm { EXCHANGE_BYTES } else { 0 };
    Span { work, unit: UnitIdx(unit), micro: Micro { index: 0, part }, lane, start_s, came_s, end_s, bytes }
}

/// Strange but possible timelines, and impossible ones that must not panic.
fn strange() -> Vec<(&'static str, Timeline)> {
    let one =
        |times| Timeline { ranks: vec![vec![span(Work::Forward, 0, 0, times), span(Work::AllReduce, 0, 0, times)]] };
    let work = |times| span(Work::Forward, 0, 0, times);
    vec![
        ("no ranks", Timeline::default()),
        ("no spans", Timeline { ranks: vec![Vec::new(); 3] }),
        ("no time", one((0.0, 0.0, 0.0))),
        ("no time, late", one((7.5, 7.5, 7.5))),
        ("hardly any time", one((0.0, 0.0, f64::MIN_POSITIVE))),
        ("before the beginning", one((-2.0, -1.0, 1.0))),
        ("not a number", one((0.0, f64::NAN, 1.0))),
        ("without end", one((0.0, 0.0, f64::INFINITY))),
        ("too large", one((-f64::MAX, 0.0, f64::MAX))),
        ("backwards", one((2.0, 1.0, 0.0))),
        ("no time, at the end", Timeline { ranks: vec![vec![work((0.0, 0.0, 1.0)), work((1.0, 1.0, 1.0))]] }),
        ("many ranks", MadeUp::step(&[1.0; 16], 1, 1)),
        ("many parts", MadeUp::step(&SPEEDS, 1, 7)),
    ]
}

fn events(json: &str) -> Vec<Value> {
    let trace: Value = serde_json::from_str(json).expect("valid JSON");
    trace["traceEvents"].as_array().expect("a list of events").clone()
}

/// The nodes of a picture's boxes.
fn boxes<'a>(document: &'a Document) -> Vec<Node<'a, 'a>> {
    document.descendants().filter(|node| node.attribute("class") == Some("box")).collect()
}

fn number(node: &Node, attribute: &str) -> f64 {
    let value = node.attribute(attribute).unwrap_or_else(|| panic!("{node:?} has no {attribute}"));
    value.parse().unwrap_or_else(|_| panic!("{attribute} is {value}"))
}

/// Left, top, right and bottom of a rectangle.
fn sides(node: &Node) -> [f64; 4] {
    let (x, y) = (number(node, "x"), number(node, "y"));
    [x, y, x + number(node, "width"), y + number(node, "height")]
}

/// The rows' backgrounds, two for each rank; they are as wide as the plot.
fn rows<'a>(document: &'a Document) -> Vec<Node<'a, 'a>> {
    document.descendants().filter(|node| node.attribute("class") == Some("row")).collect()
}

fn contains(outer: [f64; 4], inner: [f64; 4]) -> bool {
    (0..2).all(|side| inner[side] >= outer[side] - ROUNDING && inner[side + 2] <= outer[side + 2] + ROUNDING)
}

fn tooltip<'a>(node: &Node<'a, 'a>) -> &'a str {
    node.descendants().find(|inner| inner.has_tag_name("title")).and_then(|title| title.text()).unwrap_or_default()
}

#[test]
fn trace_events_last_as_long_as_their_spans_on_two_threads_per_rank() {
    let timeline = MadeUp::step(&SPEEDS, LAYERS, PARTS);
    let events = events(&perfetto(&timeline, &units(LAYERS)));
    let titled = |title: &str, name: &str| -> Vec<&Value> {
        events.iter().filter(|event| event["name"] == title && event["args"]["name"] == name).collect()
    };
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let processes = titled("process_name", &format!("rank {rank}"));
        assert_eq!(processes.len(), 1, "rank {rank}");
        for (lane, name) in [(Lane::Compute, "compute"), (Lane::Comm, "comm")] {
            let of_rank = |thread: &&&Value| thread["pid"] == processes[0]["pid"];
            let threads: Vec<&Value> = titled("thread_name", name).iter().filter(of_rank).copied().collect();
            assert_eq!(threads.len(), 1, "{name} of rank {rank}");
            let is_on_it = |event: &&Value| {
                event["ph"] == "X" && event["pid"] == threads[0]["pid"] && event["tid"] == threads[0]["tid"]
            };
            let drawn_us: f64 =
                events.iter().filter(is_on_it).map(|event| event["dur"].as_f64().expect("a duration")).sum();
            let spans_us: f64 = spans.iter().filter(|span| span.lane == lane).map(|span| span.duration_s() * 1e6).sum();
            assert!(spans_us > 0.0 && (drawn_us - spans_us).abs() < TOLERANCE * spans_us, "{drawn_us} {spans_us}");
        }
    }
}

#[test]
fn trace_events_say_what_ran() {
    let events = events(&perfetto(&MadeUp::step(&SPEEDS, LAYERS, PARTS), &units(LAYERS)));
    let cases = [
        ("forward attention 3, part 1", "attention 3", 1, 0),
        ("backward weight embedding, part 0", "embedding", 0, 0),
        ("all-reduce mlp 3, part 0", "mlp 3", 0, EXCHANGE_BYTES),
        ("loss head, chunk 1, part 1", "head", 1, 0),
        ("sum gradients, bucket 0", "embedding", 1, EXCHANGE_BYTES),
    ];
    for (name, unit, part, bytes) in cases {
        let event = events.iter().find(|event| event["name"] == name).unwrap_or_else(|| panic!("no {name}"));
        let expected = serde_json::json!({"unit": unit, "micro": 0, "part": part, "bytes": bytes});
        assert_eq!(event["args"], expected, "{name}");
    }
}

#[test]
fn an_exchange_waits_for_its_peers_and_then_transfers() {
    let exchange = span(Work::AllGather, 1, 0, (0.001, 0.003, 0.004));
    let timeline = Timeline { ranks: vec![vec![exchange]] };
    let json = perfetto(&timeline, &units(1));
    let events: Vec<Value> = events(&json).into_iter().filter(|event| event["ph"] == "X").collect();
    let times = |event: &Value| [&event["ts"], &event["dur"]].map(|time| time.as_f64().expect("a time").round());
    assert_eq!(events.iter().map(times).collect::<Vec<_>>(), [[1000.0, 2000.0], [3000.0, 1000.0]]);
    assert_eq!(events[0]["name"], "waiting for peers");
    assert_eq!(events[1]["name"], "all-gather attention 0");

    let picture = svg(&timeline, &units(1), "");
    let document = Document::parse(&picture).expect("well-formed");
    let found: Vec<&str> = boxes(&document).iter().map(tooltip).collect();
    let expected = [
        "waiting for peers: all-gather attention 0\nat 0.000 ms, for 2.000 ms",
        "all-gather attention 0\nat 2.000 ms, for 1.000 ms",
    ];
    assert_eq!(found, expected);
}

#[test]
fn every_span_has_a_box_on_its_row() {
    let timeline = MadeUp::step(&SPEEDS, LAYERS, PARTS);
    let picture = svg(&timeline, &units(LAYERS), "a step");
    let document = Document::parse(&picture).expect("well-formed");
    let (rows, boxes) = (rows(&document), boxes(&document));
    assert_eq!(rows.len(), 2 * timeline.ranks.len());
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        for (row, lane) in [Lane::Compute, Lane::Comm].into_iter().enumerate() {
            let row = sides(&rows[2 * rank + row]);
            let waits = |span: &&Span| span.lane == lane && span.came_s > span.start_s;
            let expected = spans.iter().filter(|span| span.lane == lane).count() + spans.iter().filter(waits).count();
            let on_row = boxes.iter().filter(|node| contains(row, sides(node))).count();
            assert_eq!(on_row, expected, "{lane:?} of rank {rank}");
        }
    }
}

#[test]
fn boxes_lie_where_their_times_are() {
    let work = |times| span(Work::Forward, 0, 0, times);
    let timeline = Timeline { ranks: vec![vec![work((5.0, 5.0, 6.0)), work((7.0, 7.0, 9.0))]] };
    let picture = svg(&timeline, &units(1), "");
    let document = Document::parse(&picture).expect("well-formed");
    let [left, _, right, _] = sides(&rows(&document)[0]);
    let share = |side: f64| (side - left) / (right - left);
    let found: Vec<f64> =
        boxes(&document).iter().flat_map(|node| [sides(node)[0], sides(node)[2]].map(share)).collect();
    for (found, expected) in found.iter().zip([0.0, 0.25, 0.5, 1.0]) {
        assert!((found - expected).abs() < 1e-3, "{found} instead of {expected}");
    }
    assert_eq!(found.len(), 4);
}

#[test]
fn the_summary_says_where_the_time_went() {
    let timeline = Timeline {
        ranks: vec![vec![
            span(Work::Forward, 0, 0, (0.0, 0.0, 0.010)),
            span(Work::AllReduce, 0, 0, (0.005, 0.012, 0.020)),
        ]],
    };
    let picture = svg(&timeline, &units(1), "a step");
    let expected = "compute 10.00 ms · transfer 8.000 ms · waiting 7.000 ms · exposed 10.00 ms = 50.0 % of the step";
    assert!(picture.contains(expected), "{picture}");
    assert!(picture.contains("1 rank, 20.00 ms"), "{picture}");
}

#[test]
fn names_are_text_and_never_markup() {
    let hostile = "</title><script>x</script>&\"'\u{1}\u{ffff}]]>";
    let names = vec![hostile.to_owned(); 2 * LAYERS + 1];
    let timeline = MadeUp::step(&[1.0], 1, 1);
    let picture = svg(&timeline, &names, hostile);
    let document = Document::parse(&picture).unwrap_or_else(|error| panic!("{error}\n{picture}"));
    assert!(document.descendants().all(|node| !node.has_tag_name("script")));
    let shown = hostile.replace(['\u{1}', '\u{ffff}'], " ");
    assert!(boxes(&document).iter().any(|node| tooltip(node).contains(&shown)), "{picture}");
    assert_eq!(document.root_element().attribute("aria-label"), Some(shown.as_str()));

    let events = events(&perfetto(&timeline, &names));
    assert!(events.iter().any(|event| event["args"]["unit"] == hostile));
}

#[test]
fn a_unit_behind_the_head_is_a_number() {
    let timeline = Timeline { ranks: vec![vec![span(Work::Forward, 9, 0, (0.0, 0.0, 1.0))]] };
    assert!(perfetto(&timeline, &units(1)).contains("forward unit 9"));
    assert!(svg(&timeline, &[], "").contains("forward unit 9"));
}

#[test]
fn no_timeline_is_too_strange_to_draw() {
    for (name, timeline) in strange() {
        let json = perfetto(&timeline, &units(1));
        let drawn = events(&json);
        assert!(drawn.iter().filter(|event| event["ph"] == "X").all(|event| event["dur"].is_f64()), "{name}:\n{json}");

        let picture = svg(&timeline, &units(1), name);
        let document = Document::parse(&picture).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(!picture.contains("NaN") && !picture.contains("inf"), "{name}:\n{picture}");
        let rows = rows(&document);
        assert_eq!(rows.len(), 2 * timeline.ranks.len(), "{name}");
        for node in boxes(&document) {
            assert!(rows.iter().any(|row| contains(sides(row), sides(&node))), "{name}: {:?}", sides(&node));
        }
    }
}

#[test]
fn nothing_is_drawn_of_times_that_make_no_sense() {
    for (name, timeline) in strange() {
        let senseless = ["not a number", "without end", "too large", "backwards"].contains(&name);
        let has_spans = timeline.ranks.iter().flatten().next().is_some();
        let picture = svg(&timeline, &units(1), name);
        let document = Document::parse(&picture).expect("well-formed");
        let drawn = events(&perfetto(&timeline, &units(1))).iter().any(|event| event["ph"] == "X");
        assert_eq!((boxes(&document).is_empty(), drawn), (senseless || !has_spans, !senseless && has_spans), "{name}");
    }
}

#[test]
fn narrow_neighbours_of_a_kind_are_one_box() {
    const NARROW: usize = 5_000;
    let at = |index: usize| index as f64 * 1e-6;
    let narrow = |index| span(Work::Forward, 0, 0, (at(index), at(index), at(index + 1)));
    let wide = |work, start_s: f64, end_s| span(work, 0, 0, (start_s, start_s, end_s));
    let mut spans: Vec<Span> = (0..NARROW).map(narrow).collect();
    // Another kind, a gap and a wide one of the same kind each end a run.
    spans.push(wide(Work::Enter, at(NARROW), at(NARROW + 1)));
    spans.push(wide(Work::Forward, at(NARROW + 1), at(NARROW + 2)));
    spans.push(wide(Work::Forward, 0.5, 0.5 + 1e-6));
    spans.push(wide(Work::Forward, 0.5 + 1e-6, 1.0));
    spans.push(wide(Work::Forward, 1.0, 1.0 + 1e-6));
    let timeline = Timeline { ranks: vec![spans] };
    let picture = svg(&timeline, &units(1), "");
    let document = Document::parse(&picture).expect("well-formed");
    let found: Vec<&str> = boxes(&document).iter().map(|node| tooltip(node).lines().next().unwrap_or("")).collect();
    let expected = [
        "5000 × forward, the first: forward embedding",
        "enter embedding",
        "forward embedding",
        "forward embedding",
        "forward embedding",
        "forward embedding",
    ];
    assert_eq!(found, expected);
}

#[test]
fn text_in_boxes_stays_inside_them() {
    // The narrowest letters that fonts have are about a quarter of their size wide.
    const LEAST_LETTER: f64 = 0.25 * 10.5;
    let picture = svg(&MadeUp::step(&SPEEDS, LAYERS, PARTS), &units(LAYERS), "a step");
    let document = Document::parse(&picture).expect("well-formed");
    let labels: Vec<Node> = document.descendants().filter(|node| node.attribute("font-size") == Some("10.5")).collect();
    assert!(labels.len() > 50, "only {} boxes have text", labels.len());
    for label in labels {
        let half = LEAST_LETTER * label.text().unwrap_or_default().chars().count() as f64 / 2.0;
        let (x, y) = (number(&label, "x"), number(&label, "y"));
        let place = [x - half, y, x + half, y];
        assert!(boxes(&document).iter().any(|node| contains(sides(node), place)), "{label:?}");
    }
}

#[test]
fn parts_are_told_apart_and_explained() {
    let cases: [(usize, &[&str]); 4] = [
        (1, &[]),
        (2, &["part 0", "part 1"]),
        (3, &["part 0", "part 1", "part 2"]),
        (6, &["part 0, 4, …", "part 1, 5, …", "part 2", "part 3"]),
    ];
    for (parts, expected) in cases {
        let picture = svg(&MadeUp::step(&SPEEDS, 1, parts), &units(1), "");
        let document = Document::parse(&picture).expect("well-formed");
        let texts = document.descendants().filter(|node| node.has_tag_name("text")).filter_map(|node| node.text());
        let found: Vec<&str> = texts.filter(|text| text.starts_with("part ")).collect();
        assert_eq!(found, expected, "{parts} parts");
        let marks = document.descendants().filter(|node| node.has_attribute("fill-opacity")).count();
        assert_eq!(marks > 0, parts > 1, "{parts} parts");
    }
}

fn bar(rank: usize, used_bytes: u64) -> MemoryBar {
    MemoryBar { ranks: format!("rank {rank}"), devices: "a \"card\"".to_owned(), used_bytes, limit_bytes: 80 << 30 }
}

#[test]
fn bars_of_memory_are_as_long_as_their_bytes_and_say_them() {
    let timeline = MadeUp::step(&SPEEDS, LAYERS, PARTS);
    let bars = [bar(0, 40 << 30), bar(1, 100 << 30), bar(2, 0)];
    let picture = timeline_and_memory_svg(&timeline, &units(LAYERS), "a step", &bars);
    let document = Document::parse(&picture).expect("well-formed");
    let of_class = |class: &str| -> Vec<Node> {
        document.descendants().filter(|node| node.attribute("class") == Some(class)).collect()
    };
    let (rooms, used) = (of_class("room"), of_class("used"));
    assert_eq!((rooms.len(), used.len()), (3, 3));
    let page = document.root_element();
    let page = [0.0, 0.0, number(&page, "width"), number(&page, "height")];
    let last_row = sides(rows(&document).last().expect("a row"));
    for ((room, used), bar) in rooms.iter().zip(&used).zip(&bars) {
        let share = number(used, "width") / number(room, "width");
        let expected = bar.used_bytes as f64 / bar.limit_bytes as f64;
        assert!((share - expected).abs() < 1e-3, "{share} instead of {expected}");
        assert!(contains(page, sides(used)) && contains(page, sides(room)) && sides(room)[1] > last_row[3]);
        assert_eq!(
            used.attribute("fill") == Some("#b3261e"),
            bar.used_bytes > bar.limit_bytes,
            "what is too full is red"
        );
    }
    let texts: Vec<&str> =
        document.descendants().filter(|node| node.has_tag_name("text")).filter_map(|node| node.text()).collect();
    for expected in
        ["memory", "rank 1", "40.0 GiB of 80.0 GiB = 50.0% · a \"card\"", "100.0 GiB of 80.0 GiB = 125.0% · a \"card\""]
    {
        assert!(texts.contains(&expected), "{expected}: {texts:?}");
    }
    assert_eq!(svg(&timeline, &units(LAYERS), "a step").matches("class=\"used\"").count(), 0);
}

#[test]
fn of_many_bars_the_fullest_are_drawn() {
    let bars: Vec<MemoryBar> = (0..40).map(|rank| bar(rank, (rank as u64) << 30)).collect();
    let picture = timeline_and_memory_svg(&Timeline::default(), &[], "", &bars);
    let document = Document::parse(&picture).expect("well-formed");
    let used: Vec<&str> = { document.descendants() }
        .filter(|node| node.attribute("class") == Some("used"))
        .map(|node| tooltip(&node))
        .collect();
    assert_eq!(used.len(), 16);
    assert!(used[0].starts_with("rank 24: 24.0 GiB") && used[15].starts_with("rank 39"), "{used:?}");
    assert!(picture.contains("and 24 more, none of them fuller"), "{picture}");
}
