//! The balance of experts.

use super::modules::BALANCE;
use super::rows::{Matrix, Mixed};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::kernel::{BalanceBackward, BalanceTally};

const THREADS: u32 = 256;
/// Tokens of a block.
const TOKENS: usize = 64;

impl Run for BalanceTally {
    fn run(&self, stream: &mut Stream) {
        let [tokens, experts] = self.logits.shape();
        let blocks = tokens.div_ceil(TOKENS);
        let partials = stream.scratch((blocks * 2 * experts * size_of::<f32>()) as u64);
        let (logits, chosen, out) = (Matrix::of(&self.logits), Matrix::of(&self.chosen), Matrix::of(&self.out));
        let (token_count, expert_count, k) = (tokens as i64, experts as i32, self.chosen.cols as i32);
        let (counted, defects) = (self.counted.address, stream.defects());
        let tally = arguments![token_count, expert_count, k, logits, chosen, counted, partials, defects];
        let add_up = arguments![blocks as i32, expert_count, partials, out];
        let shared_bytes = (2 * experts * size_of::<f32>()) as u32;
        let columns = (2 * experts as u64).div_ceil(THREADS as u64);
        // SAFETY: the arguments are the kernels', and the queue's order keeps others away from the operands.
        unsafe {
            if tokens > 0 {
                let shape = Shape { shared_bytes, ..Shape::linear(blocks as u64, THREADS) };
                stream.launch(&BALANCE, "balance_tally", shape, tally);
            }
            stream.launch(&BALANCE, "balance_add_up", Shape::linear(columns, THREADS), add_up);
        }
    }
}

impl Run for BalanceBackward {
    fn run(&self, stream: &mut Stream) {
        let [tokens, experts] = self.logits.shape();
        let (logits, tallies) = (Matrix::of(&self.logits), Matrix::of(&self.tallies));
        let (token_count, expert_count, layers) = (tokens as i64, experts as i32, (self.tallies.rows / 2) as i32);
        let (counted, dlogits) = (self.counted.address, Mixed::of(&self.dlogits));
        let arguments = arguments![token_count, expert_count, layers, logits, tallies, counted, self.factor, dlogits];
        let shared_bytes = (experts * size_of::<f32>()) as u32;
        let shape = Shape { shared_bytes, ..Shape::linear(tokens.div_ceil(TOKENS) as u64, THREADS) };
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&BALANCE, "balance_backward", shape, arguments) };
    }
}
