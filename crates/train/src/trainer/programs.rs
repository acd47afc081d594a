//! Programs that were proved sound, kept for micro-batches of the same shape.
//!
//! How many tokens a part has changes from step to step; what is computed and exchanged in which order does not. So a program is
//! written and proved once for each shape, and fitted to the sizes of each step.

use std::collections::HashMap;

use evenkeel_step::schedule::{Chain, PartSize, fit};
use evenkeel_step::{Program, verify};

use super::micros::Sizes;

/// Everything that a program of a chain depends on but for the number of rows of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// By share of the data and micro-batch; nothing of an evaluation.
    parts: Vec<Vec<usize>>,
    /// Of every part.
    chunks: usize,
}

/// Data that come in more shapes than this have programs written for them again and again.
const MOST_SHAPES: usize = 16;

/// The programs of one rank.
#[derive(Default)]
pub(super) struct Programs {
    proved: HashMap<Shape, Program>,
    /// That of the last step.
    last: Option<Shape>,
    written: usize,
}

impl Programs {
    /// Forgets what was written for another layout or arrangement.
    pub fn clear(&mut self) {
        self.proved.clear();
        self.last = None;
    }

    /// The program of a rank for parts of these sizes in this shape, which `write` writes for every rank of these chains.
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
            self.proved.insert(shape.clone(), proved(chains, rank, write));
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

    /// How many were written and proved so far.
    pub fn written(&self) -> usize {
        self.written
    }
}

/// A rank's program, once those of all ranks are proved sound together.
fn proved(chains: &[Chain], rank: usize, write: impl Fn(usize, &Chain) -> Program) -> Program {
    let programs = chains.iter().enumerate().map(|(rank, chain)| write(rank, chain));
    let mut programs: Vec<Program> = programs.collect();
    verify(&programs).unwrap_or_else(|unsound| panic!("schedules write sound programs: {unsound}"));
    programs.swap_remove(rank)
}

impl Shape {
    /// The shape of a step, and its sizes in as many chunks as the shape has: few numbers, so that few shapes occur.
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
