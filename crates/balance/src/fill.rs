//! Water-filling: divides a dim among ranks so that the slowest finishes as early as possible.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Divides `total` among ranks in multiples of `grain`; one rank also gets the remainder. Rank i takes `time(i, width)` seconds,
/// which must not fall with the width, and gets at most `most[i]`. Returns the widths whose slowest rank is fastest; lower ranks
/// win ties. `None` if the limits leave no room.
pub fn fill(total: usize, grain: usize, most: &[usize], time: impl Fn(usize, usize) -> f64) -> Option<Vec<usize>> {
    let guessed = guess(total, grain, most, &time).and_then(|widths| fill_up(total, grain, most, &time, widths));
    guessed.or_else(|| fill_up(total, grain, most, &time, vec![0; most.len()]))
}

/// Gives each grain to the rank that would finish first with it, beginning with `widths`. Also `None` if beginning with nothing
/// would not have passed through `widths`: a grain in them finishes later than the last one given.
fn fill_up(
    total: usize,
    grain: usize,
    most: &[usize],
    time: &impl Fn(usize, usize) -> f64,
    mut widths: Vec<usize>,
) -> Option<Vec<usize>> {
    // Non-negative floats compare like their bits.
    let next = |rank: usize, width: usize, step: usize| -> Option<Reverse<(u64, usize)>> {
        let wider = width.checked_add(step).filter(|&wider| wider <= most[rank])?;
        let seconds = time(rank, wider);
        assert!(seconds >= 0.0, "rank {rank} takes {seconds} s for {wider}");
        Some(Reverse((seconds.to_bits(), rank)))
    };
    let given = |(rank, &width): (usize, &usize)| (width > 0).then(|| (time(rank, width).to_bits(), rank));
    let latest_given = widths.iter().enumerate().filter_map(given).max();
    let mut heap: BinaryHeap<_> = (0..most.len()).filter_map(|rank| next(rank, widths[rank], grain)).collect();
    let mut latest = None;
    for _ in widths.iter().sum::<usize>() / grain..total / grain {
        let Reverse((seconds, rank)) = heap.pop()?;
        latest = Some((seconds, rank));
        widths[rank] += grain;
        heap.extend(next(rank, widths[rank], grain));
    }
    if latest < latest_given {
        return None;
    }
    let left = total % grain;
    if left > 0 {
        let candidates = (0..most.len()).filter_map(|rank| next(rank, widths[rank], left));
        let Reverse((_, rank)) = candidates.max()?;
        widths[rank] += left;
    }
    Some(widths)
}

/// Widths slightly below the result if times are lines over the width, so that thousands of grains need not be given singly.
fn guess(total: usize, grain: usize, most: &[usize], time: &impl Fn(usize, usize) -> f64) -> Option<Vec<usize>> {
    let grains = total / grain;
    if grains < 8 * most.len() {
        return None;
    }
    let line = |rank: usize| {
        let [near, far] = [grain, grains * grain].map(|width| time(rank, width));
        let rate = (far - near) / (grains - 1) as f64;
        (near - rate, rate)
    };
    let lines: Vec<(f64, f64)> = (0..most.len()).map(line).collect();
    let per_second: f64 = lines.iter().map(|(_, rate)| 1.0 / rate).sum();
    let behind: f64 = lines.iter().map(|(fixed, rate)| fixed / rate).sum();
    let seconds = (grains as f64 + behind) / per_second;
    let width = |(&(fixed, rate), &most): (&(f64, f64), &usize)| -> usize {
        let grains = ((seconds - fixed) / rate - 1.0).max(0.0) as usize;
        (grains * grain).min(most / grain * grain)
    };
    let widths: Vec<usize> = lines.iter().zip(most).map(width).collect();
    (seconds.is_finite() && widths.iter().sum::<usize>() < grains * grain).then_some(widths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers_below(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut random = seed;
        move |end| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % end
        }
    }

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
        let mut next = numbers_below(7);
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
    fn beginning_with_a_guess_changes_nothing() {
        let mut next = numbers_below(11);
        let mut guessed = 0;
        for case in 0..300 {
            let ranks = 1 + next(9) as usize;
            let lines: Vec<[f64; 2]> = (0..ranks).map(|_| [next(60) as f64, next(8) as f64 / 2.0]).collect();
            let total = next(3000) as usize;
            let grain = 1 + next(5) as usize;
            let mut limit = || if next(4) == 0 { next(500) as usize } else { usize::MAX };
            let most: Vec<usize> = (0..ranks).map(|_| limit()).collect();
            let bent = case % 3 == 0;
            let time = |rank: usize, width: usize| match width {
                0 => 0.0,
                _ if bent => lines[rank][0] + lines[rank][1] * (width as f64).sqrt(),
                _ => lines[rank][0] + lines[rank][1] * width as f64,
            };
            let one_by_one = fill_up(total, grain, &most, &time, vec![0; ranks]);
            assert_eq!(fill(total, grain, &most, time), one_by_one, "{total} in {grain}s by {lines:?} up to {most:?}");
            let from_guess = guess(total, grain, &most, &time).and_then(|g| fill_up(total, grain, &most, &time, g));
            guessed += usize::from(from_guess.is_some());
        }
        assert!(guessed > 50, "{guessed} guesses were of use");
    }

    #[test]
    fn limits_are_kept_and_too_little_room_is_told() {
        let even = |_: usize, width: usize| width as f64;
        assert_eq!(fill(10, 2, &[3, 100], even), Some(vec![2, 8]));
        assert_eq!(fill(10, 2, &[3, 4], even), None);
        assert_eq!(fill(0, 2, &[0, 0], even), Some(vec![0, 0]));
    }
}
