//! The gated delta rule against its plain twin in f64.

#[path = "support/delta.rs"]
mod plain;
mod support;

use evenkeel_device::kernel::{DeltaGates, DeltaRule, DeltaRuleBackward};
use evenkeel_device::{DType, Heads, Queue, Tensor};
use plain::{Operands, PART_NAMES, PARTS, Shape};
use support::{
    DTYPES, Random, assert_close, error_beside, framed, on_cuda, relative_error, rounded, run, strided, tolerance,
    unframed,
};

/// Every length that a chunk of 64 treats differently.
const DOCUMENTS: [usize; 7] = [70, 1, 3, 129, 0, 64, 65];

/// A rule multiplies rounded products by rounded products: it may err by this many times what a single product may.
const OUT_ROUNDINGS: f64 = 3.0;
const GRADIENT_ROUNDINGS: f64 = 6.0;

/// How fast the states of a case fade.
#[derive(Clone, Copy, Debug)]
enum Fading {
    /// Rates and fades of many sizes.
    Mixed,
    /// All states fade so slowly that they reach the next document if anything lets them.
    Slow,
    /// All states fade so slowly that they count a thousand tokens later.
    Hardly,
    /// Some tokens fade states by e^-50 and more, others leave them as they are.
    Extreme,
}

#[derive(Clone, Debug)]
struct Case {
    shape: Shape,
    fading: Fading,
    dtype: DType,
    /// Unused elements between heads.
    gap: usize,
}

fn case(key_heads: usize, ratio: usize, [key, value]: [usize; 2], lengths: &[usize], dtype: DType) -> Case {
    let shape = Shape { key_heads, ratio, key, value, lengths: lengths.to_vec() };
    Case { shape, fading: Fading::Mixed, dtype, gap: 8 }
}

/// Gradients that are sums over tokens are added to this: so little that hardly a digit of theirs is lost.
const BEFORE: f32 = 1.0 / 1024.0;

/// Lies between heads that are written.
const BETWEEN: f32 = 11.0;

/// Operands in a device's memory.
struct Placed {
    q: Heads,
    k: Heads,
    v: Heads,
    dout: Heads,
    gates: DeltaGates,
    _held: Vec<Tensor>,
}

impl Case {
    fn operands(&self, seed: u64) -> Operands<f32> {
        let Shape { key_heads, key, value, .. } = self.shape;
        let (tokens, value_heads) = (self.shape.tokens(), self.shape.value_heads());
        let mut random = Random::new(seed);
        let mut numbers = |len: usize| random.numbers(len, self.dtype);
        let [q, k] = [0, 1].map(|_| numbers(tokens * key_heads * key));
        let [v, dout] = [0, 1].map(|_| numbers(tokens * value_heads * value));
        let [fade, take] = [0, 1].map(|_| numbers(tokens * value_heads));
        let [log_rate, bias] = [0, 1].map(|_| random.numbers(value_heads, DType::F32));
        let changed = |values: Vec<f32>, change: &dyn Fn(usize, f32) -> f32| -> Vec<f32> {
            values.into_iter().enumerate().map(|(i, x)| rounded(change(i, x), self.dtype)).collect()
        };
        let (fade, log_rate) = match self.fading {
            Fading::Mixed => (changed(fade, &|_, x| 3.0 * x - 1.0), log_rate.iter().map(|x| 1.5 * x - 1.0).collect()),
            Fading::Slow => (fade, vec![0.05f32.ln(); value_heads]),
            Fading::Hardly => (fade, vec![0.0005f32.ln(); value_heads]),
            Fading::Extreme => {
                (changed(fade, &|i, x| [x, 50.0, -70.0, x, 90.0][i % 5]), log_rate.iter().map(|x| 0.1 * x).collect())
            }
        };
        let take = changed(take, &|_, x| 2.0 * x);
        Operands { q, k, v, fade, take, log_rate, bias, dout }
    }

    /// Queries, keys, values and gates as kernels take them, with NaN between heads.
    fn place(&self, queue: &Queue, operands: &Operands<f32>) -> Placed {
        let Shape { key_heads, key, value, .. } = self.shape;
        let value_heads = self.shape.value_heads();
        let mut held = Vec::new();
        let [q, k] = [&operands.q, &operands.k].map(|x| self.heads(queue, x, key_heads, key, &mut held));
        let [v, dout] = [&operands.v, &operands.dout].map(|x| self.heads(queue, x, value_heads, value, &mut held));
        let gates = [&operands.fade, &operands.take]
            .map(|gate| strided(queue, self.shape.tokens(), value_heads, 5, self.dtype, gate));
        let vectors =
            [&operands.log_rate, &operands.bias].map(|vector| queue.floats(1, value_heads, DType::F32, vector));
        let [fade, take] = gates.each_ref().map(Tensor::view);
        let [log_rate, bias] = vectors.each_ref().map(Tensor::view);
        held.extend(gates.into_iter().chain(vectors));
        Placed { q, k, v, dout, gates: DeltaGates { fade, take, log_rate, bias }, _held: held }
    }

    fn heads(&self, queue: &Queue, values: &[f32], count: usize, dim: usize, held: &mut Vec<Tensor>) -> Heads {
        let spread = self.spread(values, count, dim);
        let tensor = strided(queue, self.shape.tokens(), self.width(count, dim), 3, self.dtype, &spread);
        let heads = Heads::strided(&tensor, 0, count, dim, dim + self.gap);
        held.push(tensor);
        heads
    }

    /// Heads to be written, and the tensor to be read with [`Case::written`].
    fn written_heads(&self, queue: &Queue, count: usize, dim: usize) -> (Heads, Tensor) {
        let (tokens, width) = (self.shape.tokens(), self.width(count, dim));
        let (inner, outer) = framed(queue, tokens, width, self.dtype, &vec![BETWEEN; tokens * width]);
        (Heads::strided(&inner, 0, count, dim, dim + self.gap), outer)
    }

    /// The values of heads; asserts that nothing between them was written.
    fn written(&self, outer: &[f32], count: usize, dim: usize) -> Vec<f32> {
        let mut values = Vec::new();
        for row in unframed(outer, self.width(count, dim)).chunks(self.width(count, dim)) {
            for head in row.chunks(dim + self.gap) {
                values.extend_from_slice(&head[..dim]);
                assert!(head[dim..].iter().all(|&x| x == BETWEEN), "a kernel wrote between heads");
            }
        }
        values
    }

    fn width(&self, count: usize, dim: usize) -> usize {
        count * (dim + self.gap) - self.gap
    }

    fn spread(&self, values: &[f32], count: usize, dim: usize) -> Vec<f32> {
        let step = dim + self.gap;
        let number = |token: usize, col: usize| match (col / step, col % step) {
            (head, d) if d < dim => values[(token * count + head) * dim + d],
            _ => f32::NAN,
        };
        let width = self.width(count, dim);
        (0..self.shape.tokens() * width).map(|i| number(i / width, i % width)).collect()
    }

    /// The output, and the states behind each document if there were any before.
    fn forward(&self, operands: &Operands<f32>, states: Option<&[f32]>) -> [Vec<f32>; 2] {
        let (value_heads, value) = (self.shape.value_heads(), self.shape.value);
        let results = run(|queue| {
            let placed = self.place(queue, operands);
            let (out, outer) = self.written_heads(queue, value_heads, value);
            let states = states.map(|states| framed(queue, states.len() / value, value, DType::F32, states));
            let mut rule = DeltaRule {
                q: placed.q,
                k: placed.k,
                v: placed.v,
                gates: placed.gates,
                segments: self.shape.segments(),
                out,
                states: states.as_ref().map(|(inner, _)| inner.view()),
                work: None,
            };
            let work = on_cuda().then(|| queue.tensor(1, rule.work_len(), DType::F32));
            rule.work = work.as_ref().map(Tensor::view);
            queue.launch(rule);
            [Some(outer), states.map(|(_, outer)| outer)].into_iter().flatten().collect()
        });
        let states = results.get(1).map_or(Vec::new(), |outer| unframed(outer, value));
        [self.written(&results[0], value_heads, value), states]
    }

    /// The gradients in the order of [`PART_NAMES`]; those that are added to lack [`BEFORE`] again.
    fn backward(&self, operands: &Operands<f32>, with_sums: [bool; 2]) -> [Vec<f32>; PARTS] {
        let Shape { key_heads, key, value, .. } = self.shape;
        let (tokens, value_heads) = (self.shape.tokens(), self.shape.value_heads());
        let results = run(|queue| {
            let placed = self.place(queue, operands);
            let [(dq, dq_outer), (dk, dk_outer)] = [0, 1].map(|_| self.written_heads(queue, key_heads, key));
            let (dv, dv_outer) = self.written_heads(queue, value_heads, value);
            let gate = || framed(queue, tokens, value_heads, self.dtype, &vec![BETWEEN; tokens * value_heads]);
            let [(dfade, dfade_outer), (dtake, dtake_outer)] = [gate(), gate()];
            let [dlog_rate, dbias] =
                [0, 1].map(|_| framed(queue, 1, value_heads, DType::F32, &vec![BEFORE; value_heads]));
            let mut rule = DeltaRuleBackward {
                q: placed.q,
                k: placed.k,
                v: placed.v,
                gates: placed.gates,
                segments: self.shape.segments(),
                dout: placed.dout,
                dq,
                dk,
                dv,
                dfade: dfade.view(),
                dtake: dtake.view(),
                dlog_rate: with_sums[0].then(|| dlog_rate.0.view()),
                dbias: with_sums[1].then(|| dbias.0.view()),
                work: None,
            };
            let work = on_cuda().then(|| queue.tensor(1, rule.work_len(), DType::F32));
            rule.work = work.as_ref().map(Tensor::view);
            queue.launch(rule);
            vec![dq_outer, dk_outer, dv_outer, dfade_outer, dtake_outer, dlog_rate.1, dbias.1]
        });
        let sums = |outer: &[f32]| unframed(outer, value_heads).iter().map(|sum| sum - BEFORE).collect();
        [
            self.written(&results[0], key_heads, key),
            self.written(&results[1], key_heads, key),
            self.written(&results[2], value_heads, value),
            unframed(&results[3], value_heads),
            unframed(&results[4], value_heads),
            sums(&results[5]),
            sums(&results[6]),
        ]
    }

    fn check(&self) {
        let operands = self.operands(self.shape.key as u64 + self.shape.tokens() as u64);
        let wide = operands.wide();
        let expected = self.shape.forward(&wide, &mut vec![0.0; self.shape.state_len()]);
        let [out, _] = self.forward(&operands, None);
        assert!(out.iter().all(|x| x.is_finite()), "out of {self:?}");
        assert_close(&format!("out of {self:?}"), &out, &expected, OUT_ROUNDINGS * tolerance(self.dtype));
        let gradients = self.backward(&operands, [true; 2]);
        let expected = self.shape.backward(&wide);
        let mut sizes = expected.clone();
        let [.., dfade, _, dlog_rate, dbias] = &mut sizes;
        [*dlog_rate, *dbias] = self.shape.sizes_of_sums(&wide, dfade);
        for (part, name) in PART_NAMES.iter().enumerate() {
            assert!(gradients[part].iter().all(|x| x.is_finite()), "{name} of {self:?}");
            let error = error_beside(&gradients[part], &expected[part], &sizes[part]);
            let allowed = GRADIENT_ROUNDINGS * tolerance(self.dtype);
            assert!(error <= allowed, "{name} of {self:?}: relative error {error:.2e} above {allowed:.0e}");
        }
    }
}

#[test]
fn the_twin_of_backward_agrees_with_differences() {
    for (ratio, lengths, fading) in [(1, vec![6], Fading::Mixed), (2, vec![5, 0, 3], Fading::Slow)] {
        let case = Case { fading, ..case(2, ratio, [3, 4], &lengths, DType::F32) };
        let operands = case.operands(1).wide();
        let loss = |operands: &Operands<f64>| -> f64 {
            let out = case.shape.forward(operands, &mut vec![0.0; case.shape.state_len()]);
            out.iter().zip(&operands.dout).map(|(out, dout)| out * dout).sum()
        };
        let gradients = case.shape.backward(&operands);
        for (part, gradient) in gradients.iter().enumerate() {
            for (i, derivative) in gradient.iter().enumerate() {
                let h = 1e-5;
                let moved = |by: f64| {
                    let mut moved = operands.clone();
                    moved.parts_mut()[part][i] += by;
                    loss(&moved)
                };
                let difference = (moved(h) - moved(-h)) / (2.0 * h);
                let name = PART_NAMES[part];
                assert!((derivative - difference).abs() < 1e-7, "{name}[{i}]: {derivative} against {difference}");
            }
        }
    }
}

#[test]
fn documents_of_every_length_agree_with_the_recurrence() {
    for dtype in DTYPES {
        for (key_heads, ratio) in [(1, 1), (2, 2), (1, 3), (3, 1)] {
            for gap in [0, 8] {
                Case { gap, ..case(key_heads, ratio, [16, 16], &DOCUMENTS, dtype) }.check();
            }
        }
    }
}

#[test]
fn heads_of_every_size_agree_with_the_recurrence() {
    for dtype in DTYPES {
        for dims in [[8, 12], [1, 1], [5, 40], [33, 7], [64, 64], [128, 128], [128, 96], [96, 200]] {
            case(1, 2, dims, &DOCUMENTS, dtype).check();
        }
        case(1, 1, [256, 512], &[66, 5], dtype).check();
    }
}

#[test]
fn a_document_of_many_chunks_agrees_with_the_recurrence() {
    for dtype in DTYPES {
        for fading in [Fading::Mixed, Fading::Slow] {
            Case { fading, ..case(1, 1, [16, 24], &[3, 2500, 64], dtype) }.check();
            Case { fading, ..case(2, 1, [64, 64], &[700], dtype) }.check();
        }
    }
}

/// Few heads over long documents: in bf16, a GPU goes through stretches of them side by side.
fn stretched() -> Vec<Case> {
    const DTYPE: DType = DType::Bf16;
    let cases = [
        case(2, 1, [96, 192], &[1100], DTYPE),
        case(1, 2, [96, 192], &[700, 333], DTYPE),
        case(2, 1, [64, 64], &[1100], DTYPE),
        case(1, 2, [128, 128], &[5, 700, 0, 333], DTYPE),
        Case { gap: 3, ..case(1, 1, [33, 40], &[600, 70, 900], DTYPE) },
        case(1, 1, [256, 72], &[600], DTYPE),
    ];
    let fading = |case: Case| [Fading::Mixed, Fading::Hardly].map(|fading| Case { fading, ..case.clone() });
    cases.into_iter().flat_map(fading).collect()
}

#[test]
fn documents_in_stretches_agree_with_the_recurrence() {
    stretched().iter().for_each(Case::check);
    Case { fading: Fading::Extreme, ..case(2, 1, [64, 40], &[1100], DType::Bf16) }.check();
}

#[test]
fn documents_in_stretches_give_the_same_bits_each_time() {
    for case in stretched() {
        let (operands, before) = (case.operands(12), states(&case, 13));
        let results = || (case.forward(&operands, Some(&before)), case.backward(&operands, [true; 2]));
        let expected = results();
        (0..2).for_each(|_| assert!(results() == expected, "{case:?}"));
    }
}

#[test]
fn many_documents_agree_with_the_recurrence() {
    // More than one launch of a GPU takes.
    let mut lengths: Vec<usize> = (0..500).map(|document| document % 5 * 4).collect();
    for dtype in DTYPES {
        case(1, 2, [8, 8], &lengths, dtype).check();
    }
    // Some in stretches, in both launches.
    [lengths[100], lengths[450]] = [600, 800];
    case(1, 2, [8, 8], &lengths, DType::Bf16).check();
}

#[test]
fn no_tokens_give_nothing() {
    for lengths in [&[][..], &[0], &[0, 0]] {
        case(1, 2, [8, 8], lengths, DType::F32).check();
    }
}

#[test]
fn strong_decay_stays_finite() {
    for dtype in DTYPES {
        Case { fading: Fading::Extreme, ..case(1, 2, [16, 16], &DOCUMENTS, dtype) }.check();
        Case { fading: Fading::Extreme, ..case(2, 1, [64, 40], &[200], dtype) }.check();
    }
}

#[test]
fn keys_and_queries_of_zeros_stay_finite() {
    for dtype in DTYPES {
        let case = case(1, 2, [16, 16], &[70], dtype);
        let mut operands = case.operands(3);
        operands.k[..40 * 16].fill(0.0);
        operands.q[30 * 16..].fill(0.0);
        let [out, _] = case.forward(&operands, None);
        let gradients = case.backward(&operands, [true; 2]);
        assert!(out.iter().chain(gradients.iter().flatten()).all(|x| x.is_finite()));
    }
}

/// Everything that belongs to the tokens of one document.
fn of_document(case: &Case, document: usize, operands: &Operands<f32>) -> Vec<Vec<f32>> {
    let tokens = case.shape.segments().iter().nth(document).expect("a document");
    let [out, _] = case.forward(operands, None);
    let [dq, dk, dv, dfade, dtake, ..] = case.backward(operands, [false; 2]);
    [out, dq, dk, dv, dfade, dtake]
        .iter()
        .map(|rows| {
            let width = rows.len() / case.shape.tokens();
            rows[tokens.start * width..tokens.end * width].to_vec()
        })
        .collect()
}

#[test]
fn one_document_never_reaches_another() {
    for dtype in DTYPES {
        for lengths in [[70, 33], [1, 64], [3, 2], [64, 130]] {
            let case = Case { fading: Fading::Slow, ..case(2, 2, [16, 16], &lengths, dtype) };
            let operands = case.operands(5);
            for (changed, kept) in [(0, 1), (1, 0)] {
                let tokens = case.shape.segments().iter().nth(changed).expect("a document");
                let mut other = operands.clone();
                let count = case.shape.tokens();
                let strange = case.operands(6);
                let Operands { q, k, v, fade, take, dout, .. } = &mut other;
                let parts = [q, k, v, fade, take, dout];
                for (part, strange) in parts.into_iter().zip([
                    &strange.q,
                    &strange.k,
                    &strange.v,
                    &strange.fade,
                    &strange.take,
                    &strange.dout,
                ]) {
                    let width = part.len() / count;
                    let range = tokens.start * width..tokens.end * width;
                    part[range.clone()].copy_from_slice(&strange[range]);
                }
                assert!(
                    of_document(&case, kept, &operands) == of_document(&case, kept, &other),
                    "document {kept} of {case:?} depends on document {changed}"
                );
                assert!(of_document(&case, changed, &operands) != of_document(&case, changed, &other));
            }
        }
    }
}

#[test]
fn sums_over_tokens_may_be_left_out() {
    let case = case(1, 2, [16, 16], &[70, 5], DType::F32);
    let operands = case.operands(7);
    let all = case.backward(&operands, [true; 2]);
    for with_sums in [[false, true], [true, false], [false, false]] {
        let some = case.backward(&operands, with_sums);
        assert!(some[..5] == all[..5], "gradients depend on {with_sums:?}");
        for (sum, is_wanted) in [5, 6].into_iter().zip(with_sums) {
            let expected = if is_wanted { all[sum].clone() } else { vec![0.0; all[sum].len()] };
            assert!(some[sum] == expected, "{} with {with_sums:?}", PART_NAMES[sum]);
        }
    }
}

fn states(case: &Case, seed: u64) -> Vec<f32> {
    Random::new(seed).numbers(case.shape.state_len(), DType::F32)
}

#[test]
fn states_before_documents_count_and_those_behind_are_left() {
    let short = DTYPES.into_iter().flat_map(|dtype| {
        let of = |(ratio, dims)| case(1, ratio, dims, &DOCUMENTS, dtype);
        [(1, [8, 12]), (2, [16, 16]), (3, [33, 20]), (1, [128, 128])].map(of)
    });
    for case in short.chain(stretched()) {
        let (operands, before) = (case.operands(8), states(&case, 9));
        let mut expected_states = support::wide(&before);
        let expected = case.shape.forward(&operands.wide(), &mut expected_states);
        let [out, after] = case.forward(&operands, Some(&before));
        let allowed = OUT_ROUNDINGS * tolerance(case.dtype);
        assert_close(&format!("out of {case:?}"), &out, &expected, allowed);
        assert_close(&format!("states of {case:?}"), &after, &expected_states, allowed);
        let lengths = &case.shape.lengths;
        let size = after.len() / lengths.len();
        for document in (0..lengths.len()).filter(|&document| lengths[document] == 0) {
            let states = document * size..(document + 1) * size;
            assert!(after[states.clone()] == before[states], "the states of a document without tokens");
        }
    }
}

/// Some tokens of each document.
fn piece(case: &Case, operands: &Operands<f32>, pieces: &[std::ops::Range<usize>]) -> (Case, Operands<f32>) {
    let mut piece = case.clone();
    piece.shape.lengths = pieces.iter().map(std::ops::Range::len).collect();
    let count = case.shape.tokens();
    let cut = |values: &[f32]| -> Vec<f32> {
        let width = values.len() / count;
        let starts = case.shape.segments();
        let rows = starts.iter().zip(pieces).flat_map(|(document, piece)| {
            values[(document.start + piece.start) * width..(document.start + piece.end) * width].iter().copied()
        });
        rows.collect()
    };
    let cut_operands = Operands {
        q: cut(&operands.q),
        k: cut(&operands.k),
        v: cut(&operands.v),
        fade: cut(&operands.fade),
        take: cut(&operands.take),
        dout: cut(&operands.dout),
        ..operands.clone()
    };
    (piece, cut_operands)
}

/// Runs documents piece by piece, carrying the states: the outputs of all pieces, document by document, and the states behind.
fn in_pieces(case: &Case, operands: &Operands<f32>, ends: &[Vec<usize>]) -> [Vec<f32>; 2] {
    let mut states = vec![0.0; case.shape.state_len()];
    let mut outs = vec![Vec::new(); case.shape.lengths.len()];
    let mut starts = vec![0; outs.len()];
    for ends in ends {
        let pieces: Vec<_> = starts.iter().zip(ends).map(|(&start, &end)| start..end).collect();
        let (part, part_operands) = piece(case, operands, &pieces);
        let [out, after] = part.forward(&part_operands, Some(&states));
        for (document, tokens) in part.shape.segments().iter().enumerate() {
            let width = case.shape.value_heads() * case.shape.value;
            outs[document].extend_from_slice(&out[tokens.start * width..tokens.end * width]);
        }
        states = after;
        starts.clone_from(ends);
    }
    [outs.concat(), states]
}

#[test]
fn documents_in_pieces_or_token_by_token_are_the_whole_documents() {
    for dtype in DTYPES {
        for dims in [[8, 12], [64, 64]] {
            let case = case(1, 2, dims, &[100, 20], dtype);
            let operands = case.operands(10);
            let [whole, whole_states] = case.forward(&operands, Some(&vec![0.0; case.shape.state_len()]));
            let by_token: Vec<Vec<usize>> = (1..=100).map(|end| vec![end, end.min(20)]).collect();
            for ends in [vec![vec![70, 0], vec![100, 20]], vec![vec![1, 19], vec![66, 20], vec![100, 20]], by_token] {
                let [out, states] = in_pieces(&case, &operands, &ends);
                let allowed = 2.0 * OUT_ROUNDINGS * tolerance(dtype);
                let what = format!("{} pieces of {case:?}", ends.len());
                assert_close(&what, &out, &support::wide(&whole), allowed);
                assert_close(&what, &states, &support::wide(&whole_states), allowed);
            }
        }
    }
}

#[test]
fn without_states_they_are_zero() {
    let case = case(1, 2, [16, 16], &[70, 5], DType::Bf16);
    let operands = case.operands(11);
    let [out, _] = case.forward(&operands, None);
    let [with_states, after] = case.forward(&operands, Some(&vec![0.0; case.shape.state_len()]));
    assert!(out == with_states);
    assert!(relative_error(&after, &vec![0.0; after.len()]) > 0.0, "no states were left");
}
