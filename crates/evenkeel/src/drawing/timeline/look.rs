//! The kinds of work that a drawing distinguishes, and their looks.

use evenkeel_step::{Lane, Work, WorkFamily};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Of(WorkFamily),
    Waiting,
}

pub(super) struct Look {
    pub kind: Kind,
    pub name: &'static str,
    pub lane: Lane,
    pub fill: &'static str,
    /// Colour of text on the fill.
    pub ink: &'static str,
}

const WHITE: &str = "#ffffff";
const BLACK: &str = "#1a1a1a";

/// The pattern of waiting boxes, and its colours.
pub(super) const HATCH_NAME: &str = "evenkeel-waiting";
pub(super) const HATCH_FIELD: &str = "#ecebe7";
pub(super) const HATCH_LINE: &str = "#c2c0b8";

/// Blue runs forward, red and yellow backward, green between ranks; light colours mark work that could be spared or put off.
#[rustfmt::skip]
pub(super) const LOOKS: [Look; 12] = [
    Look { kind: Kind::Of(WorkFamily::Forward),        name: "forward",           lane: Lane::Compute, fill: "#2f6db5", ink: WHITE },
    Look { kind: Kind::Of(WorkFamily::Recompute),      name: "recompute",         lane: Lane::Compute, fill: "#9cc9ee", ink: BLACK },
    Look { kind: Kind::Of(WorkFamily::BackwardInput),  name: "backward input",    lane: Lane::Compute, fill: "#bf4a1b", ink: WHITE },
    Look { kind: Kind::Of(WorkFamily::BackwardWeight), name: "backward weight",   lane: Lane::Compute, fill: "#f2b54a", ink: BLACK },
    Look { kind: Kind::Of(WorkFamily::Head),           name: "head and loss",     lane: Lane::Compute, fill: "#8a4a9e", ink: WHITE },
    Look { kind: Kind::Of(WorkFamily::Entry),          name: "entry norms",       lane: Lane::Compute, fill: "#6b727c", ink: WHITE },
    Look { kind: Kind::Of(WorkFamily::Update),         name: "norm and update",   lane: Lane::Compute, fill: "#3d4450", ink: WHITE },
    Look { kind: Kind::Of(WorkFamily::Reduce),         name: "reduce",            lane: Lane::Comm,    fill: "#0b7a68", ink: WHITE },
    Look { kind: Kind::Of(WorkFamily::Gather),         name: "gather",            lane: Lane::Comm,    fill: "#9ad3a0", ink: BLACK },
    Look { kind: Kind::Of(WorkFamily::Migrate),           name: "migrate and return", lane: Lane::Comm,    fill: "#c9d64a", ink: BLACK },
    Look { kind: Kind::Of(WorkFamily::Pass),           name: "pass to a stage",   lane: Lane::Pass,    fill: "#4a9dd6", ink: BLACK },
    Look { kind: Kind::Waiting,                      name: "waiting for peers", lane: Lane::Comm,    fill: "url(#evenkeel-waiting)", ink: BLACK },
];

impl Kind {
    pub(super) fn of(work: Work) -> Kind {
        Kind::Of(work.row().family)
    }

    pub(super) fn look(self) -> &'static Look {
        LOOKS.iter().find(|look| look.kind == self).expect("every kind has a look")
    }
}

/// The edges of a box that are marked to tell its part: with two of them, four parts in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Edges {
    pub bottom: bool,
    pub top: bool,
}

impl Edges {
    pub(super) const COUNT: usize = 4;

    pub(super) fn of(part: usize) -> Edges {
        Edges { bottom: part & 1 != 0, top: part & 2 != 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_step::{BucketIdx, Chunk};

    /// The least contrast for small text, by the Web Content Accessibility Guidelines.
    const LEAST_CONTRAST: f64 = 4.5;

    fn luminance(colour: &str) -> f64 {
        let channel = |at: usize| {
            let value = f64::from(u8::from_str_radix(&colour[at..at + 2], 16).expect("two digits")) / 255.0;
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    /// Every kind of work, whatever its numbers.
    const WORKS: [Work; 30] = [
        Work::Enter,
        Work::Forward,
        Work::Normalise,
        Work::Recompute,
        Work::Logits(Chunk(0)),
        Work::Loss(Chunk(0)),
        Work::Evaluate(Chunk(0)),
        Work::BackwardInput,
        Work::BackwardWeight,
        Work::BackwardEnter,
        Work::AllReduce,
        Work::ReduceScatter,
        Work::AllGather,
        Work::GatherStats(Chunk(0)),
        Work::SumGradients(BucketIdx(0)),
        Work::ReduceGradients(BucketIdx(0)),
        Work::GatherParameters(BucketIdx(0)),
        Work::Arrive,
        Work::Join,
        Work::BackwardJoin,
        Work::Pass,
        Work::PassGradient,
        Work::Migrate,
        Work::Return,
        Work::MeasureNorm,
        Work::Update,
        Work::SumNorm,
        Work::GatherUpdated(BucketIdx(0)),
        Work::MeasureRows,
        Work::SumRows(BucketIdx(0)),
    ];

    #[test]
    fn work_looks_like_work_of_its_lane() {
        for work in WORKS {
            assert_eq!(Kind::of(work).look().lane, work.lane(), "{work:?}");
        }
        assert_eq!(Kind::Waiting.look().lane, Lane::Comm);
    }

    #[test]
    fn text_can_be_read_on_every_fill() {
        for look in &LOOKS {
            let is_hatched = look.fill == format!("url(#{HATCH_NAME})");
            let fills: &[&str] = if is_hatched { &[HATCH_FIELD, HATCH_LINE] } else { &[look.fill] };
            for fill in fills {
                let (a, b) = (luminance(fill), luminance(look.ink));
                let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
                assert!(contrast >= LEAST_CONTRAST, "{}: {contrast:.2} on {fill}", look.name);
            }
        }
    }
}
