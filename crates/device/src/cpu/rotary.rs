//! Rotary position embedding, in place.

use std::ops::Range;

use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{each_vector, load, rows_per_task, store};
use super::simd::{Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::kernel::{Pairs, Rotary};

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
                match self.pairs {
                    Pairs::Halves => vectorise(Rotate { kernel: self, x, table, positions, tokens }),
                    Pairs::Neighbours => rotate_neighbours(self, x, table, positions, tokens),
                }
            });
        });
    }
}

fn rotate_neighbours<E: Element>(
    kernel: &Rotary,
    x: Matrix<E>,
    table: Matrix<f32>,
    positions: &[u32],
    tokens: Range<usize>,
) {
    let (half, heads) = (table.cols / 2, kernel.x);
    let sign = if kernel.inverse { -1.0 } else { 1.0 };
    for token in tokens {
        let angles = table.at(positions[token] as usize, 0);
        for head in 0..heads.count {
            let pairs = x.at(token, head * heads.step);
            for i in 0..half {
                // SAFETY: both lie in this head, whose token is this task's alone; nobody writes the table.
                unsafe {
                    let (cos, sin) = (angles.add(i).read(), sign * angles.add(half + i).read());
                    let (first, second) = (pairs.add(2 * i), pairs.add(2 * i + 1));
                    let (a, b) = (first.read().to_f32(), second.read().to_f32());
                    first.write(E::from_f32(a * cos - b * sin));
                    second.write(E::from_f32(a * sin + b * cos));
                }
            }
        }
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
