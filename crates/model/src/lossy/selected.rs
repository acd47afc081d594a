//! Some columns of a matrix, or some rows of one that is stored transposed, and means of those.

use evenkeel_device::kernel::{Copy, Fill, GatherColumns, GatherRows, Order, Product, ScatterColumns, ScatterRows};
use evenkeel_device::{DType, Queue, Tensor, View};

pub(crate) fn gather(queue: &Queue, x: View, columns: &Tensor, transposed: bool, out: &Tensor) {
    let (selected, out) = (columns.view(), out.view());
    if transposed {
        queue.launch(GatherRows { x, rows: selected, out });
    } else {
        queue.launch(GatherColumns { x, columns: selected, out });
    }
}

/// The columns, in a matrix of their own.
pub(crate) fn gathered(queue: &Queue, x: View, columns: &Tensor) -> Tensor {
    let out = queue.tensor(x.rows, columns.cols, x.dtype);
    gather(queue, x, columns, false, &out);
    out
}

pub(crate) fn scatter(queue: &Queue, x: &Tensor, columns: &Tensor, transposed: bool, out: View, accumulate: bool) {
    let (x, selected) = (x.view(), columns.view());
    if transposed {
        queue.launch(ScatterRows { x, rows: selected, out, accumulate });
    } else {
        queue.launch(ScatterColumns { x, columns: selected, out, accumulate });
    }
}

/// The mean of each row, `count` times side by side. Sums are products with ones, which every device has and sums in f32.
pub(crate) fn row_means(queue: &Queue, x: &Tensor, count: usize) -> Tensor {
    let (ones, inverse) = (filled(queue, 1, x.cols, x.dtype, 1.0), filled(queue, count, 1, DType::F32, share(x.cols)));
    let sums = queue.tensor(x.rows, 1, DType::F32);
    queue.launch(Product::new(Order::NT, x, &ones, &sums));
    let means = queue.tensor(x.rows, count, DType::F32);
    queue.launch(Product::new(Order::NT, &sums, &inverse, &means));
    if x.dtype == DType::F32 {
        return means;
    }
    let rounded = queue.tensor(x.rows, count, x.dtype);
    queue.launch(Copy { x: means.view(), out: rounded.view() });
    rounded
}

/// The mean of each column of an f32 matrix, `count` times one below the other.
pub(crate) fn column_means(queue: &Queue, x: &Tensor, count: usize) -> Tensor {
    let (ones, inverse) =
        (filled(queue, 1, x.rows, DType::F32, 1.0), filled(queue, count, 1, DType::F32, share(x.rows)));
    let sums = queue.tensor(1, x.cols, DType::F32);
    queue.launch(Product::new(Order::NN, &ones, x, &sums));
    let means = queue.tensor(count, x.cols, DType::F32);
    queue.launch(Product::new(Order::NN, &inverse, &sums, &means));
    means
}

fn share(count: usize) -> f32 {
    (1.0 / count as f64) as f32
}

fn filled(queue: &Queue, rows: usize, cols: usize, dtype: DType, value: f32) -> Tensor {
    let tensor = queue.tensor(rows, cols, dtype);
    queue.launch(Fill { out: tensor.view(), value });
    tensor
}
