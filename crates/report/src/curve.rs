//! The loss curve as an SVG picture.

use std::fmt::Write as _;
use std::io::{self, Write};

use crate::svg::colour::{ALARM, AXIS, FAINT_INK, GRID, WHITE};
use crate::svg::{Page, Scale, elided, text};
use crate::{RunEvent, Sink};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 540.0;
/// The plot's edges.
const LEFT: f64 = 72.0;
const RIGHT: f64 = WIDTH - 24.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = HEIGHT - 56.0;

/// The line below the title, and the room that a letter in it has.
const LEGEND: f64 = 52.0;
const LETTER: f64 = 8.4;
const TITLE_SIZE: f64 = 18.0;

const TRAIN: &str = "#1f77b4";
const EVAL: &str = "#d95f02";

/// More points than the picture has columns are never kept.
const MOST_POINTS: usize = 2048;

/// Losses as they come. Memory is bounded, however long a run is: neighbours are merged when there are too many.
pub struct Curve {
    title: String,
    train: Series,
    eval: Series,
    /// Steps whose loss was not finite; no line goes through them.
    not_finite: u64,
}

impl Curve {
    pub fn new(title: impl Into<String>) -> Curve {
        Curve { title: title.into(), train: Series::default(), eval: Series::default(), not_finite: 0 }
    }

    pub fn add(&mut self, step: u64, loss: f64) {
        if loss.is_finite() {
            self.train.add(step as f64, loss);
        } else {
            self.not_finite += 1;
        }
    }

    pub fn add_eval(&mut self, step: u64, loss: f64) {
        if loss.is_finite() {
            self.eval.add(step as f64, loss);
        }
    }

    pub fn write_svg(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(self.svg().as_bytes())
    }

    fn svg(&self) -> String {
        let (train, eval) = (self.train.points(), self.eval.points());
        let plot = Plot::around(train.iter().chain(&eval));
        let style = format!("font-size=\"{TITLE_SIZE}\" font-weight=\"bold\"");
        let mut svg = text(LEFT, 28.0, &style, &elided(&self.title, TITLE_SIZE, RIGHT - LEFT));
        if self.not_finite > 0 {
            let (steps, are) = if self.not_finite == 1 { ("step", "is") } else { ("steps", "are") };
            let note = format!("{} {steps} without a finite loss {are} left out", self.not_finite);
            svg += &text(LEFT, LEGEND, &format!("font-size=\"12\" fill=\"{ALARM}\""), &note);
        }
        svg += &plot.axes();
        if train.is_empty() && eval.is_empty() {
            let middle = ((LEFT + RIGHT) / 2.0, (TOP + BOTTOM) / 2.0);
            svg += &text(middle.0, middle.1, "text-anchor=\"middle\"", "no finite loss yet");
        }
        let smooth = smoothed(&train);
        if smooth.is_some() {
            svg += &plot.line(&train, TRAIN, "stroke-width=\"1\" stroke-opacity=\"0.35\"");
        }
        let (name, shown) = match &smooth {
            Some(smooth) => ("train, smoothed", smooth),
            None => ("train", &train),
        };
        svg += &plot.line(shown, TRAIN, "stroke-width=\"2.5\"");
        svg += &plot.line(&eval, EVAL, "stroke-width=\"1.5\" stroke-dasharray=\"5 4\"");
        svg += &plot.dots(&eval, EVAL);
        svg += &legend(&[(name, TRAIN, shown.last()), ("eval", EVAL, eval.last())]);
        Page { width: WIDTH, height: HEIGHT, font_size: 14.0, background: WHITE, title: &self.title }.markup(&svg)
    }
}

impl Sink for Curve {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        match event {
            RunEvent::Step { metrics, .. } => self.add(metrics.step, metrics.loss),
            RunEvent::Evaluation { step, metrics, .. } => self.add_eval(*step, metrics.loss),
            _ => (),
        }
        Ok(())
    }
}

/// Names and last values, above the plot on the right, out of the curves' way.
fn legend(entries: &[(&str, &str, Option<&Point>)]) -> String {
    let (mut svg, mut right) = (String::new(), RIGHT);
    for (name, color, last) in entries.iter().rev() {
        let Some(last) = last else { continue };
        let (words, left, y) = (format!("{name} {:.4}", last.y), right - 24.0, LEGEND - 5.0);
        let _ = writeln!(
            svg,
            "<line x1=\"{left:.1}\" y1=\"{y}\" x2=\"{right:.1}\" y2=\"{y}\" stroke=\"{color}\" stroke-width=\"3\"/>"
        );
        svg += &text(left - 8.0, LEGEND, "text-anchor=\"end\"", &words);
        right = left - 8.0 - LETTER * words.chars().count() as f64 - 16.0;
    }
    svg
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    x: f64,
    y: f64,
}

/// Means over `stride` neighbours each.
struct Series {
    means: Vec<Point>,
    stride: usize,
    /// The sum of the last few points, fewer than `stride`.
    open: Point,
    open_count: usize,
}

impl Default for Series {
    fn default() -> Series {
        Series { means: Vec::new(), stride: 1, open: Point { x: 0.0, y: 0.0 }, open_count: 0 }
    }
}

impl Series {
    fn add(&mut self, x: f64, y: f64) {
        self.open = Point { x: self.open.x + x, y: self.open.y + y };
        self.open_count += 1;
        if self.open_count < self.stride {
            return;
        }
        self.means.extend(self.open_mean());
        (self.open, self.open_count) = (Point { x: 0.0, y: 0.0 }, 0);
        if self.means.len() == MOST_POINTS {
            let mean = |pair: &[Point]| Point { x: (pair[0].x + pair[1].x) / 2.0, y: (pair[0].y + pair[1].y) / 2.0 };
            self.means = self.means.chunks_exact(2).map(mean).collect();
            self.stride *= 2;
        }
    }

    fn points(&self) -> Vec<Point> {
        self.means.iter().copied().chain(self.open_mean()).collect()
    }

    fn open_mean(&self) -> Option<Point> {
        let count = self.open_count as f64;
        (self.open_count > 0).then(|| Point { x: self.open.x / count, y: self.open.y / count })
    }
}

/// Each point's mean with its neighbours, a fiftieth of the curve to both sides, fewer at the ends; `None` for a curve that is
/// too short to have any.
fn smoothed(points: &[Point]) -> Option<Vec<Point>> {
    let reach = points.len() / 50;
    let mean = |index: usize| {
        let before = reach.min(index);
        // At the steep beginning, as many points after it as before it, or the line would start too low.
        let after = before.min(points.len() - 1 - index);
        let near = &points[index - before..=index + after];
        Point { x: points[index].x, y: near.iter().map(|point| point.y).sum::<f64>() / near.len() as f64 }
    };
    (reach > 0).then(|| (0..points.len()).map(mean).collect())
}

/// The scales of the picture.
struct Plot {
    x: Scale,
    y: Scale,
}

impl Plot {
    fn around<'a>(points: impl Iterator<Item = &'a Point>) -> Plot {
        let nothing = ((f64::INFINITY, f64::NEG_INFINITY), (f64::INFINITY, f64::NEG_INFINITY));
        let widen = |range: (f64, f64), value: f64| (range.0.min(value), range.1.max(value));
        let (x, y) = points.fold(nothing, |(x, y), point| (widen(x, point.x), widen(y, point.y)));
        if x.0 > x.1 {
            return Plot::over((0.0, 1.0), (0.0, 1.0));
        }
        let margin = if y.1 > y.0 { 0.05 * (y.1 - y.0) } else { 0.05 * y.0.abs().max(1.0) };
        Plot::over((0.0, x.1.max(1.0)), (y.0 - margin, y.1 + margin))
    }

    fn over(x: (f64, f64), y: (f64, f64)) -> Plot {
        Plot { x: Scale { values: x, pixels: (LEFT, RIGHT) }, y: Scale { values: y, pixels: (BOTTOM, TOP) } }
    }

    fn place(&self, point: Point) -> (f64, f64) {
        (self.x.place(point.x), self.y.place(point.y))
    }

    fn axes(&self) -> String {
        let mut svg = String::new();
        let faint = |anchor: &str| format!("text-anchor=\"{anchor}\" fill=\"{FAINT_INK}\"");
        let losses = self.y.ticks(6);
        for &value in &losses.values {
            let y = self.y.place(value);
            let _ = writeln!(svg, "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"{GRID}\"/>");
            svg += &text(LEFT - 8.0, y + 5.0, &faint("end"), &losses.label(value));
        }
        let steps = self.x.ticks(8);
        for &value in &steps.values {
            let x = self.x.place(value);
            let _ = writeln!(svg, "<path d=\"M{x:.1} {BOTTOM}v5\" stroke=\"{AXIS}\"/>");
            svg += &text(x, BOTTOM + 22.0, &faint("middle"), &steps.label(value));
        }
        let _ = writeln!(svg, "<path d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}\" fill=\"none\" stroke=\"{AXIS}\"/>");
        let middle = (TOP + BOTTOM) / 2.0;
        let turned = format!("{} transform=\"rotate(-90 18 {middle})\"", faint("middle"));
        svg += &text((LEFT + RIGHT) / 2.0, HEIGHT - 12.0, &faint("middle"), "step");
        svg + &text(18.0, middle, &turned, "loss")
    }

    fn line(&self, points: &[Point], color: &str, style: &str) -> String {
        if points.len() < 2 {
            return if style.contains("dash") { String::new() } else { self.dots(points, color) };
        }
        let mut path = String::new();
        for (index, &point) in points.iter().enumerate() {
            let (x, y) = self.place(point);
            let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { "M" } else { "L" });
        }
        format!("<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-linejoin=\"round\" {style}/>\n")
    }

    fn dots(&self, points: &[Point], color: &str) -> String {
        let dot = |&point: &Point| {
            let (x, y) = self.place(point);
            format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{color}\"/>\n")
        };
        points.iter().map(dot).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(curve: &Curve) -> String {
        let mut out = Vec::new();
        curve.write_svg(&mut out).expect("memory can be written");
        String::from_utf8(out).expect("text")
    }

    /// The points of the first line, or none.
    fn places(svg: &str) -> Vec<(f64, f64)> {
        let line = svg.lines().find(|line| line.contains("stroke-linejoin")).unwrap_or_default();
        let path = line.split('"').nth(1).unwrap_or_default().split(['M', 'L']).filter(|place| !place.is_empty());
        let number = |text: &str| text.parse().expect("a number");
        path.map(|place| place.split_once(' ').map(|(x, y)| (number(x), number(y))).expect("two numbers")).collect()
    }

    #[test]
    fn a_curve_has_its_title_ticks_lines_and_points() {
        let mut curve = Curve::new("a <b> & c");
        (1..=1000).for_each(|step| curve.add(step, 10.0 / step as f64));
        [(250, 1.0), (500, 0.5), (1000, 0.25)].iter().for_each(|&(step, loss)| curve.add_eval(step, loss));
        let svg = drawn(&curve);
        for part in
            ["a &lt;b&gt; &amp; c", ">step<", ">loss<", ">200<", ">1000<", ">10<", "eval 0.2500", "smoothed 0.0101"]
        {
            assert!(svg.contains(part), "{part} is not in\n{svg}");
        }
        assert_eq!((svg.matches("<circle").count(), svg.matches("stroke-dasharray").count()), (3, 1));
        let places = places(&svg);
        assert_eq!((places.len(), places[999].0), (1000, RIGHT), "the last step is at the right edge");
        assert!(places.is_sorted_by(|a, b| a.0 <= b.0 && a.1 <= b.1), "a falling loss falls");
    }

    /// The box around each upright text, by the wider letters of a usual font: left, top, right, bottom.
    fn boxes(svg: &str) -> Vec<[f64; 4]> {
        let bounds = |line: &str| {
            let attribute = |name: &str| line.split_once(&format!(" {name}=\""))?.1.split('"').next();
            let number = |name: &str| attribute(name)?.parse::<f64>().ok();
            let (x, y) = (number("x").expect("a place"), number("y").expect("a place"));
            let size = number("font-size").unwrap_or(14.0);
            let words = line.split_once('>').and_then(|(_, rest)| rest.split_once('<')).expect("words").0;
            let width = 0.6 * size * words.chars().count() as f64;
            let left = match attribute("text-anchor") {
                Some("end") => x - width,
                Some("middle") => x - width / 2.0,
                _ => x,
            };
            [left, y - size, left + width, y]
        };
        let texts = svg.lines().filter(|line| line.starts_with("<text") && !line.contains("rotate"));
        texts.map(bounds).collect()
    }

    #[test]
    fn names_stand_clear_of_each_other_and_of_every_curve() {
        let mut curve = Curve::new(format!("{}: LlamaForCausalLM, 999.9 M parameters", "a".repeat(300)));
        for step in 1..=1000 {
            // The curve ends at its highest, where a legend inside the plot would be.
            curve.add(step, 1000.0 + step as f64);
            curve.add_eval(step, 1000.0 + 2.0 * step as f64);
        }
        (0..999_999).for_each(|_| curve.add(1000, f64::NAN));
        let svg = drawn(&curve);
        let boxes = boxes(&svg);
        let meet = |a: &[f64; 4], b: &[f64; 4]| a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
        for (index, one) in boxes.iter().enumerate() {
            assert!(one[0] >= 0.0 && one[2] <= WIDTH && one[1] >= 0.0 && one[3] <= HEIGHT, "{one:?} of\n{svg}");
            assert_eq!(boxes[..index].iter().find(|other| meet(one, other)), None, "{one:?} of\n{svg}");
            assert!(!meet(one, &[LEFT, TOP, RIGHT, BOTTOM]), "{one:?} of\n{svg}");
        }
        assert!(svg.contains("smoothed 1990") && svg.contains("eval 3000.0000"), "{svg}");
    }

    #[test]
    fn a_short_run_has_one_line_and_its_last_loss() {
        let mut curve = Curve::new("short");
        (1..50).for_each(|step| curve.add(step, f64::from(step as u32 % 2) + 0.5));
        let svg = drawn(&curve);
        assert!(svg.contains(">train 1.5000<") && !svg.contains("smoothed"), "{svg}");
        assert_eq!(svg.matches("stroke-linejoin").count(), 1, "{svg}");
        curve.add(50, 0.5);
        let svg = drawn(&curve);
        assert!(svg.contains(">train, smoothed 1.0000<"), "{svg}");
        assert_eq!(svg.matches("stroke-linejoin").count(), 2, "{svg}");
    }

    #[test]
    fn nothing_drawn_is_outside_of_the_picture_or_not_a_number() {
        let cases: [(&str, &[f64]); 6] = [
            ("nothing", &[]),
            ("one", &[2.0]),
            ("all the same", &[2.0, 2.0, 2.0]),
            ("not finite", &[f64::NAN, f64::INFINITY]),
            ("some finite", &[3.0, f64::NAN, 1.0]),
            ("large and negative", &[1e30, -1e30]),
        ];
        for (name, losses) in cases {
            let mut curve = Curve::new(name);
            losses.iter().zip(1..).for_each(|(&loss, step)| curve.add(step, loss));
            let svg = drawn(&curve);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}:\n{svg}");
            let finite = losses.iter().filter(|loss| loss.is_finite()).count();
            assert_eq!(svg.contains("no finite loss yet"), finite == 0, "{name}");
            assert_eq!(svg.contains("left out"), finite < losses.len(), "{name}");
            for (x, y) in places(&svg) {
                assert!((LEFT..=RIGHT).contains(&x) && (TOP..=BOTTOM).contains(&y), "{name}: {x} {y}\n{svg}");
            }
        }
    }

    #[test]
    fn a_long_run_keeps_its_shape_in_bounded_memory() {
        let mut series = Series::default();
        (0..1_000_000).for_each(|step| series.add(f64::from(step), f64::from(step)));
        let points = series.points();
        assert!(points.len() <= MOST_POINTS && points.len() >= MOST_POINTS / 2, "{}", points.len());
        assert!(points.iter().all(|point| point.x == point.y));
        assert!(points.is_sorted_by(|a, b| a.x < b.x));
        assert!(points.last().is_some_and(|last| last.x > 999_000.0));
        // Every part of the run counts alike; only the end may stand for fewer steps.
        let gaps: Vec<f64> = points.windows(2).map(|pair| pair[1].x - pair[0].x).collect();
        assert!(gaps[..gaps.len() - 1].iter().all(|gap| *gap == gaps[0]), "{gaps:?}");
    }

    #[test]
    fn smoothing_keeps_a_straight_line_and_calms_a_restless_one() {
        let straight: Vec<Point> = (0..500).map(|x| Point { x: f64::from(x), y: f64::from(x) }).collect();
        assert!(smoothed(&straight).unwrap()[..490].iter().all(|point| (point.x - point.y).abs() < 1e-9));
        let restless: Vec<Point> = (0..500).map(|x| Point { x: f64::from(x), y: f64::from(x % 2) }).collect();
        assert!(smoothed(&restless).unwrap()[10..].iter().all(|point| (point.y - 0.5).abs() < 0.05));
    }
}
