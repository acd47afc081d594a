//! The parameters of the rule's kernels, field by field as `kernels/delta/shared.cuh` declares them.

use crate::View;
use crate::kernel::{DeltaGates, Segments};

/// Segments of one launch: its parameters hold their offsets. More of them take more launches.
pub(super) const MOST_SEGMENTS: usize = 384;

/// The widest keys, and the widest values of gradients in f32.
const MOST_KEY: usize = 256;
const MOST_VALUE: usize = 1024;

/// One tensor's heads.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Heads {
    address: u64,
    stride: i64,
    step: i64,
}

impl Heads {
    pub fn of(heads: &crate::Heads) -> Heads {
        Heads { address: heads.view.address(), stride: heads.view.stride as i64, step: heads.step as i64 }
    }
}

/// A row of heads for each token.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Gate {
    address: u64,
    stride: i64,
}

impl Gate {
    pub fn of(view: &View) -> Gate {
        Gate { address: view.address(), stride: view.stride as i64 }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Parameters {
    pub q: Heads,
    pub k: Heads,
    pub v: Heads,
    pub out: Heads,
    pub dout: Heads,
    pub dq: Heads,
    pub dk: Heads,
    pub dv: Heads,
    fade: Gate,
    take: Gate,
    pub dfade: Gate,
    pub dtake: Gate,
    log_rate: u64,
    bias: u64,
    pub states: u64,
    pub states_stride: i64,
    pub numbers: u64,
    pub squares: u64,
    pub befores: u64,
    pub afters: u64,
    pub borders: u64,
    pub news: u64,
    pub rests: u64,
    pub errors: u64,
    pub sums: u64,
    pub dlog_rate: u64,
    pub dbias: u64,
    pub key: u32,
    pub value: u32,
    pub heads: u32,
    pub ratio: u32,
    pub padded_value: u32,
    pub aligned: u32,
    pub few: u32,
    pub stages: u32,
    pub stretch: u32,
    pub tokens: u32,
    pub shares: u32,
    pub first_segment: u32,
    pub segments: u32,
    pub offsets: [u32; MOST_SEGMENTS + 1],
}

const _: () = assert!(size_of::<Parameters>() <= 4096, "a kernel takes 4 KiB of parameters everywhere");
const _: () = assert!(
    size_of::<Parameters>() == std::mem::offset_of!(Parameters, offsets) + size_of::<[u32; MOST_SEGMENTS + 1]>(),
    "arguments are compared word by word, so there are no gaps"
);

impl Parameters {
    /// Parameters without an output, gradients, states, working memory or segments.
    pub fn new(q: &crate::Heads, k: &crate::Heads, v: &crate::Heads, gates: &DeltaGates) -> Parameters {
        assert!(k.dim <= MOST_KEY, "a delta rule with keys of {} elements, at most {MOST_KEY} are possible", k.dim);
        assert!(
            v.dim <= MOST_VALUE,
            "a delta rule with values of {} elements, at most {MOST_VALUE} are possible",
            v.dim
        );
        Parameters {
            q: Heads::of(q),
            k: Heads::of(k),
            v: Heads::of(v),
            fade: Gate::of(&gates.fade),
            take: Gate::of(&gates.take),
            log_rate: gates.log_rate.address(),
            bias: gates.bias.address(),
            key: number(k.dim),
            value: number(v.dim),
            heads: number(v.count),
            ratio: number(v.count / k.count),
            tokens: number(v.tokens()),
            ..Parameters::empty()
        }
    }

    pub fn empty() -> Parameters {
        Parameters {
            q: Heads::default(),
            k: Heads::default(),
            v: Heads::default(),
            out: Heads::default(),
            dout: Heads::default(),
            dq: Heads::default(),
            dk: Heads::default(),
            dv: Heads::default(),
            fade: Gate::default(),
            take: Gate::default(),
            dfade: Gate::default(),
            dtake: Gate::default(),
            log_rate: 0,
            bias: 0,
            states: 0,
            states_stride: 0,
            numbers: 0,
            squares: 0,
            befores: 0,
            afters: 0,
            borders: 0,
            news: 0,
            rests: 0,
            errors: 0,
            sums: 0,
            dlog_rate: 0,
            dbias: 0,
            key: 0,
            value: 0,
            heads: 0,
            ratio: 0,
            padded_value: 0,
            aligned: 0,
            few: 0,
            stages: 0,
            stretch: 0,
            tokens: 0,
            shares: 0,
            first_segment: 0,
            segments: 0,
            offsets: [0; MOST_SEGMENTS + 1],
        }
    }

    /// The same for each launch: some of the segments each.
    pub fn launches(&self, segments: &Segments) -> Vec<Parameters> {
        let of_group = |(first, offsets): (usize, Vec<u32>)| {
            let (first_segment, segments) = (number(first), number(offsets.len() - 1));
            let mut parameters = Parameters { first_segment, segments, ..*self };
            parameters.offsets[..offsets.len()].copy_from_slice(&offsets);
            parameters
        };
        some_segments(segments).into_iter().map(of_group).collect()
    }

    /// The tokens of this launch.
    pub fn launch_tokens(&self) -> usize {
        (self.offsets[self.segments as usize] - self.offsets[0]) as usize
    }

    /// Slots of this launch for so many tokens each, a chunk's or a stretch's, some of which may be empty.
    pub fn slots(&self, tokens: usize) -> usize {
        let first = |segment: usize| self.offsets[segment] as usize / tokens + segment;
        first(self.segments as usize) - first(0)
    }
}

/// Segments few enough for a launch: the first one's number, and the offsets of all. Groups without tokens are left out.
pub(super) fn some_segments(segments: &Segments) -> Vec<(usize, Vec<u32>)> {
    let all: Vec<_> = segments.iter().collect();
    let groups = all.chunks(MOST_SEGMENTS).enumerate().map(|(i, group)| {
        let ends = group.iter().map(|segment| number(segment.end));
        let offsets: Vec<u32> = std::iter::once(number(group[0].start)).chain(ends).collect();
        (i * MOST_SEGMENTS, offsets)
    });
    groups.filter(|(_, offsets)| offsets.first() < offsets.last()).collect()
}

/// Tokens, heads and their like fit 31 bits.
pub(super) fn number(value: usize) -> u32 {
    assert!(value < 1 << 31, "a delta rule over {value} tokens or rows at once");
    value as u32
}

/// Whether every head begins at a multiple of 16 bytes and fills some.
pub(super) fn are_aligned(heads: &[&crate::Heads]) -> bool {
    heads.iter().all(|heads| {
        let elements = 16 / heads.view.dtype.size_bytes();
        let whole = [heads.dim, heads.step, heads.view.stride].iter().all(|len| len % elements == 0);
        whole && heads.view.address().is_multiple_of(16)
    })
}
