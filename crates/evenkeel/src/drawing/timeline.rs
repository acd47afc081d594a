//! Timelines as pictures: two rows per rank, its computation above its exchanges.

mod axis;
mod boxes;
mod look;

use evenkeel_report::svg::colour::{FAINT_INK, GRID};
use evenkeel_report::svg::{Page, Rect, elided, escaped, text, width};
use evenkeel_step::trace::{Shares, Span, Timeline, Words};
use evenkeel_step::{Lane, WorkFamily};

use axis::Axis;
use boxes::{Piece, pieces};
use look::{Edges, HATCH_FIELD, HATCH_LINE, HATCH_NAME, Kind, LOOKS, Look};

use super::memory::{self, MemoryBar};
use super::sensible::sensible;
use super::{BACKGROUND, FONT_SIZE, TITLE_SIZE};
use crate::text::milliseconds;

const MARGIN: f64 = 20.0;
/// The plot's left edge, behind the names of ranks and rows.
const LEFT: f64 = 100.0;
/// A plot has room for a word in its usual box, as far as screens allow.
const PLOT_WIDTHS: (f64, f64) = (1160.0, 2400.0);
const USUAL_BOX: f64 = 26.0;
const LABEL_GAP: f64 = 8.0;

const TITLE_Y: f64 = 34.0;
const SUBTITLE_Y: f64 = 56.0;
const LEGEND_TOP: f64 = 72.0;
const LEGEND_ROW: f64 = 22.0;
const SWATCH_WIDTH: f64 = 22.0;
const SWATCH_HEIGHT: f64 = 14.0;
const SWATCH_GAP: f64 = 6.0;
const LEGEND_GAP: f64 = 18.0;
/// Between the legend and the first rank.
const LEGEND_BOTTOM: f64 = 38.0;

/// A rank's summary, its rows, and the room below them.
const SUMMARY_HEIGHT: f64 = 20.0;
const ROW_HEIGHT: f64 = 22.0;
const ROW_GAP: f64 = 3.0;
const RANK_GAP: f64 = 16.0;

const AXIS_HEIGHT: f64 = 28.0;
/// Between the first rank and the times above it.
const AXIS_GAP: f64 = 12.0;
const TICK_DISTANCE: f64 = 80.0;

const BOX_FONT_SIZE: f64 = 10.5;
/// From a line's middle down to its baseline, in font sizes.
const BASELINE: f64 = 0.36;
/// Left and right of the text in a box.
const BOX_PADDING: f64 = 1.5;
/// Boxes are drawn no narrower; narrower ones are merged with their like.
const NARROWEST: f64 = 0.3;
/// Narrower boxes have neither marked edges nor light between them: nothing else would be seen.
const NARROWEST_MARKED: f64 = 3.0;
const BOX_GAP: f64 = 0.6;
const EDGE_HEIGHT: f64 = 3.0;

const ROW_FILL: &str = "#fffefc";
const EDGE_FILL: &str = "#000000";
const EDGE_OPACITY: f64 = 0.55;

/// A picture of its own, wider for larger timelines. `units` names the chain's units; the head is behind the last.
pub fn svg(timeline: &Timeline, units: &[String], title: &str) -> String {
    timeline_and_memory_svg(timeline, units, title, &[])
}

/// The same with bars of memory below.
pub fn timeline_and_memory_svg(timeline: &Timeline, units: &[String], title: &str, bars: &[MemoryBar]) -> String {
    let timeline = &sensible(timeline);
    let right = LEFT + plot_width(timeline);
    let (words, axis) = (Words::of(timeline, units), Axis::over(timeline, LEFT, right));
    Drawing { timeline, rows: rows(timeline), words, axis, right }.markup(title, bars)
}

/// The lanes that are drawn. Only pipelines pass anything on.
fn rows(timeline: &Timeline) -> Vec<Lane> {
    let passes = timeline.spans().any(|(_, span)| span.lane == Lane::Pass);
    Lane::ALL.into_iter().filter(|lane| *lane != Lane::Pass || passes).collect()
}

struct Drawing<'a> {
    timeline: &'a Timeline,
    /// Of each rank.
    rows: Vec<Lane>,
    words: Words<'a>,
    axis: Axis,
    /// The plot's edge.
    right: f64,
}

fn plot_width(timeline: &Timeline) -> f64 {
    let boxes = |lane: Lane| {
        let count = move |spans: &Vec<Span>| spans.iter().filter(|span| span.lane == lane).count();
        timeline.ranks.iter().map(count).max().unwrap_or(0)
    };
    let (least, most) = PLOT_WIDTHS;
    let most_boxes = Lane::ALL.into_iter().map(boxes).max().unwrap_or(0);
    (USUAL_BOX * most_boxes as f64).clamp(least, most)
}

impl Drawing<'_> {
    fn markup(&self, title: &str, bars: &[MemoryBar]) -> String {
        let bottom = self.ranks_bottom() + AXIS_HEIGHT;
        let (width, height) = (self.right + MARGIN, bottom + memory::height(bars));
        let mut svg = hatch();
        svg += &self.header(title);
        svg += &self.legend();
        svg += &self.ticks();
        svg.extend((0..self.timeline.ranks.len()).map(|rank| self.rank(rank)));
        svg += &memory::markup(bars, bottom, MARGIN, LEFT, self.right);
        Page { width, height, font_size: FONT_SIZE, background: BACKGROUND, title }.markup(&svg)
    }

    fn ranks_bottom(&self) -> f64 {
        self.rank_top(self.timeline.ranks.len())
    }

    fn rank_top(&self, rank: usize) -> f64 {
        let rows = self.rows.len() as f64;
        let height = SUMMARY_HEIGHT + rows * (ROW_HEIGHT + ROW_GAP) - ROW_GAP + RANK_GAP;
        LEGEND_TOP + rows * LEGEND_ROW + LEGEND_BOTTOM + height * rank as f64
    }

    fn header(&self, title: &str) -> String {
        let style = format!("font-size=\"{TITLE_SIZE}\" font-weight=\"bold\"");
        let ranks = self.timeline.ranks.len();
        let subtitle = format!(
            "{ranks} {}, {} from the first start to the last end; at most {} % of it exposed",
            if ranks == 1 { "rank" } else { "ranks" },
            milliseconds(self.axis.duration_s()),
            percent(self.axis.share(self.most_exposed_s())),
        );
        text(MARGIN, TITLE_Y, &style, &elided(title, TITLE_SIZE, self.right - MARGIN))
            + &text(MARGIN, SUBTITLE_Y, &format!("fill=\"{FAINT_INK}\""), &subtitle)
    }

    fn most_exposed_s(&self) -> f64 {
        (0..self.timeline.ranks.len()).map(|rank| self.timeline.shares(rank).exposed_s).fold(0.0, f64::max)
    }

    /// A row for each lane; the parts stand behind the second.
    fn legend(&self) -> String {
        let mut svg = String::new();
        for (row, &lane) in self.rows.iter().enumerate() {
            let y = LEGEND_TOP + LEGEND_ROW * row as f64;
            svg += &row_name(lane.name(), y + SWATCH_HEIGHT / 2.0);
            let mut x = LEFT;
            for look in LOOKS.iter().filter(|look| look.lane == lane && self.shows(look.kind)) {
                svg += &entry(&mut x, y, look, Edges::of(0), look.name);
            }
            if lane == Lane::Comm {
                svg += &self.parts(x, y);
            }
        }
        svg
    }

    /// Whether the legend explains a kind. Few drawings have some of them.
    fn shows(&self, kind: Kind) -> bool {
        let is_rare = matches!(kind, Kind::Of(WorkFamily::Migrate | WorkFamily::Update));
        !is_rare || self.timeline.ranks.iter().flatten().any(|span| Kind::of(span.work) == kind)
    }

    /// Shows how boxes mark their parts, if there are several.
    fn parts(&self, mut x: f64, y: f64) -> String {
        let spans = self.timeline.ranks.iter().flatten();
        let last = spans.map(|span| span.micro.part).max().unwrap_or(0);
        if last == 0 {
            return String::new();
        }
        let part = |part: usize| {
            let again = part + Edges::COUNT;
            let name = if again > last { format!("part {part}") } else { format!("part {part}, {again}, …") };
            entry(&mut x, y, Kind::Of(WorkFamily::Forward).look(), Edges::of(part), &name)
        };
        (0..=last.min(Edges::COUNT - 1)).map(part).collect()
    }

    /// Times above the first rank and below the last.
    fn ticks(&self) -> String {
        let (above, below) = (self.rank_top(0) - AXIS_GAP, self.ranks_bottom() + FONT_SIZE / 2.0);
        let style = format!("text-anchor=\"middle\" fill=\"{FAINT_INK}\"");
        let mut svg = String::new();
        for y in [above, below] {
            svg += &text(LEFT - LABEL_GAP, y, &format!("text-anchor=\"end\" fill=\"{FAINT_INK}\""), "ms");
            svg.extend(self.ticks_shown().iter().map(|(x, label)| text(*x, y, &style, label)));
        }
        svg
    }

    fn ticks_shown(&self) -> Vec<(f64, String)> {
        self.axis.ticks(((self.right - LEFT) / TICK_DISTANCE) as usize)
    }

    fn rank(&self, rank: usize) -> String {
        let top = self.rank_top(rank);
        let baseline = top + SUMMARY_HEIGHT - LABEL_GAP;
        let mut svg = text(MARGIN, baseline, "font-weight=\"bold\"", &format!("rank {rank}"));
        let summary = self.summary(&self.timeline.shares(rank));
        svg += &text(LEFT, baseline, &format!("fill=\"{FAINT_INK}\""), &summary);
        for (row, &lane) in self.rows.iter().enumerate() {
            let y = top + SUMMARY_HEIGHT + (ROW_HEIGHT + ROW_GAP) * row as f64;
            svg += &row_name(lane.name(), y + ROW_HEIGHT / 2.0);
            svg += &self.row(rank, lane, y);
        }
        svg
    }

    fn summary(&self, shares: &Shares) -> String {
        format!(
            "compute {} · transfer {} · waiting {} · exposed {} = {} % of the step",
            milliseconds(shares.compute_s),
            milliseconds(shares.transfer_s),
            milliseconds(shares.waiting_s),
            milliseconds(shares.exposed_s),
            percent(self.axis.share(shares.exposed_s)),
        )
    }

    fn row(&self, rank: usize, lane: Lane, y: f64) -> String {
        let field = Rect { x: LEFT, y, width: self.right - LEFT, height: ROW_HEIGHT };
        let mut svg = field.markup(&format!("class=\"row\" fill=\"{ROW_FILL}\""), "");
        for (x, _) in self.ticks_shown() {
            svg += &format!("<path d=\"M{x:.2} {y:.2}v{ROW_HEIGHT}\" stroke=\"{GRID}\"/>\n");
        }
        let pieces = pieces(&self.timeline.ranks[rank], lane, self.axis.seconds(NARROWEST));
        svg.extend(pieces.iter().map(|piece| self.piece(piece, y)));
        svg
    }

    fn piece(&self, piece: &Piece, y: f64) -> String {
        let look = piece.kind.look();
        let place = self.place(piece, y);
        let tooltip = format!("<title>{}</title>", escaped(&self.tooltip(piece)));
        let mut svg = place.markup(&format!("class=\"box\" fill=\"{}\"", look.fill), &tooltip);
        if let Some(part) = piece.part.filter(|_| piece.kind != Kind::Waiting && place.width >= NARROWEST_MARKED) {
            svg += &edges(&place, Edges::of(part));
        }
        if let Some(label) = self.label(piece, place.width) {
            let (x, baseline) = (place.x + place.width / 2.0, y + ROW_HEIGHT / 2.0 + BASELINE * BOX_FONT_SIZE);
            let style = format!(
                "text-anchor=\"middle\" font-size=\"{BOX_FONT_SIZE}\" fill=\"{}\" pointer-events=\"none\"",
                look.ink
            );
            svg += &text(x, baseline, &style, &label);
        }
        svg
    }

    /// Always inside the plot.
    fn place(&self, piece: &Piece, y: f64) -> Rect {
        let (start, end) = (self.axis.x(piece.start_s), self.axis.x(piece.end_s));
        let full = (end - start).max(NARROWEST);
        let width = if full >= NARROWEST_MARKED + BOX_GAP { full - BOX_GAP } else { full };
        Rect { x: start.min(self.right - width), y, width, height: ROW_HEIGHT }
    }

    fn tooltip(&self, piece: &Piece) -> String {
        let name = self.words.name(piece.first);
        let what = match (piece.count, piece.kind) {
            (1, Kind::Waiting) => format!("waiting for peers: {name}"),
            (1, _) => name,
            (count, kind) => format!("{count} × {}, the first: {name}", kind.look().name),
        };
        let start = milliseconds(self.axis.since_start_s(piece.start_s));
        format!("{what}\nat {start}, for {}", milliseconds(piece.end_s - piece.start_s))
    }

    /// The longest label that fits.
    fn label(&self, piece: &Piece, room: f64) -> Option<String> {
        let fits = |label: &str| width(label, BOX_FONT_SIZE) + 2.0 * BOX_PADDING <= room;
        // Most boxes of a long step have no room for a single letter: this makes no words for those.
        if piece.count > 1 || !fits("1") {
            return None;
        }
        let labels = match piece.kind {
            Kind::Waiting => vec!["waiting".to_owned()],
            _ => self.words.labels(piece.first),
        };
        labels.into_iter().find(|label| fits(label))
    }
}

fn percent(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

fn row_name(name: &str, middle: f64) -> String {
    let style = format!("text-anchor=\"end\" fill=\"{FAINT_INK}\"");
    text(LEFT - LABEL_GAP, middle + BASELINE * FONT_SIZE, &style, name)
}

/// A swatch and its name at `x`, which moves on behind them.
fn entry(x: &mut f64, y: f64, look: &Look, marked: Edges, name: &str) -> String {
    let swatch = Rect { x: *x, y, width: SWATCH_WIDTH, height: SWATCH_HEIGHT };
    let name_x = *x + SWATCH_WIDTH + SWATCH_GAP;
    *x = name_x + width(name, FONT_SIZE) + LEGEND_GAP;
    let baseline = y + SWATCH_HEIGHT / 2.0 + BASELINE * FONT_SIZE;
    swatch.markup(&format!("fill=\"{}\"", look.fill), "") + &edges(&swatch, marked) + &text(name_x, baseline, "", name)
}

fn edges(place: &Rect, marked: Edges) -> String {
    let Rect { x, y, width, height } = *place;
    let edge = |y: f64| {
        let attributes = format!("fill=\"{EDGE_FILL}\" fill-opacity=\"{EDGE_OPACITY}\" pointer-events=\"none\"");
        Rect { x, y, width, height: EDGE_HEIGHT }.markup(&attributes, "")
    };
    let bottom = marked.bottom.then(|| edge(y + height - EDGE_HEIGHT));
    let top = marked.top.then(|| edge(y));
    bottom.into_iter().chain(top).collect()
}

fn hatch() -> String {
    format!(
        "<defs><pattern id=\"{HATCH_NAME}\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
         patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"{HATCH_FIELD}\"/>\
         <rect width=\"2\" height=\"6\" fill=\"{HATCH_LINE}\"/></pattern></defs>\n"
    )
}
