//! Random numbers as functions of a key: no state outlives the thing it decides.

/// One number from several, each of which changes all of it.
pub(crate) fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0x243f_6a88_85a3_08d3, |sum, &part| mix(sum ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15))
}

/// The finaliser of splitmix64: a bijection.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A stream of numbers that starts from a key.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(key: &[u64]) -> Random {
        Random(hash(key))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `count`, which is not 0. Its bias, count / 2⁶⁴, is beyond measuring.
    pub(crate) fn below(&mut self, count: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(count)) >> 64) as u64
    }

    pub(crate) fn pick<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len() as u64) as usize]
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// Where a permutation of `count` things, chosen by `key`, puts the one at `index`.
///
/// A Feistel network permutes the next power of four; walking on from a result that is too large stays a permutation.
/// No table is kept, so an endless source costs nothing.
pub(crate) fn permuted(index: u64, count: u64, key: u64) -> u64 {
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
    fn numbers_below_a_bound_are_spread_evenly() {
        let mut random = Random::new(&[1]);
        let mut counts = [0; 7];
        (0..70_000).for_each(|_| counts[random.below(7) as usize] += 1);
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
    }
}
