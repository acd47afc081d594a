//! Pipelines: the stages of a model, their places, and the order in which each place computes them.
//!
//! Place r of p has stage r, or several: r, r + p, …, or in a V r and 2p - 1 - r. An order lists a place's blocks. [`Pipeline::plan`]
//! runs the orders of all places in made-up time and lists blocks and passes as they come. Every rank's program follows that one
//! list, so whatever a task waits for is in the list before it.

use std::collections::VecDeque;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::program::ROOMS;

/// How a chain is cut in stages, and the order in which they are computed; by default it is one stage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pipeline {
    /// The first unit of each stage, the first stage's excepted, which is 0.
    pub cuts: Vec<usize>,
    pub order: PipelineOrder,
}

/// The order in which a place computes its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PipelineOrder {
    /// All forward blocks, then all backward blocks.
    Gpipe,
    /// Forward and backward blocks in turn, as soon as there is something to go backward with.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// The same with several stages at each place.
    Interleaved,
    /// In turn with the input halves of backward; the weight halves fill the gaps.
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// The same with two stages at each place, in a V.
    #[serde(rename = "zb-v")]
    ZbV,
}

impl PipelineOrder {
    pub const ALL: [PipelineOrder; 5] = [
        PipelineOrder::Gpipe,
        PipelineOrder::OneForwardOneBackward,
        PipelineOrder::Interleaved,
        PipelineOrder::ZbH1,
        PipelineOrder::ZbV,
    ];

    pub fn name(self) -> &'static str {
        match self {
            PipelineOrder::Gpipe => "gpipe",
            PipelineOrder::OneForwardOneBackward => "1f1b",
            PipelineOrder::Interleaved => "interleaved",
            PipelineOrder::ZbH1 => "zb-h1",
            PipelineOrder::ZbV => "zb-v",
        }
    }

    /// Whether each place has several stages.
    pub fn has_chunks(self) -> bool {
        matches!(self, PipelineOrder::Interleaved | PipelineOrder::ZbV)
    }

    /// Stages at each place, if nobody says how many.
    pub fn usual_chunks(self) -> usize {
        if self.has_chunks() { 2 } else { 1 }
    }

    /// Whether gradients of weights are computed apart from those of inputs.
    pub fn splits_backward(self) -> bool {
        matches!(self, PipelineOrder::ZbH1 | PipelineOrder::ZbV)
    }

    /// Whether stages keep all micro-batches until the last one has gone through. In other orders a pipeline that is full keeps no
    /// more of them, however many there are.
    pub fn keeps_all(self) -> bool {
        self == PipelineOrder::Gpipe
    }

    /// The blocks of place `r` of `p` with so many stages each, in order.
    fn blocks(self, r: usize, p: usize, chunks: usize, micros: usize) -> Vec<Block> {
        let mut list =
            List { place: r, p, is_v: self == PipelineOrder::ZbV, blocks: Vec::new(), counts: Default::default() };
        match self {
            PipelineOrder::Gpipe => {
                (0..micros).for_each(|_| list.next(BlockKind::Forward, 0));
                (0..micros).for_each(|_| list.next(BlockKind::Backward, 0));
            }
            PipelineOrder::OneForwardOneBackward => list.in_turn(micros, p - 1 - r, BlockKind::Backward, |_| ()),
            PipelineOrder::ZbH1 => {
                let mut inputs = 0;
                list.in_turn(micros, p - 1 - r, BlockKind::Input, |list| {
                    inputs += 1;
                    if inputs > r {
                        list.next(BlockKind::Weight, 0);
                    }
                });
                list.rest(BlockKind::Weight, 0, micros);
            }
            PipelineOrder::Interleaved => list.interleaved(chunks, micros.next_multiple_of(p)),
            PipelineOrder::ZbV => list.in_a_v(micros.max(2 * p - 1)),
        }
        list.blocks.retain(|block| block.micro < micros);
        list.blocks
    }
}

/// What a place computes of a stage and a micro-batch without waiting for other stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Block {
    pub kind: BlockKind,
    pub stage: usize,
    pub micro: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BlockKind {
    Forward,
    Backward,
    /// The input half of backward, and its weight half.
    Input,
    Weight,
}

/// An event of a step, as the places come to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Block(Block),
    /// What a micro-batch leaves one stage with arrives at the other, whose blocks are at another place.
    Pass {
        from: usize,
        to: usize,
        micro: usize,
    },
}

/// A place's blocks as they are listed.
struct List {
    place: usize,
    p: usize,
    is_v: bool,
    blocks: Vec<Block>,
    /// Blocks so far, by kind and chunk; orders with more chunks than two do not count.
    counts: [[usize; 2]; 4],
}

impl List {
    fn push(&mut self, kind: BlockKind, chunk: usize, micro: usize) {
        let stage = if self.is_v && chunk == 1 { 2 * self.p - 1 - self.place } else { chunk * self.p + self.place };
        self.blocks.push(Block { kind, stage, micro });
    }

    /// The next micro-batch of a kind and chunk.
    fn next(&mut self, kind: BlockKind, chunk: usize) {
        let micro = self.count(kind, chunk);
        self.counts[kind as usize][chunk] += 1;
        self.push(kind, chunk, micro);
    }

    fn count(&self, kind: BlockKind, chunk: usize) -> usize {
        self.counts[kind as usize][chunk]
    }

    fn rest(&mut self, kind: BlockKind, chunk: usize, micros: usize) {
        (self.count(kind, chunk)..micros).for_each(|_| self.next(kind, chunk));
    }

    /// Some forward blocks ahead, then one of each kind in turn.
    fn in_turn(&mut self, micros: usize, ahead: usize, backward: BlockKind, mut behind: impl FnMut(&mut List)) {
        let ahead = ahead.min(micros);
        (0..ahead).for_each(|_| self.next(BlockKind::Forward, 0));
        for turn in 0..micros {
            if turn + ahead < micros {
                self.next(BlockKind::Forward, 0);
            }
            self.next(backward, 0);
            behind(self);
        }
    }

    /// `micros` is a multiple of the places.
    fn interleaved(&mut self, chunks: usize, micros: usize) {
        let (p, all) = (self.p, micros * chunks);
        let round = p * chunks;
        let of = |index: usize| (index % round / p, p * (index / round) + index % p);
        let ahead = all.min(2 * (p - 1 - self.place) + (chunks - 1) * p);
        let forward = |list: &mut List, index: usize| {
            let (chunk, micro) = of(index);
            list.push(BlockKind::Forward, chunk, micro);
        };
        (0..ahead).for_each(|index| forward(self, index));
        for index in 0..all {
            if index + ahead < all {
                forward(self, index + ahead);
            }
            let (chunk, micro) = of(index);
            self.push(BlockKind::Backward, chunks - 1 - chunk, micro);
        }
    }

    /// `micros` is at least 2p - 1.
    fn in_a_v(&mut self, micros: usize) {
        use BlockKind::{Forward, Input, Weight};
        let (p, r) = (self.p, self.place);
        let mut repeat = |times: usize, blocks: &[(BlockKind, usize)]| {
            for _ in 0..times {
                for &(kind, chunk) in blocks {
                    if self.count(kind, chunk) < micros {
                        self.next(kind, chunk);
                    }
                }
            }
        };
        repeat(2 * (p - r) - 1, &[(Forward, 0)]);
        repeat(r, &[(Forward, 1), (Forward, 0)]);
        repeat(p - r, &[(Forward, 1), (Input, 1), (Weight, 1)]);
        let both = [(Forward, 0), (Input, 0), (Weight, 0), (Forward, 1), (Input, 1), (Weight, 1)];
        repeat(micros - p, &both);
        repeat(r, &[(Input, 0), (Input, 1)]);
        repeat(p - r, &[(Input, 0), (Weight, 0)]);
        repeat(micros, &[(Weight, 1)]);
        repeat(micros, &[(Weight, 0)]);
    }
}

impl Pipeline {
    /// Whether the model is one stage.
    pub fn is_absent(&self) -> bool {
        self.cuts.is_empty()
    }

    pub fn stages(&self) -> usize {
        self.cuts.len() + 1
    }

    /// A stage's units, of so many.
    pub fn units(&self, stage: usize, of: usize) -> Range<usize> {
        let start = if stage == 0 { 0 } else { self.cuts[stage - 1] };
        start..self.cuts.get(stage).copied().unwrap_or(of)
    }

    /// The place of a stage.
    pub fn place(&self, stage: usize, places: usize) -> usize {
        if self.order == PipelineOrder::ZbV && stage >= places { 2 * places - 1 - stage } else { stage % places }
    }

    /// The stages at a place, in the chain's order.
    pub fn stages_at(&self, place: usize, places: usize) -> Vec<usize> {
        (0..self.stages()).filter(|&stage| self.place(stage, places) == place).collect()
    }

    /// By stage: the most micro-batches that it keeps for their backward at a time.
    pub fn kept_micros(&self, places: usize, micros: usize) -> Vec<usize> {
        self.keeping(places, micros).most_micros
    }

    /// When its stages keep micro-batches for their backward.
    pub fn keeping(&self, places: usize, micros: usize) -> Keeping {
        let place_of = (0..self.stages()).map(|stage| self.place(stage, places)).collect();
        if self.order.keeps_all() {
            let changes = (0..self.stages()).map(|stage| (stage, micros as isize)).collect();
            return Keeping { place_of, changes, most_micros: vec![micros; self.stages()] };
        }
        let (mut now, mut most_micros) = (vec![0; self.stages()], vec![0; self.stages()]);
        let mut changes = Vec::new();
        for event in self.plan(places, micros.min(FULL * places), 0) {
            let Event::Block(Block { kind, stage, .. }) = event else { continue };
            match kind {
                BlockKind::Forward => now[stage] += 1,
                BlockKind::Backward | BlockKind::Weight => now[stage] -= 1,
                BlockKind::Input => (),
            }
            most_micros[stage] = most_micros[stage].max(now[stage]);
            match kind {
                BlockKind::Forward => changes.push((stage, 1)),
                BlockKind::Backward | BlockKind::Input => changes.push((stage, -1)),
                BlockKind::Weight => (),
            }
        }
        Keeping { place_of, changes, most_micros }
    }

    /// Blocks and passes of a step in an order that all places can follow. Stages before `frozen` have no backward.
    pub(crate) fn plan(&self, places: usize, micros: usize, frozen: usize) -> Vec<Event> {
        let chunks = self.stages() / places;
        let has_backward = |block: &Block| block.kind == BlockKind::Forward || block.stage >= frozen;
        let queue = |place| self.order.blocks(place, places, chunks, micros).into_iter().filter(has_backward).collect();
        Plan::new(self, places, (0..places).map(queue).collect()).run()
    }

    /// The same for the forward blocks of one micro-batch.
    pub(crate) fn plan_of_forward(&self, places: usize) -> Vec<Event> {
        let block = |stage| Block { kind: BlockKind::Forward, stage, micro: 0 };
        let queue = |place| self.stages_at(place, places).into_iter().map(block).collect();
        Plan::new(self, places, (0..places).map(queue).collect()).run()
    }
}

/// When the stages of a pipeline keep micro-batches for their backward.
#[derive(Clone, Debug)]
pub struct Keeping {
    /// By stage.
    place_of: Vec<usize>,
    /// A stage, and the micro-batches that it keeps from then on; without what is kept only for the gradients of weights.
    changes: Vec<(usize, isize)>,
    /// By stage: the most at a time.
    pub most_micros: Vec<usize>,
}

impl Keeping {
    /// By place: the most bytes that it keeps at a time, if a stage keeps so many of a micro-batch until its backward. What it keeps
    /// from there to the weights' gradients does not count.
    pub fn least_bytes(&self, of_stage: &[f64]) -> Vec<f64> {
        let places = self.place_of.iter().max().map_or(0, |last| last + 1);
        let (mut now, mut most) = (vec![0.0; places], vec![0.0_f64; places]);
        for &(stage, micros) in &self.changes {
            let place = self.place_of[stage];
            now[place] += micros as f64 * of_stage[stage];
            most[place] = most[place].max(now[place]);
        }
        most
    }
}

/// Micro-batches for each place from which on further ones take turns with those before, unless the order keeps all of them.
const FULL: usize = 4;

/// The places of a pipeline in made-up time: a stage takes two ticks forward, and two for each half of its backward. Stages are cut so
/// that they take about equally long, however many units they have.
struct Plan<'a> {
    pipeline: &'a Pipeline,
    places: usize,
    /// The blocks left to each place.
    queues: Vec<VecDeque<Block>>,
    free: Vec<u64>,
    /// When forward blocks began and ended, and backward ones; the input half stands for the whole backward.
    forward: Times,
    backward: Times,
    events: Vec<(u64, Event)>,
}

impl<'a> Plan<'a> {
    fn new(pipeline: &'a Pipeline, places: usize, queues: Vec<VecDeque<Block>>) -> Plan<'a> {
        Plan {
            pipeline,
            places,
            free: vec![0; queues.len()],
            queues,
            forward: Times { by_stage: vec![Vec::new(); pipeline.stages()] },
            backward: Times { by_stage: vec![Vec::new(); pipeline.stages()] },
            events: Vec::new(),
        }
    }

    fn run(mut self) -> Vec<Event> {
        while self.queues.iter().any(|queue| !queue.is_empty()) {
            let starts = (0..self.places).filter_map(|place| Some((self.start(*self.queues[place].front()?)?, place)));
            let (start, place) = starts.min().expect("an order's blocks can follow one another");
            let block = self.queues[place].pop_front().expect("it was looked at");
            if let Some((from, came)) = self.arrival(block) {
                self.events.push((came, Event::Pass { from: from.stage, to: block.stage, micro: block.micro }));
            }
            let end = start + if block.kind == BlockKind::Backward { 4 } else { 2 };
            self.events.push((start, Event::Block(block)));
            self.free[place] = end;
            match block.kind {
                BlockKind::Forward => self.forward.note(block, [start, end]),
                BlockKind::Backward | BlockKind::Input => self.backward.note(block, [start, end]),
                BlockKind::Weight => (),
            }
        }
        // A place passes on what it has computed before it computes the next block.
        self.events.sort_by_key(|(time, event)| (*time, matches!(event, Event::Block(_))));
        self.events.into_iter().map(|(_, event)| event).collect()
    }

    /// The earliest start of a place's next block; `None` while it waits for a block that has not begun.
    fn start(&self, block: Block) -> Option<u64> {
        let mut start = self.free[self.place(block)];
        if let Some(source) = self.source(block) {
            start = start.max(self.times(source)?[1]);
            start = start.max(self.arrival(block).map_or(0, |(_, came)| came));
        }
        Some(start)
    }

    fn place(&self, block: Block) -> usize {
        self.pipeline.place(block.stage, self.places)
    }

    /// The block of another stage whose result a block goes on with.
    fn source(&self, block: Block) -> Option<Block> {
        match block.kind {
            BlockKind::Forward => Some(Block { stage: block.stage.checked_sub(1)?, ..block }),
            BlockKind::Backward | BlockKind::Input if block.stage + 1 < self.pipeline.stages() => {
                Some(Block { stage: block.stage + 1, ..block })
            }
            _ => None,
        }
    }

    /// If a block's input crosses from another place: its source, and when it has arrived. There is room for it once the block that
    /// used the same room has begun.
    fn arrival(&self, block: Block) -> Option<(Block, u64)> {
        let source = self.source(block).filter(|source| self.place(*source) != self.place(block))?;
        let sent = self.times(source)?[1];
        let micro = block.micro.checked_sub(ROOMS);
        let room = micro.and_then(|micro| self.times(Block { micro, ..block }));
        Some((source, sent.max(room.map_or(0, |[began, _]| began + 1))))
    }

    /// When a block that others go on with began and ended, if it has begun.
    fn times(&self, block: Block) -> Option<[u64; 2]> {
        let times = if block.kind == BlockKind::Forward { &self.forward } else { &self.backward };
        *times.by_stage[block.stage].get(block.micro)?
    }
}

/// When blocks began and ended, by stage and micro-batch.
struct Times {
    by_stage: Vec<Vec<Option<[u64; 2]>>>,
}

impl Times {
    fn note(&mut self, block: Block, times: [u64; 2]) {
        let micros = &mut self.by_stage[block.stage];
        if block.micro >= micros.len() {
            micros.resize(block.micro + 1, None);
        }
        micros[block.micro] = Some(times);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipeline(order: PipelineOrder, places: usize, chunks: usize) -> Pipeline {
        Pipeline { cuts: (1..places * chunks).collect(), order }
    }

    #[test]
    fn every_order_computes_every_block_once_and_backward_behind_forward() {
        for order in PipelineOrder::ALL {
            for (places, micros) in [1, 2, 3, 4, 8].into_iter().flat_map(|p| [1, 2, 3, 5, 8, 16].map(|m| (p, m))) {
                let chunks = order.usual_chunks();
                let pipeline = pipeline(order, places, chunks);
                let events = pipeline.plan(places, micros, 0);
                let kinds: &[BlockKind] = if order.splits_backward() {
                    &[BlockKind::Forward, BlockKind::Input, BlockKind::Weight]
                } else {
                    &[BlockKind::Forward, BlockKind::Backward]
                };
                for stage in 0..places * chunks {
                    for micro in 0..micros {
                        let at = |kind| {
                            let block = Event::Block(Block { kind, stage, micro });
                            assert_eq!(
                                events.iter().filter(|event| **event == block).count(),
                                1,
                                "{order:?} {block:?}"
                            );
                            events.iter().position(|event| *event == block).unwrap()
                        };
                        assert!(kinds.windows(2).all(|pair| at(pair[0]) < at(pair[1])), "{order:?} {stage} {micro}");
                    }
                }
                let crossings = (1..places * chunks)
                    .filter(|&stage| pipeline.place(stage, places) != pipeline.place(stage - 1, places));
                let passes = events.iter().filter(|event| matches!(event, Event::Pass { .. })).count();
                assert_eq!(passes, 2 * micros * crossings.count(), "{order:?} {places} {micros}");
            }
        }
    }

    #[test]
    fn stages_keep_as_many_micro_batches_as_their_order_says() {
        for (order, expected) in [
            (PipelineOrder::Gpipe, [8, 8, 8, 8]),
            (PipelineOrder::OneForwardOneBackward, [4, 3, 2, 1]),
            (PipelineOrder::ZbH1, [4, 4, 4, 4]),
        ] {
            assert_eq!(pipeline(order, 4, 1).kept_micros(4, 8), expected, "{order:?}");
        }
    }

    #[test]
    fn a_pass_comes_behind_its_sender_and_before_its_reader() {
        for order in PipelineOrder::ALL {
            let pipeline = pipeline(order, 4, order.usual_chunks());
            let events = pipeline.plan(4, 6, 0);
            for (index, event) in events.iter().enumerate() {
                let Event::Pass { from, to, micro } = *event else { continue };
                let is_of = |event: &Event, of: usize| {
                    let is_forward = from < to;
                    matches!(event, Event::Block(block) if block.stage == of && block.micro == micro
                        && block.kind != BlockKind::Weight && (block.kind == BlockKind::Forward) == is_forward)
                };
                assert!(events[..index].iter().any(|event| is_of(event, from)), "{order:?} {event:?}");
                assert!(events[index..].iter().any(|event| is_of(event, to)), "{order:?} {event:?}");
            }
        }
    }
}
