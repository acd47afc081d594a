//! Water-filling: dividing a dim among ranks so that the slowest is done as early as possible.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Divides `total` among ranks in multiples of `grain`, but for one part that takes what is left of it: rank i takes
/// `time(i, width)` seconds, which does not fall with the width, and gets at most `most[i]`. The widths whose slowest rank is
/// fastest; of several such the one that the lowest ranks begin. None where the limits leave no room.
pub fn fill(total: usize, grain: usize, most: &[usize], time: impl Fn(usize, usize) -> f64) -> Option<Vec<usize>> {
    let mut widths = vec![0; most.len()];
    // Whoever would be done first with one grain more gets it. Times are compared as bits: they are not negative.
    let next = |rank: usize, width: usize, step: usize| -> Option<Reverse<(u64, usize)>> {
        let wider = width.checked_add(step).filter(|&wider| wider <= most[rank])?;
        let seconds = time(rank, wider);
        assert!(seconds >= 0.0, "rank {rank} takes {seconds} s for {wider}");
        Some(Reverse((seconds.to_bits(), rank)))
    };
    let mut heap: BinaryHeap<_> = (0..most.len()).filter_map(|rank| next(rank, 0, grain)).collect();
    for _ in 0..total / grain {
        let Reverse((_, rank)) = heap.pop()?;
        widths[rank] += grain;
        heap.extend(next(rank, widths[rank], grain));
    }
    let left = total % grain;
    if left > 0 {
        let candidates = (0..most.len()).filter_map(|rank| next(rank, widths[rank], left));
        let Reverse((_, rank)) = candidates.max()?;
        widths[rank] += left;
    }
    Some(widths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slowest(widths: &[usize], slowness: &[f64]) -> f64 {
        widths.iter().zip(slowness).map(|(&width, slowness)| width as f64 * slowness).fold(0.0, f64::max)
    }

    #[test]
    fn work_is_divided_by_speed() {
        let no_limit = |ranks: usize| vec![usize::MAX; ranks];
        for (total, grain, slowness, expected) in [
            (12, 1, vec![1.0, 2.0], vec![8, 4]),
            (1408, 32, vec![1.0, 1.0], vec![704, 704]),
            (1408, 32, vec![1.0, 2.0], vec![960, 448]),
            (16, 1, vec![8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], vec![0, 3, 3, 2, 2, 2, 2, 2]),
            (10, 4, vec![1.0, 1.0], vec![6, 4]),
        ] {
            let widths = fill(total, grain, &no_limit(slowness.len()), |rank, width| slowness[rank] * width as f64);
            assert_eq!(widths, Some(expected), "{total} in {grain}s by {slowness:?}");
        }
    }

    #[test]
    fn no_other_division_in_grains_is_faster() {
        let mut random = 7u64;
        let mut next = |end: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % end
        };
        for _ in 0..200 {
            let slowness: Vec<f64> = (0..3).map(|_| 1.0 + next(40) as f64 / 10.0).collect();
            let total = 1 + next(30) as usize;
            let found = fill(total, 1, &[usize::MAX; 3], |rank, width| slowness[rank] * width as f64).unwrap();
            assert_eq!(found.iter().sum::<usize>(), total);
            for a in 0..=total {
                for b in 0..=total - a {
                    let other = [a, b, total - a - b];
                    assert!(
                        slowest(&found, &slowness) <= slowest(&other, &slowness),
                        "{found:?} {other:?} {slowness:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn limits_are_kept_and_too_little_room_is_told() {
        let even = |_: usize, width: usize| width as f64;
        assert_eq!(fill(10, 2, &[3, 100], even), Some(vec![2, 8]));
        assert_eq!(fill(10, 2, &[3, 4], even), None);
        assert_eq!(fill(0, 2, &[0, 0], even), Some(vec![0, 0]));
    }
}
