//! Sums and copies over memory of several devices, by address, against plain loops.

mod support;

use evenkeel_device::{DType, Device, MOST_PEERS, PeerWork, Tensor};
use support::{DTYPES, Random, device, rounded};

/// Around a vector of f32 and of bf16, around a block of threads, and many.
const LENGTHS: [usize; 12] = [0, 1, 3, 4, 7, 8, 9, 255, 256, 2049, 4096, 100_003];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// One device each, as ranks have them.
fn devices(count: usize) -> Vec<Device> {
    (0..count).map(|_| device(1, 1 << 24)).collect()
}

#[test]
fn a_sum_over_devices_is_taken_in_the_order_given_in_f32_and_written_to_every_destination() {
    let mut random = Random::new(1);
    for count in [1, 2, 3, 5, MOST_PEERS] {
        let devices = devices(count);
        for (len, dtype) in LENGTHS.into_iter().flat_map(|len| DTYPES.map(|dtype| (len, dtype))) {
            // Whole vectors, and places that no vector begins at.
            for first in [0, 1] {
                let values: Vec<Vec<f32>> = (0..count).map(|_| random.numbers(len + first + 1, dtype)).collect();
                let tensor = |(device, values): (&Device, &Vec<f32>)| {
                    let tensor = device.comm().floats(1, values.len(), dtype, values);
                    device.comm().finish();
                    tensor
                };
                let tensors: Vec<Tensor> = devices.iter().zip(&values).map(tensor).collect();
                let skipped = (first * dtype.size_bytes()) as u64;
                let sources: Vec<u64> = tensors.iter().map(|tensor| tensor.address() + skipped).collect();
                let destinations = if count > 2 { &sources[1..] } else { &sources[..] };
                let queue = devices[count - 1].comm();
                // SAFETY: live tensors of that length, which no other queue uses now.
                unsafe { queue.peer(PeerWork::Sum { dtype, sources: &sources, destinations, len }) };
                queue.finish();
                let sum = |i: usize| values[1..].iter().fold(values[0][i], |sum, values| sum + values[i]);
                let expected: Vec<f32> = (first..first + len).map(|i| rounded(sum(i), dtype)).collect();
                for (member, tensor) in tensors.iter().enumerate() {
                    let found = devices[member].comm().read(tensor);
                    let is_written = count <= 2 || member > 0;
                    let wanted = if is_written { &expected } else { &values[member][first..first + len] };
                    let what = format!("{dtype:?}, {len} elements of {count}, member {member}, from {first} on");
                    assert_eq!(bits(&found[first..first + len]), bits(wanted), "{what}");
                    assert_eq!(bits(&found[..first]), bits(&values[member][..first]), "before it: {what}");
                    assert_eq!(bits(&found[first + len..]), bits(&values[member][first + len..]), "behind it: {what}");
                }
            }
        }
    }
}

#[test]
fn a_sum_keeps_the_sign_of_zero() {
    let device = device(1, 1 << 20);
    let queue = device.compute();
    let zeros = queue.floats(1, 40, DType::F32, &[-0.0; 40]);
    // SAFETY: a live tensor of that length.
    unsafe {
        queue.peer(PeerWork::Sum {
            dtype: DType::F32,
            sources: &[zeros.address()],
            destinations: &[zeros.address()],
            len: 40,
        });
    }
    assert_eq!(bits(&queue.read(&zeros)), bits(&[-0.0; 40]));
}

#[test]
fn a_copy_moves_the_bits_of_its_rows_and_nothing_beside_them() {
    let devices = devices(2);
    let [from_queue, to_queue] = [devices[0].compute(), devices[1].comm()];
    // Rows, bytes of one, the first byte, and steps.
    let cases = [
        (1, 4000, [0, 0], [4000, 4000]),
        (1, 4000, [4, 0], [4000, 4000]),
        (7, 64, [0, 128], [80, 96]),
        (7, 64, [0, 0], [66, 64]),
        (7, 62, [2, 4], [64, 66]),
        (5, 6, [0, 2], [6, 10]),
        (300, 16, [16, 0], [16, 32]),
        (0, 16, [0, 0], [16, 16]),
    ];
    for (rows, row_bytes, [from_first, to_first], [from_step, to_step]) in cases {
        // Every bit pattern, those of missing numbers among them, is moved as it is.
        let words: Vec<u32> = (0..4096).map(|i: u32| i.wrapping_mul(0x9e37_79b9) | 0x7f80_0000).collect();
        let from = from_queue.indices(&words);
        let to = to_queue.indices(&[7; 4096]);
        from_queue.finish();
        // SAFETY: the rows lie in live tensors, which no other queue uses now.
        unsafe {
            to_queue.peer(PeerWork::Copy {
                from: from.address() + from_first,
                to: to.address() + to_first,
                rows,
                row_bytes,
                from_step,
                to_step,
            });
        }
        let bytes = |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
        let (source, mut expected) = (bytes(&words), bytes(&[7; 4096]));
        for row in 0..rows {
            let (from, to) = (from_first as usize + row * from_step, to_first as usize + row * to_step);
            expected[to..to + row_bytes].copy_from_slice(&source[from..from + row_bytes]);
        }
        assert!(bytes(&to_queue.read_indices(&to)) == expected, "{rows} rows of {row_bytes} bytes, {from_step} apart");
    }
}
