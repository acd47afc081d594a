//! Programs that were proved sound, kept for micro-batches of the same shape.
//!
//! The number of tokens in a part changes from step to step; the order of computations and exchanges does not. So a program is
//! written and proved once for each shape, and fitted to the sizes of each step. The first rank that needs one writes those of
//! all, since they are proved together, and the others of its process take theirs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use evenkeel_model::Model;
use evenkeel_step::schedule::{Chain, PartSize, fit};
use evenkeel_step::{Program, Strategy, verify};

use super::micros::Sizes;
use crate::samples::Samples;

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
pub(super) struct Programs {
    /// `None` if nothing is proved.
    common: Option<Arc<Proofs>>,
    proved: HashMap<Shape, Program>,
    /// The shape of the last step.
    last: Option<Shape>,
    written: usize,
}

/// Programs that ranks of a process have proved for one another.
pub(crate) struct Proofs {
    /// Ranks that take them.
    takers: usize,
    written: Mutex<HashMap<Shape, Written>>,
}

struct Written {
    by_rank: Vec<Option<Program>>,
    /// Ranks that have still to take theirs.
    left: usize,
}

impl Default for Proofs {
    fn default() -> Proofs {
        Proofs::among(1)
    }
}

impl Proofs {
    pub fn among(takers: usize) -> Proofs {
        Proofs { takers, written: Mutex::default() }
    }

    /// A rank's program; `write` writes those of all, and is not asked if another rank was.
    fn take(&self, shape: &Shape, rank: usize, write: impl FnOnce() -> Vec<Program>) -> Program {
        let mut written = self.written.lock().expect("schedules write sound programs");
        let all = || Written { by_rank: write().into_iter().map(Some).collect(), left: self.takers };
        let of_shape = written.entry(shape.clone()).or_insert_with(all);
        let program = of_shape.by_rank[rank].take().expect("a rank takes its program once");
        of_shape.left -= 1;
        if of_shape.left == 0 {
            written.remove(shape);
        }
        program
    }
}

impl Default for Programs {
    fn default() -> Programs {
        Programs::of(Arc::default())
    }
}

impl Programs {
    pub fn of(common: Arc<Proofs>) -> Programs {
        Programs { common: Some(common), ..Programs::unproved() }
    }

    pub fn unproved() -> Programs {
        Programs { common: None, proved: HashMap::new(), last: None, written: 0 }
    }

    /// Forgets the programs of another layout or arrangement.
    pub fn clear(&mut self) {
        self.proved.clear();
        self.last = None;
    }

    /// The program of a rank for parts of these sizes in this shape; `write` writes it for its own chain or, to prove it, for those
    /// of all.
    pub fn take<'a>(
        &mut self,
        shape: Shape,
        own: &Chain,
        all: impl FnOnce() -> &'a [Chain],
        rank: usize,
        sizes: &[Vec<PartSize>],
        write: impl Fn(usize, &Chain) -> Program,
    ) -> &mut Program {
        if !self.proved.contains_key(&shape) {
            if self.proved.len() == MOST_SHAPES {
                self.proved.clear();
            }
            self.written += 1;
            let program = match &self.common {
                Some(common) => common.take(&shape, rank, || proved(all(), write)),
                None => write(rank, own),
            };
            tracing::debug!(rank, tasks = program.tasks.len(), ?shape, "wrote a program");
            self.proved.insert(shape.clone(), program);
        }
        let program = self.proved.get_mut(&shape).expect("it is there by now");
        fit(program, own, sizes);
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

/// The programs of all ranks, which are proved sound together.
fn proved(chains: &[Chain], write: impl Fn(usize, &Chain) -> Program) -> Vec<Program> {
    let programs: Vec<Program> = chains.iter().enumerate().map(|(rank, chain)| write(rank, chain)).collect();
    verify(&programs).unwrap_or_else(|unsound| panic!("schedules write sound programs: {unsound}"));
    programs
}

/// A rank's program of a step whose micro-batches are all like these samples. `shards` are those of the strategy's cut.
pub fn program(shards: &[Model], strategy: &Strategy, rank: usize, samples: &Samples) -> Program {
    let shard = &shards[strategy.mesh().shard(rank)];
    let parts = samples.most_parts().min(strategy.arrangement.parts);
    let (_, sizes) = Shape::of_step(vec![vec![samples.part_sizes(shard, parts); strategy.accumulate]]);
    strategy.arrangement.step(&Chain::of(shard, strategy, rank), &sizes[0])
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
