//! Expanded 4-bit codes against plain loops.

mod support;

use evenkeel_device::kernel::{ExpandNf4, NF4_BLOCK, NF4_CODES, NF4_PER_WORD};
use evenkeel_device::{DType, Queue, Tensor};
use support::{DTYPES, Random, framed, rounded, run, strided, unframed};

/// Whole blocks, one block and a rest, short rows, several tasks, one long row.
const CASES: [[usize; 2]; 9] =
    [[0, 64], [3, 0], [1, 1], [5, 30], [4, 64], [7, 128], [9, 46], [33, 2048 + 64], [1, 40_000 + 24]];

/// The codes as bitsandbytes packs them, a row after another, in words with `padding` unused ones behind each row.
fn packed(queue: &Queue, codes: &[u8], [rows, cols]: [usize; 2], padding: usize) -> Tensor {
    let width = cols.div_ceil(NF4_PER_WORD);
    let mut words = vec![u32::MAX; rows * (width + padding)];
    for row in 0..rows {
        for word in 0..width {
            let first = word * NF4_PER_WORD;
            let code = |place: usize| match first + place < cols {
                true => codes[row * cols + first + place],
                false => 0,
            };
            let bytes: [u8; 4] = std::array::from_fn(|byte| code(2 * byte) << 4 | code(2 * byte + 1));
            words[row * (width + padding) + word] = u32::from_le_bytes(bytes);
        }
    }
    let tensor = queue.tensor(rows, width + padding, DType::U32);
    queue.write_indices(&tensor, &words);
    tensor.col_range(0..width)
}

#[test]
fn expanded_numbers_are_a_code_times_its_blocks_factor() {
    for [rows, cols] in CASES {
        for (dtype, padding) in DTYPES.into_iter().flat_map(|dtype| [(dtype, 0), (dtype, 3)]) {
            let mut random = Random::new(7);
            let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(16) as u8).collect();
            let blocks = cols.div_ceil(NF4_BLOCK);
            let absmax = random.numbers(rows * blocks, DType::F32);
            let results = run(|queue| {
                let (out, outer) = framed(queue, rows, cols, dtype, &vec![0.0; rows * cols]);
                let codes = packed(queue, &codes, [rows, cols], padding);
                let absmax = strided(queue, rows, blocks, padding, DType::F32, &absmax);
                queue.launch(ExpandNf4 { codes: codes.view(), absmax: absmax.view(), out: out.view() });
                vec![outer]
            });
            let number = |place: usize| {
                let factor = absmax[place / cols * blocks + place % cols / NF4_BLOCK];
                rounded(NF4_CODES[codes[place] as usize] * factor, dtype)
            };
            let expected: Vec<f32> = (0..rows * cols).map(number).collect();
            assert_eq!(unframed(&results[0], cols), expected, "[{rows}, {cols}] {dtype:?}");
        }
    }
}

#[test]
fn codes_keep_every_bit_in_and_out_of_memory() {
    // As floats some of these would be signalling NaN, whose bits may change.
    let words: Vec<u32> = (0..64).map(|i| 0x7f80_0001u32.rotate_left(i) ^ i).collect();
    let device = support::device(1, 1 << 20);
    let queue = device.compute();
    let tensor = queue.tensor(8, 8, DType::U32);
    queue.write_indices(&tensor, &words);
    assert_eq!(queue.read_indices(&tensor), words);
}
