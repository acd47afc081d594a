//! Counter-based random numbers: the integers of `cpu/random.rs`, as a function of seed and place.

use super::modules::RANDOM;
use super::rows::{Matrix, Walk};
use super::stream::arguments;
use super::{Run, Stream};
use crate::kernel::{Dropout, Placement, RandomNormal, seed_of};

fn check(placement: &Placement, cols: usize) {
    let end = placement.first_col + cols as u64;
    assert!(end <= placement.cols, "columns up to {end} of a matrix of {}", placement.cols);
    assert!(placement.cols <= 1 << 32, "random matrices have at most 2^32 columns, not {}", placement.cols);
}

/// Elements whose random word is below this are dropped. A uniform number is the upper 24 bits of its word, so comparing words
/// gives the same result without the conversion to f32, which is slow on a GPU.
pub(super) fn dropped_below(probability: f32) -> u32 {
    const STEPS: f32 = (1 << 24) as f32;
    const WORDS_PER_STEP: u32 = 1 << 8;
    (probability * STEPS).ceil().min(STEPS - 1.0) as u32 * WORDS_PER_STEP
}

impl Run for RandomNormal {
    fn run(&self, stream: &mut Stream) {
        check(&self.placement, self.out.cols);
        let Some(walk) = Walk::rows(&[self.out]) else { return };
        let [radius, angle] = [0, 1].map(|draw| seed_of(self.seed, draw));
        let Placement { first_row, first_col, .. } = self.placement;
        let name = walk.typed("random_normal", self.out.dtype);
        let out = Matrix::of(&self.out);
        let arguments =
            arguments![walk.rows, walk.cols, out, radius, angle, first_row, first_col, self.mean, self.deviation];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&RANDOM, &name, walk.shape(), arguments) };
    }
}

impl Run for Dropout {
    fn run(&self, stream: &mut Stream) {
        check(&self.placement, self.x.cols);
        let Some(walk) = Walk::rows(&[self.x, self.out]) else { return };
        let Placement { first_row, first_col, .. } = self.placement;
        let name = walk.typed("dropout", self.out.dtype);
        let x = Matrix::of(&self.x);
        let out = Matrix::of(&self.out);
        let seed = seed_of(self.seed, 0);
        let factor = 1.0 / (1.0 - self.probability);
        let below = dropped_below(self.probability);
        let rows = self.rows.map_or(0, |rows| rows.address);
        let arguments = arguments![walk.rows, walk.cols, x, out, rows, seed, first_row, first_col, below, factor];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&RANDOM, &name, walk.shape(), arguments) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_dropped_as_their_uniform_numbers_are() {
        for probability in [0.0, 1e-9, 0.1, 0.3, 0.5, 0.6, 0.999_999_94] {
            let below = dropped_below(probability);
            let edges = [0, 255, 256, below.wrapping_sub(1), below, below.saturating_add(255), u32::MAX];
            for word in edges {
                let uniform = (word >> 8) as f32 / (1 << 24) as f32;
                assert_eq!(word < below, uniform < probability, "{word} of {probability}");
            }
        }
    }
}
