//! Partial sums of the same keys' gradients from several tasks.

use super::super::matrix::Element;
use super::super::simd::{LANES, Simd, Vectorised};
use super::pack::{self, Rows};

/// Memory that tasks write disjoint parts of.
#[derive(Clone, Copy)]
pub(super) struct SharedSums(*mut f32);

// SAFETY: tasks write disjoint parts of it.
unsafe impl Sync for SharedSums {}

impl SharedSums {
    pub fn new(memory: &mut [f32]) -> SharedSums {
        SharedSums(memory.as_mut_ptr())
    }

    /// The sums at an offset that the division counted.
    pub fn at(&self, numbers: usize) -> *mut f32 {
        self.0.wrapping_add(numbers)
    }
}

/// Adds the shares' sums for some keys, in order, into the first's, and writes them, multiplied by a factor.
#[derive(Clone)]
pub(super) struct AddShares<E> {
    /// dk and dv of these keys.
    pub to: [(Rows<E>, f32); 2],
    /// The first share's sums of dk, [keys, width]; those of dv lie half a `step` after them.
    pub first: *mut f32,
    pub shares: usize,
    /// From one share's sums to the next's.
    pub step: usize,
    pub width: usize,
}

// SAFETY: descriptions of disjoint parts of the sums.
unsafe impl<E> Sync for AddShares<E> {}

impl<E: Element> Vectorised for AddShares<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (half, (rows, factor)) in self.to.iter().enumerate() {
            // SAFETY: the shares' sums follow one another, and these keys are this task's.
            unsafe {
                let first = self.first.add(half * self.step / 2);
                for i in (0..rows.tokens.len() * self.width).step_by(LANES) {
                    let mut sum = s.load(first.add(i));
                    for share in 1..self.shares {
                        sum = s.add(sum, s.load(first.add(share * self.step + i)));
                    }
                    s.store(first.add(i), sum);
                }
                pack::unpack(s, first, self.width, *factor, rows);
            }
        }
    }
}
