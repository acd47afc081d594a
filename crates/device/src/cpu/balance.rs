//! The balance of experts: what a layer adds to it, and its gradient.

use super::loss::{RowSums, Sums};
use super::math::exp;
use super::matrix::{Element, indices, matrix, with_element};
use super::rows::{PARTS, column_sums, column_sums_floats, each_vector, load, rows_per_task, store, total};
use super::simd::{Simd, Vectorised, vectorise};
use super::{Run, Team, WorkingMemory};
use crate::kernel::{BalanceBackward, BalanceTally, Fill};

impl Run for BalanceTally {
    fn run(&self, team: &mut Team) {
        Fill { out: self.out, value: 0.0 }.run(team);
        let (logits, chosen) = (matrix::<f32>(&self.logits), indices(&self.chosen));
        let counted = indices(&self.counted);
        let outs = [0, 1].map(|row| Some(matrix::<f32>(&self.out.row_range(row..row + 1))));
        column_sums(team, logits.rows, logits.cols, &outs, |block, sums| {
            for token in block {
                // SAFETY: nobody writes these, and the sums are this task's alone.
                unsafe {
                    if counted.at(0, token).read() == 0 {
                        continue;
                    }
                    for slot in 0..chosen.cols {
                        let expert = chosen.at(token, slot).read() as usize;
                        assert!(expert < logits.cols, "expert {expert} of {}", logits.cols);
                        let pairs = sums.at(0, expert);
                        pairs.write(pairs.read() + 1.0);
                    }
                    vectorise(AddShares { logits: logits.at(token, 0), to: sums.at(1, 0), len: logits.cols });
                }
            }
        });
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(column_sums_floats(self.logits.rows, self.logits.cols, 2))
    }
}

/// `to += softmax(logits)`
struct AddShares {
    logits: *const f32,
    to: *mut f32,
    len: usize,
}

impl Vectorised for AddShares {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Sums { max, exponentials, .. } = RowSums { logits: self.logits, len: self.len }.run(s);
        let (max, factor) = (s.splat(max), s.splat(1.0 / exponentials));
        each_vector!(0..self.len, |i, count| {
            // SAFETY: `count` elements from `i` on lie before `len`.
            unsafe {
                let share = s.mul(exp(s, s.sub(load(s, self.logits.add(i), count), max)), factor);
                let to = self.to.add(i);
                store(s, to, s.add(load(s, to, count), share), count);
            }
        });
    }
}

impl Run for BalanceBackward {
    fn run(&self, team: &mut Team) {
        let (logits, counted) = (matrix::<f32>(&self.logits), indices(&self.counted));
        let tallies = matrix::<f32>(&self.tallies);
        let pairs_of = |expert: usize| -> f32 {
            // SAFETY: the kernel's operands keep their values until it has run.
            (0..tallies.rows).step_by(2).map(|row| unsafe { tallies.at(row, expert).read() }).sum()
        };
        let slopes: Vec<f32> = (0..logits.cols).map(|expert| self.factor * pairs_of(expert)).collect();
        with_element!(self.dlogits.dtype, D => {
            let dlogits = matrix::<D>(&self.dlogits);
            team.blocks(logits.rows, rows_per_task(logits.cols), |block, _| {
                for token in block {
                    // SAFETY: nobody writes this.
                    if unsafe { counted.at(0, token).read() } != 0 {
                        vectorise(AddGradient { logits: logits.at(token, 0), slopes: &slopes, out: dlogits.at(token, 0) });
                    }
                }
            });
        });
    }
}

/// `out += p · (slopes - Σ p·slopes)` with `p = softmax(logits)`
struct AddGradient<'a, D> {
    logits: *const f32,
    slopes: &'a [f32],
    out: *mut D,
}

impl<D: Element> Vectorised for AddGradient<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (len, slopes) = (self.slopes.len(), self.slopes.as_ptr());
        let Sums { max, exponentials, .. } = RowSums { logits: self.logits, len }.run(s);
        let (max, factor) = (s.splat(max), s.splat(1.0 / exponentials));
        let mut products = [s.splat(0.0); PARTS];
        each_vector!(0..len, |i, count, part| {
            // SAFETY: `count` elements from `i` on lie before `len`, here and below.
            unsafe {
                let share = s.mul(exp(s, s.sub(load(s, self.logits.add(i), count), max)), factor);
                products[part] = s.mul_add(share, load(s, slopes.add(i), count), products[part]);
            }
        });
        let mean = s.splat(total(s, products));
        each_vector!(0..len, |i, count| {
            // SAFETY: above; the row of `out` is this task's alone.
            unsafe {
                let share = s.mul(exp(s, s.sub(load(s, self.logits.add(i), count), max)), factor);
                let slope = s.sub(load(s, slopes.add(i), count), mean);
                let to = self.out.add(i);
                store(s, to, s.mul_add(share, slope, load(s, to, count)), count);
            }
        });
    }
}
