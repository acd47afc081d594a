//! A line: the tasks of one part of a micro-batch, in order, as if it were alone. With several stages, those of one stage.

use std::ops::Range;

use evenkeel_model::UnitKind;
use smallvec::smallvec;

use super::{Chain, ChainUnit, PartSize};
use crate::program::{Exchange, GroupIdx, Micro, Task, UnitIdx, Value, ValueKind, Values};
use crate::work::{Chunk, Work};

/// The values that a unit's forward keeps for its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    Everything,
    /// The stream at its entry; its body is computed again.
    Stream,
    /// Nothing: it is computed again from the stream of the unit before.
    Nothing,
}

/// How backward gets back the values that forward did not keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Only bodies; the stream has the reduced values.
    Bodies,
    /// Whole layers, with the reductions between their units.
    Layers,
    /// All that forward did, even the layer's last reduction, whose result is never read.
    Everything,
}

/// The tensor-parallel group's place among a chain's groups.
pub(super) const TENSOR: GroupIdx = GroupIdx(0);

/// Tasks of a unit's forward, and of most units' backward, at most.
const TASKS_OF_UNIT: usize = 8;

/// The values of an addition to the stream.
struct Joining {
    reads: Values,
    frees: Values,
}

pub(super) struct Line<'a> {
    chain: &'a Chain,
    /// The units of its stage.
    stage: Range<usize>,
    micro: Micro,
    size: &'a PartSize,
    /// By unit: the values that backward finds.
    keep: &'a [Keep],
    recompute: Recompute,
    tasks: Vec<Task>,
}

impl<'a> Line<'a> {
    pub fn new(
        chain: &'a Chain,
        stage: Range<usize>,
        micro: Micro,
        size: &'a PartSize,
        keep: &'a [Keep],
        recompute: Recompute,
    ) -> Line<'a> {
        let tasks = Vec::with_capacity(TASKS_OF_UNIT * stage.len());
        Line { chain, stage, micro, size, keep, recompute, tasks }
    }

    /// Losses and gradients.
    pub fn training(mut self) -> Vec<Task> {
        self.add_forward(true);
        self.add_backward();
        self.tasks
    }

    /// The stage up to its losses, or up to what it passes on.
    pub fn forward(mut self) -> Vec<Task> {
        self.add_forward(true);
        self.tasks
    }

    /// Losses, if the stage has the head, and gradients.
    pub fn backward(mut self) -> Vec<Task> {
        self.add_backward();
        self.tasks
    }

    /// Only losses.
    pub fn evaluation(mut self) -> Vec<Task> {
        self.add_forward(false);
        if self.has_head() {
            self.evaluations();
        }
        self.tasks
    }

    fn add_forward(&mut self, trains: bool) {
        for unit in self.stage.clone().map(UnitIdx) {
            if self.arrives_at(unit) {
                self.arrive(unit);
            } else {
                self.enter(unit, |unit| self.keep[unit] == Keep::Nothing);
            }
            if unit != self.head() {
                self.body(Work::Forward, unit, self.keep[unit.0] == Keep::Everything, true);
                self.reduce_output(unit);
            }
        }
        if !self.has_head() {
            self.join(UnitIdx(self.stage.end), trains && self.chain.trains_before(self.stage.end));
        }
    }

    fn has_head(&self) -> bool {
        self.stage.end == self.chain.units.len()
    }

    /// Whether the stream comes from another stage.
    fn arrives_at(&self, unit: UnitIdx) -> bool {
        unit.0 == self.stage.start && unit.0 > 0
    }

    /// The entry of a stage's first unit.
    fn arrive(&mut self, unit: UnitIdx) {
        use ValueKind::*;
        let arrived = self.value(Passed, unit);
        let writes = smallvec![self.value(Stream, unit), self.value(Normalised, unit)];
        self.push(Work::Arrive, unit, smallvec![arrived], writes, smallvec![arrived]);
        self.gather_input(unit);
    }

    /// The addition before a unit of the next stage.
    fn join(&mut self, unit: UnitIdx, keeps: bool) {
        let Joining { reads, frees } = self.joining(unit, |unit| self.keep[unit] == Keep::Nothing);
        let kinds = [Some(ValueKind::Passed), keeps.then_some(ValueKind::Joined)];
        let writes = kinds.into_iter().flatten().map(|kind| self.value(kind, unit)).collect();
        self.push(Work::Join, unit, reads, writes, frees);
    }

    fn has_entry(&self, unit: UnitIdx) -> bool {
        self.chain.units[unit.0].has_entry()
    }

    /// A unit's entry, if it has one. It frees the stream of the unit before if nothing needs it afterwards.
    fn enter(&mut self, unit: UnitIdx, is_done: impl Fn(usize) -> bool) {
        use ValueKind::*;
        if !self.has_entry(unit) {
            return;
        }
        let Joining { reads, frees } = self.joining(unit, is_done);
        let writes = smallvec![self.value(Stream, unit), self.value(Normalised, unit)];
        self.push(Work::Enter, unit, reads, writes, frees);
        self.gather_input(unit);
    }

    /// What the addition before a unit reads and frees.
    fn joining(&self, unit: UnitIdx, is_done: impl Fn(usize) -> bool) -> Joining {
        use ValueKind::*;
        let below = UnitIdx(unit.0 - 1);
        let ChainUnit { is_partial, starts_stream, .. } = self.chain.units[below.0];
        let stream = (self.has_entry(below) || starts_stream).then(|| self.value(Stream, below));
        let output = self.value(if is_partial { OutputReduced } else { Output }, below);
        // A stream that a unit starts belongs to no entry, so no backward needs it.
        let is_done = |stream: &Value| !self.has_entry(stream.unit) || is_done(stream.unit.0);
        Joining {
            reads: [stream, Some(output)].into_iter().flatten().collect(),
            frees: [Some(output), stream.filter(is_done)].into_iter().flatten().collect(),
        }
    }

    /// The forward of a unit's body; it frees its input.
    fn body(&mut self, work: Work, unit: UnitIdx, saves: bool, gives_output: bool) {
        use ValueKind::*;
        let input: Values = self.has_entry(unit).then(|| self.input(unit)).into_iter().collect();
        let starts = work == Work::Forward && self.chain.units[unit.0].starts_stream;
        let writes = [starts.then_some(Stream), gives_output.then_some(Output), saves.then_some(Saved)];
        let writes = writes.into_iter().flatten().map(|kind| self.value(kind, unit)).collect();
        self.push(work, unit, input.clone(), writes, input);
    }

    fn reduce_output(&mut self, unit: UnitIdx) {
        if self.is_partial(unit) {
            self.reduce(unit, ValueKind::Output, ValueKind::OutputReduced);
        }
    }

    /// Gathers the rows of the normalised stream from all ranks.
    fn gather_input(&mut self, unit: UnitIdx) {
        if self.chain.splits_sequence {
            self.exchange(Work::AllGather, unit, ValueKind::Normalised, ValueKind::NormalisedGathered);
        }
    }

    /// The value that a body, or the head, reads.
    fn input(&self, unit: UnitIdx) -> Value {
        let gathered = self.chain.splits_sequence;
        self.value(if gathered { ValueKind::NormalisedGathered } else { ValueKind::Normalised }, unit)
    }

    fn losses(&mut self) {
        use ValueKind::*;
        let (head, input) = (self.head(), self.input(self.head()));
        let gradient = self.value(NormalisedGradient, head);
        let chunks = self.size.chunk_rows.len();
        for chunk in (0..chunks).map(Chunk) {
            let mut known = self.logits(chunk);
            let mut frees = known.clone();
            // The first chunk allocates the gradient of all chunks.
            let writes = if chunk.0 == 0 { smallvec![gradient] } else { Values::new() };
            known.extend((chunk.0 > 0).then_some(gradient));
            known.push(input);
            frees.extend((chunk.0 + 1 == chunks).then_some(input));
            self.push(Work::Loss(chunk), head, known, writes, frees);
        }
        if !self.needs_input_gradient(head) {
            return self.forget(head, [Stream, NormalisedGradient]);
        }
        let is_partial = self.is_partial(head);
        self.reduce_gradient(head, is_partial);
        // Issues the exchange for the last units' recomputation before the head's gradient is awaited.
        self.prefetch(self.blocks().last().copied());
        self.backward_enter(head, is_partial);
    }

    fn is_partial(&self, unit: UnitIdx) -> bool {
        self.chain.units[unit.0].is_partial
    }

    fn evaluations(&mut self) {
        let (head, input) = (self.head(), self.input(self.head()));
        let chunks = self.size.chunk_rows.len();
        for chunk in (0..chunks).map(Chunk) {
            let known = self.logits(chunk);
            let mut frees = known.clone();
            if chunk.0 + 1 == chunks {
                frees.extend([input, self.value(ValueKind::Stream, head)]);
            }
            let reads = known.into_iter().chain([input]).collect();
            self.push(Work::Evaluate(chunk), head, reads, Values::new(), frees);
        }
    }

    /// A chunk's logits; returns the values that its losses are computed from.
    fn logits(&mut self, chunk: Chunk) -> Values {
        use ValueKind::*;
        let (head, input) = (self.head(), self.input(self.head()));
        let logits = self.value(Logits(chunk), head);
        if !self.is_partial(head) {
            self.push(Work::Logits(chunk), head, smallvec![input], smallvec![logits], Values::new());
            return smallvec![logits];
        }
        let stats = self.value(Stats(chunk), head);
        self.push(Work::Logits(chunk), head, smallvec![input], smallvec![logits, stats], Values::new());
        self.exchange(Work::GatherStats(chunk), head, Stats(chunk), StatsGathered(chunk));
        smallvec![logits, self.value(StatsGathered(chunk), head)]
    }

    /// The units with a backward before the head, in blocks that are recomputed together: a unit that keeps something, and those
    /// behind it that keep nothing. Each block by its first unit and the one behind its last.
    fn blocks(&self) -> Vec<[usize; 2]> {
        let lowest = self.chain.lowest_trained().0.max(self.stage.start);
        let head = self.head().0.min(self.stage.end);
        let starts = (lowest..head).filter(|&unit| unit == lowest || self.keep[unit] != Keep::Nothing);
        let starts: Vec<usize> = starts.collect();
        let ends = starts.iter().copied().skip(1).chain([head]);
        starts.iter().copied().zip(ends).map(|(start, end)| [start, end]).collect()
    }

    fn add_backward(&mut self) {
        if self.has_head() {
            self.losses();
        } else {
            self.prefetch(self.blocks().last().copied());
            self.backward_join(UnitIdx(self.stage.end));
        }
        let blocks = self.blocks();
        for (index, &[first, end]) in blocks.iter().enumerate().rev() {
            let below = index.checked_sub(1).map(|below| blocks[below]);
            if self.keep[first] != Keep::Everything {
                self.recompute(first, end);
            }
            self.prefetch(below);
            for unit in (first..end).rev().map(UnitIdx) {
                self.backward_body(unit);
            }
        }
    }

    /// Gathers the first input of a block that is to be recomputed: it depends on no gradient, so this can happen early.
    fn prefetch(&mut self, block: Option<[usize; 2]>) {
        let Some(unit) = block.map(|[first, _]| UnitIdx(first)).filter(|unit| self.has_entry(*unit)) else { return };
        if self.keep[unit.0] != Keep::Everything && self.chain.splits_sequence {
            self.normalise(unit);
        }
    }

    fn normalise(&mut self, unit: UnitIdx) {
        use ValueKind::*;
        let (reads, writes) = (smallvec![self.value(Stream, unit)], smallvec![self.value(Normalised, unit)]);
        self.push(Work::Normalise, unit, reads, writes, Values::new());
        self.gather_input(unit);
    }

    fn recompute(&mut self, first: usize, end: usize) {
        let repeats_last =
            self.recompute == Recompute::Everything && self.chain.units[first].kind != UnitKind::Embedding;
        for unit in (first..end).map(UnitIdx) {
            if unit.0 > first {
                self.enter(unit, |_| false);
            } else if self.has_entry(unit) && !self.chain.splits_sequence {
                self.normalise(unit);
            }
            let is_read = unit.0 + 1 < end;
            self.body(Work::Recompute, unit, true, is_read || repeats_last);
            if is_read || repeats_last {
                self.reduce_output(unit);
            }
        }
        if repeats_last {
            self.forget_output(UnitIdx(end - 1));
        }
    }

    /// Frees the recomputed output of a layer's last unit, which is never read.
    fn forget_output(&mut self, unit: UnitIdx) {
        let kind = if self.is_partial(unit) { ValueKind::OutputReduced } else { ValueKind::Output };
        let output = self.value(kind, unit);
        self.tasks.last_mut().expect("the unit was just recomputed").frees.push(output);
    }

    /// The gradients of a body and of its entry. Each exchange is issued as soon as its value is known. Nothing waits for the
    /// weights' gradients, so they are computed during the exchange of the input's.
    fn backward_body(&mut self, unit: UnitIdx) {
        use ValueKind::*;
        let gathered = self.chain.splits_sequence;
        let output = if gathered { OutputGradientGathered } else { OutputGradient };
        let mut reads = smallvec![self.value(Saved, unit), self.value(output, unit)];
        if !self.has_entry(unit) {
            reads.push(self.value(if gathered { StreamGradientGathered } else { StreamGradient }, unit));
        }
        let inputs = self.value(WeightInputs, unit);
        let goes_on = self.needs_input_gradient(unit);
        let writes = if goes_on { smallvec![inputs, self.value(NormalisedGradient, unit)] } else { smallvec![inputs] };
        self.push(Work::BackwardInput, unit, reads.clone(), writes, reads);
        let is_reduced = goes_on && self.is_partial(unit);
        self.reduce_gradient(unit, is_reduced);
        self.push(Work::BackwardWeight, unit, smallvec![inputs], Values::new(), smallvec![inputs]);
        if goes_on {
            self.backward_enter(unit, is_reduced);
        } else if self.has_entry(unit) {
            self.forget(unit, [Stream, StreamGradient]);
        }
    }

    /// Whether anything is trained at a unit's entry or before it.
    fn needs_input_gradient(&self, unit: UnitIdx) -> bool {
        unit > self.chain.lowest_trained() || self.chain.units[unit.0].entry_is_trained
    }

    /// The gradients of the addition behind the stage.
    fn backward_join(&mut self, unit: UnitIdx) {
        let reads = [ValueKind::PassedGradient, ValueKind::Joined].map(|kind| self.value(kind, unit)).into();
        self.push_gradients_below(Work::BackwardJoin, unit, reads);
    }

    /// Frees these values of the unit whose backward was just added: nothing else needs them.
    fn forget(&mut self, unit: UnitIdx, kinds: [ValueKind; 2]) {
        let values = kinds.map(|kind| self.value(kind, unit));
        let last = self.tasks.last_mut().expect("a backward has tasks");
        for value in values {
            if !last.reads.contains(&value) && !last.writes.contains(&value) {
                last.reads.push(value);
            }
            last.frees.push(value);
        }
    }

    fn reduce_gradient(&mut self, unit: UnitIdx, is_partial: bool) {
        if is_partial {
            self.reduce(unit, ValueKind::NormalisedGradient, ValueKind::NormalisedGradientReduced);
        }
    }

    fn backward_enter(&mut self, unit: UnitIdx, is_reduced: bool) {
        use ValueKind::*;
        let gradient = if is_reduced { NormalisedGradientReduced } else { NormalisedGradient };
        let [stream, gradient] = [Stream, gradient].map(|kind| self.value(kind, unit));
        let reads = if unit == self.head() {
            smallvec![stream, gradient]
        } else {
            smallvec![stream, gradient, self.value(StreamGradient, unit)]
        };
        if self.arrives_at(unit) {
            let leaves = self.chain.trains_before(unit.0);
            let writes = leaves.then(|| self.value(PassedGradient, unit)).into_iter().collect();
            return self.push(Work::BackwardEnter, unit, reads.clone(), writes, reads);
        }
        self.push_gradients_below(Work::BackwardEnter, unit, reads);
    }

    /// The gradients of an addition, which frees what it reads: those of the unit before, if anything is trained there.
    fn push_gradients_below(&mut self, work: Work, unit: UnitIdx, reads: Values) {
        use ValueKind::*;
        if unit <= self.chain.lowest_trained() {
            return self.push(work, unit, reads.clone(), Values::new(), reads);
        }
        let below = UnitIdx(unit.0 - 1);
        let writes = [StreamGradient, OutputGradient].map(|kind| self.value(kind, below)).into();
        self.push(work, unit, reads.clone(), writes, reads);
        if self.chain.splits_sequence {
            self.exchange(Work::AllGather, below, OutputGradient, OutputGradientGathered);
            if !self.has_entry(below) {
                self.exchange(Work::AllGather, below, StreamGradient, StreamGradientGathered);
            }
        }
    }

    /// Sums a value over the ranks; each gets all of it, or its own rows if the stream is split.
    fn reduce(&mut self, unit: UnitIdx, from: ValueKind, to: ValueKind) {
        let work = if self.chain.splits_sequence { Work::ReduceScatter } else { Work::AllReduce };
        self.exchange(work, unit, from, to);
    }

    fn exchange(&mut self, work: Work, unit: UnitIdx, from: ValueKind, to: ValueKind) {
        let bytes = self.chain.exchanged_bytes(unit, from, self.size);
        let (from, to) = (self.value(from, unit), self.value(to, unit));
        self.push(work, unit, smallvec![from], smallvec![to], smallvec![from]);
        let task = self.tasks.last_mut().expect("just pushed");
        task.exchange = Some(Exchange { group: TENSOR, bytes });
    }

    fn head(&self) -> UnitIdx {
        UnitIdx(self.chain.units.len() - 1)
    }

    fn value(&self, kind: ValueKind, unit: UnitIdx) -> Value {
        Value { kind, unit, micro: self.micro }
    }

    fn push(&mut self, work: Work, unit: UnitIdx, reads: Values, writes: Values, frees: Values) {
        self.tasks.push(Task { work, unit, micro: self.micro, reads, writes, frees, exchange: None });
    }
}
