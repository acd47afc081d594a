//! Products against sums in f64.

mod support;

use evenkeel_device::kernel::{Activation, Copy, Order, Product, Term};
use evenkeel_device::{DType, Queue, Tensor};
use support::{DTYPES, Random, assert_close, on_cuda, rounded, run, strided, tolerance};

const ORDERS: [Order; 3] = [Order::NN, Order::NT, Order::TN];

/// M, N, K: of no depth, odd, tiny, just below and above tiles and vectors, deeper than one block of K, long and thin.
const SHAPES: [[usize; 3]; 21] = [
    [1, 1, 0],
    [37, 50, 0],
    [1, 1, 1],
    [1, 2, 3],
    [3, 17, 2],
    [17, 31, 33],
    [31, 33, 65],
    [33, 65, 17],
    [64, 64, 64],
    [65, 47, 31],
    [2, 300, 64],
    [300, 2, 64],
    [128, 96, 512],
    [40, 50, 1089],
    [160, 272, 96],
    [70, 34, 2100],
    [16, 300, 70],
    [300, 13, 1100],
    [32, 128, 600],
    [5, 70, 2112],
    [45, 40, 96],
];

/// One product: its epilogue and the layout of its operands.
#[derive(Clone, Copy, Debug)]
struct Case {
    order: Order,
    dims: [usize; 3],
    dtype: DType,
    out: DType,
    padding: usize,
    scale: f32,
    /// Order and depth of the second product.
    also: Option<(Order, usize)>,
    accumulate: bool,
    bias: bool,
    activation: Option<Activation>,
    preactivation: bool,
}

impl Case {
    fn plain(order: Order, dims: [usize; 3], dtype: DType) -> Case {
        Case {
            order,
            dims,
            dtype,
            out: dtype,
            padding: 0,
            scale: 1.0,
            also: None,
            accumulate: false,
            bias: false,
            activation: None,
            preactivation: false,
        }
    }

    fn operands(&self) -> Operands {
        let [m, n, k] = self.dims;
        let mut random = Random::new((m * 1_000_003 + n * 1009 + k) as u64);
        Operands {
            a: random.numbers(m * k, self.dtype),
            b: random.numbers(k * n, self.dtype),
            before: random.numbers(m * n, self.out),
            bias: random.numbers(n, DType::F32),
            second: self.also.map(|(_, depth)| [m, n].map(|len| random.numbers(len * depth, self.dtype))),
        }
    }

    /// The output, and the preactivation if there is one.
    fn launch(&self, queue: &Queue) -> Vec<Tensor> {
        let [m, n, k] = self.dims;
        let operands = self.operands();
        let matrices = |order: Order, depth: usize, [a, b]: [&[f32]; 2]| {
            let [a_shape, b_shape] = match order {
                Order::NN => [[m, depth], [depth, n]],
                Order::NT => [[m, depth], [n, depth]],
                Order::TN => [[depth, m], [depth, n]],
            };
            [(a_shape, a), (b_shape, b)]
                .map(|([rows, cols], values)| strided(queue, rows, cols, self.padding, self.dtype, values))
        };
        let [a, b] = matrices(self.order, k, [&operands.a, &operands.b]);
        let second = self.also.zip(operands.second.as_ref());
        let second = second.map(|((order, depth), [a, b])| (order, matrices(order, depth, [a, b])));
        let out = strided(queue, m, n, self.padding, self.out, &operands.before);
        let bias = self.bias.then(|| queue.floats(1, n, DType::F32, &operands.bias));
        let preactivation = self.preactivation.then(|| strided(queue, m, n, self.padding, self.out, &operands.before));
        queue.launch(Product {
            scale: self.scale,
            also: second.as_ref().map(|(order, [a, b])| Term::new(*order, a, b)),
            accumulate: self.accumulate,
            bias: bias.as_ref().map(|bias| bias.view()),
            activation: self.activation,
            preactivation: preactivation.as_ref().map(|tensor| tensor.view()),
            ..Product::new(self.order, &a, &b, &out)
        });
        std::iter::once(out).chain(preactivation).collect()
    }

    /// A GPU's tensor units cut off the last bits of each partial sum, which shows in long ones.
    fn tolerance(&self) -> f64 {
        let is_cut_off = on_cuda() && self.dtype == DType::Bf16 && self.dims[2] > 2000;
        tolerance(self.out) * if is_cut_off { 2.0 } else { 1.0 }
    }

    /// The plain twin.
    fn expected(&self) -> Vec<Vec<f64>> {
        let [m, n, k] = self.dims;
        let operands = self.operands();
        let mut sums = vec![0.0; m * n];
        for i in 0..m {
            for j in 0..n {
                let product = |order: Order, depth: usize, [a, b]: [&[f32]; 2]| -> f64 {
                    let a = |p: usize| a[if order == Order::TN { p * m + i } else { i * depth + p }] as f64;
                    let b = |p: usize| b[if order == Order::NT { j * depth + p } else { p * n + j }] as f64;
                    (0..depth).map(|p| a(p) * b(p)).sum()
                };
                let mut sum = product(self.order, k, [&operands.a, &operands.b]);
                if let (Some((order, depth)), Some([a, b])) = (self.also, &operands.second) {
                    sum += product(order, depth, [a, b]);
                }
                sum *= self.scale as f64;
                sum += if self.accumulate { operands.before[i * n + j] as f64 } else { 0.0 };
                sum += if self.bias { operands.bias[j] as f64 } else { 0.0 };
                sums[i * n + j] = sum;
            }
        }
        let out =
            sums.iter().map(|&sum| self.activation.map_or(sum, |activation| activated(activation, sum))).collect();
        if self.preactivation { vec![out, sums] } else { vec![out] }
    }
}

struct Operands {
    a: Vec<f32>,
    b: Vec<f32>,
    before: Vec<f32>,
    bias: Vec<f32>,
    second: Option<[Vec<f32>; 2]>,
}

fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Tanh => x.tanh(),
    }
}

fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

#[track_caller]
fn check(cases: &[Case]) {
    let results = run(|queue| cases.iter().flat_map(|case| case.launch(queue)).collect());
    let expected: Vec<(Case, Vec<f64>)> =
        cases.iter().flat_map(|case| case.expected().into_iter().map(|values| (*case, values))).collect();
    assert_eq!(results.len(), expected.len());
    for (actual, (case, expected)) in results.iter().zip(expected) {
        assert_close(&format!("{case:?}"), actual, &expected, case.tolerance());
    }
}

/// Every order, dtype and shape.
fn all() -> impl Iterator<Item = Case> {
    let orders = |dtype| ORDERS.into_iter().map(move |order| (order, dtype));
    let kinds = DTYPES.into_iter().flat_map(orders);
    kinds.flat_map(|(order, dtype)| SHAPES.into_iter().map(move |dims| Case::plain(order, dims, dtype)))
}

#[test]
fn products_of_every_order_and_odd_shape_agree_with_f64() {
    check(&all().collect::<Vec<_>>());
}

#[test]
fn strided_operands_are_read_and_written_inside_their_rows_only() {
    for padding in [1, 5, 32] {
        check(&all().map(|case| Case { padding, ..case }).collect::<Vec<_>>());
    }
}

#[test]
fn the_gaps_between_the_rows_of_an_output_are_left_alone() {
    for dtype in DTYPES {
        let results = run(|queue| {
            let a = queue.floats(33, 40, dtype, &vec![1.0; 33 * 40]);
            let b = queue.floats(40, 35, dtype, &vec![1.0; 40 * 35]);
            let whole = queue.floats(33, 50, dtype, &vec![7.0; 33 * 50]);
            queue.launch(Product::new(Order::NN, &a, &b, &whole.col_range(3..38)));
            vec![whole]
        });
        for (i, &value) in results[0].iter().enumerate() {
            assert_eq!(value, if (3..38).contains(&(i % 50)) { 40.0 } else { 7.0 }, "element {i} of {dtype:?}");
        }
    }
}

/// One dim is as small as an adapter's rank. The other sizes fill whole blocks of a GPU's kernels and not.
#[test]
fn products_with_one_small_dim_agree_with_f64() {
    const LENGTHS: [[usize; 2]; 3] = [[128, 256], [200, 520], [264, 1032]];
    let small = [8, 24, 32].into_iter().flat_map(|small| LENGTHS.map(|[long, depth]| (small, long, depth)));
    let of_rank = small.flat_map(|(small, long, depth)| {
        let case = |order, dims| Case { padding: 8, ..Case::plain(order, dims, DType::Bf16) };
        let gradient = |dims| Case { out: DType::F32, scale: 0.5, ..case(Order::TN, dims) };
        [
            Case { scale: 0.25, ..case(Order::NT, [long, small, depth]) },
            case(Order::NN, [long, small, depth]),
            gradient([small, long, depth]),
            Case { accumulate: true, ..gradient([long, small, depth]) },
            case(Order::TN, [long, small, depth]),
        ]
    });
    check(&of_rank.collect::<Vec<_>>());
}

/// A GPU computes these as one product.
#[test]
fn the_second_products_operands_may_lie_beside_the_firsts() {
    const M: usize = 70;
    const N: usize = 48;
    const K: usize = 96;
    const RANK: usize = 16;
    for dtype in DTYPES {
        let results = run(|queue| {
            let mut random = Random::new(5);
            let mut matrix =
                |rows: usize, cols: usize| queue.floats(rows, cols, dtype, &random.numbers(rows * cols, dtype));
            let (a, beside, below) = (matrix(M, K + RANK), matrix(N, K + RANK), matrix(K + RANK, N));
            let [apart, beside_apart, below_apart] = [matrix(M, RANK), matrix(N, RANK), matrix(RANK, N)];
            let copies = [
                (a.col_range(K..K + RANK), &apart),
                (beside.col_range(K..K + RANK), &beside_apart),
                (below.row_range(K..K + RANK), &below_apart),
            ];
            copies.iter().for_each(|(x, out)| queue.launch(Copy { x: x.view(), out: out.view() }));
            let product = |order, b: &Tensor, also| {
                let out = queue.tensor(M, N, DType::F32);
                queue.launch(Product { also: Some(also), ..Product::new(order, &a.col_range(0..K), b, &out) });
                out
            };
            let (w, v) = (beside.col_range(0..K), below.row_range(0..K));
            vec![
                product(Order::NT, &w, Term::new(Order::NT, &copies[0].0, &copies[1].0)),
                product(Order::NT, &w, Term::new(Order::NT, &apart, &beside_apart)),
                product(Order::NN, &v, Term::new(Order::NN, &copies[0].0, &copies[2].0)),
                product(Order::NN, &v, Term::new(Order::NN, &apart, &below_apart)),
            ]
        });
        for pair in results.chunks_exact(2) {
            let expected: Vec<f64> = pair[1].iter().map(|&value| value as f64).collect();
            assert_close(&format!("{dtype:?}"), &pair[0], &expected, tolerance(DType::F32));
        }
    }
}

#[test]
fn results_have_either_dtype_whatever_the_operands_have() {
    let other = |dtype| if dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
    check(&all().map(|case| Case { out: other(case.dtype), ..case }).collect::<Vec<_>>());
}

#[test]
fn accumulating_adds_to_what_is_there() {
    for out in DTYPES {
        check(&all().map(|case| Case { out, accumulate: true, padding: 3, ..case }).collect::<Vec<_>>());
    }
}

#[test]
fn bias_and_activation_follow_the_product_and_the_preactivation_is_kept() {
    let activations = [
        None,
        Some(Activation::Silu),
        Some(Activation::GeluErf),
        Some(Activation::GeluTanh),
        Some(Activation::Relu),
        Some(Activation::Sigmoid),
        Some(Activation::Tanh),
    ];
    for activation in activations {
        for bias in [false, true] {
            let preactivation = bias && activation.is_some();
            // Sums of many terms are so large that every activation is the identity or zero.
            let shallow = all().filter(|case| case.dims[2] <= 96);
            let cases = shallow.map(|case| Case { bias, activation, preactivation, padding: 2, ..case });
            check(&cases.collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_second_product_is_added_before_bias_and_activation() {
    for (order, depth) in ORDERS.into_iter().zip([16, 3, 40]) {
        let with = all().map(|case| Case { also: Some((order, depth)), padding: 3, ..case });
        let with: Vec<Case> = with.collect();
        let of = |change: fn(Case) -> Case| with.iter().copied().map(change).collect::<Vec<_>>();
        check(&with);
        check(&of(|case| Case { padding: 0, ..case }));
        check(&of(|case| Case { accumulate: true, ..case }));
        check(&of(|case| Case { out: DType::F32, scale: 0.25, ..case }));
        let mut activated = of(|case| Case {
            bias: true,
            activation: Some(Activation::GeluTanh),
            preactivation: true,
            scale: 0.125,
            ..case
        });
        activated.retain(|case| case.dims[2] <= 96);
        check(&activated);
    }
}

#[test]
fn a_scale_multiplies_the_sums_and_nothing_else() {
    check(&all().map(|case| Case { scale: 0.3, padding: 1, ..case }).collect::<Vec<_>>());
    check(&all().map(|case| Case { scale: -2.5, accumulate: true, ..case }).collect::<Vec<_>>());
    check(&all().map(|case| Case { scale: 0.5, bias: true, ..case }).collect::<Vec<_>>());
}

/// A second product needs more working memory than the one before it, whose packed operand it shares.
#[test]
fn a_second_product_leaves_the_first_ones_packed_operands_alone() {
    const N: usize = 96;
    for (dtype, order) in DTYPES.into_iter().flat_map(|dtype| ORDERS.map(|order| (dtype, order))) {
        run(|queue| {
            let mut random = Random::new(11);
            let mut matrix =
                |rows: usize, cols: usize| queue.floats(rows, cols, dtype, &random.numbers(rows * cols, dtype));
            let [x, w, v] = [matrix(N, N), matrix(N, N), matrix(N, N)];
            let (s, b) = (matrix(N, 700), matrix(N, 700));
            let launch = |w: &Tensor, also: Option<Term>| {
                let out = queue.zeros(N, N, DType::F32);
                queue.launch(Product { also, ..Product::new(order, &x, w, &out) });
                out
            };
            let also = Some(Term::new(Order::NT, &s, &b));
            // Reading back clears what is kept, so these are computed one by one.
            let alone = [(&w, None), (&v, None), (&w, also), (&v, also)];
            let alone = alone.map(|(weight, also)| queue.read(&launch(weight, also)));
            let mut outs = Vec::new();
            for (weight, also) in [(&w, None), (&w, also), (&v, also), (&v, None), (&w, also)] {
                outs.push(launch(weight, also));
            }
            for (out, expected) in outs.iter().zip([0, 2, 3, 1, 2]) {
                assert!(queue.read(out) == alone[expected], "{dtype:?} {order:?}");
            }
            Vec::new()
        });
    }
}

#[test]
fn products_without_depth_are_zero_and_empty_ones_are_nothing() {
    for dtype in DTYPES {
        for order in ORDERS {
            let case = Case { bias: true, ..Case::plain(order, [5, 7, 0], dtype) };
            let bias: Vec<f32> = case.operands().bias.iter().map(|&bias| rounded(bias, dtype)).collect();
            let results = run(|queue| case.launch(queue));
            assert_eq!(results[0], bias.repeat(5), "{order:?} {dtype:?}");
            for dims in [[0, 7, 3], [7, 0, 3], [0, 0, 0]] {
                assert!(run(|queue| Case::plain(order, dims, dtype).launch(queue))[0].is_empty());
            }
        }
    }
}

#[test]
fn a_product_of_many_tasks_agrees_with_f64() {
    for dtype in DTYPES {
        let plain = ORDERS.map(|order| Case::plain(order, [515, 770, 130], dtype));
        let activation = Some(Activation::GeluTanh);
        check(&plain);
        check(&plain.map(|case| Case { bias: true, ..case }));
        check(&plain.map(|case| Case { bias: true, activation, preactivation: true, ..case }));
        // Rows of whole sixteen bytes: a GPU's library may then compute the activation with the product.
        let whole =
            ORDERS.map(|order| Case { activation, preactivation: true, ..Case::plain(order, [520, 768, 136], dtype) });
        check(&whole);
        check(&whole.map(|case| Case { bias: true, ..case }));
    }
}

/// Products that share an operand may pack it once, as long as it is not written to.
#[test]
fn operands_that_change_between_products_are_read_again() {
    const N: usize = 96;
    for (dtype, order) in DTYPES.into_iter().flat_map(|dtype| ORDERS.map(|order| (dtype, order))) {
        run(|queue| {
            let mut random = Random::new(7);
            let mut matrix = || queue.floats(N, N, dtype, &random.numbers(N * N, dtype));
            let [x, w, v, other] = [matrix(), matrix(), matrix(), matrix()];
            let product = |a: &Tensor, b: &Tensor| {
                let out = queue.zeros(N, N, DType::F32);
                queue.launch(Product::new(order, a, b, &out));
                queue.read(&out)
            };
            // Reading back clears what is kept, so these are computed one by one.
            let expected = [product(&x, &w), product(&x, &v), product(&other, &v), product(&v, &v)];
            let outs = [(); 4].map(|_| queue.zeros(N, N, DType::F32));
            let launch = |a: &Tensor, b: &Tensor, out: &Tensor| queue.launch(Product::new(order, a, b, out));
            launch(&x, &w, &outs[0]);
            launch(&x, &v, &outs[1]);
            queue.launch(Copy { x: other.view(), out: x.view() });
            launch(&x, &v, &outs[2]);
            // A product that writes over an operand of the last one.
            let identity: Vec<f32> = (0..N * N).map(|i| f32::from(i % N == i / N)).collect();
            let identity = queue.floats(N, N, dtype, &identity);
            launch(&x, &v, &outs[3]);
            match order {
                Order::NN | Order::NT => queue.launch(Product::new(Order::NN, &v, &identity, &x)),
                Order::TN => queue.launch(Product::new(Order::NN, &identity, &v, &x)),
            }
            launch(&x, &v, &outs[3]);
            for (out, expected) in outs.iter().zip(&expected) {
                assert!(&queue.read(out) == expected, "{dtype:?} {order:?}");
            }
            Vec::new()
        });
    }
}
