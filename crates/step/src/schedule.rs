//! Schedules: functions that write programs.

use crate::program::{Micro, Program, Task, UnitIdx, Value, ValueKind, Work};

/// What is known of a chain to schedule it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Units before the head.
    pub units: usize,
    /// Whether the first unit puts something on the stream beside its output.
    pub starts_stream: bool,
}

/// Micro-batches one after another, each forward and then backward, no two tasks at once. With `recompute`, only the
/// stream is kept for backward, and a unit's forward runs again before its backward.
pub fn sequential(chain: Chain, micros: usize, recompute: bool) -> Program {
    let mut tasks = Vec::new();
    for micro in (0..micros).map(Micro) {
        forward(chain, micro, recompute, &mut tasks);
        backward(chain, micro, recompute, &mut tasks);
    }
    Program { tasks }
}

fn forward(chain: Chain, micro: Micro, recompute: bool, tasks: &mut Vec<Task>) {
    use ValueKind::*;
    for unit in (0..chain.units).map(UnitIdx) {
        let value = |kind| Value { kind, unit, micro };
        let (stream, output) = before(chain, unit, micro);
        if unit.0 > 0 {
            // The stream that the first unit starts is part of no entry, so nothing needs it afterwards.
            let frees = [output, stream.filter(|stream| stream.unit.0 == 0)].into_iter().flatten().collect();
            let reads = [stream, output].into_iter().flatten().collect();
            let writes = vec![value(Stream), value(Normalised)];
            tasks.push(Task { work: Work::Enter, unit, micro, reads, writes, frees });
        }
        let reads: Vec<Value> = if unit.0 > 0 { vec![value(Normalised)] } else { vec![] };
        let starts = (unit.0 == 0 && chain.starts_stream).then_some(value(Stream));
        let saved = (!recompute).then_some(value(Saved));
        let writes = [starts, Some(value(Output)), saved].into_iter().flatten().collect();
        let frees = if recompute { reads.clone() } else { vec![] };
        tasks.push(Task { work: Work::Forward, unit, micro, reads, writes, frees });
    }
}

fn backward(chain: Chain, micro: Micro, recompute: bool, tasks: &mut Vec<Task>) {
    use ValueKind::*;
    let head = UnitIdx(chain.units);
    let (stream, output) = before(chain, head, micro);
    let last = UnitIdx(chain.units - 1);
    tasks.push(Task {
        work: Work::Loss,
        unit: head,
        micro,
        reads: [stream, output].into_iter().flatten().collect(),
        writes: [StreamGradient, OutputGradient].map(|kind| Value { kind, unit: last, micro }).to_vec(),
        frees: [output, stream.filter(|stream| stream.unit.0 == 0)].into_iter().flatten().collect(),
    });
    for unit in (0..chain.units).rev().map(UnitIdx) {
        let value = |kind| Value { kind, unit, micro };
        let entered = |kinds: &[ValueKind]| kinds.iter().filter(|_| unit.0 > 0).map(|&kind| value(kind)).collect();
        if recompute {
            let writes = [entered(&[Normalised]), vec![value(Saved)]].concat();
            tasks.push(Task { work: Work::Recompute, unit, micro, reads: entered(&[Stream]), writes, frees: vec![] });
        }
        let mut reads = vec![value(Saved), value(OutputGradient)];
        if unit.0 == 0 {
            reads.push(value(StreamGradient));
        }
        let writes = [entered(&[NormalisedGradient]), vec![value(WeightInputs)]].concat();
        tasks.push(Task { work: Work::BackwardInput, unit, micro, frees: reads.clone(), reads, writes });
        let inputs = vec![value(WeightInputs)];
        tasks.push(Task {
            work: Work::BackwardWeight,
            unit,
            micro,
            reads: inputs.clone(),
            writes: vec![],
            frees: inputs,
        });
        if unit.0 > 0 {
            let reads = [Stream, Normalised, StreamGradient, NormalisedGradient].map(value).to_vec();
            let below = UnitIdx(unit.0 - 1);
            let writes = [StreamGradient, OutputGradient].map(|kind| Value { kind, unit: below, micro }).to_vec();
            tasks.push(Task { work: Work::BackwardEnter, unit, micro, frees: reads.clone(), reads, writes });
        }
    }
}

/// The stream and the output that reach a unit.
fn before(chain: Chain, unit: UnitIdx, micro: Micro) -> (Option<Value>, Option<Value>) {
    let Some(before) = unit.0.checked_sub(1).map(UnitIdx) else { return (None, None) };
    let has_stream = before.0 > 0 || chain.starts_stream;
    let value = |kind| Value { kind, unit: before, micro };
    (has_stream.then_some(value(ValueKind::Stream)), Some(value(ValueKind::Output)))
}
