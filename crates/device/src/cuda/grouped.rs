//! Products of mixtures of experts. Offsets stay on the GPU: grids follow from shapes alone, so graphs can be replayed.

use super::modules::{GROUPED_HOPPER, GROUPED_PRODUCT};
use super::rows::{Matrix, Mixed, dtype_name, rows_are_aligned};
use super::stream::{Shape, arguments};
use super::tensor_map::TensorMap;
use super::{Run, Stream};
use crate::kernel::{GroupedProduct, Order};
use crate::{DType, View};

/// Mirrors `Operands` in kernels/grouped.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct Operands {
    rows: i64,
    inner: i64,
    n: i64,
    experts: i32,
    accumulate: i32,
    offsets: u64,
    defects: u64,
    out: Mixed,
    aligned: i32,
    paired: i32,
}

impl Operands {
    fn of(product: &GroupedProduct, stream: &Stream) -> Operands {
        Operands {
            rows: product.a.rows as i64,
            inner: product.a.cols as i64,
            n: product.out.cols as i64,
            experts: product.experts() as i32,
            accumulate: product.accumulate as i32,
            offsets: product.offsets.address,
            defects: stream.defects(),
            out: Mixed::of(&product.out),
            aligned: rows_are_aligned(&[product.a, product.b]) as i32,
            paired: is_paired(&product.out) as i32,
        }
    }
}

/// Whether two neighbours in an even column can be stored at once.
fn is_paired(view: &View) -> bool {
    view.address.is_multiple_of(2 * view.dtype.size_bytes() as u64) && (view.rows <= 1 || view.stride.is_multiple_of(2))
}

fn order_name(order: Order) -> &'static str {
    match order {
        Order::NT => "nt",
        Order::NN => "nn",
        Order::TN => "tn",
    }
}

impl Run for GroupedProduct {
    fn run(&self, stream: &mut Stream) {
        if self.experts() == 0 {
            return;
        }
        if stream.context().properties().capability == (9, 0) && hopper::fits(self) {
            hopper::launch(self, stream);
        } else {
            launch(self, stream);
        }
    }
}

const THREADS: u32 = 256;

/// The side of a block's tile of the output, and its shared memory, as kernels/grouped_product.cu has them.
fn tile_of(dtype: DType) -> (usize, u32) {
    const STAGES: u32 = 3;
    const TILE_ELEMENTS: u32 = 128 * (32 + 8);
    match dtype {
        DType::Bf16 => (128, STAGES * 2 * TILE_ELEMENTS * 2),
        _ => (64, 0),
    }
}

fn launch(product: &GroupedProduct, stream: &mut Stream) {
    let (side, shared_bytes) = tile_of(product.a.dtype);
    let columns = product.out.cols.div_ceil(side) as u32;
    let experts = product.experts();
    let blocks = match product.order {
        // Each expert begins a tile.
        Order::NT | Order::NN => [(product.a.rows / side + experts) as u32, columns, 1],
        Order::TN => [product.a.cols.div_ceil(side) as u32, columns, experts as u32],
    };
    let [a, b] = [product.a, product.b].map(|view| Matrix::of(&view));
    let name = format!("grouped_{}_{}", order_name(product.order), dtype_name(product.a.dtype));
    let shape = Shape { blocks, threads: [THREADS, 1, 1], shared_bytes };
    let arguments = arguments![Operands::of(product, stream), a, b];
    // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
    unsafe { stream.launch(&GROUPED_PRODUCT, &name, shape, arguments) };
}

/// Products by warpgroups, as kernels/grouped_hopper.cu has them.
mod hopper {
    use super::*;

    const THREADS: u32 = 384;
    const HEIGHT: usize = 128;
    const DEPTH: usize = 64;
    const STAGES: usize = 3;
    const ROW_BYTES: usize = 128;
    const ALIGNMENT_BYTES: usize = 1024;
    /// Four boxes of the output for each of eight warps.
    const STORED_ROWS: usize = 16;
    const STORED_BYTES: usize = 8 * 4 * STORED_ROWS * ROW_BYTES;

    /// The copy engine takes multiples of 16 bytes, and adds to f32 alone.
    pub fn fits(product: &GroupedProduct) -> bool {
        let GroupedProduct { a, b, out, accumulate, .. } = product;
        let is_whole = [a, b, out].iter().all(|view| {
            let [stride_bytes, row_bytes] = [view.stride, view.cols].map(|len| len * view.dtype.size_bytes());
            view.address.is_multiple_of(16) && stride_bytes.is_multiple_of(16) && stride_bytes >= row_bytes
        });
        let stores_whole = (out.cols * out.dtype.size_bytes()).is_multiple_of(16);
        let adds = !accumulate || out.dtype == DType::F32;
        let is_empty = [a, b, out].iter().any(|view| view.is_empty());
        a.dtype == DType::Bf16 && is_whole && stores_whole && adds && !is_empty && a.rows <= i32::MAX as usize
    }

    /// The width of a tile that computes the fewest columns, of which the narrower one's take a fifth longer.
    fn width_of(cols: usize) -> usize {
        if cols.next_multiple_of(128) * 6 < cols.next_multiple_of(256) * 5 { 128 } else { 256 }
    }

    pub fn launch(product: &GroupedProduct, stream: &mut Stream) {
        let (experts, width) = (product.experts(), width_of(product.out.cols));
        // Rows of a box of each operand, and tiles of the output, one below the other.
        let (a_rows, b_rows, down) = match product.order {
            Order::NT => (HEIGHT, width, product.a.rows / HEIGHT + experts),
            Order::NN => (HEIGHT, DEPTH, product.a.rows / HEIGHT + experts),
            Order::TN => (DEPTH, DEPTH, product.a.cols.div_ceil(HEIGHT) * experts),
        };
        let (b_groups, out_groups) = if product.order == Order::TN { (1, experts) } else { (experts, 1) };
        let a = TensorMap::new(&product.a, 1, a_rows);
        let b = TensorMap::new(&product.b, b_groups, b_rows);
        let out = TensorMap::new(&product.out, out_groups, STORED_ROWS);
        let tiles = down * product.out.cols.div_ceil(width);
        let shared_bytes = ALIGNMENT_BYTES + STAGES * (HEIGHT + width) * ROW_BYTES + STORED_BYTES;
        let blocks = tiles.min(stream.multiprocessors() as usize) as u64;
        let shape = Shape { shared_bytes: shared_bytes as u32, ..Shape::linear(blocks, THREADS) };
        let name = format!("grouped_{}_{width}", order_name(product.order));
        let arguments = arguments![Operands::of(product, stream), a, b, out];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&GROUPED_HOPPER, &name, shape, arguments) };
    }
}
