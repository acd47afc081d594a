//! Short convolutions. Four taps, which are usual, have kernels of their own.

use super::super::modules::Source;
use super::super::rows::{Matrix, dtype_name, rows_are_aligned};
use super::super::stream::{Shape, arguments};
use super::parameters::{MOST_SEGMENTS, number, some_segments};
use super::sources::{CONVOLUTION, DYNAMIC};
use super::{Run, Stream};
use crate::kernel::{DynamicConv, DynamicConvBackward, Segments, ShortConv, ShortConvBackward};
use crate::{DType, View};

const THREADS: usize = 128;
/// Tokens of a thread, at least. It reads three more before them, and in backward behind them.
const LEAST_RUN: usize = 64;
/// Where weights' gradients are added up, at most so many runs leave a share.
const MOST_SHARES: usize = 128;
const FOUR: usize = 4;

/// Field by field as `kernels/delta/convolution.cuh` declares them.
#[derive(Clone, Copy)]
#[repr(C)]
struct Parameters {
    x: Matrix,
    out: Matrix,
    dout: Matrix,
    dx: Matrix,
    weights: Matrix,
    dweights: Matrix,
    past: Matrix,
    partials: u64,
    cols: u32,
    taps: u32,
    run: u32,
    first_run: u32,
    first_segment: u32,
    segments: u32,
    offsets: [u32; MOST_SEGMENTS + 1],
    unused: u32,
}

impl Parameters {
    fn new(x: &View, weights: &View, taps: usize) -> Parameters {
        let none = Matrix::optional(&None);
        Parameters {
            x: Matrix::of(x),
            out: none,
            dout: none,
            dx: none,
            weights: Matrix::of(weights),
            dweights: none,
            past: none,
            partials: 0,
            cols: number(x.cols),
            taps: number(taps),
            run: number(LEAST_RUN),
            first_run: 0,
            first_segment: 0,
            segments: 0,
            offsets: [0; MOST_SEGMENTS + 1],
            unused: 0,
        }
    }

    /// Runs of tokens that a launch's blocks have, for each group of segments.
    fn runs(&self, offsets: &[u32]) -> usize {
        (offsets[offsets.len() - 1] - offsets[0]).div_ceil(self.run) as usize
    }
}

/// Launches a kernel whose blocks have runs of tokens and whose threads have `vector` columns.
fn launch(
    source: &'static Source,
    name: &str,
    vector: usize,
    parameters: &Parameters,
    segments: &Segments,
    stream: &mut Stream,
) {
    let mut first_run = 0;
    for (first_segment, offsets) in some_segments(segments) {
        let runs = parameters.runs(&offsets);
        let mut some = *parameters;
        some.first_run = number(first_run);
        launch_on(source, name, vector, runs, some, first_segment, &offsets, stream);
        first_run += runs;
    }
}

#[allow(clippy::too_many_arguments, reason = "a launch by its parts")]
fn launch_on(
    source: &'static Source,
    name: &str,
    vector: usize,
    down: usize,
    mut parameters: Parameters,
    first_segment: usize,
    offsets: &[u32],
    stream: &mut Stream,
) {
    parameters.first_segment = number(first_segment);
    parameters.segments = number(offsets.len() - 1);
    parameters.offsets[..offsets.len()].copy_from_slice(offsets);
    let across = (parameters.cols as usize).div_ceil(THREADS * vector);
    let shape = Shape { blocks: [number(across), number(down), 1], threads: [THREADS as u32, 1, 1], shared_bytes: 0 };
    // SAFETY: the kernel takes the parameters, and the queue's order keeps others away from the operands.
    unsafe { stream.launch_with(source, name, shape, &parameters) };
}

/// Leaves each segment's last rows as its past.
fn leave_rows(
    source: &'static Source,
    x: &View,
    past: &View,
    parameters: &Parameters,
    segments: &Segments,
    stream: &mut Stream,
) {
    let vector = vector(16 / x.dtype.size_bytes(), &[*x, *past]);
    let name = format!("leave_rows_{}_{vector}", dtype_name(x.dtype));
    for (first_segment, offsets) in some_segments(segments) {
        launch_on(source, &name, vector, offsets.len() - 1, *parameters, first_segment, &offsets, stream);
    }
}

impl Run for ShortConv {
    fn run(&self, stream: &mut Stream) {
        let taps = self.weight.cols;
        let mut parameters = Parameters::new(&self.x, &self.weight, taps);
        parameters.out = Matrix::of(&self.out);
        let past = self.past.filter(|_| taps > 1);
        parameters.past = Matrix::optional(&past);
        let views: Vec<View> = [Some(self.x), Some(self.out), past].into_iter().flatten().collect();
        let (name, vector) = kernel("short_conv", taps, self.x.dtype, &views);
        launch(&CONVOLUTION, &name, vector, &parameters, &self.segments, stream);
        if let Some(past) = past {
            leave_rows(&CONVOLUTION, &self.x, &past, &parameters, &self.segments, stream);
        }
    }
}

/// The kernel's name and the columns of its threads.
fn kernel(name: &str, taps: usize, dtype: DType, views: &[View]) -> (String, usize) {
    let of_dtype = dtype_name(dtype);
    if taps != FOUR {
        return (format!("{name}_any_{of_dtype}"), 1);
    }
    let vector = vector(FOUR, views);
    (format!("{name}_four_{of_dtype}_{vector}"), vector)
}

/// Columns of a thread: so many if every row is aligned and has a multiple of them.
fn vector(wanted: usize, views: &[View]) -> usize {
    if rows_are_aligned(views) && views[0].cols.is_multiple_of(wanted) { wanted } else { 1 }
}

impl Run for ShortConvBackward {
    fn run(&self, stream: &mut Stream) {
        let [rows, cols] = self.x.shape();
        let taps = self.weight.cols;
        let mut parameters = Parameters::new(&self.x, &self.weight, taps);
        parameters.dout = Matrix::of(&self.dout);
        parameters.dx = Matrix::of(&self.dx);
        parameters.run = number(rows.div_ceil(MOST_SHARES).max(LEAST_RUN));
        let runs: usize = some_segments(&self.segments).iter().map(|(_, offsets)| parameters.runs(offsets)).sum();
        if self.dweight.is_some() {
            parameters.partials = stream.scratch((runs * cols * taps * size_of::<f32>()) as u64);
        }
        let (name, vector) = kernel("short_conv_backward", taps, self.x.dtype, &[self.x, self.dout, self.dx]);
        launch(&CONVOLUTION, &name, vector, &parameters, &self.segments, stream);
        if let Some(dweight) = self.dweight.filter(|_| runs > 0) {
            const SIDE: usize = 32;
            let blocks = (cols * taps).div_ceil(SIDE) as u32;
            let shape = Shape { blocks: [blocks, 1, 1], threads: [SIDE as u32, SIDE as u32, 1], shared_bytes: 0 };
            let partials = parameters.partials;
            let arguments = arguments![cols as i64, taps as i32, runs as i64, partials, Matrix::of(&dweight)];
            // SAFETY: the arguments are the kernel's, and the shares were issued before.
            unsafe { stream.launch(&CONVOLUTION, "short_conv_add", shape, arguments) };
        }
    }
}

/// Columns of a thread of the kernels for four taps.
const PAIR: usize = 2;

/// The same for weights of each token's own.
fn dynamic_kernel(name: &str, taps: usize, views: &[View]) -> (String, usize) {
    let dtype = views[0].dtype;
    let is_usual = taps == FOUR && vector(PAIR, views) == PAIR;
    let (kind, vector) = if is_usual { ("four", PAIR) } else { ("any", 1) };
    (format!("{name}_{kind}_{}", dtype_name(dtype)), vector)
}

impl Run for DynamicConv {
    fn run(&self, stream: &mut Stream) {
        let taps = self.taps();
        let mut parameters = Parameters::new(&self.x, &self.weights, taps);
        parameters.out = Matrix::of(&self.out);
        let past = self.past.filter(|_| taps > 1);
        parameters.past = Matrix::optional(&past);
        let views: Vec<View> = [Some(self.x), Some(self.out), Some(self.weights), past].into_iter().flatten().collect();
        let (name, vector) = dynamic_kernel("dynamic_conv", taps, &views);
        launch(&DYNAMIC, &name, vector, &parameters, &self.segments, stream);
        if let Some(past) = past {
            leave_rows(&DYNAMIC, &self.x, &past, &parameters, &self.segments, stream);
        }
    }
}

impl Run for DynamicConvBackward {
    fn run(&self, stream: &mut Stream) {
        let taps = self.taps();
        let mut parameters = Parameters::new(&self.x, &self.weights, taps);
        parameters.dout = Matrix::of(&self.dout);
        parameters.dx = Matrix::of(&self.dx);
        parameters.dweights = Matrix::of(&self.dweights);
        let views = [self.x, self.dout, self.dx, self.weights, self.dweights];
        let (name, vector) = dynamic_kernel("dynamic_conv_backward", taps, &views);
        launch(&DYNAMIC, &name, vector, &parameters, &self.segments, stream);
    }
}
