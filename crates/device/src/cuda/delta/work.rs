//! The rule's working memory.
//!
//! bf16 keeps an item for each value head of each slot, and a slot for each chunk: see `Parameters` in kernels/delta/shared.cuh. f32
//! goes through tokens and keeps states of whole heads.

use super::parameters::Parameters;
use super::sources::Variant;
use super::stretches::{Stretches, WARP_COLUMNS};
use crate::kernel::{DELTA_CHUNK, Segments};
use crate::{DType, Heads};

/// Numbers of a row, `NUMBERS` in kernels/delta/tiles.cuh.
const NUMBERS: usize = 11;
/// Columns of values that the gradients' kernel takes at once.
const VALUE_GRAIN: usize = 32;
/// Segments of up to so many tokens go token by token: a chunk of padding takes longer.
pub(super) const FEW_TOKENS: usize = 8;
/// Parts begin at multiples of this many f32.
const GRAIN: usize = 64;
/// An f64 is two f32.
const F64: usize = 2;

/// Hands out consecutive parts of working memory, or only counts them.
struct Cutter {
    address: u64,
    len: usize,
}

impl Cutter {
    fn cut(&mut self, floats: usize) -> u64 {
        let at = self.address + (self.len * size_of::<f32>()) as u64;
        self.len += floats.next_multiple_of(GRAIN);
        at
    }
}

/// What the sizes follow from.
pub(super) struct Sizes {
    key: usize,
    value: usize,
    heads: usize,
    tokens: usize,
    segments: usize,
    dtype: DType,
    /// Whether there are segments that are taken chunk by chunk.
    has_chunks: bool,
    pub stretches: Stretches,
}

impl Sizes {
    /// `few` is the most tokens of segments that go token by token.
    pub fn new(k: &Heads, v: &Heads, segments: &Segments, few: usize) -> Sizes {
        Sizes {
            key: k.dim,
            value: v.dim,
            heads: v.count,
            tokens: segments.tokens(),
            segments: segments.iter().count(),
            dtype: v.view.dtype,
            has_chunks: segments.iter().any(|tokens| tokens.len() > few),
            stretches: Stretches::new(v.count * border_rows(k.dim, v.dim), segments, few),
        }
    }

    pub fn slots(&self) -> usize {
        self.tokens / DELTA_CHUNK + self.segments
    }

    fn items(&self) -> usize {
        self.slots() * self.heads
    }

    pub fn variant(&self) -> &'static Variant {
        Variant::of(self.key)
    }

    /// V as the kernels of chunks take it.
    pub fn padded_value(&self) -> usize {
        padded_value(self.value)
    }

    /// Rows of a border, as `border_rows` in kernels/delta/tiles.cuh counts them.
    pub fn border_rows(&self) -> usize {
        border_rows(self.key, self.value)
    }

    fn cut_borders(&self, cutter: &mut Cutter) -> u64 {
        let border = self.border_rows() * self.variant().width;
        cutter.cut(self.stretches.borders(self.tokens) * self.heads * border)
    }

    fn cut_squares(&self, cutter: &mut Cutter) -> [u64; 2] {
        let numbers = cutter.cut(self.items() * NUMBERS * DELTA_CHUNK);
        // Two squares of bf16.
        [numbers, cutter.cut(self.items() * DELTA_CHUNK * DELTA_CHUNK)]
    }

    /// Sets the parts of working memory that begins at an address; returns its length.
    pub fn place_forward(&self, address: u64, parameters: &mut Parameters) -> usize {
        let mut cutter = Cutter { address, len: 0 };
        if self.dtype == DType::Bf16 && self.has_chunks {
            [parameters.numbers, parameters.squares] = self.cut_squares(&mut cutter);
            parameters.borders = self.cut_borders(&mut cutter);
        }
        cutter.len
    }

    pub fn place_backward(&self, address: u64, parameters: &mut Parameters) -> usize {
        let mut cutter = Cutter { address, len: 0 };
        if self.dtype == DType::Bf16 {
            [parameters.numbers, parameters.squares] = self.cut_squares(&mut cutter);
            parameters.borders = self.cut_borders(&mut cutter);
            // In bf16, two to an f32.
            let state = self.variant().width * self.padded_value() / 2;
            let rows = DELTA_CHUNK * self.padded_value() / 2;
            parameters.befores = cutter.cut(self.items() * state);
            parameters.afters = cutter.cut(self.items() * state);
            parameters.news = cutter.cut(self.items() * rows);
            parameters.rests = cutter.cut(self.items() * rows);
            parameters.errors = cutter.cut(self.items() * rows);
            parameters.sums = cutter.cut(self.items() * 2 * F64);
        } else {
            let state = self.key * self.value;
            let blocks = self.segments * self.heads;
            parameters.befores = cutter.cut(self.items() * state);
            parameters.afters = cutter.cut(blocks * (DELTA_CHUNK + 2) * state);
            parameters.news = cutter.cut(blocks * DELTA_CHUNK * self.value);
            parameters.errors = cutter.cut(2 * self.tokens * self.heads * self.key);
            parameters.sums = cutter.cut(blocks * 2 * F64);
        }
        cutter.len
    }
}

fn padded_value(value: usize) -> usize {
    value.next_multiple_of(VALUE_GRAIN)
}

fn border_rows(key: usize, value: usize) -> usize {
    padded_value(value) + key.next_multiple_of(WARP_COLUMNS)
}

/// f32 numbers of working memory for the forward rule.
pub(crate) fn delta_work_len(k: &Heads, v: &Heads, segments: &Segments) -> usize {
    Sizes::new(k, v, segments, FEW_TOKENS).place_forward(0, &mut Parameters::empty())
}

/// The same for backward.
pub(crate) fn delta_backward_work_len(k: &Heads, v: &Heads, segments: &Segments) -> usize {
    Sizes::new(k, v, segments, 0).place_backward(0, &mut Parameters::empty())
}
