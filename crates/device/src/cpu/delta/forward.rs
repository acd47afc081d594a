//! The gated delta rule, forward. A task has some columns of one value head's state in one segment: only they run from chunk to chunk.

use std::ops::Range;

use super::super::features::{Bf16Level, bf16_level};
use super::super::matrix::{Element, Matrix, matrix, with_element};
use super::super::simd::vectorise;
use super::super::{Run, Team, WorkingMemory};
use super::block::{Block, Cutter};
use super::chunk::{Chunk, Sizes, lower, upper};
use super::fading::{Fading, Gates};
use super::product::{Level, Multiply, Zeros};
use super::recurrence::Recurrence;
use super::rows::{Clear, LoadRows, Rows, ScaleRows, StoreRows};
use crate::kernel::{DELTA_CHUNK, DeltaRule};

/// Tasks wanted, if the shape has enough work.
const TASKS: usize = 32;
/// The fewest columns of a state that are worth computing a chunk's scores once more.
const FEWEST_COLUMNS: usize = 64;
/// Up to so many tokens go one by one: a chunk of padding takes longer.
const FEW_TOKENS: usize = 8;

impl Run for DeltaRule {
    fn run(&self, team: &mut Team) {
        run_at(self, bf16_level(), team);
    }

    fn working_memory(&self) -> WorkingMemory {
        let division = Division::new(self, Level::of(self.v.view.dtype));
        WorkingMemory::of_thread(if division.tasks.is_empty() { 0 } else { division.floats() })
    }
}

/// Computes bf16 at the given level, which this CPU must have.
pub(super) fn run_at(kernel: &DeltaRule, bf16: Bf16Level, team: &mut Team) {
    let division = Division::new(kernel, Level::at(kernel.v.view.dtype, bf16));
    with_element!(kernel.v.view.dtype, E => {
        team.tasks(division.tasks.len(), |number, scratch| {
            let memory = scratch.floats(division.floats());
            let task = ForwardTask::<E>::new(kernel, division.sizes, &division.tasks[number], memory);
            division.sizes.level.run(|| task.run());
        });
    });
}

/// The work of a task.
#[derive(Clone, Debug)]
struct Part {
    /// The segment's number among all.
    segment: usize,
    tokens: Range<usize>,
    /// The value head.
    head: usize,
    /// Columns of its state.
    cols: Range<usize>,
}

/// The tasks, by shape alone.
struct Division {
    tasks: Vec<Part>,
    /// Those of a task.
    sizes: Sizes,
}

impl Division {
    fn new(kernel: &DeltaRule, level: Level) -> Division {
        let filled: Vec<(usize, Range<usize>)> =
            kernel.segments.iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()).collect();
        let (heads, value) = (kernel.v.count, kernel.v.dim);
        let mut parts = 1;
        while filled.len() * heads * parts < TASKS && value >= 2 * parts * FEWEST_COLUMNS {
            parts *= 2;
        }
        let cols = value.div_ceil(parts).next_multiple_of(level.grain());
        let mut tasks = Vec::new();
        for (segment, tokens) in filled {
            for (head, first) in (0..heads).flat_map(|head| (0..value).step_by(cols).map(move |first| (head, first))) {
                tasks.push(Part { segment, tokens: tokens.clone(), head, cols: first..value.min(first + cols) });
            }
        }
        // The longest first, so that none ends alone.
        tasks.sort_by_key(|task| std::cmp::Reverse(task.tokens.len()));
        Division { tasks, sizes: Sizes::new(level, kernel.k.dim, cols) }
    }

    fn floats(&self) -> usize {
        Cutter::count(|cutter| Memory::cut(self.sizes, cutter))
    }
}

/// A task's working memory.
struct Memory {
    chunk: Chunk,
    /// [C, C]
    weights: Block,
    inverse: Block,
    /// [2C, V]: what Q reads from the state, above what K̂ does.
    read: Block,
    /// [C, V]: N.
    news: Block,
    /// [K, V]
    state: Block,
}

impl Memory {
    fn cut(sizes: Sizes, cutter: &mut Cutter) -> Memory {
        Memory {
            chunk: Chunk::cut(sizes, cutter),
            weights: cutter.block([DELTA_CHUNK; 2]),
            inverse: cutter.block([DELTA_CHUNK; 2]),
            read: cutter.block([2 * DELTA_CHUNK, sizes.value]),
            news: cutter.block([DELTA_CHUNK, sizes.value]),
            state: cutter.block([sizes.key, sizes.value]),
        }
    }
}

struct ForwardTask<'a, E> {
    kernel: &'a DeltaRule,
    sizes: Sizes,
    part: &'a Part,
    gates: Gates<E>,
    memory: Memory,
}

impl<E: Element> ForwardTask<'_, E> {
    fn new<'a>(kernel: &'a DeltaRule, sizes: Sizes, part: &'a Part, memory: &mut [f32]) -> ForwardTask<'a, E> {
        let memory = Memory::cut(sizes, &mut Cutter::new(memory));
        ForwardTask { kernel, sizes, part, gates: Gates::of(&kernel.gates), memory }
    }

    fn run(&self) {
        if self.part.tokens.len() <= FEW_TOKENS {
            return self.go_through_tokens();
        }
        let state = self.memory.state;
        match self.states() {
            Some(from) => vectorise(LoadRows { from, to: state }),
            None => vectorise(Clear(state)),
        }
        for first in self.part.tokens.clone().step_by(DELTA_CHUNK) {
            self.go_through_chunk(first..self.part.tokens.end.min(first + DELTA_CHUNK));
        }
        if let Some(to) = self.states() {
            vectorise(StoreRows { from: state, to });
        }
    }

    /// The part's state in the kernel's memory.
    fn states(&self) -> Option<Rows<f32>> {
        let first = (self.part.segment * self.kernel.v.count + self.part.head) * self.kernel.k.dim;
        let rows =
            |states: Matrix<f32>| Rows::of_matrix(states, first..first + self.kernel.k.dim, self.part.cols.clone());
        self.kernel.states.as_ref().map(|states| rows(matrix(states)))
    }

    /// Queries and keys, which all columns read.
    fn operands(&self, tokens: &Range<usize>) -> [Rows<E>; 2] {
        let key_head = self.part.head / (self.kernel.v.count / self.kernel.k.count);
        [&self.kernel.q, &self.kernel.k].map(|heads| Rows::of_head(heads, key_head, tokens.clone(), 0..heads.dim))
    }

    /// The part's columns of values and the output.
    fn columns(&self, tokens: &Range<usize>) -> [Rows<E>; 2] {
        [&self.kernel.v, &self.kernel.out]
            .map(|heads| Rows::of_head(heads, self.part.head, tokens.clone(), self.part.cols.clone()))
    }

    fn go_through_tokens(&self) {
        let tokens = &self.part.tokens;
        let chunk = self.memory.chunk.of_rows(self.sizes.rows(tokens.len()));
        let [q, k] = self.operands(tokens);
        let [v, out] = self.columns(tokens);
        chunk.load_units(q, k);
        let fading = &Fading::new(&self.gates, self.part.head, tokens.clone());
        let state = self.states().unwrap_or_else(|| {
            vectorise(Clear(self.memory.state));
            Rows::of_matrix(matrix(&self.memory.state.view()), 0..self.kernel.k.dim, 0..self.part.cols.len())
        });
        vectorise(Recurrence { queries: chunk.queries(), keys: chunk.keys(), v, fading, state, out });
    }

    fn go_through_chunk(&self, tokens: Range<usize>) {
        let rows = self.sizes.rows(tokens.len());
        let Memory { weights, inverse, read, news, state, .. } = self.memory;
        let chunk = self.memory.chunk.of_rows(rows);
        let square = |block: Block| block.corner(rows, rows);
        let (weights, inverse) = (square(weights), square(inverse));
        let (read, news) = (read.corner(2 * rows, read.cols), news.corner(rows, news.cols));
        let [q, k] = self.operands(&tokens);
        let [v, out] = self.columns(&tokens);
        chunk.load_units(q, k);
        let fading = &Fading::new(&self.gates, self.part.head, tokens);
        chunk.score(false);
        chunk.decay(fading);
        chunk.weigh(weights);
        chunk.invert(fading, inverse);
        let from_state =
            Multiply { out: read, left: chunk.units.into(), right: state.into(), keep: 0.0, zeros: Zeros::None };
        // SAFETY: blocks of this task's memory that do not overlap.
        unsafe { chunk.multiply(from_state) };
        chunk.news(fading, v, lower(read), inverse, news);
        let sums = upper(read);
        vectorise(ScaleRows { from: sums, factors: &fading.since_start, to: sums });
        let from_chunk =
            Multiply { out: sums, left: weights.into(), right: news.into(), keep: 1.0, zeros: Zeros::AboveLeft };
        // SAFETY: as above.
        unsafe { chunk.multiply(from_chunk) };
        vectorise(StoreRows { from: sums, to: out });
        chunk.advance(fading, news, state);
    }
}
