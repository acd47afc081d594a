//! Passes matrices to kernels, and spreads threads over their elements.

use super::stream::Shape;
use crate::{DType, View, kernel};

/// A matrix whose element type the kernel knows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    address: u64,
    stride: i64,
}

impl Matrix {
    pub fn of(view: &View) -> Matrix {
        Matrix { address: view.address, stride: view.stride as i64 }
    }

    /// Address 0 stands for `None`.
    pub fn optional(view: &Option<View>) -> Matrix {
        view.as_ref().map_or(Matrix { address: 0, stride: 0 }, Matrix::of)
    }
}

/// A matrix of either element type, which the kernel looks up at each vector.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixed {
    matrix: Matrix,
    is_bf16: i64,
}

impl Mixed {
    pub fn of(view: &View) -> Mixed {
        Mixed { matrix: Matrix::of(view), is_bf16: (view.dtype == DType::Bf16) as i64 }
    }

    pub fn optional(view: &Option<View>) -> Mixed {
        let is_bf16 = view.is_some_and(|view| view.dtype == DType::Bf16) as i64;
        Mixed { matrix: Matrix::optional(view), is_bf16 }
    }
}

/// Rows of which a kernel looks up how many there are.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RowCount {
    all: i64,
    count: u64,
}

impl RowCount {
    pub fn of(rows: i64, count: &Option<kernel::RowCount>) -> RowCount {
        RowCount { all: rows, count: count.map_or(0, |count| count.at.address) }
    }
}

/// Bytes that a thread reads or writes at once if rows are aligned. Measured in a fill: twice as much ran at half the speed,
/// because each access of a warp then skipped every other sector.
const VECTOR_BYTES: usize = 16;
const THREADS: u32 = 256;

/// Whether every row of every view begins at a multiple of 16 bytes.
pub(super) fn rows_are_aligned(views: &[View]) -> bool {
    views.iter().all(|view| {
        let stride_bytes = (view.stride * view.dtype.size_bytes()) as u64;
        view.address.is_multiple_of(VECTOR_BYTES as u64)
            && (view.rows <= 1 || stride_bytes.is_multiple_of(VECTOR_BYTES as u64))
    })
}

/// One thread for each vector of matrices of one shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    pub rows: i64,
    pub cols: i64,
    pub vector: usize,
}

impl Walk {
    /// For kernels whose elements do not depend on row or column: walks matrices without gaps as one row. `None` if there is
    /// nothing to do.
    pub fn flat(views: &[View]) -> Option<Walk> {
        let walk = Walk::rows(views)?;
        let contiguous = views.iter().all(View::is_contiguous);
        // Then only the first elements' alignment counts.
        let first_rows: Vec<View> = views.iter().map(|view| view.row_range(0..1)).collect();
        Some(match contiguous {
            true => Walk { rows: 1, cols: walk.rows * walk.cols, vector: mixed_vector(&first_rows) },
            false => walk,
        })
    }

    /// One row of all, unless only a count says how many rows there are.
    pub fn counted(views: &[View], count: &Option<kernel::RowCount>) -> Option<(Walk, RowCount)> {
        let walk = if count.is_some() { Walk::rows(views) } else { Walk::flat(views) }?;
        Some((walk, RowCount::of(walk.rows, count)))
    }

    /// Row after row.
    pub fn rows(views: &[View]) -> Option<Walk> {
        let [rows, cols] = views[0].shape();
        (rows > 0 && cols > 0).then(|| Walk { rows: rows as i64, cols: cols as i64, vector: mixed_vector(views) })
    }

    /// For several groups of matrices: enough threads for the largest, and vectors that suit all. `None` if there is nothing to do.
    pub fn longest<const N: usize>(groups: &[[View; N]]) -> Option<Walk> {
        let all: Vec<View> = groups.iter().flatten().copied().collect();
        let walks = groups.iter().filter_map(|group| Walk::rows(group));
        let longest = walks.max_by_key(|walk| walk.rows * walk.cols)?;
        Some(Walk { vector: mixed_vector(&all), ..longest })
    }

    /// Row after row, in a kernel whose output has this dtype.
    pub fn rows_of(dtype: DType, views: &[View]) -> Option<Walk> {
        Some(Walk { vector: vector(dtype, views), ..Walk::rows(views)? })
    }

    pub fn shape(&self) -> Shape {
        let vectors = self.rows as u64 * (self.cols as u64).div_ceil(self.vector as u64);
        Shape::linear(vectors.div_ceil(THREADS as u64), THREADS)
    }

    /// The same for `each_vector_by_rows`: a row of blocks for each row, if rows are long enough to fill them.
    pub fn shape_by_rows(&self) -> Shape {
        let across = (self.cols as u64).div_ceil(self.vector as u64);
        if self.rows == 1 || across < THREADS as u64 {
            return self.shape();
        }
        Shape::linear(across.div_ceil(THREADS as u64), THREADS).of_rows(self.rows as usize)
    }

    /// The kernel for this width of vectors.
    pub fn name(&self, kernel: &str) -> String {
        format!("{kernel}_{}", self.vector)
    }

    /// The kernel for a dtype and this width of vectors.
    pub fn typed(&self, kernel: &str, dtype: DType) -> String {
        format!("{kernel}_{}_{}", dtype_name(dtype), self.vector)
    }
}

/// Elements that a thread takes at once, in a kernel whose main operands have this dtype.
pub(super) fn vector(dtype: DType, views: &[View]) -> usize {
    if rows_are_aligned(views) { VECTOR_BYTES / dtype.size_bytes() } else { 1 }
}

/// The same for kernels of mixed dtypes: that of the widest.
fn mixed_vector(views: &[View]) -> usize {
    let has_f32 = views.iter().any(|view| view.dtype != DType::Bf16);
    vector(if has_f32 { DType::F32 } else { DType::Bf16 }, views)
}

pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::Bf16 => "bf16",
        DType::U32 => panic!("indices are not numbers"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Extent;

    fn view(address: u64, [rows, cols]: [usize; 2], stride: usize, dtype: DType) -> View {
        View::new(address, Extent { rows, cols, stride, dtype })
    }

    #[test]
    fn vectors_are_whole_only_where_every_row_is_aligned() {
        let cases = [
            (view(256, [4, 24], 24, DType::Bf16), true),
            (view(256, [4, 20], 20, DType::Bf16), false),
            (view(256, [1, 20], 20, DType::Bf16), true),
            (view(256, [4, 20], 24, DType::Bf16), true),
            (view(258, [4, 24], 24, DType::Bf16), false),
            (view(256, [4, 20], 20, DType::F32), true),
            (view(264, [4, 20], 20, DType::F32), false),
        ];
        for (view, aligned) in cases {
            assert_eq!(rows_are_aligned(&[view]), aligned, "{view:?}");
        }
    }

    #[test]
    fn matrices_without_gaps_are_walked_as_one_row() {
        let whole = view(256, [3, 5], 5, DType::F32);
        let strided = view(256, [3, 5], 8, DType::F32);
        let of = |views: &[View]| Walk::flat(views).map(|walk| (walk.rows, walk.cols, walk.vector));
        assert_eq!(of(&[whole, whole]), Some((1, 15, 4)));
        assert_eq!(of(&[whole, strided]), Some((3, 5, 1)));
        assert_eq!(of(&[strided]), Some((3, 5, 4)));
        assert_eq!(of(&[view(256, [3, 5], 8, DType::Bf16)]), Some((3, 5, 8)));
        assert_eq!(of(&[view(256, [3, 5], 8, DType::Bf16), strided]), Some((3, 5, 4)));
        assert_eq!(of(&[view(256, [0, 5], 5, DType::F32)]), None);
        assert_eq!(of(&[view(256, [5, 0], 0, DType::F32)]), None);
    }
}
