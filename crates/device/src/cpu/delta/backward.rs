//! Gradients of the gated delta rule. A task has one key head and its value heads in one segment.
//!
//! States before each chunk are kept for a group of chunks at a time, N and T with them: a pass forward leaves the states before each
//! group, then groups are gone through from the last to the first, each forward and back. In a segment of one group, the first pass
//! falls away. See [`gradients`](super::gradients) for a chunk's gradients.

use std::ops::Range;

use super::super::features::{Bf16Level, bf16_level};
use super::super::matrix::{Element, Matrix, matrix, with_element};
use super::super::simd::vectorise;
use super::super::{Run, Team, WorkingMemory};
use super::block::{Block, Cutter};
use super::chunk::{Chunk, Sizes};
use super::fading::{Fading, Gates};
use super::gradients::{ChunkGradients, GradientMemory};
use super::product::{Level, Multiply, Zeros};
use super::rows::{Clear, CopyBlock, Rows};
use crate::kernel::{DELTA_CHUNK, DeltaRuleBackward};

/// Numbers that a group's chunks may keep, if that is no reason to keep less than [`LEAST_GROUP`] of them.
const GROUP_NUMBERS: usize = if cfg!(test) { 1 << 13 } else { 1 << 21 };
const LEAST_GROUP: usize = 4;

impl Run for DeltaRuleBackward {
    fn run(&self, team: &mut Team) {
        run_at(self, bf16_level(), team);
    }

    fn working_memory(&self) -> WorkingMemory {
        let division = Division::new(self, Level::of(self.v.view.dtype));
        let thread = WorkingMemory::of_thread(if division.tasks.is_empty() { 0 } else { division.floats() });
        thread.max(WorkingMemory::of_team(division.sums_floats()))
    }
}

/// Computes bf16 at the given level, which this CPU must have.
pub(super) fn run_at(kernel: &DeltaRuleBackward, bf16: Bf16Level, team: &mut Team) {
    let division = Division::new(kernel, Level::at(kernel.v.view.dtype, bf16));
    let mut common = team.take_common();
    let sums = common.floats(division.sums_floats());
    let sums_at = SharedSums(sums.as_mut_ptr());
    with_element!(kernel.v.view.dtype, E => {
        team.tasks(division.tasks.len(), |number, scratch| {
            let memory = scratch.floats(division.floats());
            let task = BackwardTask::<E>::new(kernel, &division, &division.tasks[number], memory);
            division.sizes.level.run(|| task.run(&sums_at));
        });
    });
    add_sums(kernel, &division, sums);
    team.return_common(common);
}

/// Adds the segments' sums of each head in order.
fn add_sums(kernel: &DeltaRuleBackward, division: &Division, sums: &[f32]) {
    for (which, out) in [kernel.dlog_rate, kernel.dbias].iter().enumerate() {
        let Some(out) = out.as_ref().map(matrix::<f32>) else { continue };
        for head in 0..kernel.v.count {
            let of_segment = |segment: usize| sums[(segment * kernel.v.count + head) * SUMS + which] as f64;
            let total: f64 = (0..division.segments).map(of_segment).sum();
            // SAFETY: no task runs, and the vector has a number for each head.
            unsafe { *out.at(0, head) += total as f32 };
        }
    }
}

/// Sums over a segment's tokens for each head: those of the rate's logarithm and of the bias.
const SUMS: usize = 2;

/// Sums that tasks write disjoint parts of.
struct SharedSums(*mut f32);

// SAFETY: tasks write disjoint parts.
unsafe impl Sync for SharedSums {}

impl SharedSums {
    /// # Safety
    /// The segment and the head are the calling task's alone.
    unsafe fn write(&self, segment: usize, heads: usize, head: usize, sums: [f64; SUMS]) {
        for (which, sum) in sums.into_iter().enumerate() {
            // SAFETY: the division counted them, and the caller's promise.
            unsafe { self.0.add((segment * heads + head) * SUMS + which).write(sum as f32) };
        }
    }
}

/// The work of a task.
#[derive(Clone, Debug)]
struct Part {
    /// The segment's number among those that have tokens.
    segment: usize,
    tokens: Range<usize>,
    key_head: usize,
}

/// The tasks, by shape alone.
struct Division {
    tasks: Vec<Part>,
    /// Segments that have tokens.
    segments: usize,
    sizes: Sizes,
    heads: usize,
    ratio: usize,
    /// Chunks of the longest segment, and of its groups.
    chunks: usize,
    group: usize,
}

impl Division {
    fn new(kernel: &DeltaRuleBackward, level: Level) -> Division {
        let sizes = Sizes::new(level, kernel.k.dim, kernel.v.dim);
        let filled: Vec<Range<usize>> = kernel.segments.iter().filter(|tokens| !tokens.is_empty()).collect();
        let chunks = filled.iter().map(|tokens| tokens.len().div_ceil(DELTA_CHUNK)).max().unwrap_or(0);
        let ratio = kernel.v.count / kernel.k.count;
        let segments = filled.len();
        let mut tasks = Vec::new();
        for (segment, tokens) in filled.into_iter().enumerate() {
            tasks.extend((0..kernel.k.count).map(|key_head| Part { segment, tokens: tokens.clone(), key_head }));
        }
        // The longest first, so that none ends alone.
        tasks.sort_by_key(|task| std::cmp::Reverse(task.tokens.len()));
        let kept = Cutter::count(|cutter| Kept::cut(sizes, cutter));
        let allowed = (GROUP_NUMBERS / (ratio * kept)).max(LEAST_GROUP);
        // As many groups as chunks of a group take the least memory.
        let group = allowed.max(chunks.isqrt()).min(chunks);
        Division { tasks, segments, sizes, heads: kernel.v.count, ratio, chunks, group }
    }

    fn groups(&self) -> usize {
        self.chunks.div_ceil(self.group.max(1))
    }

    fn floats(&self) -> usize {
        Cutter::count(|cutter| Memory::cut(self, cutter))
    }

    fn sums_floats(&self) -> usize {
        self.segments * self.heads * SUMS
    }
}

/// What is kept of a chunk for the way back.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    /// [K, V]: S before the chunk.
    pub state: Block,
    /// [C, V]: N.
    pub news: Block,
    /// [C, C]: T.
    pub inverse: Block,
}

impl Kept {
    fn cut(sizes: Sizes, cutter: &mut Cutter) -> Kept {
        Kept {
            state: cutter.block([sizes.key, sizes.value]),
            news: cutter.block([DELTA_CHUNK, sizes.value]),
            inverse: cutter.block([DELTA_CHUNK; 2]),
        }
    }

    fn of_rows(&self, rows: usize) -> Kept {
        let (news, inverse) = (self.news.corner(rows, self.news.cols), self.inverse.corner(rows, rows));
        Kept { state: self.state, news, inverse }
    }
}

/// A task's working memory.
struct Memory {
    chunk: Chunk,
    gradients: GradientMemory,
    /// [C, V]
    read: Block,
    /// For each chunk of a group and each head.
    kept: Vec<Kept>,
    /// For each head, [K, V]: the state of a pass forward, and the gradient of the state behind a chunk.
    states: Vec<Block>,
    dstates: Vec<Block>,
    /// For each group and each head, [K, V]: the state before it. None if there is one group.
    checkpoints: Vec<Block>,
}

impl Memory {
    fn cut(division: &Division, cutter: &mut Cutter) -> Memory {
        let Division { sizes, ratio, group, .. } = *division;
        let state = [sizes.key, sizes.value];
        let groups = if division.groups() > 1 { division.groups() } else { 0 };
        let states = |count: usize, cutter: &mut Cutter| (0..count).map(|_| cutter.block(state)).collect();
        Memory {
            chunk: Chunk::cut(sizes, cutter),
            gradients: GradientMemory::cut(sizes, cutter),
            read: cutter.block([DELTA_CHUNK, sizes.value]),
            kept: (0..group * ratio).map(|_| Kept::cut(sizes, cutter)).collect(),
            states: states(ratio, cutter),
            dstates: states(ratio, cutter),
            checkpoints: states(groups * ratio, cutter),
        }
    }
}

struct BackwardTask<'a, E> {
    kernel: &'a DeltaRuleBackward,
    division: &'a Division,
    part: &'a Part,
    gates: Gates<E>,
    memory: Memory,
}

impl<E: Element> BackwardTask<'_, E> {
    fn new<'a>(
        kernel: &'a DeltaRuleBackward,
        division: &'a Division,
        part: &'a Part,
        memory: &mut [f32],
    ) -> BackwardTask<'a, E> {
        let memory = Memory::cut(division, &mut Cutter::new(memory));
        BackwardTask { kernel, division, part, gates: Gates::of(&kernel.gates), memory }
    }

    fn run(&self, sums: &SharedSums) {
        let chunks = self.part.tokens.len().div_ceil(DELTA_CHUNK);
        let group = self.division.group;
        let groups = chunks.div_ceil(group);
        self.memory.states.iter().chain(&self.memory.dstates).for_each(|state| vectorise(Clear(*state)));
        if groups > 1 {
            for number in 0..groups {
                self.copy_states(&self.memory.states, self.checkpoints(number));
                if number + 1 < groups {
                    (number * group..(number + 1) * group).for_each(|chunk| self.go_forward(chunk, 0, false));
                }
            }
        }
        let mut totals = vec![[0f64; SUMS]; self.division.ratio];
        for number in (0..groups).rev() {
            if groups > 1 {
                self.copy_states(self.checkpoints(number), &self.memory.states);
            }
            let members = number * group..chunks.min((number + 1) * group);
            members.clone().for_each(|chunk| self.go_forward(chunk, chunk - members.start, true));
            members.clone().rev().for_each(|chunk| self.go_back(chunk, chunk - members.start, &mut totals));
        }
        for (head, total) in self.heads().zip(totals) {
            // SAFETY: the segment's heads of this key head are this task's.
            unsafe { sums.write(self.part.segment, self.kernel.v.count, head, total) };
        }
    }

    /// The value heads.
    fn heads(&self) -> Range<usize> {
        self.part.key_head * self.division.ratio..(self.part.key_head + 1) * self.division.ratio
    }

    fn checkpoints(&self, group: usize) -> &[Block] {
        &self.memory.checkpoints[group * self.division.ratio..][..self.division.ratio]
    }

    fn copy_states(&self, from: &[Block], to: &[Block]) {
        from.iter().zip(to).for_each(|(&from, &to)| vectorise(CopyBlock { from, to }));
    }

    fn tokens(&self, chunk: usize) -> Range<usize> {
        let first = self.part.tokens.start + chunk * DELTA_CHUNK;
        first..self.part.tokens.end.min(first + DELTA_CHUNK)
    }

    fn rows_of(&self, heads: &crate::Heads, head: usize, tokens: &Range<usize>) -> Rows<E> {
        Rows::of_head(heads, head, tokens.clone(), 0..heads.dim)
    }

    /// Advances the states by a chunk; keeps what the way back needs as the group's member `member`.
    fn go_forward(&self, number: usize, member: usize, is_kept: bool) {
        let tokens = self.tokens(number);
        let rows = self.division.sizes.rows(tokens.len());
        let chunk = self.memory.chunk.of_rows(rows);
        let read = self.memory.read.corner(rows, self.memory.read.cols);
        let [q, k] = [&self.kernel.q, &self.kernel.k].map(|heads| self.rows_of(heads, self.part.key_head, &tokens));
        chunk.load_units(q, k);
        chunk.score(true);
        for (i, head) in self.heads().enumerate() {
            let state = self.memory.states[i];
            let kept = self.memory.kept[member * self.division.ratio + i].of_rows(rows);
            if is_kept {
                vectorise(CopyBlock { from: state, to: kept.state });
            }
            let fading = &Fading::new(&self.gates, head, tokens.clone());
            chunk.decay(fading);
            chunk.invert(fading, kept.inverse);
            let from_state =
                Multiply { out: read, left: chunk.keys().into(), right: state.into(), keep: 0.0, zeros: Zeros::None };
            // SAFETY: blocks of this task's memory that do not overlap.
            unsafe { chunk.multiply(from_state) };
            chunk.news(fading, self.rows_of(&self.kernel.v, head, &tokens), read, kept.inverse, kept.news);
            chunk.advance(fading, kept.news, state);
        }
    }

    /// Computes a chunk's gradients, and those of the states before it.
    fn go_back(&self, number: usize, member: usize, totals: &mut [[f64; SUMS]]) {
        let tokens = self.tokens(number);
        let rows = self.division.sizes.rows(tokens.len());
        let chunk = self.memory.chunk.of_rows(rows);
        let kernel = self.kernel;
        let [q, k] = [&kernel.q, &kernel.k].map(|heads| self.rows_of(heads, self.part.key_head, &tokens));
        let inverses = chunk.load_units(q, k);
        chunk.score(false);
        let gradients = ChunkGradients { chunk, memory: self.memory.gradients.of_rows(rows) };
        gradients.clear();
        for (i, head) in self.heads().enumerate() {
            let kept = self.memory.kept[member * self.division.ratio + i].of_rows(rows);
            let fading = &Fading::new(&self.gates, head, tokens.clone());
            let [v, dout, dv] = [&kernel.v, &kernel.dout, &kernel.dv].map(|heads| self.rows_of(heads, head, &tokens));
            let of_gates = gradients.of_head(fading, kept, [v, dout, dv], self.memory.dstates[i]);
            let [rate, bias] = self.gates.of_head(head);
            let [dfade, dtake]: [Matrix<E>; 2] = [matrix(&kernel.dfade), matrix(&kernel.dtake)];
            for (row, token) in tokens.clone().enumerate() {
                let (dg, take) = (of_gates.decays[row], fading.takes[row]);
                let slope = 1.0 / (1.0 + (-(self.gates.fade(token, head) + bias)).exp());
                let df = -dg * rate * slope;
                totals[i][0] += (dg * fading.decays[row]) as f64;
                totals[i][1] += df as f64;
                // SAFETY: the head's gates of these tokens are this task's.
                unsafe {
                    dfade.at(token, head).write(E::from_f32(df));
                    dtake.at(token, head).write(E::from_f32(of_gates.takes[row] * take * (1.0 - take)));
                }
            }
        }
        let [dq, dk] = [&kernel.dq, &kernel.dk].map(|heads| self.rows_of(heads, self.part.key_head, &tokens));
        gradients.store(inverses, dq, dk);
    }
}
