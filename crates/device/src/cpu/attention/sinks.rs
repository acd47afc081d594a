//! Gradients of sinks: `dsink = -Σ exp(sink - logsum) · δ` over the queries of a head, with `δ = Σ dout · out` of each.
//!
//! Tasks add up some tokens each; the sums are added in the tokens' order.

use super::super::Team;
use super::super::matrix::{Element, Matrix, matrix};
use super::super::simd::{Simd, Vectorised, vectorise};
use super::HeadRows;
use super::pack::{self, Rows};
use super::sums::SharedSums;
use crate::View;
use crate::kernel::AttentionBackward;

/// Tokens of a task.
const TOKENS: usize = 64;

/// Numbers that tasks share.
pub(super) fn sums_floats(kernel: &AttentionBackward) -> usize {
    if kernel.dsinks.is_some() { kernel.q.tokens().div_ceil(TOKENS) * kernel.q.count } else { 0 }
}

/// Adds the gradients to the kernel's `dsinks`, if it has them.
pub(super) fn add<E: Element>(kernel: &AttentionBackward, shared: &mut [f32], team: &mut Team) {
    let (Some(sinks), Some(dsinks)) = (kernel.scores.sinks, kernel.dsinks) else { return };
    let (tokens, heads) = (kernel.q.tokens(), kernel.q.count);
    let operands = Operands::<E> {
        out: HeadRows::of(&kernel.out),
        dout: HeadRows::of(&kernel.dout),
        logsum: matrix(&kernel.logsum),
        sinks: matrix(&sinks),
    };
    let sums = SharedSums::new(shared);
    let blocks = tokens.div_ceil(TOKENS);
    team.tasks(blocks * heads, |task, _| {
        let (block, head) = (task / heads, task % heads);
        let tokens = block * TOKENS..tokens.min((block + 1) * TOKENS);
        let sum = vectorise(Part { operands, head, tokens });
        // SAFETY: a number for each task.
        unsafe { sums.at(task).write(sum) };
    });
    subtract(&shared[..blocks * heads], &dsinks);
}

fn subtract(sums: &[f32], dsinks: &View) {
    let dsinks = matrix::<f32>(dsinks);
    for head in 0..dsinks.cols {
        let total: f64 = sums.iter().skip(head).step_by(dsinks.cols).map(|&sum| sum as f64).sum();
        let to = dsinks.at(0, head);
        // SAFETY: the kernel's check: a number for each head, which no task writes.
        unsafe { to.write((to.read() as f64 - total) as f32) };
    }
}

#[derive(Clone, Copy)]
struct Operands<E> {
    out: HeadRows<E>,
    dout: HeadRows<E>,
    logsum: Matrix<f32>,
    sinks: Matrix<f32>,
}

/// The sum of some tokens' `exp(sink - logsum) · δ`.
struct Part<E> {
    operands: Operands<E>,
    head: usize,
    tokens: std::ops::Range<usize>,
}

impl<E: Element> Vectorised for Part<E> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let Part { operands: Operands { out, dout, logsum, sinks }, head, tokens } = self;
        let mut delta = [0.0; TOKENS];
        let rows = |of| Rows { of, head, tokens: tokens.clone() };
        // SAFETY of all: tokens and heads of the operands.
        // SAFETY: above.
        unsafe { pack::row_products(s, &rows(dout), &rows(out), delta.as_mut_ptr()) };
        let mut sum = 0.0;
        for (token, delta) in tokens.clone().zip(delta) {
            // SAFETY: above.
            let weight = unsafe { (sinks.at(0, head).read() - logsum.at(token, head).read()).exp() };
            sum += weight as f64 * delta as f64;
        }
        sum as f32
    }
}
