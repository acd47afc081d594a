//! A rank's tasks of a pipeline: its blocks, and the passes that it takes part in, as all places come to them.

use std::collections::HashMap;
use std::ops::Range;

use smallvec::smallvec;

use super::line::Line;
use super::{Chain, PartSize, parts};
use crate::pipeline::{Block, BlockKind, Event};
use crate::program::{Exchange, Micro, Task, UnitIdx, Value, ValueKind};
use crate::work::Work;

/// Losses and gradients. `line` begins the line of a part at a stage; `arrange` merges those of a micro-batch.
pub(super) fn training<'a>(
    chain: &Chain,
    micros: &[Vec<PartSize>],
    line: impl Fn(Range<usize>, Micro) -> Line<'a>,
    arrange: impl Fn(&mut dyn Iterator<Item = Vec<Vec<Task>>>) -> Vec<Task>,
) -> Vec<Task> {
    let stages = &chain.stages;
    let has_backward = |stage: &usize| {
        let end = chain.stage(*stage).end;
        end == chain.units.len() || chain.trains_before(end)
    };
    let frozen = (0..stages.pipeline.stages()).find(has_backward).expect("the last stage has one");
    let events = stages.pipeline.plan(stages.places, micros.len(), frozen);
    // The weight halves of backward blocks whose input halves have been written.
    let mut weights: HashMap<(usize, usize), Vec<Vec<Task>>> = HashMap::new();
    tasks(chain, &events, micros, |block| {
        let begun = || parts(micros, block.micro).map(|micro| line(chain.stage(block.stage), micro));
        let place = (block.stage, block.micro);
        let lines = match block.kind {
            BlockKind::Forward => begun().map(Line::forward).collect(),
            BlockKind::Backward => begun().map(Line::backward).collect(),
            BlockKind::Input => {
                let is_weight = |task: &Task| task.work == Work::BackwardWeight;
                let halves = |line: Line| line.backward().into_iter().partition(is_weight);
                let (of_weights, of_inputs) = begun().map(halves).unzip();
                weights.insert(place, of_weights);
                of_inputs
            }
            BlockKind::Weight => weights.remove(&place).expect("the input half comes first"),
        };
        arrange(&mut std::iter::once(lines))
    })
}

/// The forward of one micro-batch, whose tasks at a stage are `evaluated`.
pub(super) fn forward(chain: &Chain, size: &PartSize, evaluated: impl Fn(Range<usize>) -> Vec<Task>) -> Vec<Task> {
    let events = chain.stages.pipeline.plan_of_forward(chain.stages.places);
    tasks(chain, &events, &[vec![size.clone()]], |block| evaluated(chain.stage(block.stage)))
}

fn tasks(
    chain: &Chain,
    events: &[Event],
    micros: &[Vec<PartSize>],
    mut block: impl FnMut(&Block) -> Vec<Task>,
) -> Vec<Task> {
    let stages = &chain.stages;
    let is_here = |stage: usize| stages.pipeline.place(stage, stages.places) == stages.place;
    let mut tasks = Vec::new();
    for event in events {
        match event {
            Event::Block(found) if is_here(found.stage) => tasks.extend(block(found)),
            &Event::Pass { from, to, micro } if is_here(from) || is_here(to) => {
                let unit = chain.stage(from.max(to)).start;
                let sizes = micros[micro].iter().enumerate();
                tasks.extend(sizes.map(|(part, size)| {
                    pass(chain, unit, Micro { index: micro, part }, from < to, is_here(from), size)
                }));
            }
            _ => (),
        }
    }
    tasks
}

/// One side of a pass before a unit.
fn pass(chain: &Chain, unit: usize, micro: Micro, is_forward: bool, sends: bool, size: &PartSize) -> Task {
    let (work, kind) =
        if is_forward { (Work::Pass, ValueKind::Passed) } else { (Work::PassGradient, ValueKind::PassedGradient) };
    let value = Value { kind, unit: UnitIdx(unit), micro };
    let (reads, writes) = if sends { (smallvec![value], smallvec![]) } else { (smallvec![], smallvec![value]) };
    let exchange = Exchange { group: chain.stages.passes[&unit], bytes: chain.passed_bytes(size) };
    Task { work, unit: UnitIdx(unit), micro, frees: reads.clone(), reads, writes, exchange: Some(exchange) }
}
