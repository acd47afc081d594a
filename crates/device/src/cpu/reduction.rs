//! Sums of vectors at several addresses, by one thread.

use std::marker::PhantomData;

use half::bf16;

use super::matrix::Element;
use super::simd::{LANES, Simd, Vectorised, vectorise};

/// # Safety
/// As [`host::sum`](crate::host::sum).
pub(crate) unsafe fn sum<E: Summand>(sources: &[u64], destinations: &[u64], len: usize) {
    vectorise(Sum::<E> { sources, destinations, len, element: PhantomData });
}

/// An element type that is summed a vector of its own at a time: sixteen f32, or 32 bf16 as two vectors of f32.
///
/// [`Element::load`] and [`Element::store`] would take bf16 by sixteen and round them once for every destination.
pub(crate) trait Summand: Element {
    type Wide<S: Simd>: Copy;
    /// The elements in a vector's bits.
    fn widen<S: Simd>(s: S, bits: S::Vector) -> Self::Wide<S>;
    fn add<S: Simd>(s: S, a: Self::Wide<S>, b: Self::Wide<S>) -> Self::Wide<S>;
    fn round<S: Simd>(s: S, sum: Self::Wide<S>) -> S::Vector;
}

impl Summand for f32 {
    type Wide<S: Simd> = S::Vector;
    #[inline(always)]
    fn widen<S: Simd>(_: S, bits: S::Vector) -> S::Vector {
        bits
    }
    #[inline(always)]
    fn add<S: Simd>(s: S, a: S::Vector, b: S::Vector) -> S::Vector {
        s.add(a, b)
    }
    #[inline(always)]
    fn round<S: Simd>(_: S, sum: S::Vector) -> S::Vector {
        sum
    }
}

impl Summand for bf16 {
    /// Those at even places, and those at odd ones.
    type Wide<S: Simd> = [S::Vector; 2];
    #[inline(always)]
    fn widen<S: Simd>(s: S, bits: S::Vector) -> [S::Vector; 2] {
        [s.widen_lower_halves(bits), s.widen_upper_halves(bits)]
    }
    #[inline(always)]
    fn add<S: Simd>(s: S, a: [S::Vector; 2], b: [S::Vector; 2]) -> [S::Vector; 2] {
        [s.add(a[0], b[0]), s.add(a[1], b[1])]
    }
    #[inline(always)]
    fn round<S: Simd>(s: S, [even, odd]: [S::Vector; 2]) -> S::Vector {
        s.pair_nearest_bf16(even, odd)
    }
}

struct Sum<'a, E> {
    sources: &'a [u64],
    destinations: &'a [u64],
    len: usize,
    element: PhantomData<E>,
}

/// Vectors of one source that are added before the next source.
const VECTORS: usize = 4;

impl<E: Summand> Vectorised for Sum<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let step = VECTORS * LANES * size_of::<f32>() / size_of::<E>();
        let mut first = 0;
        while first + step <= self.len {
            // SAFETY: the vectors end before `len`; the rest is the promise made to `sum`.
            unsafe { self.vectors(s, first) };
            first += step;
        }
        while first < self.len {
            // SAFETY: as above.
            unsafe { self.rest(s, first, LANES.min(self.len - first)) };
            first += LANES;
        }
    }
}

impl<E: Summand> Sum<'_, E> {
    /// # Safety
    /// [`VECTORS`] full vectors of elements from `first` on end before `len`.
    #[inline(always)]
    unsafe fn vectors<S: Simd>(&self, s: S, first: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [E::widen(s, s.splat(0.0)); VECTORS];
            let source = (self.sources[0] as *const E).add(first).cast::<f32>();
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = E::widen(s, s.load(source.add(i * LANES)));
            }
            for &source in &self.sources[1..] {
                let source = (source as *const E).add(first).cast::<f32>();
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = E::add(s, *sum, E::widen(s, s.load(source.add(i * LANES))));
                }
            }
            let mut rounded = [s.splat(0.0); VECTORS];
            for (rounded, &sum) in rounded.iter_mut().zip(&sums) {
                *rounded = E::round(s, sum);
            }
            for &destination in self.destinations {
                let destination = (destination as *mut E).add(first).cast::<f32>();
                for (i, &vector) in rounded.iter().enumerate() {
                    s.store(destination.add(i * LANES), vector);
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
