//! Runs the steps of all members in host memory, against a plain twin.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use evenkeel_device::{CpuOptions, Device, PeerWork, Tensor};

use super::*;
use crate::call::Call;
use crate::local::Parcels;

/// Room for one small stretch from each of seven others, for several, and for everything.
const SCRATCHES: [usize; 3] = [2048, 10_000, 1 << 20];
const MEMBERS: [usize; 4] = [2, 3, 5, 8];

fn device() -> Device {
    Device::cpu(&CpuOptions { memory_bytes: 1 << 26, ..CpuOptions::with_threads(1) }).expect("a device starts")
}

/// Numbers whose sum depends on the order.
fn numbers(seed: usize, len: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 37 + seed * 101 + 11) % 97) as f32 * [1.0, 1e4, 1e-4][(i + seed) % 3] - 31.0;
    (0..len).map(number).collect()
}

/// Runs all members' steps, one transfer after the other, and returns how many transfers each had.
fn run(posts: &[Post], scratch_bytes: usize) -> usize {
    let mut scratches: Vec<Vec<u64>> = posts.iter().map(|_| vec![0; scratch_bytes / 8]).collect();
    let ranges: Vec<Range<u64>> = scratches
        .iter_mut()
        .map(|scratch| scratch.as_mut_ptr() as u64..scratch.as_mut_ptr() as u64 + scratch_bytes as u64)
        .collect();
    let scratch = |me: usize| Scratch { address: ranges[me].start, bytes: scratch_bytes as u64 };
    let mut steps: Vec<VecDeque<Step>> = (0..posts.len()).map(|me| steps(posts, me, scratch(me)).into()).collect();
    let counts: Vec<usize> = steps.iter().map(|of| of.iter().filter(|step| is_transfer(step)).count()).collect();
    assert!(counts.iter().all(|count| *count == counts[0]), "transfers of the members: {counts:?}");
    for _ in 0..=counts[0] {
        // The steps before the next transfer, then that transfer of all members.
        let mut sent: BTreeMap<(usize, usize), VecDeque<(u64, usize)>> = BTreeMap::new();
        let mut received = Vec::new();
        for (me, steps) in steps.iter_mut().enumerate() {
            while let Some(step) = steps.pop_front() {
                let is_last = is_transfer(&step);
                match step {
                    Step::Transfer(transfers) => collect(me, &transfers, posts, &mut sent, &mut received),
                    // SAFETY: live memory of this test.
                    step => unsafe { work(&step) },
                }
                if is_last {
                    break;
                }
            }
        }
        for ((from, to), address, bytes) in received {
            let (source, sent_bytes) = sent.get_mut(&(from, to)).and_then(VecDeque::pop_front).expect("it was sent");
            assert_eq!(sent_bytes, bytes, "from {from} to {to}");
            let in_scratch = ranges[to].contains(&address);
            assert!(!in_scratch || address + bytes as u64 <= ranges[to].end, "beyond scratch memory");
            // SAFETY: as above.
            unsafe { PeerWork::copy(source, address, bytes).run() };
        }
        assert!(sent.values().all(VecDeque::is_empty), "something was sent that nobody receives");
    }
    counts[0]
}

fn is_transfer(step: &Step) -> bool {
    matches!(step, Step::Transfer(_))
}

type Received = ((usize, usize), u64, usize);

fn collect(
    me: usize,
    transfers: &[NcclTransfer],
    posts: &[Post],
    sent: &mut BTreeMap<(usize, usize), VecDeque<(u64, usize)>>,
    received: &mut Vec<Received>,
) {
    for transfer in transfers {
        match *transfer {
            NcclTransfer::Send { address, bytes, to } => sent.entry((me, to)).or_default().push_back((address, bytes)),
            NcclTransfer::Receive { address, bytes, from } => received.push(((from, me), address, bytes)),
            NcclTransfer::Broadcast { address, bytes, root } if root == me => {
                let others = (0..posts.len()).filter(|other| *other != me);
                others.for_each(|to| sent.entry((me, to)).or_default().push_back((address, bytes)));
            }
            NcclTransfer::Broadcast { address, bytes, root } => received.push(((root, me), address, bytes)),
        }
    }
}

/// # Safety
/// The step is about live memory.
unsafe fn work(step: &Step) {
    // SAFETY: the caller's promise.
    unsafe {
        match step {
            Step::Sum { dtype, sources, destination, len } => {
                PeerWork::Sum { dtype: *dtype, sources, destinations: &[*destination], len: *len }.run();
            }
            &Step::Copy { from, to, rows, row_bytes, from_step, to_step } => {
                PeerWork::Copy { from, to, rows, row_bytes, from_step, to_step }.run();
            }
            Step::Transfer(_) => unreachable!("transfers are done together"),
        }
    }
}

/// A tensor for each member.
fn tensors(device: &Device, members: usize, rows: usize, cols: usize, dtype: DType) -> Vec<Tensor> {
    let queue = device.compute();
    let tensor = |member| queue.floats(rows, cols, dtype, &numbers(member, rows * cols));
    let tensors = (0..members).map(tensor).collect();
    queue.finish();
    tensors
}

fn post(kind: ExchangeKind, whole: &Tensor, from: u64, to: u64) -> Post {
    let call = Call { dtype: whole.dtype, bytes: whole.bytes(), ..Call::of(kind) };
    Post::new(call, from, to)
}

/// The sum in the order of the members, rounded once.
fn sum(device: &Device, of: &[Tensor]) -> Vec<f32> {
    let queue = device.compute();
    let (rows, cols) = (of[0].rows, of[0].cols);
    let values: Vec<Vec<f32>> = of.iter().map(|tensor| queue.read(tensor)).collect();
    let sums: Vec<f32> =
        (0..rows * cols).map(|i| values[1..].iter().fold(values[0][i], |sum, values| sum + values[i])).collect();
    queue.read(&queue.floats(rows, cols, of[0].dtype, &sums))
}

/// Every number of members, dtype and size of scratch memory.
fn on_all(case: impl Fn(&Device, usize, DType, usize)) {
    let device = device();
    for members in MEMBERS {
        for dtype in [DType::F32, DType::Bf16] {
            SCRATCHES.iter().for_each(|&scratch| case(&device, members, dtype, scratch));
        }
    }
}

#[test]
fn an_all_reduce_gives_everybody_the_sum_in_order_however_little_scratch_memory_there_is() {
    on_all(|device, members, dtype, scratch| {
        for len in [0, 1, 63, 1000, 20_011] {
            let tensors = tensors(device, members, 1, len, dtype);
            let expected = sum(device, &tensors);
            let post = |tensor: &Tensor| post(ExchangeKind::AllReduce, tensor, tensor.address(), tensor.address());
            run(&tensors.iter().map(post).collect::<Vec<_>>(), scratch);
            for tensor in &tensors {
                assert_eq!(device.compute().read(tensor), expected, "{members} members, {dtype:?}, {len}, {scratch}");
            }
        }
    });
}

#[test]
fn a_reduce_gives_the_root_the_sum_and_leaves_the_others_theirs() {
    on_all(|device, members, dtype, scratch| {
        for root in [0, members - 1] {
            let tensors = tensors(device, members, 1, 5003, dtype);
            let before: Vec<Vec<f32>> = tensors.iter().map(|tensor| device.compute().read(tensor)).collect();
            let expected = sum(device, &tensors);
            let post = |tensor: &Tensor| Post {
                root,
                ..post(ExchangeKind::Reduce, tensor, tensor.address(), tensor.address())
            };
            run(&tensors.iter().map(post).collect::<Vec<_>>(), scratch);
            for (member, tensor) in tensors.iter().enumerate() {
                let expected = if member == root { &expected } else { &before[member] };
                assert_eq!(&device.compute().read(tensor), expected, "{member} of {members}, {dtype:?}, {scratch}");
            }
        }
    });
}

/// Cuts into unequal parts, one of them empty if there are three or more.
fn bounds(rows: usize, members: usize) -> Arc<[usize]> {
    let mut bounds: Vec<usize> = (0..=members).map(|i| rows * i * i / (members * members)).collect();
    if members > 2 {
        bounds[2] = bounds[1];
    }
    bounds.into()
}

#[test]
fn rows_of_unequal_cuts_are_summed_to_their_members_and_gathered_from_them() {
    const ROWS: usize = 90;
    on_all(|device, members, dtype, scratch| {
        let queue = device.compute();
        let bounds = bounds(ROWS, members);
        for in_place in [false, true] {
            let wholes = tensors(device, members, ROWS, 23, dtype);
            let expected = sum(device, &wholes);
            let part = |member: usize| {
                let rows = bounds[member]..bounds[member + 1];
                if in_place { wholes[member].row_range(rows) } else { queue.tensor(rows.len(), 23, dtype) }
            };
            let parts: Vec<Tensor> = (0..members).map(part).collect();
            let what = format!("{members} members, {dtype:?}, {scratch}, in place: {in_place}");
            let posts = |kind: ExchangeKind, is_from_whole: bool| -> Vec<Post> {
                let post = |(whole, part): (&Tensor, &Tensor)| {
                    let (a, b) = (whole.address(), part.address());
                    let mut post = if is_from_whole { post(kind, whole, a, b) } else { post(kind, whole, b, a) };
                    post.call.bounds = Some(bounds.clone());
                    post
                };
                wholes.iter().zip(&parts).map(post).collect()
            };
            run(&posts(ExchangeKind::ReduceScatter, true), scratch);
            for (member, part) in parts.iter().enumerate() {
                let rows = bounds[member] * 23..bounds[member + 1] * 23;
                assert_eq!(queue.read(part), expected[rows], "{member}: {what}");
            }
            run(&posts(ExchangeKind::AllGather, false), scratch);
            for whole in &wholes {
                assert_eq!(queue.read(whole), expected, "gathered: {what}");
            }
        }
    });
}

#[test]
fn a_tensor_comes_from_the_root_or_the_sender() {
    let device = device();
    for (kind, members, root) in [(ExchangeKind::Broadcast, 4, 2), (ExchangeKind::Send, 2, 0)] {
        let tensors = tensors(&device, members, 1, 777, DType::F32);
        let kind_of =
            |member: usize| if kind == ExchangeKind::Send && member == 1 { ExchangeKind::Receive } else { kind };
        let post = |(member, tensor): (usize, &Tensor)| Post {
            root,
            ..post(kind_of(member), tensor, tensor.address(), tensor.address())
        };
        assert_eq!(run(&tensors.iter().enumerate().map(post).collect::<Vec<_>>(), 2048), 1);
        assert!(tensors.iter().all(|tensor| device.compute().read(tensor) == numbers(root, 777)), "{kind}");
    }
}

#[test]
fn parcels_come_to_their_places_whole_or_in_stretches() {
    on_all(|device, members, dtype, scratch| {
        // Rows that have no room in the smallest scratch memory, and many small ones.
        for (rows, width) in [(3, 1500), (40, 7), (1, 2), (1, 70_000)] {
            let queue = device.compute();
            let from = tensors(device, members, rows, width * members, dtype);
            let to = tensors(device, members, rows, width * members, dtype);
            let of = |tensor: &Tensor| -> Vec<_> {
                let slice = |other: usize| tensor.col_range(other * width..(other + 1) * width).view();
                (0..members).map(|other| (other, slice(other))).collect()
            };
            let post = |(from, to): (&Tensor, &Tensor)| {
                let parcels = Arc::new(Parcels { sent: of(from), received: of(to) });
                Post { parcels, ..Post::new(Call::of(ExchangeKind::Redistribute), 0, 0) }
            };
            let values: Vec<Vec<f32>> = from.iter().map(|tensor| queue.read(tensor)).collect();
            run(&from.iter().zip(&to).map(post).collect::<Vec<_>>(), scratch);
            for (me, to) in to.iter().enumerate() {
                let found = queue.read(to);
                let cols = width * members;
                for (i, found) in found.into_iter().enumerate() {
                    let row = i / cols;
                    let other = i % cols / width;
                    let col = i % width;
                    let expected = values[other][row * cols + me * width + col];
                    assert_eq!(found, expected, "{me} of {members}, [{rows}, {width}], {dtype:?}, {scratch}");
                }
            }
        }
    });
}

#[test]
fn a_parcel_without_gaps_comes_to_a_place_with_gaps() {
    const ROWS: usize = 300;
    on_all(|device, members, dtype, scratch| {
        let queue = device.compute();
        let width = 250;
        let from = tensors(device, members, ROWS * members, width, dtype);
        let to = tensors(device, members, ROWS, width * members, dtype);
        let post = |(from, to): (&Tensor, &Tensor)| {
            let sent = (0..members).map(|other| (other, from.row_range(other * ROWS..(other + 1) * ROWS).view()));
            let received = (0..members).map(|other| (other, to.col_range(other * width..(other + 1) * width).view()));
            let parcels = Arc::new(Parcels { sent: sent.collect(), received: received.collect() });
            Post { parcels, ..Post::new(Call::of(ExchangeKind::Redistribute), 0, 0) }
        };
        let values: Vec<Vec<f32>> = from.iter().map(|tensor| queue.read(tensor)).collect();
        run(&from.iter().zip(&to).map(post).collect::<Vec<_>>(), scratch);
        for (me, to) in to.iter().enumerate() {
            let cols = width * members;
            for (i, found) in queue.read(to).into_iter().enumerate() {
                let row = i / cols;
                let other = i % cols / width;
                let col = i % width;
                let expected = values[other][(me * ROWS + row) * width + col];
                assert_eq!(found, expected, "{me} of {members}, {dtype:?}, {scratch}");
            }
        }
    });
}

#[test]
fn a_barrier_moves_nothing() {
    let posts: Vec<Post> = (0..3).map(|_| Post::new(Call::of(ExchangeKind::Barrier), 0, 0)).collect();
    assert_eq!(run(&posts, 2048), 0);
}
