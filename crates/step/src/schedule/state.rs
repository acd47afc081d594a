//! Adds the exchanges of state to a program, whatever schedule wrote it: reductions of gradients once they are complete, gathers
//! of parameters ahead of their use, and the tail that updates them.

use std::collections::BTreeMap;

use smallvec::smallvec;

use super::Chain;
use super::chain::ChainBucket;

use crate::program::{Exchange, GroupIdx, Micro, Task, UnitIdx, Value, ValueKind, Values};
use crate::work::{BucketIdx, Chunk, Lane, Work};

/// The most reductions of split gradients in flight: each holds the gradients of a whole bucket.
const REDUCTIONS_IN_FLIGHT: usize = 2;
/// Parameters stay gathered if they are used again after at most so many bodies.
const RESIDENCE: usize = 8;

pub(super) const WHOLE_STEP: Micro = Micro { index: 0, part: 0 };

/// Adds the reductions of gradients: each as soon as nothing more is added to its bucket or, if gradients are split, as soon as a
/// micro-batch adds nothing more. Whole gradients are reduced behind the
/// exchanges that other places wait for.
pub(super) fn reduce_gradients(tasks: Vec<Task>, chain: &Chain) -> Vec<Task> {
    let mut after: BTreeMap<usize, Vec<(usize, Micro)>> = BTreeMap::new();
    let passed_on = last_pass_behind_exchanges(&tasks).unwrap_or(0);
    for (index, last) in last_additions(&tasks, chain).into_iter().enumerate() {
        for (micro, last) in last {
            let micro = Micro { index: micro, part: 0 };
            // The first stage is the last to add to a table that it shares, and until then nothing may wait for the sum.
            let is_shared = chain.buckets[index].is_shared_table;
            let last = match chain.buckets[index].splits_gradients {
                _ if is_shared => tasks.len() - 1,
                true => behind_exchanges(&tasks, last),
                false => behind_exchanges(&tasks, last).max(passed_on),
            };
            after.entry(last).or_default().push((index, micro));
        }
    }
    let mut reduced: Vec<Value> = Vec::new();
    let mut out: Vec<Task> = Vec::with_capacity(tasks.len() + after.len());
    let mut after = after.into_iter().peekable();
    for (index, mut task) in tasks.into_iter().enumerate() {
        // The next compute task waits for all but the last few reductions, which frees the memory of the others.
        if task.work.lane() == Lane::Compute && reduced.len() > REDUCTIONS_IN_FLIGHT {
            let done: Vec<Value> = reduced.drain(..reduced.len() - REDUCTIONS_IN_FLIGHT).collect();
            task.reads.extend_from_slice(&done);
            task.frees.extend_from_slice(&done);
        }
        out.push(task);
        for (bucket, micro) in after.next_if(|(last, _)| *last == index).into_iter().flat_map(|(_, here)| here) {
            out.extend(reductions(chain, bucket, micro));
            reduced.extend(out.last().and_then(|task| task.writes.first()).filter(|value| is_reduced(value)));
        }
    }
    // No task computes behind the last reductions.
    for task in &mut out {
        let last: Vec<Value> = task.writes.iter().filter(|value| reduced.contains(value)).copied().collect();
        task.frees.extend(last);
    }
    out
}

/// The last gradient that a place passes on, if the gradient follows from exchanges, which reductions would hold up.
fn last_pass_behind_exchanges(tasks: &[Task]) -> Option<usize> {
    let exchanges = tasks.iter().any(|task| task.work.lane() == Lane::Comm);
    tasks.iter().rposition(|task| task.work == Work::PassGradient && !task.receives()).filter(|_| exchanges)
}

fn is_reduced(value: &Value) -> bool {
    matches!(value.kind, ValueKind::GradientsReduced(_))
}

/// By bucket: the task that adds to it for the last time; if gradients are split, the last one of each micro-batch. None if it is
/// not trained.
fn last_additions(tasks: &[Task], chain: &Chain) -> Vec<BTreeMap<usize, usize>> {
    let users = by_user(chain, |bucket| bucket.is_trained);
    let mut last = vec![BTreeMap::new(); chain.buckets.len()];
    for (index, task) in tasks.iter().enumerate() {
        let (unit, only_of_entries) = match task.work {
            Work::BackwardInput | Work::BackwardWeight | Work::Loss(_) => (task.unit.0, false),
            Work::BackwardEnter => (task.unit.0, true),
            // The addition behind a stage counts with its last unit.
            Work::BackwardJoin => (task.unit.0 - 1, true),
            _ => continue,
        };
        for &number in &users[unit] {
            let bucket = &chain.buckets[number];
            if bucket.is_of_entries || !only_of_entries {
                last[number].insert(if bucket.splits_gradients { task.micro.index } else { 0 }, index);
            }
        }
    }
    last
}

/// By unit: the buckets of a kind that it computes with.
fn by_user(chain: &Chain, is_of_kind: impl Fn(&ChainBucket) -> bool) -> Vec<Vec<usize>> {
    let mut by_user = vec![Vec::new(); chain.units.len()];
    for (index, bucket) in chain.buckets.iter().enumerate().filter(|(_, bucket)| is_of_kind(bucket)) {
        bucket.users.iter().for_each(|&unit| by_user[unit].push(index));
    }
    by_user
}

/// The last of the exchanges that directly follow a task, or the task itself: awaited exchanges go first.
pub(super) fn behind_exchanges(tasks: &[Task], mut index: usize) -> usize {
    while tasks.get(index + 1).is_some_and(|task| task.exchange.is_some()) {
        index += 1;
    }
    index
}

/// The sum over the shards that hold a bucket, and the reduction over the replicas.
fn reductions(chain: &Chain, bucket: usize, micro: Micro) -> Vec<Task> {
    let ChainBucket { summed_in, gradient_bytes: bytes, splits_gradients, .. } = &chain.buckets[bucket];
    let (unit, index) = (chain.buckets[bucket].unit(), BucketIdx(bucket));
    let task = |work, group: GroupIdx, writes: Values| Task {
        work,
        unit,
        micro,
        reads: Values::new(),
        writes,
        frees: Values::new(),
        exchange: Some(Exchange { group, bytes: *bytes }),
    };
    let sum = summed_in.map(|group| task(Work::SumGradients(index), group, Values::new()));
    let reduced = Value { kind: ValueKind::GradientsReduced(index), unit, micro };
    let reduction = chain.data_group.map(|group| {
        let writes = if *splits_gradients { smallvec![reduced] } else { Values::new() };
        task(Work::ReduceGradients(index), group, writes)
    });
    sum.into_iter().chain(reduction).collect()
}

/// The tail of a step: the norm of all gradients, the update, the gathers of values that other ranks have updated, and the norms of
/// adapted weights' rows.
pub(super) fn tail(chain: &Chain) -> Vec<Task> {
    let unit = UnitIdx(chain.units.len() - 1);
    let task = |work, reads, writes, exchange| Task {
        work,
        unit,
        micro: WHOLE_STEP,
        reads,
        writes,
        frees: Values::new(),
        exchange,
    };
    let norm = |groups| Value { kind: ValueKind::SquaredNorm(groups), unit, micro: WHOLE_STEP };
    let norms: Values = (0..=chain.keepers.len()).map(norm).collect();
    let mut tasks = vec![task(Work::MeasureNorm, smallvec![], smallvec![norm(0)], None)];
    for (index, &group) in chain.keepers.iter().enumerate() {
        let exchange = Exchange { group, bytes: chain.squares_bytes };
        tasks.push(task(Work::SumNorm, smallvec![norm(index)], smallvec![norm(index + 1)], Some(exchange)));
    }
    tasks.push(Task { frees: norms.clone(), ..task(Work::Update, norms, smallvec![], None) });
    if let Some(group) = chain.data_group {
        for (index, bucket) in chain.buckets.iter().enumerate().filter(|(_, bucket)| bucket.splits_update) {
            let exchange = Exchange { group, bytes: bucket.value_bytes };
            tasks.push(task(Work::GatherUpdated(BucketIdx(index)), smallvec![], smallvec![], Some(exchange)));
        }
    }
    if chain.measures_rows {
        let rows = Value { kind: ValueKind::SquaredRows, unit, micro: WHOLE_STEP };
        let mut factors = Values::new();
        for (index, group) in chain.gathered_for_rows() {
            let number = BucketIdx(index);
            let value = Value { kind: ValueKind::ParametersGathered(number), unit, micro: WHOLE_STEP };
            let exchange = Exchange { group, bytes: chain.buckets[index].value_bytes };
            tasks.push(task(Work::GatherUpdated(number), smallvec![], smallvec![value], Some(exchange)));
            factors.push(value);
        }
        tasks.push(Task { frees: factors.clone(), ..task(Work::MeasureRows, factors, smallvec![rows], None) });
        for (index, group) in chain.summed_rows() {
            let exchange = Exchange { group, bytes: chain.buckets[index].value_bytes };
            tasks.push(task(Work::SumRows(BucketIdx(index)), smallvec![rows], smallvec![], Some(exchange)));
        }
        tasks.last_mut().expect("just added").frees.push(rows);
    }
    tasks
}

/// Adds the gathers of split parameters, each during the bodies before its users, and frees the parameters behind their users.
pub(super) fn gather_parameters(tasks: Vec<Task>, chain: &Chain) -> Vec<Task> {
    let Some(group) = chain.data_group else { return tasks };
    if !chain.buckets.iter().any(|bucket| bucket.splits_values) {
        return tasks;
    }
    let mut residences = residences(&tasks, chain);
    residences.sort_by_key(|residence| residence.uses[0]);
    let mut before: BTreeMap<usize, Vec<Task>> = BTreeMap::new();
    let mut last_use = vec![0; chain.buckets.len()];
    let mut out = tasks;
    for (index, residence) in residences.iter().enumerate() {
        let bucket = &chain.buckets[residence.bucket];
        let (unit, number) = (bucket.unit(), BucketIdx(residence.bucket));
        let value = Value { kind: ValueKind::ParametersGathered(number), unit, micro: WHOLE_STEP };
        let ahead = index.checked_sub(1).map_or(0, |before| residences[before].uses[0]);
        before.entry(ahead.max(last_use[residence.bucket])).or_default().push(Task {
            work: Work::GatherParameters(number),
            unit,
            micro: WHOLE_STEP,
            reads: Values::new(),
            writes: smallvec![value],
            frees: Values::new(),
            exchange: Some(Exchange { group, bytes: bucket.value_bytes }),
        });
        residence.uses.iter().for_each(|&task| out[task].reads.push(value));
        let last = residence.uses[residence.uses.len() - 1];
        out[last].frees.push(value);
        last_use[residence.bucket] = last + 1;
    }
    let gathered = |(index, task)| before.remove(&index).unwrap_or_default().into_iter().chain([task]);
    out.into_iter().enumerate().flat_map(gathered).collect()
}

/// A period in which a bucket's parameters are gathered.
struct Residence {
    bucket: usize,
    /// The tasks that compute with them, in order.
    uses: Vec<usize>,
}

/// Those of all buckets, one bucket after another.
fn residences(tasks: &[Task], chain: &Chain) -> Vec<Residence> {
    let users = by_user(chain, |bucket| bucket.splits_values);
    let mut of_buckets: Vec<Vec<Residence>> = chain.buckets.iter().map(|_| Vec::new()).collect();
    // Bodies so far, and by bucket their number at its last use.
    let mut bodies = 0;
    let mut used = vec![0; of_buckets.len()];
    for (index, task) in tasks.iter().enumerate() {
        let is_body = matches!(task.work, Work::Forward | Work::Recompute | Work::BackwardInput);
        let is_of_head = matches!(task.work, Work::Logits(_) | Work::Loss(_) | Work::Evaluate(_));
        // The head counts once: its number of chunks may differ between replicas.
        bodies += usize::from(is_body || task.work == Work::Logits(Chunk(0)));
        if !is_body && !is_of_head {
            continue;
        }
        for &bucket in &users[task.unit.0] {
            let residences = &mut of_buckets[bucket];
            if residences.is_empty() || bodies - used[bucket] > RESIDENCE {
                residences.push(Residence { bucket, uses: Vec::new() });
            }
            residences.last_mut().expect("there is one").uses.push(index);
            used[bucket] = bodies;
        }
    }
    of_buckets.into_iter().flatten().collect()
}
