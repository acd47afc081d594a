//! Softmax cross-entropy.

use super::modules::LOSS;
use super::rows::{Matrix, dtype_name, vector};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::View;
use crate::kernel::{LossBackward, LossMerge, LossStats};

const MOST_THREADS: usize = 512;

/// A block for each row of logits, and the width of its vectors.
fn of_rows(views: &[View]) -> (Shape, usize) {
    let vector = vector(views[0].dtype, views);
    let [rows, cols] = views[0].shape();
    let threads = cols.div_ceil(vector).next_multiple_of(32).clamp(32, MOST_THREADS);
    (Shape::linear(rows as u64, threads as u32), vector)
}

impl Run for LossStats {
    fn run(&self, stream: &mut Stream) {
        if self.logits.rows == 0 {
            return;
        }
        let (shape, vector) = of_rows(&[self.logits]);
        let name = format!("loss_stats_{}_{vector}", dtype_name(self.logits.dtype));
        let cols = self.logits.cols as i64;
        let logits = Matrix::of(&self.logits);
        let stats = Matrix::of(&self.stats);
        let arguments = arguments![cols, logits, self.labels.address, self.first, stats];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&LOSS, &name, shape, arguments) };
    }
}

impl Run for LossMerge {
    fn run(&self, stream: &mut Stream) {
        const THREADS: u32 = 128;
        if self.stats.rows == 0 {
            return;
        }
        let tokens = self.stats.rows as i64;
        let ranks = self.parts.rows as i64;
        let arguments = arguments![tokens, ranks, Matrix::of(&self.parts), Matrix::of(&self.stats)];
        let shape = Shape::linear((tokens as u64).div_ceil(THREADS as u64), THREADS);
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&LOSS, "loss_merge", shape, arguments) };
    }
}

impl Run for LossBackward {
    fn run(&self, stream: &mut Stream) {
        if self.logits.rows == 0 {
            return;
        }
        let views: Vec<View> = [Some(self.logits), self.dlogits].into_iter().flatten().collect();
        let (mut shape, vector) = of_rows(&views);
        if self.dlogits.is_none() {
            shape.threads = [32, 1, 1];
        }
        let dlogits_dtype = self.dlogits.map_or(self.logits.dtype, |dlogits| dlogits.dtype);
        let [from, to] = [self.logits.dtype, dlogits_dtype].map(dtype_name);
        let name = format!("loss_backward_{from}_{to}_{vector}");
        let cols = self.logits.cols as i64;
        let (logits, stats, dlogits) =
            (Matrix::of(&self.logits), Matrix::of(&self.stats), Matrix::optional(&self.dlogits));
        let rest = self.smoothing / self.vocabulary as f32;
        let share = self.cap.map_or(0f32, |cap| 1.0 / cap);
        let (labels, losses) = (self.labels.address, self.losses.address);
        let arguments = arguments![
            cols,
            logits,
            labels,
            self.first,
            stats,
            losses,
            dlogits,
            self.smoothing,
            rest,
            self.scale,
            share
        ];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&LOSS, &name, shape, arguments) };
    }
}
