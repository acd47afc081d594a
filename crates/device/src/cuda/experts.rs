//! Dropless mixtures of experts, all but their products.

use super::modules::EXPERTS;
use super::rows::{Matrix, Mixed, RowCount, Walk};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::View;
use crate::kernel::{CombinePairs, GatherPairs, PairDots, Route, RouteBackward, ScalePairs};

const THREADS: u32 = 256;
const WARP: usize = 32;

/// A warp for each row.
fn by_warps(rows: usize) -> Shape {
    Shape::linear((rows as u64).div_ceil((THREADS as usize / WARP) as u64), THREADS)
}

/// Pairs are counted and sorted in at most this many blocks of tokens...
const MOST_BLOCKS: usize = 1024;
/// ...of at least this many, so that the counts of all experts cost little beside the logits.
const LEAST_TOKENS: usize = 32;
/// Threads of a block at most.
const MOST_THREADS: usize = 1024;

impl Run for Route {
    fn run(&self, stream: &mut Stream) {
        let [tokens, experts] = self.logits.shape();
        let tokens_per_block = tokens.div_ceil(MOST_BLOCKS).max(LEAST_TOKENS);
        let blocks = tokens.div_ceil(tokens_per_block);
        let counts = stream.scratch((blocks * experts * size_of::<u32>()) as u64);
        let (chosen, k) = (Matrix::of(&self.chosen), self.chosen.cols as i32);
        let (token_count, expert_count, per_block) = (tokens as i64, experts as i32, tokens_per_block as i64);
        let (pairs, places, offsets) = (self.pairs.address, self.places.address, self.offsets.address);
        let logits = Matrix::of(&self.logits);
        let weights = Matrix::of(&self.weights);
        let renormalise = self.renormalise as i32;
        let choose = arguments![token_count, expert_count, k, logits, renormalise, weights, chosen];
        let first = self.first as i32;
        let count = arguments![token_count, expert_count, first, k, per_block, chosen, counts];
        let add_up = arguments![expert_count, blocks as i32, counts, offsets];
        let place = arguments![token_count, expert_count, first, k, per_block, chosen, counts, offsets, pairs, places];
        let counting =
            Shape { shared_bytes: (experts * size_of::<u32>()) as u32, ..Shape::linear(blocks as u64, THREADS) };
        // A thread for each expert.
        let threads = experts.next_multiple_of(WARP).clamp(THREADS as usize, MOST_THREADS) as u32;
        // SAFETY: the arguments are the kernels', and the queue's order keeps others away from the operands.
        unsafe {
            if tokens > 0 {
                stream.launch(&EXPERTS, "route_choose", by_warps(tokens), choose);
                stream.launch(&EXPERTS, "route_count", counting, count);
            }
            stream.launch(&EXPERTS, "route_add_up", Shape::linear(1, MOST_THREADS as u32), add_up);
            if tokens > 0 {
                stream.launch(&EXPERTS, "route_place", Shape::linear(blocks as u64, threads), place);
            }
        }
    }
}

impl Run for RouteBackward {
    fn run(&self, stream: &mut Stream) {
        let [tokens, experts] = self.logits.shape();
        let (chosen, k) = (Matrix::of(&self.chosen), self.chosen.cols as i32);
        let [logits, weights, dweights] = [self.logits, self.weights, self.dweights].map(|view| Matrix::of(&view));
        let dlogits = Mixed::of(&self.dlogits);
        let (token_count, expert_count) = (tokens as i64, experts as i32);
        let (renormalise, defects) = (self.renormalise as i32, stream.defects());
        let arguments =
            arguments![token_count, expert_count, k, logits, chosen, weights, renormalise, dweights, dlogits, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EXPERTS, "route_backward", by_warps(tokens), arguments) };
    }
}

impl Run for GatherPairs {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.out, self.x]) else { return };
        let [x, out] = [self.x, self.out].map(|view| Matrix::of(&view));
        let (x_rows, k) = (self.x.rows as i64, self.chosen_per_token as i32);
        let weights = Matrix::optional(&self.weights);
        let defects = stream.defects();
        let rows = RowCount::of(walk.rows, &self.count);
        let arguments = arguments![rows, walk.cols, x, x_rows, self.pairs.address, k, weights, out, defects];
        let name = walk.typed("gather_pairs", self.x.dtype);
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EXPERTS, &name, walk.shape(), arguments) };
    }
}

/// Where pairs are listed; nowhere if they lie in their own order.
fn address_of(pairs: &Option<View>) -> u64 {
    pairs.map_or(0, |pairs| pairs.address)
}

impl Run for ScalePairs {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.out, self.x]) else { return };
        let [x, out] = [self.x, self.out].map(|view| Mixed::of(&view));
        let (tokens, k) = (self.weights.rows as i64, self.weights.cols as i32);
        let weights = Matrix::of(&self.weights);
        let defects = stream.defects();
        let pairs = address_of(&self.pairs);
        let rows = RowCount::of(walk.rows, &self.count);
        let arguments = arguments![rows, walk.cols, x, pairs, tokens, k, weights, out, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EXPERTS, &walk.name("scale_pairs"), walk.shape(), arguments) };
    }
}

impl Run for CombinePairs {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.out, self.x]) else { return };
        let [x, out] = [self.x, self.out].map(|view| Mixed::of(&view));
        let (x_rows, k) = (RowCount::of(self.x.rows as i64, &self.count), self.chosen_per_token() as i32);
        let weights = Matrix::optional(&self.weights);
        let accumulate = self.accumulate as i32;
        let defects = stream.defects();
        let places = self.places.address;
        let arguments = arguments![walk.rows, walk.cols, x, x_rows, places, k, weights, out, accumulate, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EXPERTS, &walk.name("combine_pairs"), walk.shape(), arguments) };
    }
}

impl Run for PairDots {
    fn run(&self, stream: &mut Stream) {
        // Rows of no columns have dots, too.
        let vector = Walk::rows(&[self.a, self.b]).map_or(1, |walk| walk.vector);
        let [rows, cols] = self.a.shape();
        let [a, b] = [self.a, self.b].map(|view| Mixed::of(&view));
        let (tokens, k) = (self.out.rows as i64, self.out.cols as i32);
        let out = Matrix::of(&self.out);
        let defects = stream.defects();
        let pairs = address_of(&self.pairs);
        let there = RowCount::of(rows as i64, &self.count);
        let arguments = arguments![there, cols as i64, a, b, pairs, tokens, k, out, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EXPERTS, &format!("pair_dots_{vector}"), by_warps(rows), arguments) };
    }
}
