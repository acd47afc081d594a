//! PyTorch's sum of f32 numbers on a CPU, bit by bit: the mean of a matrix's factors is part of bitsandbytes' numbers.
//!
//! PyTorch adds up lanes in four strands, each in levels of partial sums. On a GPU it adds in another order, and numbers differ in
//! their last bits.

const LANES: usize = 8;
const STRANDS: usize = 4;
const LEVELS: usize = 4;

type Lanes = [f32; LANES];

pub(super) fn mean(values: &[f32]) -> f32 {
    sum(values) / values.len() as f32
}

fn sum(values: &[f32]) -> f32 {
    let (vectors, rest) = values.as_chunks::<LANES>();
    let (strands, left) = vectors.as_chunks::<STRANDS>();
    let mut sums = strand_sums(strands);
    let [first, others @ ..] = &mut sums;
    left.iter().for_each(|vector| add(first, vector));
    others.iter().for_each(|strand| add(first, strand));
    rest.iter().chain(first.iter()).fold(0.0, |sum, value| sum + value)
}

fn strand_sums(strands: &[[Lanes; STRANDS]]) -> [Lanes; STRANDS] {
    let bits = strands.len().next_power_of_two().trailing_zeros() as usize;
    let level_bits = (bits / LEVELS).max(4);
    let level_len = 1 << level_bits;
    let mut levels = [[[0.0; LANES]; STRANDS]; LEVELS];
    let mut added = 0;
    for block in strands.chunks(level_len) {
        for vectors in block {
            (0..STRANDS).for_each(|strand| add(&mut levels[0][strand], &vectors[strand]));
        }
        added += block.len();
        if block.len() < level_len {
            break;
        }
        for level in 1..LEVELS {
            let below = std::mem::take(&mut levels[level - 1]);
            (0..STRANDS).for_each(|strand| add(&mut levels[level][strand], &below[strand]));
            if added & ((level_len - 1) << (level * level_bits)) != 0 {
                break;
            }
        }
    }
    let [mut sums, above @ ..] = levels;
    for level in above {
        (0..STRANDS).for_each(|strand| add(&mut sums[strand], &level[strand]));
    }
    sums
}

fn add(sums: &mut Lanes, values: &Lanes) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}
