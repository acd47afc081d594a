//! Schedules: functions that write programs.

use crate::program::{Chunk, Micro, Program, Task, UnitIdx, Value, ValueKind, Work};

/// What is known of a chain to schedule it. All ranks of a tensor-parallel group have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Of each unit before the head: whether its output is a summand of the group's.
    pub partial: Vec<bool>,
    pub head_is_partial: bool,
    /// Whether the first unit puts something on the stream beside its output.
    pub starts_stream: bool,
    /// Whether the stream is split by tokens: then every output is partial.
    pub splits_sequence: bool,
    /// Whether some parameters are held by several ranks that each have a summand of the gradient.
    pub sums_gradients: bool,
}

/// Micro-batches one after another, each forward and then backward; of each, in how many chunks its head is treated. With
/// `recompute`, only the stream is kept for backward, and a unit's forward runs again before its backward.
pub fn sequential(chain: &Chain, chunks: &[usize], recompute: bool) -> Program {
    let mut tasks = Vec::new();
    for (micro, &chunks) in chunks.iter().enumerate() {
        let mut writer = Writer { chain, micro: Micro(micro), tasks };
        writer.forward(if recompute { Keep::Stream } else { Keep::Everything });
        writer.losses(chunks);
        writer.backward(recompute);
        tasks = writer.tasks;
    }
    if chain.sums_gradients {
        let (unit, micro) = (UnitIdx(0), Micro(0));
        tasks.push(Task {
            work: Work::SumGradients,
            unit,
            micro,
            reads: Vec::new(),
            writes: Vec::new(),
            frees: Vec::new(),
        });
    }
    Program { tasks }
}

/// The losses of one micro-batch, and no gradients.
pub fn evaluation(chain: &Chain, chunks: usize) -> Program {
    let mut writer = Writer { chain, micro: Micro(0), tasks: Vec::new() };
    writer.forward(Keep::Nothing);
    writer.evaluations(chunks);
    Program { tasks: writer.tasks }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    Nothing,
    Stream,
    Everything,
}

/// Writes the tasks of one micro-batch.
struct Writer<'a> {
    chain: &'a Chain,
    micro: Micro,
    tasks: Vec<Task>,
}

impl Writer<'_> {
    fn forward(&mut self, keep: Keep) {
        use ValueKind::*;
        for unit in (0..self.chain.partial.len()).map(UnitIdx) {
            self.enter(unit, keep);
            let mut input = Vec::new();
            if unit.0 > 0 {
                input.push(self.input(unit));
            }
            let starts = (unit.0 == 0 && self.chain.starts_stream).then_some(Stream);
            let saved = (keep == Keep::Everything).then_some(Saved);
            let writes = [starts, Some(Output), saved].into_iter().flatten().map(|kind| self.value(kind, unit));
            let writes = writes.collect();
            self.push(Work::Forward, unit, input.clone(), writes, input);
            if self.chain.partial[unit.0] {
                self.reduce(unit, Output, OutputReduced);
            }
        }
        self.enter(self.head(), keep);
    }

    /// The entry of a unit behind the first, or of the head.
    fn enter(&mut self, unit: UnitIdx, keep: Keep) {
        use ValueKind::*;
        let Some(below) = unit.0.checked_sub(1).map(UnitIdx) else { return };
        let stream = (below.0 > 0 || self.chain.starts_stream).then(|| self.value(Stream, below));
        let output = self.value(if self.chain.partial[below.0] { OutputReduced } else { Output }, below);
        // The stream that the first unit starts is part of no entry, so nothing needs it afterwards.
        let is_done = |stream: &Value| stream.unit.0 == 0 || keep == Keep::Nothing;
        let frees = [Some(output), stream.filter(is_done)].into_iter().flatten().collect();
        let reads = [stream, Some(output)].into_iter().flatten().collect();
        let writes = vec![self.value(Stream, unit), self.value(Normalised, unit)];
        self.push(Work::Enter, unit, reads, writes, frees);
        self.gather_input(unit);
    }

    /// Rows of the normalised stream that other ranks have.
    fn gather_input(&mut self, unit: UnitIdx) {
        if self.chain.splits_sequence {
            self.exchange(Work::AllGather, unit, ValueKind::Normalised, ValueKind::NormalisedGathered);
        }
    }

    /// What a body, or the head, reads.
    fn input(&self, unit: UnitIdx) -> Value {
        let gathered = self.chain.splits_sequence;
        self.value(if gathered { ValueKind::NormalisedGathered } else { ValueKind::Normalised }, unit)
    }

    fn losses(&mut self, chunks: usize) {
        use ValueKind::*;
        let (head, input) = (self.head(), self.input(self.head()));
        let gradient = self.value(NormalisedGradient, head);
        for chunk in (0..chunks).map(Chunk) {
            let mut known = self.logits(chunk);
            let mut frees = known.clone();
            // The first chunk makes room for the gradient of all.
            let writes = if chunk.0 == 0 { vec![gradient] } else { Vec::new() };
            known.extend((chunk.0 > 0).then_some(gradient));
            known.push(input);
            frees.extend((chunk.0 + 1 == chunks).then_some(input));
            self.push(Work::Loss(chunk), head, known, writes, frees);
        }
        if self.chain.head_is_partial {
            self.reduce(head, NormalisedGradient, NormalisedGradientReduced);
        }
        self.backward_enter(head, self.chain.head_is_partial);
    }

    fn evaluations(&mut self, chunks: usize) {
        let (head, input) = (self.head(), self.input(self.head()));
        for chunk in (0..chunks).map(Chunk) {
            let known = self.logits(chunk);
            let mut frees = known.clone();
            if chunk.0 + 1 == chunks {
                frees.extend([input, self.value(ValueKind::Stream, head)]);
            }
            self.push(Work::Evaluate(chunk), head, known, Vec::new(), frees);
        }
    }

    /// A chunk's logits; returns what its losses are computed from.
    fn logits(&mut self, chunk: Chunk) -> Vec<Value> {
        use ValueKind::*;
        let (head, input) = (self.head(), self.input(self.head()));
        let logits = self.value(Logits(chunk), head);
        if !self.chain.head_is_partial {
            self.push(Work::Logits(chunk), head, vec![input], vec![logits], Vec::new());
            return vec![logits];
        }
        let stats = self.value(Stats(chunk), head);
        self.push(Work::Logits(chunk), head, vec![input], vec![logits, stats], Vec::new());
        self.exchange(Work::AllGather, head, Stats(chunk), StatsGathered(chunk));
        vec![logits, self.value(StatsGathered(chunk), head)]
    }

    fn backward(&mut self, recompute: bool) {
        use ValueKind::*;
        for unit in (0..self.chain.partial.len()).rev().map(UnitIdx) {
            if recompute {
                self.recompute(unit);
            }
            let mut reads = vec![self.value(Saved, unit)];
            reads.push(self.gradient_of_all_rows(unit, OutputGradient, OutputGradientGathered));
            if unit.0 == 0 {
                reads.push(self.gradient_of_all_rows(unit, StreamGradient, StreamGradientGathered));
            }
            let inputs = self.value(WeightInputs, unit);
            let mut writes = vec![inputs];
            if unit.0 > 0 {
                writes.push(self.value(NormalisedGradient, unit));
            }
            self.push(Work::BackwardInput, unit, reads.clone(), writes, reads);
            let is_reduced = unit.0 > 0 && self.chain.partial[unit.0];
            if is_reduced {
                self.reduce(unit, NormalisedGradient, NormalisedGradientReduced);
            }
            // Nobody waits for the weights' gradients, so they are computed while the others travel.
            self.push(Work::BackwardWeight, unit, vec![inputs], Vec::new(), vec![inputs]);
            if unit.0 > 0 {
                self.backward_enter(unit, is_reduced);
            }
        }
    }

    fn recompute(&mut self, unit: UnitIdx) {
        use ValueKind::*;
        let mut input = Vec::new();
        if unit.0 > 0 {
            let (reads, writes) = (vec![self.value(Stream, unit)], vec![self.value(Normalised, unit)]);
            self.push(Work::Normalise, unit, reads, writes, Vec::new());
            self.gather_input(unit);
            input.push(self.input(unit));
        }
        let saved = vec![self.value(Saved, unit)];
        self.push(Work::Recompute, unit, input.clone(), saved, input);
    }

    /// A gradient whose rows the ranks have a part of each, gathered where the stream is split.
    fn gradient_of_all_rows(&mut self, unit: UnitIdx, own: ValueKind, gathered: ValueKind) -> Value {
        if !self.chain.splits_sequence {
            return self.value(own, unit);
        }
        self.exchange(Work::AllGather, unit, own, gathered);
        self.value(gathered, unit)
    }

    fn backward_enter(&mut self, unit: UnitIdx, is_reduced: bool) {
        use ValueKind::*;
        let gradient = if is_reduced { NormalisedGradientReduced } else { NormalisedGradient };
        let mut reads = vec![self.value(Stream, unit), self.value(gradient, unit)];
        if unit != self.head() {
            reads.push(self.value(StreamGradient, unit));
        }
        let below = UnitIdx(unit.0 - 1);
        let writes = [StreamGradient, OutputGradient].map(|kind| self.value(kind, below)).to_vec();
        self.push(Work::BackwardEnter, unit, reads.clone(), writes, reads);
    }

    /// Sums a value over the ranks; each gets all of it, or its own rows where the stream is split.
    fn reduce(&mut self, unit: UnitIdx, from: ValueKind, to: ValueKind) {
        let work = if self.chain.splits_sequence { Work::ReduceScatter } else { Work::AllReduce };
        self.exchange(work, unit, from, to);
    }

    fn exchange(&mut self, work: Work, unit: UnitIdx, from: ValueKind, to: ValueKind) {
        let (from, to) = (self.value(from, unit), self.value(to, unit));
        self.push(work, unit, vec![from], vec![to], vec![from]);
    }

    fn head(&self) -> UnitIdx {
        UnitIdx(self.chain.partial.len())
    }

    fn value(&self, kind: ValueKind, unit: UnitIdx) -> Value {
        Value { kind, unit, micro: self.micro }
    }

    fn push(&mut self, work: Work, unit: UnitIdx, reads: Vec<Value>, writes: Vec<Value>, frees: Vec<Value>) {
        self.tasks.push(Task { work, unit, micro: self.micro, reads, writes, frees });
    }
}
