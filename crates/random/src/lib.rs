//! Random numbers as functions of a key: no state outlives the thing it decides.
//!
//! Everything is made of [`mix`]. Kernels repeat it in CUDA C++ (`prelude.cuh`), so its bits are part of every result.

/// 2⁶⁴ over the golden ratio: its multiples lie far apart.
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of splitmix64: a bijection of 64-bit numbers, in which every bit of a number changes all of the result.
#[inline(always)]
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A seed of its own for each of several things that are numbered: splitmix64's numbers from a seed on.
#[inline(always)]
pub fn seed_of(seed: u64, number: u64) -> u64 {
    mix(seed.wrapping_add(GOLDEN.wrapping_mul(number.wrapping_add(1))))
}

/// [`mix`], but zero has no special place.
pub fn mixed(x: u64) -> u64 {
    mix(x.wrapping_add(GOLDEN))
}

/// One number from several, each of which changes all of it.
pub fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0x243f_6a88_85a3_08d3, |sum, &part| mix(sum ^ part).wrapping_add(GOLDEN))
}

/// A stream of numbers that starts from a key.
pub struct Random(u64);

impl Random {
    pub fn new(key: &[u64]) -> Random {
        Random(hash(key))
    }

    /// The next number; the stream has no end, so this is no iterator.
    #[allow(clippy::should_implement_trait, reason = "a stream without an end needs no Option")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A number below `count`, which is not 0. Its bias, count / 2⁶⁴, is beyond measuring.
    pub fn below(&mut self, count: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(count)) >> 64) as u64
    }

    pub fn pick<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len() as u64) as usize]
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// Where a permutation of `count` things, chosen by `key`, puts the one at `index`.
///
/// A Feistel network permutes the next power of four; walking on from a result that is too large stays a permutation.
/// No table is kept, so an endless source costs nothing.
pub fn permuted(index: u64, count: u64, key: u64) -> u64 {
    // Halves of fewer bits reach too few of the permutations of a handful of chunks.
    const FEWEST_HALF_BITS: u32 = 4;
    const ROUNDS: u64 = 6;
    assert!(index < count, "index {index} of {count}");
    let bits = u64::BITS - (count - 1).leading_zeros();
    let half = bits.div_ceil(2).max(FEWEST_HALF_BITS);
    let mask = (1u64 << half) - 1;
    let mut x = index;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (hash(&[key, round, right]) & mask));
        }
        x = left << half | right;
        if x < count {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permuted_visits_every_index_once_whatever_the_count() {
        for count in [1u64, 2, 3, 7, 8, 9, 100, 255, 256, 257, 4097] {
            let mut places: Vec<u64> = (0..count).map(|index| permuted(index, count, 5)).collect();
            places.sort_unstable();
            assert_eq!(places, (0..count).collect::<Vec<_>>(), "{count}");
        }
    }

    #[test]
    fn permuted_reaches_every_order_of_four_things() {
        let orders: std::collections::HashSet<Vec<u64>> =
            (0..2000).map(|key| (0..4).map(|index| permuted(index, 4, key)).collect()).collect();
        assert_eq!(orders.len(), 24);
    }

    #[test]
    fn permuted_works_on_counts_near_the_largest() {
        for count in [u64::MAX, 1 << 63, (1 << 62) + 1] {
            let place = permuted(count - 1, count, 1);
            assert!(place < count);
        }
    }

    #[test]
    fn a_stream_has_the_numbers_of_its_seed() {
        let key = hash(&[3]);
        let mut random = Random::new(&[3]);
        for number in 0..5 {
            assert_eq!(random.next(), seed_of(key, number), "{number}");
        }
        // By the reference implementation of splitmix64, from the seed 0 on.
        assert_eq!([mixed(0), seed_of(0, 1)], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn numbers_below_a_bound_are_spread_evenly() {
        let mut random = Random::new(&[1]);
        let mut counts = [0; 7];
        (0..70_000).for_each(|_| counts[random.below(7) as usize] += 1);
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
    }
}
