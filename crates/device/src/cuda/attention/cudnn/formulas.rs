//! Attention and its gradients as graphs, written as cuDNN recognises them: it looks for these operations in this form,
//! and runs them as one kernel.
//!
//! Shapes in comments: B sequences of S tokens, N query heads, D elements. Keys are given transposed.

use super::super::problem::{Layouts, Problem, Steps};
use super::descriptor::Refusal;
use super::graph::{BF16, F32, Graph, Mode, Node, Reduction, Shape};

/// The role of a tensor that an execution gives a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Q,
    K,
    V,
    Out,
    Logsum,
    Dout,
    Dq,
    Dk,
    Dv,
    /// f32 [B, N, S]: δ, the products of dout and out.
    Delta,
    /// f32 [B, N, S, D]: the sums of dq.
    DqSums,
    /// Host numbers.
    Scale,
    One,
    Hidden,
    Window,
}

impl Role {
    /// Whether it is one of the host's numbers.
    pub fn is_number(self) -> bool {
        matches!(self, Role::Scale | Role::One | Role::Hidden | Role::Window)
    }
}

/// A graph, and the tensors that an execution gives it.
pub(super) struct Formula {
    pub graph: Graph,
    pub roles: Vec<(Role, Node)>,
    /// Elements of the f32 tensors that only the plan uses.
    pub sums: [(Role, i64); 2],
}

impl Problem {
    fn heads(&self, count: i64, [stride, step]: Steps) -> Shape {
        Shape { dims: [self.batch, count, self.len, self.dim], strides: [self.len * stride, step, stride, 1] }
    }

    /// [B, N, S, 1] in the layout [T, N].
    fn logsum(&self) -> Shape {
        let strides = [self.len * self.logsum_stride, 1, self.logsum_stride, 1];
        Shape { dims: [self.batch, self.heads, self.len, 1], strides }
    }

    /// [B, N, S, S]
    fn scores(&self) -> Shape {
        Shape::packed([self.batch, self.heads, self.len, self.len])
    }

    /// [B, N, S, 1]
    fn rows(&self) -> Shape {
        Shape::packed([self.batch, self.heads, self.len, 1])
    }

    /// [B, N, S, D]
    fn sums(&self) -> Shape {
        Shape::packed([self.batch, self.heads, self.len, self.dim])
    }
}

struct Writer<'a> {
    problem: &'a Problem,
    graph: Graph,
    roles: Vec<(Role, Node)>,
}

impl Writer<'_> {
    fn heads(&mut self, role: Role, count: i64, steps: Steps, transposed: bool) -> Result<Node, Refusal> {
        let shape = self.problem.heads(count, steps);
        let node = self.graph.tensor(BF16, if transposed { shape.transposed() } else { shape })?;
        self.roles.push((role, node));
        Ok(node)
    }

    fn memory(&mut self, role: Role, shape: Shape) -> Result<Node, Refusal> {
        let node = self.graph.tensor(F32, shape)?;
        self.roles.push((role, node));
        Ok(node)
    }

    fn scalar(&mut self, role: Role) -> Result<Node, Refusal> {
        let node = self.graph.scalar()?;
        self.roles.push((role, node));
        Ok(node)
    }

    /// ScoreChanges that their query does not see are replaced.
    fn hide(&mut self, mut scores: Node) -> Result<Node, Refusal> {
        if self.problem.causal {
            let (query, key) = (self.graph.index(scores, 2)?, self.graph.index(scores, 3)?);
            let sees = self.graph.compare(Mode::CUDNN_POINTWISE_CMP_GE, query, key)?;
            scores = self.select(scores, sees)?;
        }
        if self.problem.window.is_some() {
            let (query, key) = (self.graph.index(scores, 2)?, self.graph.index(scores, 3)?);
            let window = self.scalar(Role::Window)?;
            let end = self.graph.pointwise(Mode::CUDNN_POINTWISE_ADD, &[key, window])?;
            let sees = self.graph.compare(Mode::CUDNN_POINTWISE_CMP_GT, end, query)?;
            scores = self.select(scores, sees)?;
        }
        Ok(scores)
    }

    fn select(&mut self, scores: Node, sees: Node) -> Result<Node, Refusal> {
        let hidden = self.scalar(Role::Hidden)?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_BINARY_SELECT, &[scores, hidden, sees])
    }

    fn scaled_scores(&mut self, q: Node, keys: Node, scale: Node) -> Result<Node, Refusal> {
        let scores = self.graph.inside(F32, self.problem.scores())?;
        let scores = self.graph.matmul(q, keys, scores)?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_MUL, &[scores, scale])
    }

    /// The product of transposed weights, rounded, and rows of queries; summed over the heads of each group.
    fn sum_by_keys(&mut self, weights: Node, rows: Node, to: Node) -> Result<(), Refusal> {
        let weights = self.graph.transposed(weights, BF16)?;
        if self.problem.heads == self.problem.key_heads {
            self.graph.matmul(weights, rows, to)?;
        } else {
            let of_all_heads = self.graph.inside(BF16, self.problem.sums())?;
            let of_all_heads = self.graph.matmul(weights, rows, of_all_heads)?;
            self.graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, of_all_heads, to)?;
        }
        Ok(())
    }
}

pub(super) fn formula(problem: &Problem) -> Result<Formula, Refusal> {
    let mut writer = Writer { problem, graph: Graph::default(), roles: Vec::new() };
    let sums = match problem.layouts {
        Layouts::Forward { q, k, v, out } => {
            writer.forward([q, k, v, out])?;
            [(Role::Delta, 0), (Role::DqSums, 0)]
        }
        Layouts::Backward { q, k, v, out, dout, dq, dk, dv } => {
            writer.backward([q, k, v, out, dout, dq, dk, dv])?;
            [(Role::Delta, problem.rows().elements()), (Role::DqSums, problem.sums().elements())]
        }
    };
    Ok(Formula { graph: writer.graph, roles: writer.roles, sums })
}

impl Writer<'_> {
    fn forward(&mut self, [q, k, v, out]: [Steps; 4]) -> Result<(), Refusal> {
        let Problem { heads, key_heads, .. } = *self.problem;
        let q = self.heads(Role::Q, heads, q, false)?;
        let keys = self.heads(Role::K, key_heads, k, true)?;
        let v = self.heads(Role::V, key_heads, v, false)?;
        let out = self.heads(Role::Out, heads, out, false)?;
        let logsum = self.memory(Role::Logsum, self.problem.logsum())?;
        let scale = self.scalar(Role::Scale)?;

        let scores = self.scaled_scores(q, keys, scale)?;
        let scores = self.hide(scores)?;
        let highest = self.graph.inside(F32, self.problem.rows())?;
        let highest = self.graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_MAX, scores, highest)?;
        let below = self.graph.pointwise(Mode::CUDNN_POINTWISE_SUB, &[scores, highest])?;
        let powers = self.graph.pointwise(Mode::CUDNN_POINTWISE_EXP, &[below])?;
        let sum = self.graph.inside(F32, self.problem.rows())?;
        let sum = self.graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, powers, sum)?;
        let log = self.graph.pointwise(Mode::CUDNN_POINTWISE_LOG, &[sum])?;
        self.graph.pointwise_to(Mode::CUDNN_POINTWISE_ADD, &[highest, log], logsum)?;
        let weights = self.graph.inside(BF16, self.problem.scores())?;
        let weights = self.graph.pointwise_to(Mode::CUDNN_POINTWISE_DIV, &[powers, sum], weights)?;
        self.graph.matmul(weights, v, out)?;
        Ok(())
    }

    fn backward(&mut self, [q, k, v, out, dout, dq, dk, dv]: [Steps; 8]) -> Result<(), Refusal> {
        let Problem { batch, heads, key_heads, len, dim, .. } = *self.problem;
        let q = self.heads(Role::Q, heads, q, false)?;
        let keys = self.heads(Role::K, key_heads, k, true)?;
        let values = self.heads(Role::V, key_heads, v, true)?;
        let out = self.heads(Role::Out, heads, out, false)?;
        let dout = self.heads(Role::Dout, heads, dout, false)?;
        let dq = self.heads(Role::Dq, heads, dq, false)?;
        let dk = self.heads(Role::Dk, key_heads, dk, false)?;
        let dv = self.heads(Role::Dv, key_heads, dv, false)?;
        let logsum = self.memory(Role::Logsum, self.problem.logsum())?;

        // δ
        let strides = [heads * len * dim, len * dim, heads * dim, 1];
        let products = self.graph.inside(F32, Shape { dims: [batch, heads, len, dim], strides })?;
        let products = self.graph.pointwise_to(Mode::CUDNN_POINTWISE_MUL, &[dout, out], products)?;
        let sum = self.graph.inside(F32, self.problem.rows())?;
        let sum = self.graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, products, sum)?;
        // The usual form of this graph has dropout's factor here; only that form was tried on a GPU.
        let one = self.scalar(Role::One)?;
        let delta = self.memory(Role::Delta, self.problem.rows())?;
        let delta = self.graph.pointwise_to(Mode::CUDNN_POINTWISE_MUL, &[sum, one], delta)?;

        let scale = self.scalar(Role::Scale)?;
        let scores = self.scaled_scores(q, keys, scale)?;
        let below = self.graph.pointwise(Mode::CUDNN_POINTWISE_SUB, &[scores, logsum])?;
        let below = self.hide(below)?;
        let weights = self.graph.pointwise(Mode::CUDNN_POINTWISE_EXP, &[below])?;
        self.sum_by_keys(weights, dout, dv)?;

        let gradients = self.graph.inside(F32, self.problem.scores())?;
        let gradients = self.graph.matmul(dout, values, gradients)?;
        let gradients = self.graph.pointwise(Mode::CUDNN_POINTWISE_SUB, &[gradients, delta])?;
        let gradients = self.graph.pointwise(Mode::CUDNN_POINTWISE_MUL, &[gradients, weights])?;
        let gradients = self.graph.pointwise(Mode::CUDNN_POINTWISE_MUL, &[gradients, scale])?;
        self.sum_by_keys(gradients, q, dk)?;

        let rows = self.graph.transposed(keys, F32)?;
        let sums = self.memory(Role::DqSums, self.problem.sums())?;
        self.graph.matmul(gradients, rows, sums)?;
        self.graph.pointwise_to(Mode::CUDNN_POINTWISE_IDENTITY, &[sums], dq)?;
        Ok(())
    }
}
