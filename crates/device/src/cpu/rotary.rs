//! Rotary position embedding, in place.

use std::ops::Range;

use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{each_vector, load, rows_per_task, store};
use super::simd::{Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::kernel::Rotary;

impl Run for Rotary {
    fn run(&self, team: &mut Team) {
        // SAFETY: the kernel's operands live and keep their values until the kernel has run.
        let positions: &[u32] = unsafe { indices(&self.positions).as_slice() };
        let table = matrix::<f32>(&self.table);
        if let Some(position) = positions.iter().find(|&&position| position as usize >= table.rows) {
            panic!("position {position} of a rotary table of {} rows", table.rows);
        }
        with_element!(self.x.view.dtype, E => {
            let x = matrix::<E>(&self.x.view);
            team.blocks(x.rows, rows_per_task(self.x.count * table.cols), |tokens, _| {
                vectorise(Rotate { kernel: self, x, table, positions, tokens });
            });
        });
    }
}

struct Rotate<'a, E> {
    kernel: &'a Rotary,
    x: Matrix<E>,
    table: Matrix<f32>,
    positions: &'a [u32],
    tokens: Range<usize>,
}

impl<E: Element> Vectorised for Rotate<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = self.table.cols / 2;
        let heads = self.kernel.x;
        let sign = s.splat(if self.kernel.inverse { -1.0 } else { 1.0 });
        for token in self.tokens {
            let position = self.positions[token] as usize;
            for head in 0..heads.count {
                each_vector!(0..half, |i, count| {
                    let first = self.x.at(token, head * heads.step + i);
                    let second = self.x.at(token, head * heads.step + half + i);
                    // SAFETY: both lie in this head, whose token is this task's alone; nobody writes the table.
                    unsafe {
                        let cos = load(s, self.table.at(position, i), count);
                        let sin = s.mul(load(s, self.table.at(position, half + i), count), sign);
                        let (a, b) = (load(s, first, count), load(s, second, count));
                        store(s, first, s.sub(s.mul(a, cos), s.mul(b, sin)), count);
                        store(s, second, s.mul_add(b, cos, s.mul(a, sin)), count);
                    }
                });
            }
        }
    }
}
