//! Typed access to a view's memory from the threads of a team.

use half::bf16;

use super::simd::{LANES, Simd};
use crate::{DType, View};

/// An element type that kernels compute on: widened to f32 when loaded, rounded to nearest when stored.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    const DTYPE: DType;
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;

    /// # Safety
    /// `from` is readable for `LANES` elements.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::Vector;
    /// The lanes from `count` on are zero.
    /// # Safety
    /// `from` is readable for `count` elements, `count <= LANES`.
    unsafe fn load_partial<S: Simd>(simd: S, from: *const Self, count: usize) -> S::Vector;
    /// # Safety
    /// `to` is writable for `LANES` elements.
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, vector: S::Vector);
    /// # Safety
    /// `to` is writable for `count` elements, `count <= LANES`.
    unsafe fn store_partial<S: Simd>(simd: S, to: *mut Self, vector: S::Vector, count: usize);
}

macro_rules! element {
    ($type:ty, $dtype:expr, $to:expr, $from:expr, $load:ident, $load_partial:ident, $store:ident, $store_partial:ident) => {
        impl Element for $type {
            const DTYPE: DType = $dtype;
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                $from(value)
            }
            #[inline(always)]
            unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::Vector {
                // SAFETY: the caller's promise.
                unsafe { simd.$load(from) }
            }
            #[inline(always)]
            unsafe fn load_partial<S: Simd>(simd: S, from: *const Self, count: usize) -> S::Vector {
                debug_assert!(count <= LANES);
                // SAFETY: the caller's promise.
                unsafe { simd.$load_partial(from, count) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(simd: S, to: *mut Self, vector: S::Vector) {
                // SAFETY: the caller's promise.
                unsafe { simd.$store(to, vector) }
            }
            #[inline(always)]
            unsafe fn store_partial<S: Simd>(simd: S, to: *mut Self, vector: S::Vector, count: usize) {
                debug_assert!(count <= LANES);
                // SAFETY: the caller's promise.
                unsafe { simd.$store_partial(to, vector, count) }
            }
        }
    };
}

element!(f32, DType::F32, |v| v, |v| v, load, load_partial, store, store_partial);
element!(bf16, DType::Bf16, bf16::to_f32, bf16::from_f32, load_bf16, load_bf16_partial, store_bf16, store_bf16_partial);

/// A view as pointers. Copies of it are handed to the tasks of a team, which write disjoint parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<E> {
    first: *mut E,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

// SAFETY: a matrix is only a description; every access through it is an unsafe act of the kernel, whose tasks write
// disjoint elements.
unsafe impl<E> Send for Matrix<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for Matrix<E> {}

impl<E> Matrix<E> {
    fn of(view: &View) -> Matrix<E> {
        Matrix { first: view.address as *mut E, rows: view.rows, cols: view.cols, stride: view.stride }
    }

    /// The address of an element; (row, col) may be one past the end of a row.
    #[inline(always)]
    pub fn at(&self, row: usize, col: usize) -> *mut E {
        debug_assert!(row < self.rows && col <= self.cols, "({row}, {col}) of [{}, {}]", self.rows, self.cols);
        // SAFETY: the arena placed the whole view inside its memory, and (row, col) lies in it or one past a row's end.
        unsafe { self.first.add(row * self.stride + col) }
    }

    /// The address where an element would be if the matrix had it, for loads whose mask leaves it out.
    #[inline(always)]
    pub fn beyond(&self, row: usize, col: usize) -> *mut E {
        self.first.wrapping_add(row * self.stride + col)
    }
}

/// The view as a matrix of its element type, which the kernel knows.
pub(crate) fn matrix<E: Element>(view: &View) -> Matrix<E> {
    assert_eq!(view.dtype, E::DTYPE, "a kernel was given the wrong dtype");
    Matrix::of(view)
}

pub(crate) fn indices(view: &View) -> Matrix<u32> {
    assert_eq!(view.dtype, DType::U32, "a kernel was given the wrong dtype");
    Matrix::of(view)
}

impl Matrix<u32> {
    /// The indices as a slice.
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub unsafe fn as_slice<'a>(&self) -> &'a [u32] {
        assert_eq!(self.rows, 1);
        // SAFETY: one row of `cols` elements, and the caller's promise.
        unsafe { std::slice::from_raw_parts(self.first, self.cols) }
    }
}

/// Runs generic code for the element type that a dtype stands for.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $element = f32;
                $body
            }
            $crate::DType::Bf16 => {
                type $element = half::bf16;
                $body
            }
            $crate::DType::U32 => panic!("indices are not numbers"),
        }
    };
}
pub(crate) use with_element;
