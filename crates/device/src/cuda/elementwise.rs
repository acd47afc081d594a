//! Sums, copies, fills, and the selection of columns.

use super::modules::ELEMENTWISE;
use super::rows::{Matrix, Mixed, Walk, dtype_name, vector};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::kernel::{
    Add, ColumnSum, Copies, Copy, Fill, GatherColumns, MOST_COPIES, Multiply, ScatterColumns, SoftCap,
};
use crate::{DType, Extent, View};

impl Run for Add {
    fn run(&self, stream: &mut Stream) {
        let views = [self.a, self.b, self.out];
        let Some(walk) = Walk::flat(&views) else { return };
        let [a, b, out] = views.map(|view| Mixed::of(&view));
        let arguments = arguments![walk.rows, walk.cols, a, b, out];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &walk.name("add"), walk.shape(), arguments) };
    }
}

impl Run for Multiply {
    fn run(&self, stream: &mut Stream) {
        let views = [self.x, self.out];
        let Some(walk) = Walk::flat(&views) else { return };
        let [x, out] = views.map(|view| Mixed::of(&view));
        let by = self.by.map_or(0, |by| by.address);
        let arguments = arguments![walk.rows, walk.cols, x, out, self.factor, by];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &walk.name("scale"), walk.shape(), arguments) };
    }
}

impl Run for SoftCap {
    fn run(&self, stream: &mut Stream) {
        let views = [self.x, self.out];
        let Some(walk) = Walk::flat(&views) else { return };
        let [x, out] = views.map(|view| Mixed::of(&view));
        let arguments = arguments![walk.rows, walk.cols, x, out, self.cap];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &walk.name("soft_cap"), walk.shape(), arguments) };
    }
}

/// Indices are as wide as f32, and moving an f32 keeps its bits.
fn as_numbers(view: View) -> View {
    match view.dtype {
        DType::U32 => View::new(view.address, Extent { dtype: DType::F32, ..*view }),
        _ => view,
    }
}

/// The argument of the kernel for several copies, as in kernels/elementwise.cu.
#[repr(C)]
#[derive(Clone, std::marker::Copy)]
struct CopyList {
    rows: [i64; MOST_COPIES],
    cols: [i64; MOST_COPIES],
    from: [Mixed; MOST_COPIES],
    to: [Mixed; MOST_COPIES],
}

impl Run for Copies {
    fn run(&self, stream: &mut Stream) {
        let copies: Vec<[View; 2]> = self.0.iter().map(|copy| [copy.x, copy.out].map(as_numbers)).collect();
        let Some(walk) = Walk::longest(&copies) else { return };
        let of = |place: usize| copies.get(place).unwrap_or(&copies[0]);
        let list = CopyList {
            rows: std::array::from_fn(|place| of(place)[0].rows as i64),
            cols: std::array::from_fn(|place| of(place)[0].cols as i64),
            from: std::array::from_fn(|place| Mixed::of(&of(place)[0])),
            to: std::array::from_fn(|place| Mixed::of(&of(place)[1])),
        };
        let mut shape = walk.shape();
        shape.blocks[1] = copies.len() as u32;
        // SAFETY: the argument is the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch_with(&ELEMENTWISE, &walk.name("copies"), shape, &list) };
    }
}

impl Run for Copy {
    fn run(&self, stream: &mut Stream) {
        let views = [self.x, self.out].map(as_numbers);
        let Some(walk) = Walk::flat(&views) else { return };
        let [x, out] = views.map(|view| Mixed::of(&view));
        let arguments = arguments![walk.rows, walk.cols, x, out];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &walk.name("copy"), walk.shape(), arguments) };
    }
}

impl Run for Fill {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::flat(&[self.out]) else { return };
        let name = walk.typed("fill", self.out.dtype);
        let arguments = arguments![walk.rows, walk.cols, Matrix::of(&self.out), self.value];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &name, walk.shape(), arguments) };
    }
}

impl Run for ColumnSum {
    fn run(&self, stream: &mut Stream) {
        column_sum(self.x, None, self.out, 1.0, stream);
    }
}

/// Column sums use at most this many blocks of rows...
pub(super) const MOST_BLOCKS: usize = 256;
/// ...of at least this many rows, so that partial sums cost little beside the rows themselves.
pub(super) const LEAST_ROWS: usize = 64;
/// Threads along a row, and rows side by side, in a block of the kernel.
pub(super) const LANES: usize = 32;
pub(super) const ROW_GROUPS: usize = 8;

/// `out += scale · Σ_rows x`, of all rows or of those with a certain index.
pub(super) fn column_sum(x: View, rows_of: Option<(View, u32)>, out: View, scale: f32, stream: &mut Stream) {
    if x.is_empty() {
        return;
    }
    let vector = vector(x.dtype, &[x]);
    let rows_per_block = x.rows.div_ceil(MOST_BLOCKS).max(LEAST_ROWS);
    let blocks = x.rows.div_ceil(rows_per_block);
    let partials = stream.scratch((blocks * x.cols * size_of::<f32>()) as u64);
    let rows = x.rows as i64;
    let cols = x.cols as i64;
    let rows_per_block = rows_per_block as i64;
    let (indices, wanted) = rows_of.map_or((0, 0), |(indices, wanted)| (indices.address, wanted));
    let name = format!("column_sum_{}_{vector}", dtype_name(x.dtype));
    let shape = Shape {
        blocks: [x.cols.div_ceil(LANES * vector) as u32, blocks as u32, 1],
        threads: [LANES as u32, ROW_GROUPS as u32, 1],
        shared_bytes: 0,
    };
    let arguments = arguments![rows, cols, Matrix::of(&x), rows_per_block, partials, indices, wanted];
    // SAFETY: the arguments are the kernels', and the queue's order keeps others away from the operands.
    unsafe {
        stream.launch(&ELEMENTWISE, &name, shape, arguments);
        add_partials(partials, blocks, x.cols, x.cols, [Some(out), None], scale, stream);
    }
}

/// `out += scale · Σ partials`, the rows of which begin `step` elements one after another. A second vector's partial sums lie
/// behind the first one's in each row.
///
/// # Safety
/// The partials are written when the stream reaches this.
pub(super) unsafe fn add_partials(
    partials: u64,
    blocks: usize,
    step: usize,
    cols: usize,
    outs: [Option<View>; 2],
    scale: f32,
    stream: &mut Stream,
) {
    const SIDE: u32 = 32;
    let Some(last) = outs.iter().rposition(Option::is_some) else { return };
    let vectors = last as u32 + 1;
    let shape =
        Shape { blocks: [cols.div_ceil(SIDE as usize) as u32, vectors, 1], threads: [SIDE, SIDE, 1], shared_bytes: 0 };
    let [first, second] = outs.map(|out| out.map_or(0, |out| out.address));
    let arguments = arguments![cols as i64, blocks as i64, step as i64, partials, first, second, scale];
    // SAFETY: the arguments are the kernel's, and the caller's promise.
    unsafe { stream.launch(&ELEMENTWISE, "add_partials", shape, arguments) };
}

impl Run for GatherColumns {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.out]) else { return };
        let name = format!("gather_columns_{}", dtype_name(self.x.dtype));
        let x = Matrix::of(&self.x);
        let out = Matrix::of(&self.out);
        let x_cols = self.x.cols as i64;
        let defects = stream.defects();
        let arguments = arguments![walk.rows, walk.cols, x, x_cols, self.columns.address, out, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &name, one_by_one(walk), arguments) };
    }
}

impl Run for ScatterColumns {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.x]) else { return };
        let name = format!("scatter_columns_{}", dtype_name(self.x.dtype));
        let x = Matrix::of(&self.x);
        let out = Matrix::of(&self.out);
        let out_cols = self.out.cols as i64;
        let accumulate = self.accumulate as i32;
        let defects = stream.defects();
        let arguments = arguments![walk.rows, walk.cols, x, self.columns.address, out, out_cols, accumulate, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &name, one_by_one(walk), arguments) };
    }
}

/// A thread for each element.
fn one_by_one(walk: Walk) -> Shape {
    Shape::linear((walk.rows as u64 * walk.cols as u64).div_ceil(256), 256)
}
