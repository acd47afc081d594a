//! Adafactor: a matrix's variance kept as that of its rows and columns.
//!
//! Means of rows and columns, and the root mean squares of weights and updates, are those of whole parameters. Ranks that keep
//! parts sum their contributions; the resulting variances are the same bits on all ranks, and each rank keeps them whole.

use std::ops::Range;

use evenkeel_device::kernel::{Adafactor, AdafactorNorm, ColumnSum, Combine, Factored, SquareSums, SquaredNorm};
use evenkeel_device::{DType, Queue, Tensor, View};
use evenkeel_model::{Held, ParamId, ParamSpec, Rectangle, Stretch};

use super::{Changing, Optimizer, Peers};
use crate::state_kind::StateKind;

/// The weight of a step's squares in the variance is the step's number to this power.
const DECAY_POWER: f64 = -0.8;
const EPSILON: f32 = f32::EPSILON;
/// Steps are relative to a parameter's root mean square, but at least to this.
const LEAST_SCALE: f32 = 1e-3;
/// Updates with a larger root mean square are scaled down to it.
const MOST_RMS: f32 = 1.0;

/// The variances of all parameters' rows and columns.
pub(super) struct Variances {
    /// By parameter: the places of its rows (none for a vector) and of its columns. Frozen parameters have neither.
    places: Vec<(Range<usize>, Range<usize>)>,
    /// f32 [1, n]
    all: Tensor,
}

impl Variances {
    pub fn new(specs: &[ParamSpec], queue: &Queue) -> Variances {
        let mut end = 0;
        let mut place = |len: usize| {
            end += len;
            end - len..end
        };
        let of = |spec: &ParamSpec| {
            let [rows, cols] = if spec.is_trained { spec.whole } else { [0, 0] };
            (place(if spec.is_vector() { 0 } else { rows }), place(cols))
        };
        let places: Vec<_> = specs.iter().map(of).collect();
        Variances { places, all: queue.zeros(1, end, DType::F32) }
    }

    /// The variances of a parameter's rows or columns, f32 [1, n].
    pub fn of(&self, kind: StateKind, id: ParamId) -> Option<Tensor> {
        let (rows, cols) = &self.places[id.0];
        let place = if kind == StateKind::RowVariance { rows } else { cols };
        (!place.is_empty()).then(|| self.all.col_range(place.clone()))
    }

    /// The numbers of a part of a parameter: of its rows, if it has any, and of its columns.
    fn of_part(&self, flat: &Tensor, id: ParamId, part: &Rectangle) -> (Option<View>, View) {
        let (rows, cols) = &self.places[id.0];
        let within = |place: &Range<usize>, part: &Range<usize>| {
            flat.col_range(place.start + part.start..place.start + part.end).view()
        };
        ((!rows.is_empty()).then(|| within(rows, &part.rows)), within(cols, &part.cols))
    }
}

/// A part of a parameter that is a rectangle here and in the whole.
struct Part {
    id: ParamId,
    bucket: usize,
    rectangle: Rectangle,
    /// Its beginning in the kept elements of the bucket.
    first: usize,
    /// Whether this rank speaks for it where others keep the same.
    is_counted: bool,
}

impl Part {
    fn of(&self, flat: &Tensor) -> View {
        let Rectangle { rows, cols, stride, .. } = &self.rectangle;
        flat.view().block(self.first, [rows.len(), cols.len()], *stride)
    }
}

impl Optimizer {
    pub(super) fn update_factored(&self, changing: &Changing, peers: Option<&Peers>) {
        let Changing { queue, parameters, gradients, update, grad_factor } = *changing;
        let variances = self.variances.as_ref().expect("they are kept by this rule");
        let parts = parts(changing, peers);
        let specs = &parameters.specs;
        let sum = |tensor: &Tensor| peers.into_iter().for_each(|peers| peers.sum(tensor));

        // Means of squared gradients along rows and columns, followed by each parameter's sum of squared weights.
        let count = variances.all.len();
        let sums = queue.zeros(1, count + specs.len(), DType::F32);
        let squared_weight = |id: ParamId| sums.col_range(count + id.0..count + id.0 + 1).view();
        for part in parts.iter().filter(|part| part.is_counted) {
            let [rows_of_all, cols_of_all] = specs[part.id.0].whole;
            let (rows, cols) = variances.of_part(&sums, part.id, &part.rectangle);
            let x = part.of(&gradients.own(queue, part.bucket));
            let (row_scale, col_scale) = (1.0 / cols_of_all as f32, 1.0 / rows_of_all as f32);
            queue.launch(SquareSums { x, factor: grad_factor, rows, cols, row_scale, col_scale });
            let (x, out) = (part.of(parameters.masters(part.bucket)), squared_weight(part.id));
            queue.launch(SquaredNorm { x, out, accumulate: true });
        }
        sum(&sums);
        let share = (update.step as f64).powf(DECAY_POWER);
        queue.launch(Combine {
            a: variances.all.view(),
            b: sums.col_range(0..count).view(),
            alpha: (1.0 - share) as f32,
            beta: share as f32,
            out: variances.all.view(),
        });

        let [row_sums, squared_updates] = [(); 2].map(|()| queue.zeros(1, specs.len(), DType::F32));
        let scalar = |of: &Tensor, id: ParamId| of.col_range(id.0..id.0 + 1).view();
        for id in parameters.ids() {
            if let Some(rows) = variances.of(StateKind::RowVariance, id) {
                let x = rows.reshaped(rows.len(), 1).view();
                queue.launch(ColumnSum { x, out: scalar(&row_sums, id) });
            }
        }
        let factored = |part: &Part| {
            let (rows, cols) = variances.of_part(&variances.all, part.id, &part.rectangle);
            let grad = part.of(&gradients.own(queue, part.bucket));
            let (row_sum, row_count) = (scalar(&row_sums, part.id), specs[part.id.0].whole[0]);
            Factored { grad, grad_factor, rows, cols, row_sum, row_count, epsilon: EPSILON }
        };
        for part in parts.iter().filter(|part| part.is_counted) {
            queue.launch(AdafactorNorm { factored: factored(part), out: scalar(&squared_updates, part.id) });
        }
        sum(&squared_updates);
        for part in &parts {
            queue.launch(Adafactor {
                factored: factored(part),
                weight: part.of(parameters.masters(part.bucket)),
                copy: parameters.copies(part.bucket).map(|copies| part.of(&copies)),
                squared_weight: squared_weight(part.id),
                squared_update: scalar(&squared_updates, part.id),
                count: specs[part.id.0].whole.iter().product(),
                lr: update.lr,
                rate: (update.lr as f64).min(1.0 / (update.step as f64).sqrt()) as f32,
                weight_decay: self.decay_of(parameters, part.id),
                least_scale: LEAST_SCALE,
                most_rms: MOST_RMS,
            });
        }
    }
}

/// All trained parts that are kept here.
fn parts(changing: &Changing, peers: Option<&Peers>) -> Vec<Part> {
    let parameters = changing.parameters;
    let of = |id: ParamId| {
        let spec = &parameters.specs[id.0];
        let Stretch { elements, place } = parameters.own_stretch(id)?;
        let (bucket, is_counted) = (parameters.bucket_of(id), peers.is_none_or(|peers| (peers.counts)(id)));
        let held = Held { slice: spec.slice.clone(), range: elements };
        let part = move |rectangle: Rectangle| {
            let first = place.start + rectangle.start;
            Part { id, bucket, rectangle, first, is_counted }
        };
        Some(held.rectangles().into_iter().map(part))
    };
    parameters.trained().filter_map(of).flatten().collect()
}
