//! The gated delta rule. bf16 goes chunk by chunk by tensor units: `prepare` computes what does not depend on states, then a block for
//! some columns of each head's state goes through a segment, or through a stretch of it. Few tokens, and f32, go token by token.

use super::super::modules::Source;
use super::super::stream::Shape;
use super::parameters::{Gate, Heads, Parameters, are_aligned, number};
use super::sources::{EXACT, TOKENS, Variant};
use super::stretches::{Stretches, WARP_COLUMNS};
use super::work::{FEW_TOKENS, Sizes};
use super::{Run, Stream};
use crate::kernel::{DELTA_CHUNK, DeltaRule, DeltaRuleBackward, Segments};
use crate::{DType, View};

/// Threads as the sources declare them.
const PREPARE_THREADS: u32 = 128;
const GRADIENTS_THREADS: u32 = 512;
const TOKEN_THREADS: u32 = 256;
/// Columns of a block that goes by tokens.
const TOKEN_COLUMNS: usize = 32;
/// Columns of the largest block that goes by chunks, whose registers fill a multiprocessor.
const MOST_COLUMNS: usize = 128;
/// Elements that rows of tiles are longer than the tiles.
const PAD: usize = 8;

impl Run for DeltaRule {
    fn run(&self, stream: &mut Stream) {
        let DeltaRule { q, k, v, gates, segments, out, states, work } = self;
        let is_bf16 = v.view.dtype == DType::Bf16;
        let sizes = Sizes::new(k, v, segments, FEW_TOKENS);
        let mut parameters = Parameters::new(q, k, v, gates);
        let work_bytes = sizes.place_forward(0, &mut parameters) * size_of::<f32>();
        sizes.place_forward(working_memory(work, work_bytes, stream), &mut parameters);
        parameters.out = Heads::of(out);
        parameters.padded_value = number(sizes.padded_value());
        parameters.stretch = number(sizes.stretches.tokens());
        parameters.aligned = are_aligned(&[q, k, v, out]) as u32;
        parameters.few = if is_bf16 { number(FEW_TOKENS) } else { u32::MAX >> 1 };
        if let Some(states) = states {
            parameters.states = states.address();
            parameters.states_stride = states.stride as i64;
        }
        if is_bf16 {
            prepare(&parameters, k.count, segments, stream);
            forth_ahead(&sizes, &mut parameters, segments, stream);
            Turns { is_whole: true, ..Turns::forth("delta_forward", &sizes) }.launch(&mut parameters, segments, stream);
        }
        if segments.iter().any(|tokens| (1..=parameters.few as usize).contains(&tokens.len())) {
            let name = if is_bf16 { "delta_tokens_bf16" } else { "delta_tokens_f32" };
            for parameters in parameters.launches(segments) {
                let columns = v.dim.div_ceil(TOKEN_COLUMNS);
                let blocks = [parameters.segments as usize, v.count, columns];
                // SAFETY: the kernel takes the parameters, whose operands live until it has run.
                unsafe { launch(&TOKENS, name, blocks, TOKEN_THREADS, 0, &parameters, stream) };
            }
        }
    }
}

/// The address of so many bytes: those that a kernel was given, or else the stream's.
fn working_memory(work: &Option<View>, bytes: usize, stream: &mut Stream) -> u64 {
    match work {
        Some(work) => {
            assert!(work.bytes() >= bytes as u64, "{} bytes of working memory, {bytes} are needed", work.bytes());
            assert!(bytes == 0 || work.address().is_multiple_of(16), "working memory begins at no multiple of 16");
            work.address()
        }
        None => stream.scratch(bytes as u64),
    }
}

fn prepare(parameters: &Parameters, key_heads: usize, segments: &Segments, stream: &mut Stream) {
    let variant = Variant::of(parameters.key as usize);
    if segments.iter().all(|tokens| tokens.len() <= parameters.few as usize) {
        return;
    }
    // Queries and keys, then M and T in their place.
    let units_bytes = 2 * DELTA_CHUNK * (variant.width + PAD) * 2;
    let squares_bytes = 2 * DELTA_CHUNK * (DELTA_CHUNK + 4) * 4;
    for parameters in parameters.launches(segments) {
        let blocks = [parameters.slots(DELTA_CHUNK), key_heads, 1];
        let bytes = units_bytes.max(squares_bytes);
        // SAFETY: the kernel takes the parameters, whose operands live until it has run.
        unsafe { launch(&variant.prepare, "delta_prepare", blocks, PREPARE_THREADS, bytes, &parameters, stream) };
    }
}

/// A kernel whose blocks go through the chunks of a head's stretch in turn.
struct Turns {
    source: &'static Source,
    name: &'static str,
    /// The keys' width.
    width: usize,
    /// Columns of the states.
    columns: usize,
    /// Whether it needs queries and P, too.
    is_whole: bool,
    /// Whether its warps keep states in working memory.
    has_shelf: bool,
    stretches: Stretches,
    /// Whether one stretch of each segment has nothing to do.
    is_ahead: bool,
}

impl Turns {
    fn forth(name: &'static str, sizes: &Sizes) -> Turns {
        let Variant { width, forward, .. } = sizes.variant();
        Turns {
            source: forward,
            name,
            width: *width,
            columns: sizes.padded_value(),
            is_whole: false,
            has_shelf: false,
            stretches: sizes.stretches,
            is_ahead: false,
        }
    }

    fn back(name: &'static str, sizes: &Sizes) -> Turns {
        Turns { source: &sizes.variant().backward, is_whole: true, ..Turns::forth(name, sizes) }
    }

    /// Shared memory, as `tiles_bytes` in kernels/delta/turned.cuh counts it.
    fn bytes(&self, columns: usize, stages: usize) -> usize {
        const NUMBERS_IN_TURN: usize = 5;
        let pitch = self.width + PAD;
        let of_each = DELTA_CHUNK * (pitch + DELTA_CHUNK + PAD) * if self.is_whole { 2 } else { 1 };
        let tiles = (of_each + DELTA_CHUNK * (columns + PAD)) * 2 + NUMBERS_IN_TURN * DELTA_CHUNK * 4;
        let shelf = if self.has_shelf { columns * pitch * 2 } else { 0 };
        stages * tiles + shelf
    }

    /// Columns of a block and stages of its ring: as few blocks as fill the GPU's multiprocessors, since each reads the same keys, but
    /// no more rounds of them than smaller ones take.
    fn division(&self, heads: usize, stream: &Stream) -> (usize, usize) {
        let most = stream.context().properties().shared_bytes as usize;
        let multiprocessors = stream.multiprocessors() as usize;
        let blocks = |columns: usize| heads * self.columns.div_ceil(columns);
        let fits = |columns: usize| self.bytes(columns, 1) <= most;
        let at_once = |columns: usize| {
            let of_each = blocks(columns).div_ceil(multiprocessors);
            of_each.min(MOST_COLUMNS / columns).min(most / self.bytes(columns, 1)).max(1)
        };
        let rounds = |columns: usize| blocks(columns).div_ceil(multiprocessors * at_once(columns));
        let is_too_wide = |columns: usize| {
            !fits(columns) || 2 * blocks(columns) <= multiprocessors || rounds(columns / 2) < rounds(columns)
        };
        let mut columns = self.columns.next_power_of_two().clamp(WARP_COLUMNS, MOST_COLUMNS);
        while columns > WARP_COLUMNS && is_too_wide(columns) {
            columns /= 2;
        }
        (columns, if at_once(columns) * self.bytes(columns, 2) <= most { 2 } else { 1 })
    }

    fn launch(&self, parameters: &mut Parameters, segments: &Segments, stream: &mut Stream) {
        let stretches = self.stretches.count(segments, self.is_ahead);
        if stretches == 0 {
            return;
        }
        let heads = parameters.heads as usize;
        let (columns, stages) = self.division(stretches * heads, stream);
        parameters.stages = number(stages);
        let threads = (2 * columns) as u32;
        for parameters in parameters.launches(segments) {
            let blocks = [parameters.slots(self.stretches.tokens()), heads, self.columns.div_ceil(columns)];
            let bytes = self.bytes(columns, stages);
            // SAFETY: the kernel takes the parameters, whose operands live until it has run.
            unsafe { launch(self.source, self.name, blocks, threads, bytes, &parameters, stream) };
        }
    }
}

/// Finds the states between stretches, if there are several.
fn forth_ahead(sizes: &Sizes, parameters: &mut Parameters, segments: &Segments, stream: &mut Stream) {
    let turns = Turns { columns: sizes.border_rows(), is_ahead: true, ..Turns::forth("delta_ahead", sizes) };
    run_ahead(&turns, "delta_carry", sizes, parameters, segments, stream);
}

/// Finds the gradients of states between stretches, after [`forth_ahead`].
fn back_ahead(sizes: &Sizes, parameters: &mut Parameters, segments: &Segments, stream: &mut Stream) {
    let turns = Turns { is_ahead: true, ..Turns::back("delta_ahead_back", sizes) };
    run_ahead(&turns, "delta_carry_back", sizes, parameters, segments, stream);
}

fn run_ahead(
    turns: &Turns,
    carry: &str,
    sizes: &Sizes,
    parameters: &mut Parameters,
    segments: &Segments,
    stream: &mut Stream,
) {
    if !sizes.stretches.are_several() {
        return;
    }
    turns.launch(parameters, segments, stream);
    let variant = sizes.variant();
    for parameters in parameters.launches(segments) {
        let blocks = [parameters.segments as usize, parameters.heads as usize, sizes.padded_value() / WARP_COLUMNS];
        let threads = (variant.width / WARP_COLUMNS * 32) as u32;
        // SAFETY: the kernel takes the parameters, whose operands live until it has run.
        unsafe { launch(&variant.carry, carry, blocks, threads, 0, &parameters, stream) };
    }
}

impl Run for DeltaRuleBackward {
    fn run(&self, stream: &mut Stream) {
        let DeltaRuleBackward { q, k, v, gates, segments, dout, dq, dk, dv, dfade, dtake, .. } = self;
        let sizes = Sizes::new(k, v, segments, 0);
        let mut parameters = Parameters::new(q, k, v, gates);
        let work_bytes = sizes.place_backward(0, &mut parameters) * size_of::<f32>();
        sizes.place_backward(working_memory(&self.work, work_bytes, stream), &mut parameters);
        parameters.dout = Heads::of(dout);
        parameters.dq = Heads::of(dq);
        parameters.dk = Heads::of(dk);
        parameters.dv = Heads::of(dv);
        parameters.dfade = Gate::of(dfade);
        parameters.dtake = Gate::of(dtake);
        parameters.dlog_rate = self.dlog_rate.map_or(0, |view| view.address());
        parameters.dbias = self.dbias.map_or(0, |view| view.address());
        parameters.padded_value = number(sizes.padded_value());
        parameters.stretch = number(sizes.stretches.tokens());
        parameters.aligned = are_aligned(&[q, k, v, dout, dq, dk, dv]) as u32;
        if v.view.dtype == DType::Bf16 {
            backward_by_chunks(self, &sizes, &mut parameters, stream);
            parameters.shares = number(sizes.slots());
        } else {
            backward_by_tokens(self, &parameters, stream);
            parameters.shares = number(segments.iter().count());
        }
        if v.tokens() > 0 && (self.dlog_rate.is_some() || self.dbias.is_some()) {
            // SAFETY: the kernel takes the parameters, whose operands live until it has run.
            unsafe { launch(&TOKENS, "delta_sums", [v.count, 1, 1], TOKEN_THREADS, 0, &parameters, stream) };
        }
    }
}

fn backward_by_chunks(kernel: &DeltaRuleBackward, sizes: &Sizes, parameters: &mut Parameters, stream: &mut Stream) {
    let (k, segments) = (&kernel.k, &kernel.segments);
    let variant = sizes.variant();
    prepare(parameters, k.count, segments, stream);
    forth_ahead(sizes, parameters, segments, stream);
    Turns { has_shelf: true, ..Turns::forth("delta_keep", sizes) }.launch(parameters, segments, stream);
    back_ahead(sizes, parameters, segments, stream);
    Turns { has_shelf: true, ..Turns::back("delta_go_back", sizes) }.launch(parameters, segments, stream);
    let most = stream.context().properties().shared_bytes as usize;
    let stages = if gradients_bytes(variant.width, 2) <= most { 2 } else { 1 };
    parameters.stages = number(stages);
    let name = if parameters.ratio == 1 { "delta_gradients" } else { "delta_grouped_gradients" };
    for parameters in parameters.launches(segments) {
        // A block fills a multiprocessor and goes through chunks, fetching the next one meanwhile.
        let chunks = parameters.slots(DELTA_CHUNK) * k.count;
        let blocks = [chunks.min(stream.multiprocessors() as usize), 1, 1];
        let bytes = gradients_bytes(variant.width, stages);
        // SAFETY: the kernel takes the parameters, whose operands live until it has run.
        unsafe { launch(&variant.gradients, name, blocks, GRADIENTS_THREADS, bytes, &parameters, stream) };
    }
}

/// Shared memory of the gradients' kernel, as `memory_of` in kernels/delta/gradients.cu lays it out.
fn gradients_bytes(width: usize, stages: usize) -> usize {
    const DEPTH: usize = 32;
    let pitch = width + PAD;
    let parts = GRADIENTS_THREADS as usize / 128;
    let floats = DELTA_CHUNK * (2 * 11 + parts * 5 + 4 + 1);
    let tiles = 2 * DELTA_CHUNK * pitch + 2 * DELTA_CHUNK * (DELTA_CHUNK + PAD);
    let ring = stages * (4 * DELTA_CHUNK * (DEPTH + PAD) + 2 * DEPTH * pitch);
    // `sum_of_block` has some memory of its own.
    const OWN_BYTES: usize = 256;
    OWN_BYTES + floats * 4 + (tiles + ring) * 2
}

fn backward_by_tokens(kernel: &DeltaRuleBackward, parameters: &Parameters, stream: &mut Stream) {
    for parameters in parameters.launches(&kernel.segments) {
        let blocks = [parameters.segments as usize, kernel.v.count, 1];
        let units = [parameters.launch_tokens(), kernel.k.count, 1];
        // SAFETY: the kernels take the parameters, whose operands live until they have run.
        unsafe {
            launch(&EXACT, "delta_exact_gradients", blocks, TOKEN_THREADS, 0, &parameters, stream);
            launch(&EXACT, "delta_exact_units", units, TOKEN_THREADS, 0, &parameters, stream);
        }
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
