//! Sums and copies by address against plain loops.

mod support;

use evenkeel_device::{CpuOptions, DType, Device, Tensor, host};
use support::{DTYPES, Random, rounded};

/// Around one vector, around four of f32 and of bf16, and many.
const LENGTHS: [usize; 12] = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1003];

fn device() -> Device {
    Device::cpu(&CpuOptions { memory_bytes: 1 << 26, ..CpuOptions::with_threads(1) }).expect("a CPU device starts")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_sum_is_taken_in_the_order_given_in_f32_and_written_to_every_destination() {
    let device = device();
    let queue = device.compute();
    let mut random = Random::new(1);
    for dtype in DTYPES {
        for (len, count) in LENGTHS.into_iter().flat_map(|len| [1, 2, 3, 8].map(|count| (len, count))) {
            let values: Vec<Vec<f32>> = (0..count).map(|_| random.numbers(len, dtype)).collect();
            let sources: Vec<Tensor> = values.iter().map(|values| queue.floats(1, len, dtype, values)).collect();
            let beside = queue.floats(1, len + 1, dtype, &vec![7.0; len + 1]);
            queue.finish();
            let addresses: Vec<u64> = sources.iter().map(|source| source.address()).collect();
            let last = addresses[count - 1];
            // SAFETY: live tensors of that length, which no queue uses now.
            unsafe { host::sum(dtype, &addresses, &[beside.address(), last], len) };

            let sum = |i: usize| values[1..].iter().fold(values[0][i], |sum, values| sum + values[i]);
            let expected: Vec<f32> = (0..len).map(|i| rounded(sum(i), dtype)).collect();
            let written = queue.read(&beside);
            assert_eq!(bits(&written[..len]), bits(&expected), "{dtype:?}, {len} elements of {count}");
            assert_eq!(written[len], 7.0, "nothing is written behind the end");
            assert_eq!(bits(&queue.read(&sources[count - 1])), bits(&expected), "in place");
            for (source, values) in sources[..count - 1].iter().zip(&values) {
                assert_eq!(bits(&queue.read(source)), bits(values), "a source that is no destination stays");
            }
        }
    }
}

#[test]
fn a_sum_keeps_small_large_and_missing_numbers() {
    let device = device();
    let queue = device.compute();
    let bf16_least = f32::from_bits(1 << 16);
    let numbers = [0.0, -0.0, bf16_least, -bf16_least, 3e38, f32::INFINITY, f32::NAN, 1.0];
    for dtype in DTYPES {
        // Long enough for whole vectors, and a rest.
        let [a, b]: [Vec<f32>; 2] =
            [1, 8].map(|step| (0..200).map(|i| rounded(numbers[i / step % 8], dtype)).collect());
        let [x, y] = [&a, &b].map(|values| queue.floats(1, 200, dtype, values));
        queue.finish();
        let addresses = [x.address(), y.address()];
        // SAFETY: live tensors of that length, which no queue uses now.
        unsafe { host::sum(dtype, &addresses, &addresses, 200) };
        let (x, y) = (queue.read(&x), queue.read(&y));
        for i in 0..200 {
            let expected = rounded(a[i] + b[i], dtype);
            let same = |value: f32| value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same(x[i]) && same(y[i]), "{dtype:?}: {} + {} is {}", a[i], b[i], x[i]);
        }
    }
}

#[test]
fn a_copy_moves_exactly_the_bytes_it_was_asked_for() {
    let device = device();
    let queue = device.compute();
    let from = queue.floats(1, 1003, DType::F32, &Random::new(2).numbers(1003, DType::F32));
    for len in LENGTHS.into_iter().filter(|&len| len < 1003) {
        let to = queue.zeros(1, 1003, DType::F32);
        queue.finish();
        // SAFETY: live tensors of at least that length, which no queue uses now.
        unsafe { host::copy(from.address(), to.address(), 4 * len) };
        let (from, to) = (queue.read(&from), queue.read(&to));
        assert_eq!(to[..len], from[..len]);
        assert!(to[len..].iter().all(|&value| value == 0.0), "{len} elements");
    }
}
