//! Programs that were proved sound, kept for micro-batches of the same shape.
//!
//! The number of tokens in a part changes from step to step; the order of computations and exchanges does not. So a program is
//! written and proved once for each shape, and fitted to the sizes of each step.

use std::collections::HashMap;

use evenkeel_step::schedule::{Chain, PartSize, fit};
use evenkeel_step::{Program, verify};

use super::micros::Sizes;

/// Everything that a chain's program depends on, except the number of rows of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// By replica and micro-batch; empty for an evaluation.
    parts: Vec<Vec<usize>>,
    /// Per part.
    chunks: usize,
}

/// Data in more shapes than this have their programs written again and again.
const MOST_SHAPES: usize = 16;

/// The programs of one rank.
#[derive(Default)]
pub(super) struct Programs {
    proved: HashMap<Shape, Program>,
    /// The shape of the last step.
    last: Option<Shape>,
    written: usize,
}

impl Programs {
    /// Forgets the programs of another layout or arrangement.
    pub fn clear(&mut self) {
        self.proved.clear();
        self.last = None;
    }

    /// The program of a rank for parts of these sizes in this shape; `write` writes it for every rank of these chains.
    pub fn take(
        &mut self,
        shape: Shape,
        chains: &[Chain],
        rank: usize,
        sizes: &[Vec<PartSize>],
        write: impl Fn(usize, &Chain) -> Program,
    ) -> &mut Program {
        if !self.proved.contains_key(&shape) {
            if self.proved.len() == MOST_SHAPES {
                self.proved.clear();
            }
            self.written += 1;
            let program = proved(chains, rank, write);
            tracing::debug!(rank, tasks = program.tasks.len(), ?shape, "wrote a program and proved it sound");
            self.proved.insert(shape.clone(), program);
        }
        let program = self.proved.get_mut(&shape).expect("it is there by now");
        fit(program, &chains[rank], sizes);
        program
    }

    pub fn note_last(&mut self, shape: Shape) {
        self.last = Some(shape);
    }

    /// The program of the last step.
    pub fn last(&self) -> Option<&Program> {
        self.proved.get(self.last.as_ref()?)
    }

    /// Number of programs written and proved so far.
    pub fn written(&self) -> usize {
        self.written
    }
}

/// A rank's program, after those of all ranks are proved sound together.
fn proved(chains: &[Chain], rank: usize, write: impl Fn(usize, &Chain) -> Program) -> Program {
    let programs = chains.iter().enumerate().map(|(rank, chain)| write(rank, chain));
    let mut programs: Vec<Program> = programs.collect();
    verify(&programs).unwrap_or_else(|unsound| panic!("schedules write sound programs: {unsound}"));
    programs.swap_remove(rank)
}

impl Shape {
    /// The shape of a step, and its sizes in as many chunks as the shape has: a power of two, so that few shapes occur.
    pub fn of_step(sizes: Sizes) -> (Shape, Sizes) {
        let parts = sizes.iter().map(|share| share.iter().map(Vec::len).collect()).collect();
        let most = sizes.iter().flatten().flatten().map(|part| part.chunk_rows.len()).max().unwrap_or(0);
        let chunks = most.next_power_of_two();
        let in_chunks = |parts: Vec<PartSize>| parts.into_iter().map(|part| part.in_chunks(chunks)).collect();
        let sizes = sizes.into_iter().map(|share| share.into_iter().map(in_chunks).collect()).collect();
        (Shape { parts, chunks }, sizes)
    }

    pub fn of_evaluation(size: PartSize) -> (Shape, PartSize) {
        let chunks = size.chunk_rows.len().next_power_of_two();
        (Shape { parts: Vec::new(), chunks }, size.in_chunks(chunks))
    }
}
