//! Launches of our own kernels.
//!
//! Heads of 33 to 64 elements in bf16 have kernels for Hopper's warpgroups. Measured on an H200 for GPT-2's 32 × 1024
//! tokens of 12 heads, a tenth dropped: 0.23 ms forward and 0.58 backward, where the others took 0.50 and 1.50.

use std::ops::Range;

use super::super::Stream;
use super::super::modules::Source;
use super::super::stream::Shape;
use super::parameters::{Heads, MOST_SEGMENTS, Parameters, are_aligned, number};
use super::sources::{HOPPER_WIDTH, ROWS, Variant, hopper_backward, hopper_forward};
use crate::DType;
use crate::kernel::{Attention, AttentionBackward, CachedAttention, Segments};

const THREADS: u32 = 128;
const WARPS: usize = 4;

/// As the sources of Hopper's kernels say: a block's threads, forward's queries, and shared memory, of which up to a kilobyte
/// is lost to the tiles' alignment.
mod hopper {
    use super::{HOPPER_WIDTH, MOST_SEGMENTS, Segments};

    pub const FORWARD_THREADS: u32 = 128;
    pub const BACKWARD_THREADS: u32 = 256;
    pub const QUERIES: usize = 64;
    const ROW_BYTES: usize = 128;
    const ALIGNMENT_BYTES: usize = 1024;
    /// Queries, and keys and values thrice.
    pub const FORWARD_BYTES: usize = ALIGNMENT_BYTES + (QUERIES + 3 * 2 * 64) * ROW_BYTES;
    /// Keys, values and gradients twice; queries, dout and four numbers of each query thrice.
    pub const BACKWARD_BYTES: usize = ALIGNMENT_BYTES + (2 * 3 * 128 + 3 * 2 * 64) * ROW_BYTES + 3 * 64 * 16;
    /// Sums of the gradients of a tile of 64 queries.
    pub const SUM_TILE_BYTES: usize = 64 * HOPPER_WIDTH * size_of::<f32>();

    /// An upper bound on the tiles of a launch: each segment begins a tile.
    pub fn sum_tiles(tokens: usize, segments: &Segments) -> usize {
        tokens / 64 + segments.iter().count().min(MOST_SEGMENTS)
    }
}

/// The widest heads whose sums a block has in its registers.
const WIDEST_WHOLE: usize = 256;

/// A block takes all keys of a segment.
const WHOLE_SEGMENTS: usize = usize::MAX;

/// The tiles of a block, as the sources of a variant's kernels declare them.
struct Tiles {
    dtype: DType,
    width: usize,
}

impl Tiles {
    /// Queries of a forward block; queries or keys of a backward one.
    fn rows(&self) -> usize {
        match self.dtype {
            DType::F32 if self.width > WIDEST_WHOLE => 16,
            DType::F32 => 32,
            _ => 64,
        }
    }

    /// Blocks that share a result's columns.
    fn slices(&self) -> usize {
        if self.dtype == DType::F32 { 1 } else { self.width.div_ceil(WIDEST_WHOLE) }
    }

    /// Keys that stream past the block's queries, or queries past its keys; two tiles, one fetched while the other is used.
    fn bf16_columns(&self, widest_at_64: usize) -> usize {
        match self.width {
            width if width <= widest_at_64 => 64,
            width if width <= WIDEST_WHOLE => 32,
            _ => 16,
        }
    }

    /// `resident` tiles of rows, past which two of 32 stream, and `weights` of each row.
    fn f32_bytes(&self, resident: usize, weights: usize) -> usize {
        ((resident * self.rows() + 2 * 32) * (self.width + 4) + weights * self.rows() * 32) * 4
    }

    fn forward_bytes(&self) -> usize {
        match self.dtype {
            DType::F32 => self.f32_bytes(1, 1),
            _ => (self.rows() + 4 * self.bf16_columns(128)) * (self.width + 8) * 2,
        }
    }

    fn backward_queries_bytes(&self) -> usize {
        match self.dtype {
            DType::F32 => self.f32_bytes(2, 1),
            _ => (2 * self.rows() + 4 * self.bf16_columns(128)) * (self.width + 8) * 2,
        }
    }

    fn backward_keys_bytes(&self) -> usize {
        match self.dtype {
            DType::F32 => self.f32_bytes(2, 2),
            _ => {
                let queries = self.bf16_columns(64);
                (2 * self.rows() + 4 * queries) * (self.width + 8) * 2 + 2 * queries * 16
            }
        }
    }
}

pub(super) fn forward(kernel: &Attention, stream: &mut Stream) {
    let Attention { q, k, v, out, logsum, segments, mask, scale, dropout, scores } = kernel;
    let mut parameters = Parameters::new(q, k, v, *mask, *scale);
    parameters.out = Heads::of(out);
    parameters.aligned = are_aligned(&[q, k, v, out]) as u32;
    parameters.set_logsum(logsum);
    parameters.set_dropout(*dropout);
    parameters.set_scores(scores);
    if by_warpgroups(&parameters, q.view.dtype, stream) {
        let launch = Launch {
            source: hopper_forward(parameters.forward_options()),
            name: "attention_forward",
            rows: hopper::QUERIES,
            heads: q.count,
            slices: 1,
            threads: hopper::FORWARD_THREADS,
            shared_bytes: hopper::FORWARD_BYTES,
        };
        launch.over_segments(&parameters, segments, &[], q.view.dtype, stream);
    } else {
        attend(&parameters, q.count, q.view.dtype, segments, &[], stream);
    }
}

/// Whether there are kernels for warpgroups of this GPU.
fn by_warpgroups(parameters: &Parameters, dtype: DType, stream: &Stream) -> bool {
    let fits = dtype == DType::Bf16 && Variant::of(parameters.dim as usize).width == HOPPER_WIDTH;
    fits && parameters.aligned == 1 && stream.context().properties().capability == (9, 0)
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
        source: variant.forward(dtype, parameters.forward_options()),
        name: "attention_forward",
        rows: tiles.rows(),
        heads,
        slices: tiles.slices(),
        threads: THREADS,
        shared_bytes: tiles.forward_bytes(),
    };
    launch.over_segments(parameters, segments, cached, dtype, stream);
}

/// The average number of busy blocks, with a segment each, until the longest segment is done: work grows with the square of a
/// length.
fn segments_at_once(segments: &Segments) -> f64 {
    let squares = || segments.iter().map(|segment| (segment.len() as f64).powi(2));
    squares().sum::<f64>() / squares().fold(1.0, f64::max)
}

pub(super) fn backward(kernel: &AttentionBackward, stream: &mut Stream) {
    let AttentionBackward { q, k, v, out, logsum, dout, dq, dk, dv, segments, mask, scale, dropout, scores, dsinks } =
        kernel;
    let dtype = q.view.dtype;
    let mut parameters = Parameters::new(q, k, v, *mask, *scale);
    parameters.out = Heads::of(out);
    parameters.dout = Heads::of(dout);
    parameters.dq = Heads::of(dq);
    parameters.dk = Heads::of(dk);
    parameters.dv = Heads::of(dv);
    parameters.aligned = are_aligned(&[q, k, v, out, dout, dq, dk, dv]) as u32;
    parameters.set_logsum(logsum);
    parameters.set_dropout(*dropout);
    parameters.set_scores(scores);
    parameters.dsinks = dsinks.map_or(0, |dsinks| dsinks.address());
    let tokens = q.tokens();
    let group = q.count / k.count;
    let delta_bytes = ((tokens * q.count * size_of::<f32>()) as u64).next_multiple_of(256);
    let sum_bytes = (group * hopper::sum_tiles(tokens, segments) * hopper::SUM_TILE_BYTES) as u64;
    let fills = k.count as f64 * segments_at_once(segments) * 100.0
        >= stream.multiprocessors() as f64 * LEAST_FILLED_PERCENT as f64;
    if fills && sum_bytes <= MOST_SUM_BYTES && by_warpgroups(&parameters, dtype, stream) {
        let at_once = (MOST_SUM_BYTES / sum_bytes.max(1)).clamp(1, k.count as u64) as usize;
        parameters.delta = stream.scratch(delta_bytes + at_once as u64 * sum_bytes);
        parameters.dq_sums = parameters.delta + delta_bytes;
        launch_delta(&parameters, q.count, dtype, stream);
        launch_sinks(&parameters, q.count, stream);
        for first in (0..k.count).step_by(at_once) {
            let launch = Launch {
                source: hopper_backward(parameters.backward_options()),
                name: "attention_backward",
                rows: WHOLE_SEGMENTS,
                heads: at_once.min(k.count - first),
                slices: 1,
                threads: hopper::BACKWARD_THREADS,
                shared_bytes: hopper::BACKWARD_BYTES,
            };
            launch.over_segments(&parameters.starting_at(first * group), segments, &[], dtype, stream);
        }
        return;
    }
    parameters.delta = stream.scratch(delta_bytes);
    launch_delta(&parameters, q.count, dtype, stream);
    launch_sinks(&parameters, q.count, stream);

    let variant = Variant::of(q.dim);
    let tiles = Tiles { dtype, width: variant.width };
    let source = variant.backward(dtype, parameters.backward_options());
    // The sums of wide heads' gradients do not fit the registers together.
    let key_kernels: &[&str] = match dtype {
        DType::Bf16 if variant.width > 128 => &["attention_backward_keys", "attention_backward_values"],
        _ => &["attention_backward_keys_and_values"],
    };
    let of_queries = [("attention_backward_queries", q.count, tiles.backward_queries_bytes())];
    let of_keys = key_kernels.iter().map(|&name| (name, k.count, tiles.backward_keys_bytes()));
    for (name, heads, shared_bytes) in of_queries.into_iter().chain(of_keys) {
        let (rows, slices) = (tiles.rows(), tiles.slices());
        let launch = Launch { source, name, rows, heads, slices, threads: THREADS, shared_bytes };
        launch.over_segments(&parameters, segments, &[], dtype, stream);
    }
}

/// The most memory for sums of queries' gradients beside the arena: key heads that need more are computed separately.
const MOST_SUM_BYTES: u64 = 256 << 20;
/// A block for each key head of a segment pays if the blocks fill this share of the GPU: the other kernels take twice the time,
/// and have a block for every 64 queries or keys. Measured with 64 blocks on an H200's 132 multiprocessors (8 × 2048 tokens, 32
/// query and 8 key heads): 1.9 ms, where the others' 138 TFLOP/s are 2.5.
const LEAST_FILLED_PERCENT: usize = 45;

fn launch_delta(parameters: &Parameters, heads: usize, dtype: DType, stream: &mut Stream) {
    let name = if dtype == DType::F32 { "attention_delta_float" } else { "attention_delta_bf16" };
    // A row takes a warp, or eight lanes that read sixteen bytes each.
    let rows = if parameters.aligned == 1 { 4 * WARPS } else { WARPS };
    let blocks = [(parameters.tokens as usize).div_ceil(rows), heads, 1];
    // SAFETY: the kernel takes the parameters; the views live until it has run; the scratch memory is this stream's.
    unsafe { launch(&ROWS, name, blocks, THREADS, 0, parameters, stream) };
}

/// Adds to the gradients of sinks, if they are asked for: after δ of all heads.
fn launch_sinks(parameters: &Parameters, heads: usize, stream: &mut Stream) {
    if parameters.dsinks != 0 {
        // SAFETY: as for `launch_delta`.
        unsafe { launch(&ROWS, "attention_sinks", [heads, 1, 1], THREADS, 0, parameters, stream) };
    }
}

pub(super) fn cached(kernel: &CachedAttention, stream: &mut Stream) {
    let CachedAttention { q, k, v, out, cached_k, cached_v, capacity, lengths, segments, mask, scale, scores } = kernel;
    let dtype = q.view.dtype;
    let mut parameters = Parameters::new(q, cached_k, cached_v, *mask, *scale);
    parameters.out = Heads::of(out);
    parameters.capacity = number(*capacity);
    parameters.set_scores(scores);
    parameters.aligned = are_aligned(&[q, cached_k, cached_v, out]) as u32;
    let name = if dtype == DType::F32 { "attention_append_float" } else { "attention_append_bf16" };
    let append = Launch { source: &ROWS, name, rows: 1, heads: k.count, slices: 1, threads: THREADS, shared_bytes: 0 };
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
    /// The grid's depth.
    slices: usize,
    threads: u32,
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
        let blocks = [tokens.len() / self.rows + segments.len(), self.heads, self.slices];
        // SAFETY: the kernel takes the parameters, whose views live until it has run.
        unsafe { launch(self.source, self.name, blocks, self.threads, self.shared_bytes, &parameters, stream) };
    }
}

/// # Safety
/// The kernel takes the parameters alone, and what they name lives until it has run.
unsafe fn launch(
    source: &'static Source,
    name: &str,
    blocks: [usize; 3],
    threads: u32,
    shared_bytes: usize,
    parameters: &Parameters,
    stream: &mut Stream,
) {
    if blocks.contains(&0) {
        return;
    }
    let shape = Shape { blocks: blocks.map(number), threads: [threads, 1, 1], shared_bytes: shared_bytes as u32 };
    // SAFETY: the caller's promise.
    unsafe { stream.launch_with(source, name, shape, parameters) };
}
