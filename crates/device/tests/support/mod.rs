//! Devices, random operands, and all tolerances of kernel tests.
#![allow(dead_code, unused_imports)]

mod device;

use evenkeel_device::{DType, Queue, Tensor};

pub use device::{device, devices, on_cuda};

/// Both compute dtypes.
pub const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Relative error by norm that a kernel may have against its plain twin in f64, given operands already rounded.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        // Half a unit in the last of eight bits, on results that are rounded once.
        DType::Bf16 => 4e-3,
        DType::U32 => 0.0,
    }
}

/// Runs a case on each of the devices under test, asserts that every run gave the same bits, and returns the results.
pub fn run(case: impl Fn(&Queue) -> Vec<Tensor>) -> Vec<Vec<f32>> {
    let results: Vec<Vec<Vec<f32>>> = devices(1 << 30)
        .iter()
        .map(|device| {
            let queue = device.compute();
            case(queue).iter().map(|tensor| queue.read(tensor)).collect()
        })
        .collect();
    for other in &results[1..] {
        assert_eq!(bits(other), bits(&results[0]), "the bits depend on the device");
    }
    results.into_iter().next().expect("several runs")
}

fn bits(results: &[Vec<f32>]) -> Vec<Vec<u32>> {
    results.iter().map(|values| values.iter().map(|value| value.to_bits()).collect()).collect()
}

/// A small seeded generator.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }

    /// In -1..1.
    pub fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Numbers that `dtype` holds exactly, so that a twin in f64 starts from the same operands.
    pub fn numbers(&mut self, len: usize, dtype: DType) -> Vec<f32> {
        (0..len).map(|_| rounded(self.number(), dtype)).collect()
    }
}

pub fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => evenkeel_device::bf16::from_f32(value).to_f32(),
        DType::F32 | DType::U32 => value,
    }
}

/// Whether rows begin at whole vectors, with `EVENKEEL_TEST_ROWS=aligned`: a GPU has other kernels for them. Else most
/// begin anywhere.
fn rows_are_aligned() -> bool {
    match std::env::var("EVENKEEL_TEST_ROWS").as_deref() {
        Err(_) => false,
        Ok("aligned") => true,
        Ok(other) => panic!("EVENKEEL_TEST_ROWS is `{other}`, expected aligned or nothing"),
    }
}

/// Elements of a whole vector.
const VECTOR: usize = 8;

/// A tensor with `padding` unused columns after each row, to exercise strides. The padding is NaN.
pub fn strided(queue: &Queue, rows: usize, cols: usize, padding: usize, dtype: DType, values: &[f32]) -> Tensor {
    let width = if rows_are_aligned() { (cols + padding).next_multiple_of(VECTOR) } else { cols + padding };
    let padded: Vec<f32> = (0..rows * width)
        .map(|i| if i % width < cols { values[i / width * cols + i % width] } else { f32::NAN })
        .collect();
    queue.floats(rows, width, dtype, &padded).col_range(0..cols)
}

/// ‖actual - expected‖ / ‖expected‖.
pub fn relative_error(actual: &[f32], expected: &[f64]) -> f64 {
    error_beside(actual, expected, expected)
}

/// The error by norm as a share of the norm of `sizes`.
pub fn error_beside(actual: &[f32], expected: &[f64], sizes: &[f64]) -> f64 {
    assert_eq!([actual.len(), sizes.len()], [expected.len(); 2]);
    let difference: f64 = actual.iter().zip(expected).map(|(&a, &e)| (a as f64 - e).powi(2)).sum();
    let size: f64 = sizes.iter().map(|size| size.powi(2)).sum();
    if difference == 0.0 { 0.0 } else { (difference / size.max(1e-30)).sqrt() }
}

#[track_caller]
pub fn assert_close(what: &str, actual: &[f32], expected: &[f64], tolerance: f64) {
    let error = relative_error(actual, expected);
    assert!(error <= tolerance, "{what}: relative error {error:.2e} above {tolerance:.0e}");
}

/// Unused columns on the left and on the right of a framed tensor.
fn frame(cols: usize) -> [usize; 2] {
    if rows_are_aligned() { [VECTOR, (cols + 1).next_multiple_of(VECTOR) - cols] } else { [3, 2] }
}

const FRAME_VALUE: f32 = 7.0;

/// A tensor inside a wider one, to be written by a kernel: the inner, and the outer to be read with [`unframed`].
pub fn framed(queue: &Queue, rows: usize, cols: usize, dtype: DType, values: &[f32]) -> (Tensor, Tensor) {
    let [left, right] = frame(cols);
    let width = left + cols + right;
    let mut outer = vec![FRAME_VALUE; rows * width];
    for row in 0..rows {
        outer[row * width + left..][..cols].copy_from_slice(&values[row * cols..][..cols]);
    }
    let outer = queue.floats(rows, width, dtype, &outer);
    (outer.col_range(left..left + cols), outer)
}

/// The values of the inner tensor; asserts that its frame is untouched.
pub fn unframed(outer: &[f32], cols: usize) -> Vec<f32> {
    let mut inner = Vec::new();
    let [left, right] = frame(cols);
    for row in outer.chunks_exact(left + cols + right) {
        let (left, rest) = row.split_at(left);
        let (values, right) = rest.split_at(cols);
        assert!(left.iter().chain(right).all(|&value| value == FRAME_VALUE), "a kernel wrote beside its tensor");
        inner.extend_from_slice(values);
    }
    inner
}

/// Shapes for row-wise kernels: empty, one element, whole vectors, vectors and a rest, several tasks.
pub const SHAPES: [[usize; 2]; 9] =
    [[0, 5], [5, 0], [1, 1], [3, 17], [5, 32], [37, 100], [300, 7], [70, 1030], [2, 40_000]];

/// The numbers as f64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value as f64).collect()
}
