//! Muon: the momentum of a matrix made orthogonal, by Newton–Schulz iterations.
//!
//! The iterations need whole matrices. Ranks that keep parts take turns: in each round every rank gets one whole matrix, and
//! returns to each rank the direction of its part.

use evenkeel_device::kernel::{Combine, Copy, MuonMomentum, Normalize, Order, Product, SquaredNorm};
use evenkeel_device::{DType, Queue, Tensor};
use evenkeel_model::{ParamId, ParamSpec};

use super::{Changing, Optimizer, Peers, Rule, Together, together};
use crate::relocation::{Keeping, Route};
use crate::state_kind::StateKind;

/// The quintic that drives singular values towards one, and how often it is applied.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];
const STEPS: usize = 5;
/// A matrix is divided by at least this norm.
const EPSILON: f32 = 1e-7;

/// One matrix per rank, made orthogonal at the same time.
pub(super) struct Round {
    /// Rows and columns of this rank's matrix.
    own: Option<[usize; 2]>,
    gathered: Route,
    returned: Route,
}

impl Round {
    /// The rounds of all matrices, largest first, so that the matrices of a round are of about the same size.
    pub fn all(specs: &[ParamSpec], mut matrices: Vec<ParamId>, keeping: &[Keeping], me: usize) -> Vec<Round> {
        let work = |id: &ParamId| {
            let [rows, cols] = specs[id.0].whole;
            rows * cols * rows.min(cols)
        };
        matrices.sort_by_key(|id| std::cmp::Reverse(work(id)));
        let round = |owned: &[ParamId]| {
            let whole = |rank: usize| Keeping::of_one(specs, owned.get(rank).copied());
            let whole: Vec<Keeping> = (0..keeping.len()).map(whole).collect();
            let is_moved = |id: ParamId| owned.contains(&id);
            Round {
                own: owned.get(me).map(|id| specs[id.0].whole),
                gathered: Route::new(keeping, &whole, me, is_moved),
                returned: Route::new(&whole, keeping, me, is_moved),
            }
        };
        matrices.chunks(keeping.len()).map(round).collect()
    }
}

impl Optimizer {
    /// Updates the momentum of hidden matrices; their gradients become the directions to go.
    pub(super) fn make_orthogonal(&self, changing: &Changing, beta: f32, nesterov: bool, peers: Option<&Peers>) {
        let Changing { queue, parameters, gradients, grad_factor, .. } = *changing;
        let is_made = |id: ParamId| parameters.specs[id.0].is_trained && matches!(self.rules[id.0], Rule::Muon { .. });
        let stretch = |id: ParamId| Some((parameters.own_stretch(id)?.place, parameters.bucket_of(id), ()));
        for Together { bucket, place, .. } in together(parameters.ids().filter(|&id| is_made(id)).filter_map(stretch)) {
            let of = |flat: &Tensor| flat.col_range(place.clone()).view();
            let grad = of(&gradients.own(queue, bucket));
            let momentum = of(self.flat(StateKind::Momentum, bucket).expect("matrices have a momentum"));
            queue.launch(MuonMomentum { grad, momentum, beta, nesterov, grad_factor });
        }
        let dtype = parameters.dtype();
        let Some(peers) = peers else {
            for id in parameters.ids().filter(|&id| is_made(id)) {
                let (place, [rows, cols]) = (parameters.own_stretch(id), parameters.specs[id.0].whole);
                let Some(place) = place.map(|stretch| stretch.place) else { continue };
                let grad = gradients.own(queue, parameters.bucket_of(id)).col_range(place);
                orthogonalise(queue, &grad.reshaped(rows, cols), dtype);
            }
            return;
        };
        let directions: Vec<Option<Tensor>> = (0..parameters.buckets.len())
            .map(|bucket| {
                let is_made = parameters.buckets[bucket].members.iter().any(|&(id, _)| is_made(id));
                is_made.then(|| gradients.own(queue, bucket))
            })
            .collect();
        for round in &self.rounds {
            let whole = [round.own.map(|[rows, cols]| queue.tensor(1, rows * cols, DType::F32))];
            peers.relocate(&round.gathered, &directions, &whole);
            if let (Some([rows, cols]), [Some(whole)]) = (round.own, &whole) {
                orthogonalise(queue, &whole.reshaped(rows, cols), dtype);
            }
            peers.relocate(&round.returned, &whole, &directions);
        }
    }
}

/// Replaces a matrix, f32, by one with about the same singular vectors and singular values near one. Products use `dtype`.
fn orthogonalise(queue: &Queue, matrix: &Tensor, dtype: DType) {
    let [rows, cols] = [matrix.rows, matrix.cols];
    let is_wide = rows <= cols;
    let side = rows.min(cols);
    let squared_norm = queue.tensor(1, 1, DType::F32);
    queue.launch(SquaredNorm { x: matrix.view(), out: squared_norm.view(), accumulate: false });
    let [x, next] = [(); 2].map(|()| queue.tensor(rows, cols, dtype));
    queue.launch(Normalize { x: matrix.view(), squared_norm: squared_norm.view(), least: EPSILON, out: x.view() });
    let [gram, square] = [(); 2].map(|()| queue.tensor(side, side, dtype));
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..STEPS {
        queue.launch(Product::new(if is_wide { Order::NT } else { Order::TN }, &x, &x, &gram));
        queue.launch(Product::new(Order::NN, &gram, &gram, &square));
        queue.launch(Combine { a: gram.view(), b: square.view(), alpha: b, beta: c, out: square.view() });
        let [left, right] = if is_wide { [&square, &x] } else { [&x, &square] };
        queue.launch(Product::new(Order::NN, left, right, &next));
        queue.launch(Combine { a: x.view(), b: next.view(), alpha: a, beta: 1.0, out: x.view() });
    }
    queue.launch(Copy { x: x.view(), out: matrix.view() });
}
