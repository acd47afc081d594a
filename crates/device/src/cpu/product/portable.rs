//! Products on CPUs without AVX-512, by the `gemm-f32` crate. Blocks of bf16 are widened to f32 first.

use half::bf16;

use super::super::Team;
use super::super::matrix::{Element, Matrix, matrix};
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::epilogue::Epilogue;
use crate::DType;
use crate::kernel::{Order, Product};

/// A task's share of the output at most: small enough that sixteen threads are busy on small products, large enough
/// that a task's repacking of its operands does not show.
const BLOCK_ROWS: usize = 256;
const BLOCK_COLS: usize = 256;
/// Elements along K widened at a time.
const BLOCK_DEPTH: usize = 1024;

/// Working memory of each task: its sums, and its operands if they are widened.
pub(super) fn task_floats(product: &Product) -> usize {
    let widened = if product.a.dtype == DType::Bf16 { (BLOCK_ROWS + BLOCK_COLS) * BLOCK_DEPTH } else { 0 };
    BLOCK_ROWS * BLOCK_COLS + widened
}

pub(super) fn run<O: Element>(product: &Product, epilogue: &Epilogue<O>, team: &mut Team) {
    let [m, n, _] = product.dims();
    let (row_blocks, col_blocks) = (m.div_ceil(BLOCK_ROWS), n.div_ceil(BLOCK_COLS));
    team.tasks(row_blocks * col_blocks, |task, scratch| {
        let (row, col) = (task % row_blocks * BLOCK_ROWS, task / row_blocks * BLOCK_COLS);
        let (rows, cols) = (BLOCK_ROWS.min(m - row), BLOCK_COLS.min(n - col));
        let (sums, operands) = scratch.floats(task_floats(product)).split_at_mut(BLOCK_ROWS * BLOCK_COLS);
        sums[..rows * cols].fill(0.0);
        for term in [Some(*product), product.second()].iter().flatten() {
            match term.a.dtype {
                DType::F32 => multiply_f32(term, (row, col), rows, cols, sums),
                _ => multiply_bf16(term, (row, col), rows, cols, sums, operands),
            }
        }
        // SAFETY: the block is this task's own.
        unsafe { epilogue.finish(sums.as_ptr(), cols, (row, col), rows, cols) };
    });
}

/// `count` vectors along K, one for each row or column of the output, as addresses and steps.
#[derive(Clone, Copy)]
struct Operand {
    first: *const f32,
    /// From one K to the next.
    depth_step: isize,
    /// From one row or column of the output to the next.
    step: isize,
}

fn multiply_f32(product: &Product, (row, col): (usize, usize), rows: usize, cols: usize, sums: &mut [f32]) {
    let [_, _, depth] = product.dims();
    let (a, b) = (matrix::<f32>(&product.a), matrix::<f32>(&product.b));
    let along = |matrix: Matrix<f32>, at: usize| Operand {
        first: if depth > 0 { matrix.at(at, 0) } else { std::ptr::null() },
        depth_step: 1,
        step: matrix.stride as isize,
    };
    let across = |matrix: Matrix<f32>, at: usize| Operand {
        first: if depth > 0 { matrix.at(0, at) } else { std::ptr::null() },
        depth_step: matrix.stride as isize,
        step: 1,
    };
    let left = if product.order == Order::TN { across(a, row) } else { along(a, row) };
    let right = if product.order == Order::NT { along(b, col) } else { across(b, col) };
    add_product(sums, rows, cols, depth, left, right);
}

fn multiply_bf16(
    product: &Product,
    (row, col): (usize, usize),
    rows: usize,
    cols: usize,
    sums: &mut [f32],
    operands: &mut [f32],
) {
    let [_, _, depth] = product.dims();
    let (a, b) = (matrix::<bf16>(&product.a), matrix::<bf16>(&product.b));
    let (left, right) = operands.split_at_mut(BLOCK_ROWS * BLOCK_DEPTH);
    for k in (0..depth).step_by(BLOCK_DEPTH) {
        let depth = BLOCK_DEPTH.min(depth - k);
        let left = match product.order {
            Order::TN => widen_across(a, (k, row), depth, rows, left),
            _ => widen_along(a, (row, k), rows, depth, left),
        };
        let right = match product.order {
            Order::NT => widen_along(b, (col, k), cols, depth, right),
            _ => widen_across(b, (k, col), depth, cols, right),
        };
        add_product(sums, rows, cols, depth, left, right);
    }
}

/// Widens a block whose rows run along K.
fn widen_along(from: Matrix<bf16>, at: (usize, usize), rows: usize, depth: usize, to: &mut [f32]) -> Operand {
    vectorise(Widen { from, at, rows, cols: depth, to });
    Operand { first: to.as_ptr(), depth_step: 1, step: depth as isize }
}

/// Widens a block whose columns run along K.
fn widen_across(from: Matrix<bf16>, at: (usize, usize), depth: usize, cols: usize, to: &mut [f32]) -> Operand {
    vectorise(Widen { from, at, rows: depth, cols, to });
    Operand { first: to.as_ptr(), depth_step: cols as isize, step: 1 }
}

/// `sums += left · right`; sums are [rows, cols], contiguous.
fn add_product(sums: &mut [f32], rows: usize, cols: usize, depth: usize, left: Operand, right: Operand) {
    assert!(sums.len() >= rows * cols);
    if depth == 0 {
        return;
    }
    // The library stores columns, so it is asked for the transpose of everything: sumsᵀ += rightᵀ · leftᵀ.
    // SAFETY: the operands have `rows`, `cols` and `depth` elements in their directions, as their makers took them from
    // matrices of that size, and the sums are borrowed.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            cols,
            rows,
            depth,
            sums.as_mut_ptr(),
            cols as isize,
            1,
            true,
            right.first,
            right.depth_step,
            right.step,
            left.first,
            left.step,
            left.depth_step,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

struct Widen<'a> {
    from: Matrix<bf16>,
    at: (usize, usize),
    rows: usize,
    cols: usize,
    to: &'a mut [f32],
}

impl Vectorised for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(self.to.len() >= self.rows * self.cols);
        for row in 0..self.rows {
            let to = self.to[row * self.cols..].as_mut_ptr();
            for col in (0..self.cols).step_by(LANES) {
                let count = LANES.min(self.cols - col);
                let from = self.from.at(self.at.0 + row, self.at.1 + col);
                // SAFETY: `count` elements are left in the row here and there.
                unsafe { s.store_partial(to.add(col), s.load_bf16_partial(from, count), count) };
            }
        }
    }
}
