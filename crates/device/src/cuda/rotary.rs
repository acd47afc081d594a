//! Rotary position embedding, in place.

use super::modules::ROTARY;
use super::rows::{Matrix, dtype_name, vector};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::kernel::{Pairs, Rotary};

impl Run for Rotary {
    fn run(&self, stream: &mut Stream) {
        const MOST_THREADS: usize = 256;
        let heads = self.x;
        let half = self.table.cols / 2;
        if heads.tokens() * heads.count() == 0 || half == 0 {
            return;
        }
        let vector = match vector(heads.view.dtype, &[heads.view, self.table]) {
            vector
                if self.pairs == Pairs::Halves && half.is_multiple_of(vector) && heads.step.is_multiple_of(vector) =>
            {
                vector
            }
            _ => 1,
        };
        let vectors = heads.count() * half.div_ceil(vector);
        let threads = vectors.next_multiple_of(32).min(MOST_THREADS);
        let shape = Shape::linear(vectors.div_ceil(threads) as u64, threads as u32).of_rows(heads.tokens());
        let name = match self.pairs {
            Pairs::Halves => format!("rotary_{}_{vector}", dtype_name(heads.view.dtype)),
            Pairs::Neighbours => format!("rotary_neighbours_{}", dtype_name(heads.view.dtype)),
        };
        let [tokens, count, step, half, positions] =
            [heads.tokens(), heads.count(), heads.step, half, self.table.rows].map(|number| number as i64);
        let (x, table, sign) =
            (Matrix::of(&heads.view), Matrix::of(&self.table), if self.inverse { -1f32 } else { 1.0 });
        let defects = stream.defects();
        let arguments =
            arguments![tokens, count, step, half, x, table, positions, self.positions.address, sign, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ROTARY, &name, shape, arguments) };
    }
}
