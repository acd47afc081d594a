//! Products aᵀ·b of which one operand has few columns, such as the gradients of an adapter's factors. They read more than they
//! multiply, so nothing is packed: a task takes some columns of the wide operand and all of the narrow one.

use super::super::matrix::{Element, Matrix, matrix, with_element};
use super::super::rows::load;
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::super::{Team, WorkingMemory};
use super::epilogue::Epilogue;
use crate::kernel::{Order, Product};

/// Columns of a narrow operand at most, and of a wide one at least.
const MOST_NARROW: usize = 32;
const LEAST_WIDE: usize = 128;
/// Columns of the wide operand that a task takes: two vectors.
const WIDE: usize = 2 * LANES;
/// Rows whose products are summed before they are added to the others.
const DEPTH_BLOCK: usize = 512;

pub(super) fn is_thin(product: &Product) -> bool {
    let [m, n, _] = product.dims();
    product.order == Order::TN && product.also.is_none() && m.min(n) <= MOST_NARROW && m.max(n) >= LEAST_WIDE
}

/// A task's sums, by column of the narrow operand and by column of the wide one.
pub(super) fn working_memory() -> WorkingMemory {
    WorkingMemory::of_thread(2 * MOST_NARROW * WIDE)
}

pub(super) fn run<O: Element>(product: &Product, epilogue: &Epilogue<O>, team: &mut Team) {
    with_element!(product.a.dtype, E => run_with::<E, O>(product, epilogue, team));
}

fn run_with<E: Element, O: Element>(product: &Product, epilogue: &Epilogue<O>, team: &mut Team) {
    let [m, n, depth] = product.dims();
    let (a, b) = (matrix::<E>(&product.a), matrix::<E>(&product.b));
    let is_left_wide = m > n;
    let (wide, narrow) = if is_left_wide { (a, b) } else { (b, a) };
    let (wide_cols, narrow_cols) = (m.max(n), m.min(n));
    team.blocks(wide_cols, WIDE, |cols, scratch| {
        let (sums, turned) = scratch.floats(2 * MOST_NARROW * WIDE).split_at_mut(MOST_NARROW * WIDE);
        sums[..narrow_cols * WIDE].fill(0.0);
        vectorise(Sums { wide, narrow, first: cols.start, count: cols.len(), narrow_cols, depth, sums });
        let (first, count) = (cols.start, cols.len());
        if !is_left_wide {
            // SAFETY: these columns of the output are this task's own.
            unsafe { epilogue.finish(sums.as_ptr(), WIDE, (0, first), narrow_cols, count) };
            return;
        }
        for (row, turned) in turned.chunks_exact_mut(narrow_cols).take(count).enumerate() {
            turned.iter_mut().zip(sums[row..].iter().step_by(WIDE)).for_each(|(turned, sum)| *turned = *sum);
        }
        // SAFETY: these rows of the output are this task's own.
        unsafe { epilogue.finish(turned.as_ptr(), narrow_cols, (first, 0), count, narrow_cols) };
    });
}

struct Sums<'a, E> {
    wide: Matrix<E>,
    narrow: Matrix<E>,
    /// Columns of the wide operand, at most `WIDE`.
    first: usize,
    count: usize,
    narrow_cols: usize,
    depth: usize,
    /// [narrow columns, WIDE]
    sums: &'a mut [f32],
}

impl<E: Element> Vectorised for Sums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for row in (0..self.depth).step_by(DEPTH_BLOCK) {
            let rows = row..self.depth.min(row + DEPTH_BLOCK);
            let mut col = 0;
            while col < self.narrow_cols {
                let left = self.narrow_cols - col;
                col += match (left, self.count == WIDE) {
                    (8.., true) => self.columns::<S, 8, true>(s, rows.clone(), col),
                    (8.., false) => self.columns::<S, 8, false>(s, rows.clone(), col),
                    (4.., _) => self.columns::<S, 4, false>(s, rows.clone(), col),
                    (2.., _) => self.columns::<S, 2, false>(s, rows.clone(), col),
                    _ => self.columns::<S, 1, false>(s, rows.clone(), col),
                };
            }
        }
    }
}

impl<E: Element> Sums<'_, E> {
    /// Adds the products of these rows for so many columns of the narrow operand, and returns how many they are.
    #[inline(always)]
    fn columns<S: Simd, const COLUMNS: usize, const IS_WHOLE: bool>(
        &mut self,
        s: S,
        rows: std::ops::Range<usize>,
        col: usize,
    ) -> usize {
        let counts = [self.count.min(LANES), self.count.saturating_sub(LANES)];
        let mut sums = [[s.splat(0.0); 2]; COLUMNS];
        for row in rows {
            let first = self.wide.at(row, self.first);
            // SAFETY: the wide operand has `count` columns from `first` on.
            let wide = unsafe {
                if IS_WHOLE {
                    [E::load(s, first), E::load(s, first.wrapping_add(LANES))]
                } else {
                    [load(s, first, counts[0]), load(s, first.wrapping_add(LANES), counts[1])]
                }
            };
            let narrow = self.narrow.at(row, col);
            for (index, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the narrow operand has `COLUMNS` columns from `col` on.
                let factor = s.splat(unsafe { (*narrow.wrapping_add(index)).to_f32() });
                *sums = [s.mul_add(wide[0], factor, sums[0]), s.mul_add(wide[1], factor, sums[1])];
            }
        }
        for (index, [first, second]) in sums.into_iter().enumerate() {
            let to = self.sums[(col + index) * WIDE..][..WIDE].as_mut_ptr();
            // SAFETY: two vectors of sums for each column.
            unsafe {
                s.store(to, s.add(s.load(to), first));
                s.store(to.add(LANES), s.add(s.load(to.add(LANES)), second));
            }
        }
        COLUMNS
    }
}
