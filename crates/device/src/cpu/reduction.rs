//! Sums of vectors that lie in several places, by one thread.

use super::matrix::Element;
use super::simd::{LANES, Simd, Vectorised, vectorise};

/// # Safety
/// As [`host::sum`](crate::host::sum).
pub(crate) unsafe fn sum<E: Element>(sources: &[u64], destinations: &[u64], len: usize) {
    vectorise(Sum::<E> { sources, destinations, len, element: std::marker::PhantomData });
}

struct Sum<'a, E> {
    sources: &'a [u64],
    destinations: &'a [u64],
    len: usize,
    element: std::marker::PhantomData<E>,
}

/// Vectors of one source that are added before the next source is looked at: two cache lines of bf16, four of f32.
const VECTORS: usize = 4;

impl<E: Element> Vectorised for Sum<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut first = 0;
        while first + VECTORS * LANES <= self.len {
            // SAFETY: the vectors end before `len`; the rest is the promise made to `sum`.
            unsafe { self.vectors::<S, VECTORS>(s, first) };
            first += VECTORS * LANES;
        }
        while first < self.len {
            // SAFETY: as above.
            unsafe { self.rest(s, first, LANES.min(self.len - first)) };
            first += LANES;
        }
    }
}

impl<E: Element> Sum<'_, E> {
    /// # Safety
    /// `first + N * LANES <= len`.
    #[inline(always)]
    unsafe fn vectors<S: Simd, const N: usize>(&self, s: S, first: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [s.splat(0.0); N];
            let source = (self.sources[0] as *const E).add(first);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = E::load(s, source.add(i * LANES));
            }
            for &source in &self.sources[1..] {
                let source = (source as *const E).add(first);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = s.add(*sum, E::load(s, source.add(i * LANES)));
                }
            }
            for &destination in self.destinations {
                let destination = (destination as *mut E).add(first);
                for (i, &sum) in sums.iter().enumerate() {
                    E::store(s, destination.add(i * LANES), sum);
                }
            }
        }
    }

    /// # Safety
    /// `first + count <= len` and `count <= LANES`.
    #[inline(always)]
    unsafe fn rest<S: Simd>(&self, s: S, first: usize, count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sum = E::load_partial(s, (self.sources[0] as *const E).add(first), count);
            for &source in &self.sources[1..] {
                sum = s.add(sum, E::load_partial(s, (source as *const E).add(first), count));
            }
            for &destination in self.destinations {
                E::store_partial(s, (destination as *mut E).add(first), sum, count);
            }
        }
    }
}
