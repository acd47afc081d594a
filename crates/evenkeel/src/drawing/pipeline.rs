//! A pipeline as the picture that people know: a row for each place, a box for each micro-batch at a stage, gaps where it is idle.

use evenkeel_report::svg::colour::FAINT_INK;
use evenkeel_report::svg::{Page, Rect, elided, escaped, text, width};
use evenkeel_step::trace::{Span, Timeline};
use evenkeel_step::{Lane, PipelineOrder, Strategy, Work};

use super::memory::{self, MemoryBar};
use super::sensible::sensible;
use super::{BACKGROUND, FONT_SIZE, TITLE_SIZE};
use crate::text::milliseconds;

const MARGIN: f64 = 20.0;
const LEFT: f64 = 100.0;
const PLOT_WIDTH: f64 = 1160.0;
const TOP: f64 = 112.0;
const ROW_HEIGHT: f64 = 30.0;
const ROW_GAP: f64 = 6.0;
const ROW_FILL: &str = "#e4e2dc";
/// Light between two boxes.
const BOX_GAP: f64 = 0.8;

/// What a box stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Forward,
    Backward,
    Weight,
}

impl Kind {
    fn name(self, order: PipelineOrder) -> &'static str {
        match self {
            Kind::Forward => "forward",
            Kind::Backward if order.splits_backward() => "gradients of inputs",
            Kind::Backward => "backward",
            Kind::Weight => "gradients of weights",
        }
    }

    /// The colours of a box and of the text on it, at a stage that is the `chunk`-th of its place's. Later ones are lighter.
    fn look(self, chunk: usize, chunks: usize) -> (String, &'static str) {
        let [first, last]: [[f64; 3]; 2] = match self {
            Kind::Forward => [[47.0, 109.0, 181.0], [156.0, 201.0, 238.0]],
            Kind::Backward => [[191.0, 74.0, 27.0], [240.0, 169.0, 138.0]],
            Kind::Weight => [[242.0, 181.0, 74.0], [251.0, 227.0, 178.0]],
        };
        let share = chunk as f64 / (chunks.max(2) - 1) as f64;
        let [red, green, blue] = [0, 1, 2].map(|part| (first[part] + share * (last[part] - first[part])).round() as u8);
        let is_dark = 0.3 * f64::from(red) + 0.6 * f64::from(green) + 0.1 * f64::from(blue) < 130.0;
        (format!("#{red:02x}{green:02x}{blue:02x}"), if is_dark { "#ffffff" } else { "#000000" })
    }

    /// `None` for light work and for what is not of a stage.
    fn of(work: Work, order: PipelineOrder) -> Option<Kind> {
        match work {
            Work::Forward => Some(Kind::Forward),
            Work::BackwardWeight if order.splits_backward() => Some(Kind::Weight),
            Work::Recompute
            | Work::Logits(_)
            | Work::Loss(_)
            | Work::Evaluate(_)
            | Work::BackwardInput
            | Work::BackwardWeight => Some(Kind::Backward),
            _ => None,
        }
    }
}

/// A micro-batch at a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Block {
    kind: Kind,
    stage: usize,
    micro: usize,
    start_s: f64,
    end_s: f64,
}

/// The places of a strategy's pipeline; replicas and shards do alike. `units` is their number in the whole chain.
pub fn pipeline_svg(timeline: &Timeline, strategy: &Strategy, units: usize, title: &str) -> String {
    pipeline_and_memory_svg(timeline, strategy, units, title, &[])
}

/// The same with bars of memory below.
pub fn pipeline_and_memory_svg(
    timeline: &Timeline,
    strategy: &Strategy,
    units: usize,
    title: &str,
    bars: &[MemoryBar],
) -> String {
    let timeline = &sensible(timeline).from_zero();
    let ranks = strategy.mesh().place_ranks(0);
    let rows: Vec<Vec<Block>> = ranks.iter().map(|&rank| blocks(&timeline.ranks[rank], strategy, units)).collect();
    let step_s = timeline.duration_s();
    let scale = PLOT_WIDTH / step_s.max(f64::MIN_POSITIVE);
    let mut svg = header(title, &rows, step_s);
    svg += &legend(&rows, strategy);
    for (place, blocks) in rows.iter().enumerate() {
        let y = TOP + (ROW_HEIGHT + ROW_GAP) * place as f64;
        let field = Rect { x: LEFT, y, width: PLOT_WIDTH, height: ROW_HEIGHT };
        svg += &field.markup(&format!("class=\"row\" fill=\"{ROW_FILL}\""), "");
        let style = format!("text-anchor=\"end\" fill=\"{FAINT_INK}\"");
        svg += &text(LEFT - 8.0, y + ROW_HEIGHT / 2.0 + 4.0, &style, &format!("place {place}"));
        svg.extend(blocks.iter().map(|block| drawn(block, y, scale, strategy)));
    }
    let bottom = TOP + (ROW_HEIGHT + ROW_GAP) * rows.len() as f64 + MARGIN;
    svg += &memory::markup(bars, bottom, MARGIN, LEFT, LEFT + PLOT_WIDTH);
    let height = bottom + memory::height(bars);
    let width = LEFT + PLOT_WIDTH + MARGIN;
    Page { width, height, font_size: FONT_SIZE, background: BACKGROUND, title }.markup(&svg)
}

/// A rank's heavy tasks, those of a stage and micro-batch that follow one another as one.
fn blocks(spans: &[Span], strategy: &Strategy, units: usize) -> Vec<Block> {
    let pipeline = &strategy.pipeline;
    let stage_of = |unit: usize| (0..pipeline.stages()).find(|&stage| pipeline.units(stage, units).contains(&unit));
    let mut blocks: Vec<Block> = Vec::new();
    for span in spans.iter().filter(|span| span.lane == Lane::Compute) {
        let Some((kind, stage)) = Kind::of(span.work, pipeline.order).zip(stage_of(span.unit.0)) else { continue };
        let micro = span.micro.index;
        match blocks.last_mut() {
            Some(last) if (last.kind, last.stage, last.micro) == (kind, stage, micro) => last.end_s = span.end_s,
            _ => blocks.push(Block { kind, stage, micro, start_s: span.start_s, end_s: span.end_s }),
        }
    }
    blocks
}

fn header(title: &str, rows: &[Vec<Block>], step_s: f64) -> String {
    let busy_s: f64 = rows.iter().flatten().map(|block| block.end_s - block.start_s).sum();
    let idle = 1.0 - busy_s / (step_s * rows.len() as f64).max(f64::MIN_POSITIVE);
    let about = format!("{} a step; places are idle {:.0} % of it", milliseconds(step_s), 100.0 * idle.clamp(0.0, 1.0));
    let style = format!("font-size=\"{TITLE_SIZE}\" font-weight=\"bold\"");
    text(MARGIN, 34.0, &style, &elided(title, TITLE_SIZE, LEFT + PLOT_WIDTH - MARGIN))
        + &text(MARGIN, 56.0, &format!("fill=\"{FAINT_INK}\""), &about)
}

/// The kinds that there are, of each of a place's stages.
fn legend(rows: &[Vec<Block>], strategy: &Strategy) -> String {
    let (mut svg, mut x) = (String::new(), LEFT);
    let chunks = strategy.pipeline.stages() / strategy.pp;
    for kind in [Kind::Forward, Kind::Backward, Kind::Weight] {
        for chunk in 0..chunks {
            let is_shown = |block: &Block| block.kind == kind && chunk_of(block.stage, strategy) == chunk;
            if rows.iter().flatten().any(is_shown) {
                let swatch = Rect { x, y: 72.0, width: 22.0, height: 14.0 };
                svg += &swatch.markup(&format!("fill=\"{}\"", kind.look(chunk, chunks).0), "");
                let of_stage = if chunk == 0 { String::new() } else { format!(" {}", chunk + 1) };
                let name = format!("{}{of_stage}", kind.name(strategy.pipeline.order));
                svg += &text(x + 28.0, 83.0, "", &name);
                x += 46.0 + width(&name, FONT_SIZE);
            }
        }
    }
    svg
}

/// The number of a stage among those of its place.
fn chunk_of(stage: usize, strategy: &Strategy) -> usize {
    let pipeline = &strategy.pipeline;
    let stages = pipeline.stages_at(pipeline.place(stage, strategy.pp), strategy.pp);
    stages.iter().position(|other| *other == stage).expect("a stage is at its place")
}

fn drawn(block: &Block, y: f64, scale: f64, strategy: &Strategy) -> String {
    let Block { kind, stage, micro, start_s, end_s } = *block;
    let name = kind.name(strategy.pipeline.order);
    let (fill, ink) = kind.look(chunk_of(stage, strategy), strategy.pipeline.stages() / strategy.pp);
    let wide = ((end_s - start_s) * scale - BOX_GAP).max(BOX_GAP);
    let place = Rect { x: LEFT + start_s * scale, y, width: wide, height: ROW_HEIGHT };
    let about = format!("{name} of micro-batch {micro} at stage {stage}, for {}", milliseconds(end_s - start_s));
    let title = format!("<title>{}</title>", escaped(&about));
    let mut svg = place.markup(&format!("class=\"box\" fill=\"{fill}\""), &title);
    let label = micro.to_string();
    if width(&label, FONT_SIZE) + 2.0 <= wide {
        let style = format!("text-anchor=\"middle\" fill=\"{ink}\" pointer-events=\"none\"");
        svg += &text(place.x + wide / 2.0, y + ROW_HEIGHT / 2.0 + 4.0, &style, &label);
    }
    svg
}
