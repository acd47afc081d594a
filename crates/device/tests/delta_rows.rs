//! Short convolutions and gated norms, which stand around the delta rule, against plain loops in f64.

mod support;

use evenkeel_device::kernel::{
    DynamicConv, DynamicConvBackward, GatedNorm, GatedNormBackward, Segments, ShortConv, ShortConvBackward,
};
use evenkeel_device::{DType, Tensor};
use support::{DTYPES, Random, SHAPES, assert_close, framed, rounded, run, strided, tolerance, unframed, wide};

/// Tokens of documents: shorter than the taps, empty, longer than a task's rows.
const DOCUMENTS: [&[usize]; 6] = [&[], &[0, 0], &[1], &[70, 1, 3, 129, 0, 64, 65], &[2, 2, 2, 0, 1], &[3000, 5]];

/// Columns: less than a vector, whole vectors, vectors and a rest.
const WIDTHS: [usize; 4] = [1, 5, 64, 150];

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn silu_derivative(x: f64) -> f64 {
    let sigma = 1.0 / (1.0 + (-x).exp());
    sigma * (1.0 + x * (1.0 - sigma))
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Weights {
    OfAllTokens,
    OfEachToken,
}

/// A convolution's shape and operands.
#[derive(Clone)]
struct Convolution {
    lengths: Vec<usize>,
    cols: usize,
    taps: usize,
    /// [T, C]
    x: Vec<f64>,
    weights: Weights,
    /// [C, W], or [T, C · W].
    weight: Vec<f64>,
    /// [documents · (W - 1), C]
    past: Vec<f64>,
}

impl Convolution {
    fn new(lengths: &[usize], cols: usize, taps: usize, dtype: DType) -> Convolution {
        Convolution::with(Weights::OfAllTokens, lengths, cols, taps, dtype)
    }

    fn with(weights: Weights, lengths: &[usize], cols: usize, taps: usize, dtype: DType) -> Convolution {
        let mut random = Random::new((cols + 17 * taps) as u64);
        let tokens: usize = lengths.iter().sum();
        let mut numbers = |len: usize, size: f32| -> Vec<f64> {
            wide(&(0..len).map(|_| rounded(size * random.number(), dtype)).collect::<Vec<f32>>())
        };
        let x = numbers(tokens * cols, 2.0);
        let rows = if weights == Weights::OfEachToken { tokens } else { 1 };
        let weight = numbers(rows * cols * taps, 1.0);
        let past = numbers(lengths.len() * (taps - 1) * cols, 2.0);
        Convolution { lengths: lengths.to_vec(), cols, taps, x, weights, weight, past }
    }

    fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    fn segments(&self) -> Segments {
        let mut offsets = vec![0];
        self.lengths.iter().for_each(|len| offsets.push(offsets[offsets.len() - 1] + len));
        Segments::new(offsets)
    }

    /// The place of the weight by which a token reads.
    fn place(&self, token: usize, col: usize, tap: usize) -> usize {
        let row = if self.weights == Weights::OfEachToken { token } else { 0 };
        (row * self.cols + col) * self.taps + tap
    }

    fn without_past(mut self) -> Convolution {
        self.past.fill(0.0);
        self
    }

    /// The input of a document's column at a place, which is negative for the past.
    fn input(&self, document: usize, start: usize, place: isize, col: usize) -> f64 {
        match usize::try_from(place) {
            Ok(place) => self.x[(start + place) * self.cols + col],
            Err(_) => {
                let row = document * (self.taps - 1) + (self.taps as isize - 1 + place) as usize;
                self.past[row * self.cols + col]
            }
        }
    }

    /// The sums before the activation, [T, C].
    fn sums(&self) -> Vec<f64> {
        let mut sums = Vec::new();
        for (document, tokens) in self.segments().iter().enumerate() {
            for place in 0..tokens.len() {
                for col in 0..self.cols {
                    let tap = |j: usize| {
                        let from = place as isize + j as isize - (self.taps as isize - 1);
                        let weight = self.weight[self.place(tokens.start + place, col, j)];
                        weight * self.input(document, tokens.start, from, col)
                    };
                    sums.push((0..self.taps).map(tap).sum());
                }
            }
        }
        sums
    }

    fn out(&self) -> Vec<f64> {
        self.sums().into_iter().map(silu).collect()
    }

    /// The rows that the next tokens of each document see before themselves.
    fn past_behind(&self) -> Vec<f64> {
        let mut past = Vec::new();
        for (document, tokens) in self.segments().iter().enumerate() {
            for row in 0..self.taps - 1 {
                let place = tokens.len() as isize + row as isize - (self.taps as isize - 1);
                past.extend((0..self.cols).map(|col| self.input(document, tokens.start, place, col)));
            }
        }
        past
    }

    /// dx [T, C] and the weights' gradients, without a past.
    fn gradients(&self, dout: &[f64]) -> [Vec<f64>; 2] {
        let (mut dx, mut dweight) = (vec![0.0; self.x.len()], vec![0.0; self.weight.len()]);
        let du: Vec<f64> = self.sums().iter().zip(dout).map(|(u, dout)| dout * silu_derivative(*u)).collect();
        for tokens in self.segments().iter() {
            for t in tokens.clone() {
                for j in 0..self.taps {
                    let Some(from) = (t + j).checked_sub(self.taps - 1).filter(|from| tokens.contains(from)) else {
                        continue;
                    };
                    for col in 0..self.cols {
                        let du = du[t * self.cols + col];
                        let place = self.place(t, col, j);
                        dx[from * self.cols + col] += self.weight[place] * du;
                        dweight[place] += self.x[from * self.cols + col] * du;
                    }
                }
            }
        }
        [dx, dweight]
    }
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

fn for_each_convolution(weights: Weights, check: impl Fn(Convolution, DType, &str)) {
    let mut documents = DOCUMENTS.map(<[usize]>::to_vec).to_vec();
    // More than one launch of a GPU takes.
    documents.push((0..500).map(|document| document % 4).collect());
    for dtype in DTYPES {
        for lengths in &documents {
            for cols in WIDTHS {
                for taps in [1, 2, 3, 4, 7] {
                    let what = format!("{lengths:?} {cols} columns {taps} taps {dtype:?} {weights:?}");
                    check(Convolution::with(weights, lengths, cols, taps, dtype), dtype, &what);
                }
            }
        }
    }
}

/// The output, and the past behind each document if there is one.
fn convolve(convolution: &Convolution, dtype: DType, with_past: bool) -> [Vec<f32>; 2] {
    let Convolution { cols, taps, .. } = *convolution;
    let tokens = convolution.tokens();
    let results = run(|queue| {
        let x = strided(queue, tokens, cols, 3, dtype, &narrow(&convolution.x));
        let (out, outer) = framed(queue, tokens, cols, dtype, &vec![0.0; tokens * cols]);
        let rows = convolution.lengths.len() * (taps - 1);
        let past = with_past.then(|| framed(queue, rows, cols, dtype, &narrow(&convolution.past)));
        let weight = narrow(&convolution.weight);
        let (x, segments, out) = (x.view(), convolution.segments(), out.view());
        let past_view = past.as_ref().map(|(inner, _)| inner.view());
        match convolution.weights {
            Weights::OfAllTokens => {
                let weight = strided(queue, cols, taps, 0, dtype, &weight);
                queue.launch(ShortConv { x, weight: weight.view(), segments, out, past: past_view });
            }
            Weights::OfEachToken => {
                let weights = strided(queue, tokens, cols * taps, 1, dtype, &weight);
                queue.launch(DynamicConv { x, weights: weights.view(), segments, out, past: past_view });
            }
        }
        [Some(outer), past.map(|(_, outer)| outer)].into_iter().flatten().collect()
    });
    [unframed(&results[0], cols), results.get(1).map_or(Vec::new(), |outer| unframed(outer, cols))]
}

#[test]
fn convolutions_agree_with_plain_loops() {
    for weights in [Weights::OfAllTokens, Weights::OfEachToken] {
        for_each_convolution(weights, |convolution, dtype, what| {
            let convolution = convolution.without_past();
            let [out, _] = convolve(&convolution, dtype, false);
            assert_close(what, &out, &convolution.out(), tolerance(dtype));
        });
    }
}

#[test]
fn convolutions_begin_with_the_past_and_leave_the_last_rows() {
    for weights in [Weights::OfAllTokens, Weights::OfEachToken] {
        for_each_convolution(weights, |convolution, dtype, what| {
            let [out, past] = convolve(&convolution, dtype, true);
            assert_close(what, &out, &convolution.out(), tolerance(dtype));
            assert!(past == narrow(&convolution.past_behind()), "past of {what}");
        });
    }
}

#[test]
fn convolutions_of_pieces_are_that_of_the_whole() {
    for dtype in DTYPES {
        let whole = Convolution::new(&[40, 9], 20, 4, dtype);
        let [expected, past_behind] = convolve(&whole, dtype, true);
        for ends in
            [vec![[7, 9], [40, 9]], vec![[1, 0], [2, 8], [40, 9]], (1..=40).map(|end| [end, end.min(9)]).collect()]
        {
            let mut outs = [Vec::new(), Vec::new()];
            let mut piece = whole.clone();
            let mut starts = [0, 0];
            for ends in ends {
                piece.lengths = vec![ends[0] - starts[0], ends[1] - starts[1]];
                let rows = |first: usize, document: usize| {
                    whole.x[(first + starts[document]) * 20..(first + ends[document]) * 20].to_vec()
                };
                piece.x = [rows(0, 0), rows(40, 1)].concat();
                let [out, past] = convolve(&piece, dtype, true);
                let (first, second) = out.split_at(piece.lengths[0] * 20);
                outs[0].extend_from_slice(first);
                outs[1].extend_from_slice(second);
                piece.past = wide(&past);
                starts = ends;
            }
            assert!(outs.concat() == expected, "pieces give other bits than the whole");
            assert!(narrow(&piece.past) == past_behind);
        }
    }
}

#[test]
fn the_twin_of_convolutions_gradients_agrees_with_differences() {
    for weights in [Weights::OfAllTokens, Weights::OfEachToken] {
        let convolution = Convolution::with(weights, &[5, 0, 1, 3], 2, 3, DType::F32).without_past();
        let dout = wide(&Random::new(2).numbers(convolution.x.len(), DType::F32));
        let loss = |convolution: &Convolution| -> f64 { convolution.out().iter().zip(&dout).map(|(y, d)| y * d).sum() };
        let [dx, dweight] = convolution.gradients(&dout);
        let h = 1e-5;
        let difference = |place: &dyn Fn(&mut Convolution) -> &mut f64| {
            let moved = |by: f64| {
                let mut moved = convolution.clone();
                *place(&mut moved) += by;
                loss(&moved)
            };
            (moved(h) - moved(-h)) / (2.0 * h)
        };
        for (i, dx) in dx.iter().enumerate() {
            assert!((dx - difference(&|c| &mut c.x[i])).abs() < 1e-8, "dx[{i}], weights {weights:?}");
        }
        for (i, dweight) in dweight.iter().enumerate() {
            assert!((dweight - difference(&|c| &mut c.weight[i])).abs() < 1e-8, "dweight[{i}], weights {weights:?}");
        }
    }
}

#[test]
fn convolutions_gradients_agree_with_their_twin() {
    for_each_convolution(Weights::OfAllTokens, |convolution, dtype, what| {
        let convolution = convolution.without_past();
        let Convolution { cols, taps, .. } = convolution;
        let tokens = convolution.tokens();
        let dout = Random::new(3).numbers(tokens * cols, dtype);
        let before = Random::new(4).numbers(cols * taps, DType::F32);
        let results = run(|queue| {
            let x = strided(queue, tokens, cols, 3, dtype, &narrow(&convolution.x));
            let weight = strided(queue, cols, taps, 1, dtype, &narrow(&convolution.weight));
            let dout = strided(queue, tokens, cols, 5, dtype, &dout);
            let (dweight, dweight_outer) = framed(queue, cols, taps, DType::F32, &before);
            let [with, without] = [Some(dweight.view()), None].map(|dweight| {
                let (dx, dx_outer) = framed(queue, tokens, cols, dtype, &vec![0.0; tokens * cols]);
                queue.launch(ShortConvBackward {
                    x: x.view(),
                    weight: weight.view(),
                    segments: convolution.segments(),
                    dout: dout.view(),
                    dx: dx.view(),
                    dweight,
                });
                dx_outer
            });
            vec![with, without, dweight_outer]
        });
        let [dx, dweight] = convolution.gradients(&wide(&dout));
        let found = unframed(&results[0], cols);
        assert_close(&format!("dx of {what}"), &found, &dx, tolerance(dtype));
        assert!(found == unframed(&results[1], cols), "dx of {what} depends on whether dweight is wanted");
        let expected: Vec<f64> = dweight.iter().zip(&before).map(|(sum, &before)| sum + before as f64).collect();
        assert_close(&format!("dweight of {what}"), &unframed(&results[2], taps), &expected, tolerance(DType::F32));
    });
}

#[test]
fn gradients_of_each_tokens_weights_agree_with_their_twin() {
    for_each_convolution(Weights::OfEachToken, |convolution, dtype, what| {
        let convolution = convolution.without_past();
        let Convolution { cols, taps, .. } = convolution;
        let tokens = convolution.tokens();
        let dout = Random::new(3).numbers(tokens * cols, dtype);
        let results = run(|queue| {
            let x = strided(queue, tokens, cols, 3, dtype, &narrow(&convolution.x));
            let weights = strided(queue, tokens, cols * taps, 1, dtype, &narrow(&convolution.weight));
            let dout = strided(queue, tokens, cols, 5, dtype, &dout);
            let (dx, dx_outer) = framed(queue, tokens, cols, dtype, &vec![0.0; tokens * cols]);
            let (dweights, dweights_outer) =
                framed(queue, tokens, cols * taps, dtype, &vec![0.0; tokens * cols * taps]);
            let [x, weights, dout, dx, dweights] = [&x, &weights, &dout, &dx, &dweights].map(Tensor::view);
            queue.launch(DynamicConvBackward { x, weights, segments: convolution.segments(), dout, dx, dweights });
            vec![dx_outer, dweights_outer]
        });
        let [dx, dweights] = convolution.gradients(&wide(&dout));
        assert_close(&format!("dx of {what}"), &unframed(&results[0], cols), &dx, tolerance(dtype));
        let found = unframed(&results[1], cols * taps);
        assert_close(&format!("dweights of {what}"), &found, &dweights, tolerance(dtype));
    });
}

#[test]
fn one_document_never_reaches_anothers_convolution() {
    for dtype in DTYPES {
        let convolution = Convolution::new(&[9, 30], 20, 4, dtype).without_past();
        let mut other = convolution.clone();
        other.x[8 * 20..9 * 20].fill(100.0);
        let [[out, _], [other_out, _]] = [&convolution, &other].map(|c| convolve(c, dtype, false));
        assert!(out[9 * 20..] == other_out[9 * 20..]);
        assert!(out[..9 * 20] != other_out[..9 * 20]);
    }
}

const EPSILON: f32 = 1e-5;

/// A row's norm before the weight, and the divisor's inverse.
fn normal(x: &[f64]) -> (Vec<f64>, f64) {
    let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + EPSILON as f64).sqrt();
    (x.iter().map(|x| x * scale).collect(), scale)
}

fn gated_norm(x: &[f64], gate: &[f64], weight: &[f64]) -> Vec<f64> {
    let (normal, _) = normal(x);
    normal.iter().zip(weight).zip(gate).map(|((x, w), &z)| x * w * silu(z)).collect()
}

/// dx, dgate and this row's share of dweight.
fn gated_norm_gradients(x: &[f64], gate: &[f64], weight: &[f64], dout: &[f64]) -> [Vec<f64>; 3] {
    let (normal, scale) = normal(x);
    let dnormal = |i: usize| dout[i] * silu(gate[i]) * weight[i];
    let mean = (0..x.len()).map(|i| dnormal(i) * normal[i]).sum::<f64>() / x.len() as f64;
    let each = |f: &dyn Fn(usize) -> f64| (0..x.len()).map(f).collect::<Vec<f64>>();
    [
        each(&|i| scale * (dnormal(i) - normal[i] * mean)),
        each(&|i| dout[i] * weight[i] * normal[i] * silu_derivative(gate[i])),
        each(&|i| dout[i] * silu(gate[i]) * normal[i]),
    ]
}

#[test]
fn the_twin_of_gated_norms_gradients_agrees_with_differences() {
    let mut random = Random::new(5);
    let operands: [Vec<f64>; 4] = std::array::from_fn(|_| wide(&random.numbers(9, DType::F32)));
    let loss = |operands: &[Vec<f64>; 4]| -> f64 {
        let [x, gate, weight, dout] = operands;
        gated_norm(x, gate, weight).iter().zip(dout).map(|(y, d)| y * d).sum()
    };
    let [x, gate, weight, dout] = &operands;
    for (part, gradient) in gated_norm_gradients(x, gate, weight, dout).iter().enumerate() {
        for (i, derivative) in gradient.iter().enumerate() {
            let h = 1e-5;
            let moved = |by: f64| {
                let mut moved = operands.clone();
                moved[part][i] += by;
                loss(&moved)
            };
            let difference = (moved(h) - moved(-h)) / (2.0 * h);
            assert!((derivative - difference).abs() < 1e-8, "part {part} at {i}: {derivative} against {difference}");
        }
    }
}

/// x, gate, weight and dout of a shape.
fn norm_operands([rows, cols]: [usize; 2], dtype: DType) -> [Vec<f32>; 4] {
    let mut random = Random::new((rows + cols) as u64);
    let mut numbers = |len: usize, dtype, size: f32| -> Vec<f32> {
        (0..len).map(|_| rounded(size * random.number(), dtype)).collect()
    };
    let x = numbers(rows * cols, dtype, 2.0);
    let gate = numbers(rows * cols, dtype, 4.0);
    let weight = numbers(cols, DType::F32, 1.5);
    [x, gate, weight, numbers(rows * cols, dtype, 1.0)]
}

#[test]
fn gated_norms_agree_with_their_definition_and_may_work_in_place() {
    for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| DTYPES.map(|dtype| (shape, dtype))) {
        let [rows, cols] = shape;
        let [x, gate, weight, _] = norm_operands(shape, dtype);
        let results = run(|queue| {
            let fresh = |values: &[f32]| framed(queue, rows, cols, dtype, values);
            let weight = queue.floats(1, cols, DType::F32, &weight);
            let launch = |x: &Tensor, gate: &Tensor, out: &Tensor| {
                let [x, gate, out, weight] = [x, gate, out, &weight].map(Tensor::view);
                queue.launch(GatedNorm { x, gate, weight, epsilon: EPSILON, out });
            };
            let (apart, apart_outer) = fresh(&x);
            let ((in_x, in_x_outer), (in_gate, in_gate_outer)) = (fresh(&x), fresh(&gate));
            let (x, gate) = (strided(queue, rows, cols, 3, dtype, &x), strided(queue, rows, cols, 5, dtype, &gate));
            launch(&x, &gate, &apart);
            launch(&in_x, &gate, &in_x);
            launch(&x, &in_gate, &in_gate);
            vec![apart_outer, in_x_outer, in_gate_outer]
        });
        let [x, gate, weight] = [&x, &gate, &weight].map(|values| wide(values));
        let rows = x.chunks(cols.max(1)).zip(gate.chunks(cols.max(1)));
        let expected: Vec<f64> = rows.flat_map(|(x, gate)| gated_norm(x, gate, &weight)).collect();
        for (place, result) in results.iter().enumerate() {
            let what = format!("{shape:?} {dtype:?} in place {place}");
            assert_close(&what, &unframed(result, cols), &expected, tolerance(dtype));
        }
    }
}

#[test]
fn gated_norms_gradients_agree_with_their_twin_and_may_overwrite_their_operands() {
    for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| DTYPES.map(|dtype| (shape, dtype))) {
        let [rows, cols] = shape;
        let [x, gate, weight, dout] = norm_operands(shape, dtype);
        let before = Random::new(6).numbers(cols, DType::F32);
        let results = run(|queue| {
            let fresh = |values: &[f32]| framed(queue, rows, cols, dtype, values);
            let weight = queue.floats(1, cols, DType::F32, &weight);
            let launch = |[x, gate, dout, dx, dgate]: [&Tensor; 5], is_trained: bool| {
                let (dweight, outer) = framed(queue, 1, cols, DType::F32, &before);
                let [x, gate, dout, dx, dgate, weight] = [x, gate, dout, dx, dgate, &weight].map(Tensor::view);
                let dweight = is_trained.then(|| dweight.view());
                queue.launch(GatedNormBackward { x, gate, weight, epsilon: EPSILON, dout, dx, dgate, dweight });
                outer
            };
            let ((dx, dx_outer), (dgate, dgate_outer)) = (fresh(&x), fresh(&x));
            let ((in_x, in_x_outer), (in_gate, in_gate_outer)) = (fresh(&x), fresh(&gate));
            let ((in_dout, in_dout_outer), (bare, bare_outer)) = (fresh(&dout), fresh(&x));
            let (x, gate) = (strided(queue, rows, cols, 3, dtype, &x), strided(queue, rows, cols, 5, dtype, &gate));
            let dout = strided(queue, rows, cols, 1, dtype, &dout);
            let first = launch([&x, &gate, &dout, &dx, &dgate], true);
            let second = launch([&in_x, &in_gate, &dout, &in_x, &in_gate], true);
            let third = launch([&x, &gate, &in_dout, &in_dout, &bare], false);
            let dxs = [dx_outer, in_x_outer, in_dout_outer];
            dxs.into_iter().chain([dgate_outer, in_gate_outer, bare_outer, first, second, third]).collect()
        });
        let [x, gate, weight, dout] = [&x, &gate, &weight, &dout].map(|values| wide(values));
        let (mut dx, mut dgate, mut dweight) = (Vec::new(), Vec::new(), wide(&before));
        for row in 0..if cols == 0 { 0 } else { rows } {
            let at = row * cols..(row + 1) * cols;
            let [of_x, of_gate, of_weight] =
                gated_norm_gradients(&x[at.clone()], &gate[at.clone()], &weight, &dout[at]);
            dx.extend(of_x);
            dgate.extend(of_gate);
            dweight.iter_mut().zip(of_weight).for_each(|(sum, share)| *sum += share);
        }
        let what = format!("{shape:?} {dtype:?}");
        for place in 0..3 {
            // A row of one element is its own norm: it has no gradient, and only rounding is left.
            if cols > 1 {
                assert_close(&format!("dx {place} of {what}"), &unframed(&results[place], cols), &dx, tolerance(dtype));
            }
            assert_close(
                &format!("dgate {place} of {what}"),
                &unframed(&results[3 + place], cols),
                &dgate,
                tolerance(dtype),
            );
        }
        for (launch, expected) in [&dweight, &dweight, &wide(&before)].into_iter().enumerate() {
            let found = unframed(&results[6 + launch], cols);
            assert_close(&format!("dweight {launch} of {what}"), &found, expected, tolerance(DType::F32));
        }
    }
}
