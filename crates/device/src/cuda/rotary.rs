//! Rotary position embedding, in place.

use super::modules::ROTARY;
use super::rows::{Matrix, dtype_name, vector};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::kernel::Rotary;

impl Run for Rotary {
    fn run(&self, stream: &mut Stream) {
        const THREADS: u32 = 256;
        let heads = self.x;
        let half = self.table.cols / 2;
        let places = heads.tokens() * heads.count();
        if places == 0 || half == 0 {
            return;
        }
        assert!(places <= u32::MAX as usize, "Rotary: {places} heads of tokens");
        let vector = match vector(heads.view.dtype, &[heads.view, self.table]) {
            vector if half.is_multiple_of(vector) && heads.step.is_multiple_of(vector) => vector,
            _ => 1,
        };
        let vectors = places as u64 * half.div_ceil(vector) as u64;
        let shape = Shape::linear(vectors.div_ceil(THREADS as u64), THREADS);
        let name = format!("rotary_{}_{vector}", dtype_name(heads.view.dtype));
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
