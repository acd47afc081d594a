//! The rule token by token, for generation: each token reads and writes the whole state once.

use super::super::matrix::Element;
use super::super::rows::{load, store};
use super::super::simd::{LANES, Simd, Vectorised};
use super::block::Block;
use super::fading::Fading;
use super::rows::Rows;

/// Vectors of columns whose states pass through registers together.
const VECTORS: usize = 4;

/// `S ← e^g·S; S ← S + k̂·(β·(v - Sᵀk̂))ᵀ; out = Sᵀq̂` for each token in turn.
pub(super) struct Recurrence<'a, E> {
    /// [tokens, K] at least.
    pub queries: Block,
    pub keys: Block,
    pub v: Rows<E>,
    pub fading: &'a Fading,
    /// [K, V]
    pub state: Rows<f32>,
    pub out: Rows<E>,
}

impl<E: Element> Vectorised for Recurrence<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut col = 0;
        while col < self.state.dim {
            if col + VECTORS * LANES <= self.state.dim {
                self.columns::<S, VECTORS>(s, col, LANES);
                col += VECTORS * LANES;
            } else {
                let count = (self.state.dim - col).min(LANES);
                self.columns::<S, 1>(s, col, count);
                col += count;
            }
        }
    }
}

impl<E: Element> Recurrence<'_, E> {
    /// `N` vectors of columns, of `count` numbers each.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&self, s: S, col: usize, count: usize) {
        for token in 0..self.v.count {
            let decay = s.splat(self.fading.decays[token].exp());
            let take = s.splat(self.fading.takes[token]);
            // SAFETY: the columns exist and are this task's; keys and queries have a number for each row of the state.
            unsafe {
                let mut deltas = [s.splat(0.0); N];
                for row in 0..self.state.count {
                    let key = s.splat(self.keys.at(token, row).read());
                    for (v, delta) in deltas.iter_mut().enumerate() {
                        let state = load(s, self.state.at(row, col + v * LANES).cast_const(), count);
                        *delta = s.mul_add(key, state, *delta);
                    }
                }
                for (v, delta) in deltas.iter_mut().enumerate() {
                    let value = self.v.load(s, token, col + v * LANES);
                    *delta = s.mul(take, s.sub(value, s.mul(decay, *delta)));
                }
                let mut outs = [s.splat(0.0); N];
                for row in 0..self.state.count {
                    let key = s.splat(self.keys.at(token, row).read());
                    let query = s.splat(self.queries.at(token, row).read());
                    for v in 0..N {
                        let at = self.state.at(row, col + v * LANES);
                        let state = s.mul_add(key, deltas[v], s.mul(decay, load(s, at.cast_const(), count)));
                        store(s, at, state, count);
                        outs[v] = s.mul_add(query, state, outs[v]);
                    }
                }
                for (v, out) in outs.into_iter().enumerate() {
                    self.out.store(s, token, col + v * LANES, out);
                }
            }
        }
    }
}
