//! Launches of our own kernels.

use std::ops::Range;

use super::super::Stream;
use super::super::modules::Source;
use super::super::stream::Shape;
use super::parameters::{Heads, MOST_SEGMENTS, Parameters, are_aligned, number};
use super::sources::{ROWS, Variant};
use crate::DType;
use crate::kernel::{Attention, AttentionBackward, CachedAttention, Segments};

const THREADS: u32 = 128;
const WARPS: usize = 4;

/// The tiles that a block has of a variant's kernels, as their sources say.
struct Tiles {
    dtype: DType,
    width: usize,
}

impl Tiles {
    /// Queries of a forward block; queries or keys of a backward one.
    fn rows(&self) -> usize {
        if self.dtype == DType::F32 { 32 } else { 64 }
    }

    /// Keys, or queries where keys have the block, that stream past, twice: one is fetched while another is used.
    fn bf16_columns(&self, widest_at_64: usize) -> usize {
        if self.width <= widest_at_64 { 64 } else { 32 }
    }

    fn forward_bytes(&self) -> usize {
        match self.dtype {
            DType::F32 => (3 * 32 * (self.width + 4) + 32 * 32) * 4,
            _ => (self.rows() + 4 * self.bf16_columns(128)) * (self.width + 8) * 2,
        }
    }

    fn backward_queries_bytes(&self) -> usize {
        match self.dtype {
            DType::F32 => (4 * 32 * (self.width + 4) + 32 * 32) * 4,
            _ => (2 * self.rows() + 4 * self.bf16_columns(128)) * (self.width + 8) * 2,
        }
    }

    fn backward_keys_bytes(&self) -> usize {
        match self.dtype {
            DType::F32 => (4 * 32 * (self.width + 4) + 2 * 32 * 32) * 4,
            _ => {
                let queries = self.bf16_columns(64);
                (2 * self.rows() + 4 * queries) * (self.width + 8) * 2 + 2 * queries * 16
            }
        }
    }
}

pub(super) fn forward(kernel: &Attention, stream: &mut Stream) {
    let Attention { q, k, v, out, logsum, segments, mask, scale, dropout } = kernel;
    let mut parameters = Parameters::new(q, k, v, *mask, *scale);
    parameters.out = Heads::of(out);
    parameters.aligned = are_aligned(&[q, k, v, out]) as u32;
    parameters.set_logsum(logsum);
    parameters.set_dropout(*dropout);
    attend(&parameters, q.count, q.view.dtype, segments, &[], stream);
}

fn attend(
    parameters: &Parameters,
    heads: usize,
    dtype: DType,
    segments: &Segments,
    cached: &[usize],
    stream: &mut Stream,
) {
    let variant = Variant::of(parameters.dim as usize);
    let tiles = Tiles { dtype, width: variant.width };
    let launch = Launch {
        source: variant.forward(dtype, parameters.drops()),
        name: "attention_forward",
        rows: tiles.rows(),
        heads,
        shared_bytes: tiles.forward_bytes(),
    };
    launch.over_segments(parameters, segments, cached, dtype, stream);
}

pub(super) fn backward(kernel: &AttentionBackward, stream: &mut Stream) {
    let AttentionBackward { q, k, v, out, logsum, dout, dq, dk, dv, segments, mask, scale, dropout } = kernel;
    let dtype = q.view.dtype;
    let mut parameters = Parameters::new(q, k, v, *mask, *scale);
    (parameters.out, parameters.dout) = (Heads::of(out), Heads::of(dout));
    (parameters.dq, parameters.dk, parameters.dv) = (Heads::of(dq), Heads::of(dk), Heads::of(dv));
    parameters.aligned = are_aligned(&[q, k, v, dout, dq, dk, dv]) as u32;
    parameters.set_logsum(logsum);
    parameters.set_dropout(*dropout);
    let variant = Variant::of(q.dim);
    let delta_bytes = ((q.tokens() * q.count * size_of::<f32>()) as u64).next_multiple_of(256);
    let (bit_words, bit_bytes) = bits(segments, q.tokens() * q.count);
    let keeps_bits = parameters.drops() && dtype == DType::Bf16 && variant.width <= 128 && bit_bytes <= MOST_BIT_BYTES;
    parameters.delta = stream.scratch(delta_bytes + if keeps_bits { bit_bytes } else { 0 });
    if keeps_bits {
        (parameters.bits, parameters.bit_words) = (parameters.delta + delta_bytes, bit_words);
    }
    launch_delta(&parameters, q.count, dtype, stream);

    let tiles = Tiles { dtype, width: variant.width };
    let source = variant.backward(dtype, parameters.drops());
    // The sums of wide heads' gradients do not fit the registers together.
    let key_kernels: &[&str] = match dtype {
        DType::Bf16 if variant.width > 128 => &["attention_backward_keys", "attention_backward_values"],
        DType::Bf16 if keeps_bits => &["attention_backward_keys_and_values_by_bits"],
        _ => &["attention_backward_keys_and_values"],
    };
    let of_queries = [("attention_backward_queries", q.count, tiles.backward_queries_bytes())];
    let of_keys = key_kernels.iter().map(|&name| (name, k.count, tiles.backward_keys_bytes()));
    for (name, heads, shared_bytes) in of_queries.into_iter().chain(of_keys) {
        let launch = Launch { source, name, rows: tiles.rows(), heads, shared_bytes };
        launch.over_segments(&parameters, segments, &[], dtype, stream);
    }
}

/// What the bits of dropped weights may take beside the arena. More are drawn twice.
const MOST_BIT_BYTES: u64 = 256 << 20;

/// Words for the keys that a query may see, 64 to a word, and bytes of those of all queries of all heads.
fn bits(segments: &Segments, queries: usize) -> (u64, u64) {
    let words = segments.iter().map(|segment| segment.len()).max().unwrap_or(0).div_ceil(64) as u64;
    (words, (queries as u64).saturating_mul(words * size_of::<u64>() as u64))
}

fn launch_delta(parameters: &Parameters, heads: usize, dtype: DType, stream: &mut Stream) {
    let name = if dtype == DType::F32 { "attention_delta_float" } else { "attention_delta_bf16" };
    let blocks = [(parameters.tokens as usize).div_ceil(WARPS), heads];
    // SAFETY: the kernel takes the parameters; the views live until it has run; the scratch memory is this stream's.
    unsafe { launch(&ROWS, name, blocks, 0, parameters, stream) };
}

pub(super) fn cached(kernel: &CachedAttention, stream: &mut Stream) {
    let CachedAttention { q, k, v, out, cached_k, cached_v, capacity, lengths, segments, mask, scale } = kernel;
    let dtype = q.view.dtype;
    let mut parameters = Parameters::new(q, cached_k, cached_v, *mask, *scale);
    parameters.out = Heads::of(out);
    parameters.capacity = number(*capacity);
    parameters.aligned = are_aligned(&[q, cached_k, cached_v, out]) as u32;
    let name = if dtype == DType::F32 { "attention_append_float" } else { "attention_append_bf16" };
    let append = Launch { source: &ROWS, name, rows: 1, heads: k.count, shared_bytes: 0 };
    let new = Parameters { dk: Heads::of(k), dv: Heads::of(v), ..parameters };
    append.over_segments(&new, segments, lengths, dtype, stream);
    attend(&parameters, q.count, dtype, segments, lengths, stream);
}

/// A kernel whose blocks have tiles of segments.
struct Launch {
    source: &'static Source,
    name: &'static str,
    /// Rows of a tile.
    rows: usize,
    /// Query or key heads: the grid's height.
    heads: usize,
    shared_bytes: usize,
}

impl Launch {
    fn over_segments(
        &self,
        parameters: &Parameters,
        segments: &Segments,
        cached: &[usize],
        dtype: DType,
        stream: &mut Stream,
    ) {
        let all: Vec<Range<usize>> = segments.iter().collect();
        for (number, some) in all.chunks(MOST_SEGMENTS).enumerate() {
            let first = number * MOST_SEGMENTS;
            self.over_some(parameters, first, some, cached, dtype, stream);
        }
    }

    /// Segments from the `first` of all on, few enough for one launch.
    fn over_some(
        &self,
        parameters: &Parameters,
        first: usize,
        segments: &[Range<usize>],
        cached: &[usize],
        dtype: DType,
        stream: &mut Stream,
    ) {
        let tokens = segments[0].start..segments[segments.len() - 1].end;
        if tokens.is_empty() {
            return;
        }
        let mut parameters = *parameters;
        parameters.segments = number(segments.len());
        parameters.offsets[0] = number(tokens.start);
        for (i, segment) in segments.iter().enumerate() {
            parameters.offsets[i + 1] = number(segment.end);
        }
        if !cached.is_empty() {
            for (to, &length) in parameters.cached.iter_mut().zip(&cached[first..first + segments.len()]) {
                *to = number(length);
            }
            // The kernel counts sequences, and so their rows in the cache, from this launch's first.
            let rows = first * parameters.capacity as usize;
            for heads in [&mut parameters.k, &mut parameters.v] {
                heads.address += (rows * heads.stride as usize * dtype.size_bytes()) as u64;
            }
        }
        let blocks = [tokens.len() / self.rows + segments.len(), self.heads];
        // SAFETY: the kernel takes the parameters, whose views live until it has run.
        unsafe { launch(self.source, self.name, blocks, self.shared_bytes, &parameters, stream) };
    }
}

/// # Safety
/// The kernel takes the parameters alone, and what they name lives until it has run.
unsafe fn launch(
    source: &'static Source,
    name: &str,
    [across, down]: [usize; 2],
    shared_bytes: usize,
    parameters: &Parameters,
    stream: &mut Stream,
) {
    if across == 0 || down == 0 {
        return;
    }
    let shape = Shape {
        blocks: [number(across), number(down), 1],
        threads: [THREADS, 1, 1],
        shared_bytes: shared_bytes as u32,
    };
    // SAFETY: the caller's promise.
    unsafe { stream.launch_with(source, name, shape, parameters) };
}
