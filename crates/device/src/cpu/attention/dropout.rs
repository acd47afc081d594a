//! Decides which weights of a tile are dropped.
//!
//! A query of a head has a key of 64 bits, as `cpu/random.rs` says. Two keys of its segment, eight apart, share a word: keys
//! 16 i + j and 16 i + j + 8 have pair 8 i + j, which tensor cores, too, give to one thread. The word is a bijection of
//! 32-bit numbers applied to the pair: the key's lower half is added, then two rounds of shift and multiply, the key's
//! upper half being added after the first. The word's upper half decides on the first weight; it and the lower half,
//! exclusive-or, on the second. A weight is dropped if its sixteen bits are less than probability · 2¹⁶.

use super::super::simd::{LANES, Simd};
use super::{TILE, Tile};
use crate::kernel::{AttentionDropout, seed_of};

/// Drops or keeps weights. Chosen outside the loops over them, so that keeping all costs nothing.
pub(super) trait Dropping: Copy {
    /// Zeroes the dropped numbers of a key, counted from its segment's start, and sixteen queries of a tile from `lanes` on. It
    /// does not divide by the share kept: see [`kept_factor`].
    fn keep<S: Simd, const N: usize>(self, s: S, key: usize, lanes: usize, numbers: [S::Vector; N]) -> [S::Vector; N];
}

#[derive(Clone, Copy)]
pub(super) struct KeepAll;

impl Dropping for KeepAll {
    #[inline(always)]
    fn keep<S: Simd, const N: usize>(self, _: S, _: usize, _: usize, numbers: [S::Vector; N]) -> [S::Vector; N] {
        numbers
    }
}

/// The random numbers of a tile: its queries' keys, in halves.
pub(super) struct TileNoise {
    lower: [u32; TILE],
    upper: [u32; TILE],
    /// Weights whose sixteen bits are below this are dropped.
    dropped_below: f32,
}

impl TileNoise {
    #[inline(always)]
    pub fn of(dropout: &AttentionDropout, tile: &Tile) -> TileNoise {
        let seed = seed_of(dropout.seed, dropout.first_head + tile.head as u64);
        let first = dropout.first_token + tile.tokens.start as u64;
        let (mut lower, mut upper) = ([0; TILE], [0; TILE]);
        // Lanes beyond the last query have unused numbers.
        for lane in 0..TILE {
            let key = seed_of(seed, first + lane as u64);
            lower[lane] = key as u32;
            upper[lane] = (key >> 32) as u32;
        }
        TileNoise { lower, upper, dropped_below: dropped_below(dropout.probability) }
    }
}

impl Dropping for &TileNoise {
    #[inline(always)]
    fn keep<S: Simd, const N: usize>(
        self,
        s: S,
        key: usize,
        lanes: usize,
        mut numbers: [S::Vector; N],
    ) -> [S::Vector; N] {
        let mut steps = [0f32; LANES];
        let pair = pair_of(key);
        let is_second = if key & 8 == 0 { 0 } else { u32::MAX };
        // Written out, since a closure is not compiled for the vectors' level.
        for (lane, step) in steps.iter_mut().enumerate() {
            let word = pair_word([self.lower[lanes + lane], self.upper[lanes + lane]], pair);
            *step = ((word ^ (word << 16 & is_second)) >> 16) as i32 as f32;
        }
        // SAFETY: the array has LANES elements.
        let steps = unsafe { s.load(steps.as_ptr()) };
        for number in &mut numbers {
            *number = s.select_less(steps, s.splat(self.dropped_below), s.splat(0.0), *number);
        }
        numbers
    }
}

/// A probability next to 1 keeps a weight in 2¹⁶.
fn dropped_below(probability: f32) -> f32 {
    const STEPS: f32 = (1 << 16) as f32;
    (probability * STEPS).min(STEPS - 1.0)
}

#[inline(always)]
fn pair_of(key: usize) -> u32 {
    (key / 16 * 8 + key % 8) as u32
}

/// The query's key in its lower and its upper half.
#[inline(always)]
fn pair_word([lower, upper]: [u32; 2], pair: u32) -> u32 {
    let x = pair.wrapping_add(lower);
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d).wrapping_add(upper);
    (x ^ (x >> 15)).wrapping_mul(0x846c_a68b)
}

/// The dropout that a kernel asks for, if it drops anything.
pub(super) fn active(dropout: Option<AttentionDropout>) -> Option<AttentionDropout> {
    dropout.filter(|dropout| dropout.probability > 0.0)
}

/// The factor of the weights that are kept.
pub(super) fn kept_factor(dropout: Option<AttentionDropout>) -> f32 {
    dropout.map_or(1.0, |dropout| 1.0 / (1.0 - dropout.probability))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sixteen bits of a query's weights.
    fn bits(head: u64, query: u64, keys: usize) -> Vec<u32> {
        let of_query = seed_of(seed_of(5, head), query);
        let halves = [of_query as u32, (of_query >> 32) as u32];
        let of_key = |key: usize| {
            let word = pair_word(halves, pair_of(key));
            if key & 8 == 0 { word >> 16 } else { (word ^ word << 16) >> 16 }
        };
        (0..keys).map(of_key).collect()
    }

    /// Asserts that the number of hits is likely for the share.
    fn assert_share(what: &str, hits: usize, tries: usize, share: f64) {
        let deviation = (share * (1.0 - share) * tries as f64).sqrt();
        let off = (hits as f64 - share * tries as f64) / deviation;
        assert!(off.abs() < 5.0, "{what}: {hits} of {tries}, {off:.1} deviations from {share}");
    }

    const QUERIES: u64 = 1024;
    const KEYS: usize = 1024;

    #[test]
    fn each_of_the_sixteen_bits_is_set_half_of_the_time_and_every_share_is_dropped() {
        let all: Vec<u32> = (0..QUERIES).flat_map(|query| bits(0, query, KEYS)).collect();
        for bit in 0..16 {
            let hits = all.iter().filter(|&&bits| bits >> bit & 1 == 1).count();
            assert_share(&format!("bit {bit}"), hits, all.len(), 0.5);
        }
        for below in [1u32 << 8, 1 << 10, 6554, 1 << 14, 40000, 65000] {
            let hits = all.iter().filter(|&&bits| bits < below).count();
            assert_share(&format!("below {below}"), hits, all.len(), below as f64 / 65536.0);
        }
    }

    #[test]
    fn weights_at_any_small_distance_are_dropped_independently() {
        for below in [6554, 32768] {
            let rows = |head: u64| -> Vec<Vec<bool>> {
                let dropped = |query| bits(head, query, KEYS).into_iter().map(|bits| bits < below).collect();
                (0..QUERIES).map(dropped).collect()
            };
            let (rows, others) = (rows(3), rows(4));
            let share = below as f64 / 65536.0;
            let together = |queries: usize, keys: usize, others: &[Vec<bool>]| {
                let pairs = rows.iter().zip(&others[queries..]).flat_map(|(a, b)| a.iter().zip(&b[keys..]));
                pairs.fold((0, 0), |(hits, tries), (a, b)| (hits + usize::from(*a && *b), tries + 1))
            };
            let distances = (0..4).flat_map(|queries| (0..34).map(move |keys| (queries, keys)));
            for (queries, keys) in distances.filter(|&distance| distance != (0, 0)) {
                let (hits, tries) = together(queries, keys, &rows);
                assert_share(&format!("{queries} queries and {keys} keys apart"), hits, tries, share * share);
            }
            let (hits, tries) = together(0, 0, &others);
            assert_share("neighbouring heads", hits, tries, share * share);
            // The corners of rectangles: dropping three says nothing about the fourth.
            for (queries, keys) in [(1, 1), (1, 8), (2, 16), (7, 3)] {
                let (mut hits, mut tries) = (0, 0);
                for (a, b) in rows.iter().zip(&rows[queries..]) {
                    for key in 0..KEYS - keys {
                        let odd = a[key] ^ a[key + keys] ^ b[key] ^ b[key + keys];
                        hits += usize::from(odd);
                        tries += 1;
                    }
                }
                let odd = (1.0 - (1.0 - 2.0 * share).powi(4)) / 2.0;
                assert_share(&format!("corners {queries} queries and {keys} keys apart"), hits, tries, odd);
            }
        }
    }
}
