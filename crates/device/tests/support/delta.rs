//! The gated delta rule's plain twin in f64: token by token, and backward through the tokens.

#![allow(dead_code, reason = "each test uses its part")]

use evenkeel_device::kernel::{DELTA_EPSILON, Segments};

/// Heads of a rule and its documents.
#[derive(Clone, Debug)]
pub struct Shape {
    pub key_heads: usize,
    /// Value heads to a key head.
    pub ratio: usize,
    pub key: usize,
    pub value: usize,
    /// Tokens of each document.
    pub lengths: Vec<usize>,
}

/// The operands of a rule and its output's gradient, heads side by side.
#[derive(Clone, Debug)]
pub struct Operands<T> {
    /// [T, nk · K]
    pub q: Vec<T>,
    pub k: Vec<T>,
    /// [T, nv · V]
    pub v: Vec<T>,
    /// [T, nv]
    pub fade: Vec<T>,
    pub take: Vec<T>,
    /// [nv]
    pub log_rate: Vec<T>,
    pub bias: Vec<T>,
    /// [T, nv · V]
    pub dout: Vec<T>,
}

/// The number of an [`Operands`]' parts that have gradients.
pub const PARTS: usize = 7;
pub const PART_NAMES: [&str; PARTS] = ["dq", "dk", "dv", "dfade", "dtake", "dlog_rate", "dbias"];

impl<T> Operands<T> {
    /// The parts that have gradients, in the order of [`PART_NAMES`].
    pub fn parts(&self) -> [&Vec<T>; PARTS] {
        [&self.q, &self.k, &self.v, &self.fade, &self.take, &self.log_rate, &self.bias]
    }

    pub fn parts_mut(&mut self) -> [&mut Vec<T>; PARTS] {
        [&mut self.q, &mut self.k, &mut self.v, &mut self.fade, &mut self.take, &mut self.log_rate, &mut self.bias]
    }
}

impl Operands<f32> {
    pub fn wide(&self) -> Operands<f64> {
        let wide = |values: &Vec<f32>| values.iter().map(|&value| value as f64).collect();
        Operands {
            q: wide(&self.q),
            k: wide(&self.k),
            v: wide(&self.v),
            fade: wide(&self.fade),
            take: wide(&self.take),
            log_rate: wide(&self.log_rate),
            bias: wide(&self.bias),
            dout: wide(&self.dout),
        }
    }
}

impl Shape {
    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    pub fn value_heads(&self) -> usize {
        self.key_heads * self.ratio
    }

    pub fn segments(&self) -> Segments {
        let mut offsets = vec![0];
        self.lengths.iter().for_each(|len| offsets.push(offsets[offsets.len() - 1] + len));
        Segments::new(offsets)
    }

    /// Numbers of all states, [documents, nv, K, V].
    pub fn state_len(&self) -> usize {
        self.lengths.len() * self.value_heads() * self.key * self.value
    }

    /// The output. Overwrites the states, [documents, nv, K, V], with those behind each document.
    pub fn forward(&self, operands: &Operands<f64>, states: &mut [f64]) -> Vec<f64> {
        let mut out = vec![0.0; operands.v.len()];
        let size = self.key * self.value;
        for (document, tokens) in self.segments().iter().enumerate() {
            for head in 0..self.value_heads() {
                let state = &mut states[(document * self.value_heads() + head) * size..][..size];
                for t in tokens.clone() {
                    let token = self.token(operands, t, head);
                    state.iter_mut().for_each(|s| *s *= token.g.exp());
                    let delta = token.delta(state);
                    add_outer(state, &token.k.unit, &delta);
                    let to = (t * self.value_heads() + head) * self.value;
                    out[to..to + self.value].copy_from_slice(&times_left(&token.q.unit, state));
                }
            }
        }
        out
    }

    /// The gradients of `Σ out · dout`, in the order of [`PART_NAMES`].
    pub fn backward(&self, operands: &Operands<f64>) -> [Vec<f64>; PARTS] {
        let mut gradients = operands.parts().map(|part| vec![0.0; part.len()]);
        for tokens in self.segments().iter() {
            for head in 0..self.value_heads() {
                self.backward_of_head(operands, tokens.clone(), head, &mut gradients);
            }
        }
        gradients
    }

    /// What the sums over tokens, dlog_rate and dbias, err by at most if dfade errs by its norm: rounding errors of a
    /// gate's gradient are shares of the largest gradient's, while terms of opposite signs leave less than that.
    pub fn sizes_of_sums(&self, operands: &Operands<f64>, dfade: &[f64]) -> [Vec<f64>; 2] {
        let sizes = (0..self.value_heads()).map(|head| {
            let of_head = |norm: [f64; 3], gate: usize| {
                let biased = operands.fade[gate] + operands.bias[head];
                let factors = [dfade[gate], softplus(biased) / sigmoid(biased), 1.0];
                [0, 1, 2].map(|i| norm[i].hypot(factors[i]))
            };
            let gates = (0..self.tokens()).map(|t| t * self.value_heads() + head);
            let [dfade, of_rate, of_bias] = gates.fold([0.0; 3], of_head);
            (dfade * of_rate, dfade * of_bias)
        });
        let (log_rate, bias) = sizes.unzip();
        [log_rate, bias]
    }

    fn backward_of_head(
        &self,
        operands: &Operands<f64>,
        tokens: std::ops::Range<usize>,
        head: usize,
        gradients: &mut [Vec<f64>; PARTS],
    ) {
        let (key, value) = (self.key, self.value);
        // Each token's state as it is after the decay.
        let mut decayed = Vec::new();
        let mut state = vec![0.0; key * value];
        for t in tokens.clone() {
            let token = self.token(operands, t, head);
            state.iter_mut().for_each(|s| *s *= token.g.exp());
            decayed.push(state.clone());
            let delta = token.delta(&state);
            add_outer(&mut state, &token.k.unit, &delta);
        }
        let [dq, dk, dv, dfade, dtake, dlog_rate, dbias] = gradients;
        let mut dstate = vec![0.0; key * value];
        for (t, before) in tokens.zip(&decayed).rev() {
            let token = self.token(operands, t, head);
            let at_value = (t * self.value_heads() + head) * value;
            let at_key = (t * self.key_heads + head / self.ratio) * key;
            let at_gate = t * self.value_heads() + head;
            let dout = &operands.dout[at_value..at_value + value];
            let delta = token.delta(before);
            let mut after = before.clone();
            add_outer(&mut after, &token.k.unit, &delta);

            add_outer(&mut dstate, &token.q.unit, dout);
            token.q.add_gradient(&times_right(&after, dout), &mut dq[at_key..at_key + key]);
            let ddelta = times_left(&token.k.unit, &dstate);
            let derror: Vec<f64> = ddelta.iter().map(|d| token.beta * d).collect();
            let dbeta: f64 = ddelta.iter().zip(&delta).map(|(d, delta)| d * delta / token.beta).sum();
            let of_written = times_right(&dstate, &delta);
            let of_read = times_right(before, &derror);
            let dunit: Vec<f64> = of_written.iter().zip(&of_read).map(|(written, read)| written - read).collect();
            token.k.add_gradient(&dunit, &mut dk[at_key..at_key + key]);
            let minus: Vec<f64> = derror.iter().map(|d| -d).collect();
            add_outer(&mut dstate, &token.k.unit, &minus);
            let dg: f64 = dstate.iter().zip(before).map(|(d, s)| d * s).sum();
            dstate.iter_mut().for_each(|d| *d *= token.g.exp());

            dv[at_value..at_value + value].copy_from_slice(&derror);
            dtake[at_gate] = dbeta * token.beta * (1.0 - token.beta);
            dfade[at_gate] =
                -dg * operands.log_rate[head].exp() * sigmoid(operands.fade[at_gate] + operands.bias[head]);
            dlog_rate[head] += dg * token.g;
            dbias[head] += dfade[at_gate];
        }
    }

    fn token(&self, operands: &Operands<f64>, t: usize, head: usize) -> Token {
        let unit = |rows: &[f64], scale: f64| {
            let row = &rows[(t * self.key_heads + head / self.ratio) * self.key..][..self.key];
            Unit::new(row, scale)
        };
        let gate = t * self.value_heads() + head;
        Token {
            q: unit(&operands.q, 1.0 / (self.key as f64).sqrt()),
            k: unit(&operands.k, 1.0),
            v: operands.v[gate * self.value..][..self.value].to_vec(),
            g: -operands.log_rate[head].exp() * softplus(operands.fade[gate] + operands.bias[head]),
            beta: sigmoid(operands.take[gate]),
        }
    }
}

/// One head's operands at one token.
struct Token {
    q: Unit,
    k: Unit,
    v: Vec<f64>,
    g: f64,
    beta: f64,
}

impl Token {
    /// `β·(v - Sᵀk̂)` for the decayed state.
    fn delta(&self, state: &[f64]) -> Vec<f64> {
        let read = times_left(&self.k.unit, state);
        self.v.iter().zip(read).map(|(v, read)| self.beta * (v - read)).collect()
    }
}

/// A normalised row, times `scale`.
struct Unit {
    unit: Vec<f64>,
    inverse: f64,
    scale: f64,
}

impl Unit {
    fn new(row: &[f64], scale: f64) -> Unit {
        let inverse = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() + DELTA_EPSILON as f64).sqrt();
        Unit { unit: row.iter().map(|x| x * inverse * scale).collect(), inverse, scale }
    }

    /// Adds the gradient of the row before the norm.
    fn add_gradient(&self, dunit: &[f64], to: &mut [f64]) {
        let dot: f64 = self.unit.iter().zip(dunit).map(|(y, dy)| y * dy).sum::<f64>() / self.scale;
        for ((to, y), dy) in to.iter_mut().zip(&self.unit).zip(dunit) {
            *to += self.inverse * (self.scale * dy - y * dot);
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `Sᵀx` for S of as many rows as x has numbers.
fn times_left(x: &[f64], state: &[f64]) -> Vec<f64> {
    let mut product = vec![0.0; state.len() / x.len()];
    for (x, row) in x.iter().zip(state.chunks_exact(product.len())) {
        product.iter_mut().zip(row).for_each(|(to, s)| *to += x * s);
    }
    product
}

/// `Sx`
fn times_right(state: &[f64], x: &[f64]) -> Vec<f64> {
    state.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(s, x)| s * x).sum()).collect()
}

/// `S += left · rightᵀ`
fn add_outer(state: &mut [f64], left: &[f64], right: &[f64]) {
    for (row, left) in state.chunks_exact_mut(right.len()).zip(left) {
        row.iter_mut().zip(right).for_each(|(s, right)| *s += left * right);
    }
}
