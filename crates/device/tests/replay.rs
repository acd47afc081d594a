//! Repeated work: with graphs or without, every kernel runs in its turn with its own arguments.

#[path = "support/device.rs"]
mod support;

use evenkeel_device::kernel::{Add, Fill, Order, Product};
use evenkeel_device::{DType, Device, Queue, Replays, Tensor};

fn device() -> Device {
    support::device(2, 1 << 26)
}

/// On a GPU, asserts that graphs were really used.
fn assert_replayed(replays: &Replays, is_replayed: impl Fn(&Replays) -> bool) {
    assert_eq!(replays.refusal, None);
    assert!(!support::on_cuda() || is_replayed(replays), "{replays:?}");
}

/// Adds up numbers, each written by its own kernel, so the result depends on each of them.
fn sum(queue: &Queue, sum: &Tensor, summand: &Tensor, values: impl Iterator<Item = f32>) {
    queue.launch(Fill { out: sum.view(), value: 0.0 });
    for value in values {
        queue.launch(Fill { out: summand.view(), value });
        queue.launch(Add { a: sum.view(), b: summand.view(), out: sum.view() });
    }
}

#[test]
fn arguments_of_this_time_count_and_not_those_of_the_last() {
    let device = device();
    let queue = device.compute();
    let (total, summand) = (queue.zeros(3, 5, DType::F32), queue.zeros(3, 5, DType::F32));
    for round in 0..8 {
        let values = |i: usize| if i == 77 { round as f32 * 1000.0 } else { i as f32 };
        sum(queue, &total, &summand, (0..150).map(values));
        let expected: f32 = (0..150).map(values).sum();
        assert_eq!(queue.read(&total), [expected; 15], "round {round}");
    }
    // One of 301 kernels had another number.
    let replays = device.replays();
    assert_replayed(&replays, |replays| replays.graphs > 4 && (5..=8).contains(&replays.changed));
}

#[test]
fn rows_and_addresses_may_change_from_one_time_to_the_next() {
    let device = device();
    let queue = device.compute();
    for (round, rows) in [4, 4, 4, 9, 4, 9, 2, 4].into_iter().enumerate() {
        // An allocation before them changes their addresses.
        let _before = queue.zeros(1, 100 * (round % 3) + 1, DType::F32);
        let (total, summand) = (queue.zeros(rows, 24, DType::F32), queue.zeros(rows, 24, DType::F32));
        sum(queue, &total, &summand, (0..40).map(|i| (i + round) as f32));
        let expected: f32 = (0..40).map(|i| (i + round) as f32).sum();
        assert_eq!(queue.read(&total), vec![expected; rows * 24], "round {round}");
    }
    assert_replayed(&device.replays(), |replays| replays.graphs > 0 && replays.changed > 0);
}

#[test]
fn products_follow_their_operands_wherever_they_lie() {
    let device = device();
    let queue = device.compute();
    let size = 32;
    let identity: Vec<f32> = (0..size * size).map(|i| f32::from(u8::from(i % (size + 1) == 0))).collect();
    let identity = queue.floats(size, size, DType::F32, &identity);
    let places = [0, 1].map(|_| queue.zeros(size, size, DType::F32));
    let out = queue.zeros(size, size, DType::F32);
    for round in 0..12 {
        let from = &places[usize::from(round % 4 == 3)];
        let value = round as f32 + 0.5;
        queue.launch(Fill { out: from.view(), value });
        for accumulate in [false, true, true, true, true] {
            queue.launch(Product { accumulate, ..Product::new(Order::NN, from, &identity, &out) });
        }
        assert_eq!(queue.read(&out), vec![5.0 * value; size * size], "round {round}");
    }
    assert_replayed(&device.replays(), |replays| replays.graphs >= 8 && replays.captured == 2);
}

#[test]
fn more_than_is_remembered_is_forgotten_and_still_computed() {
    let device = device();
    let queue = device.compute();
    let [x, y] = [0, 1].map(|_| queue.zeros(1, 8, DType::F32));
    // Each order of two kernels is another, and comes three times in a row.
    let mut state = 1u64;
    for order in 0..300 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let adds: Vec<bool> = (0..100).map(|i| state.rotate_left(i) & 1 == 1).collect();
        for time in 0..3 {
            queue.launch(Fill { out: x.view(), value: 1.0 });
            queue.launch(Fill { out: y.view(), value: 0.0 });
            for &add in &adds {
                match add {
                    true => queue.launch(Add { a: y.view(), b: x.view(), out: y.view() }),
                    false => queue.launch(Fill { out: x.view(), value: 1.0 }),
                }
            }
            let expected = adds.iter().filter(|&&add| add).count() as f32;
            assert_eq!(queue.read(&y), [expected; 8], "order {order}, time {time}");
        }
    }
    assert_replayed(&device.replays(), |replays| replays.captured > 300 && replays.graphs > 600);
}

#[test]
fn replaying_is_turned_off_and_on_without_a_trace_in_the_results() {
    let device = device();
    let queue = device.compute();
    let (total, summand) = (queue.zeros(1, 16, DType::F32), queue.zeros(1, 16, DType::F32));
    let mut graphs = 0;
    for round in 0..12 {
        device.replay_graphs(round / 3 % 2 == 0);
        sum(queue, &total, &summand, (0..30).map(|i| (i * round) as f32));
        assert_eq!(queue.read(&total), [(435 * round) as f32; 16], "round {round}");
        let now = device.replays().graphs;
        assert!(round / 3 % 2 == 0 || now == graphs, "round {round}");
        graphs = now;
    }
    assert_replayed(&device.replays(), |replays| replays.graphs > 0);
}
