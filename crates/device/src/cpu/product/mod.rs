//! Products of matrices.
//!
//! On AVX-512 and AMX the right operand is packed once by the whole team into panels that every task reads, and the left one is
//! read in place if possible ([`operands`], [`grid`]). Tiles compute the transpose where that leaves the larger operand in place. A
//! level brings only the multiplication of one panel by another: [`mod@f32`], [`avx512_bf16`], [`amx`]. Every other CPU uses the
//! `gemm-f32` crate, task by task ([`portable`]). Products with an operand of few columns are bound by memory and have loops or
//! levels that pack less ([`thin`]).
//!
//! Whatever the level, the output is cut in tasks by shape alone and sums are added along K in one fixed order, so the result has the
//! same bits on any number of threads. Bias, activation and rounding happen on each tile while it is hot ([`epilogue`]).

mod epilogue;
mod portable;
mod thin;

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod f32;
#[cfg(target_arch = "x86_64")]
mod grid;
#[cfg(target_arch = "x86_64")]
mod operands;
#[cfg(target_arch = "x86_64")]
mod pack;

use super::features::{Bf16Level, F32Level, bf16_level, f32_level};
use super::matrix::{Element, with_element};
use super::team::LEAST_TASKS;
use super::{Run, Team, WorkingMemory};
use crate::DType;
#[cfg(target_arch = "x86_64")]
use crate::kernel::Order;
use crate::kernel::Product;
use epilogue::Epilogue;

impl Run for Product {
    fn run(&self, team: &mut Team) {
        run_at(self, f32_level(), bf16_level(), team);
    }

    fn working_memory(&self) -> WorkingMemory {
        if thin::is_thin(self) {
            thin::working_memory()
        } else {
            working_memory_at(self, f32_level(), bf16_level(), LEAST_TASKS)
        }
    }
}

/// Computes at the given levels, which this CPU must have.
fn run_at(product: &Product, f32: F32Level, bf16: Bf16Level, team: &mut Team) {
    let [m, n, _] = product.dims();
    if m > 0 && n > 0 {
        with_element!(product.out.dtype, O => {
            let epilogue = Epilogue::<O>::new(product);
            if thin::is_thin(product) {
                team.forget_operands();
                thin::run(product, &epilogue, team);
            } else {
                dispatch(product, &epilogue, f32, bf16, team);
            }
        });
    }
}

/// Splitting a left operand in parts for tiles takes longer than multiplying it with so few columns.
#[cfg(target_arch = "x86_64")]
fn f32_level_of(product: &Product, level: F32Level) -> F32Level {
    const FEW_COLUMNS: usize = 32;
    if product.order != Order::TN && product.out.cols <= FEW_COLUMNS { level.min(F32Level::Avx512) } else { level }
}

#[cfg(target_arch = "x86_64")]
fn dispatch<O: Element>(product: &Product, epilogue: &Epilogue<O>, f32: F32Level, bf16: Bf16Level, team: &mut Team) {
    use grid::run_tiles;
    let run = match (product.a.dtype, f32_level_of(product, f32), bf16) {
        (DType::F32, F32Level::AmxTiles, _) => run_tiles::<amx::TilesOfParts, O>,
        (DType::F32, F32Level::Avx512, _) => run_tiles::<f32::Fma, O>,
        (DType::Bf16, _, Bf16Level::AmxTiles) => run_tiles::<amx::Tiles, O>,
        (DType::Bf16, _, Bf16Level::Avx512Bf16) => run_tiles::<avx512_bf16::Dots, O>,
        _ => {
            team.forget_operands();
            return portable::run(product, epilogue, team);
        }
    };
    // SAFETY: the CPU has the level, as `run_at` requires.
    unsafe { run(product, epilogue, team) };
}

#[cfg(target_arch = "x86_64")]
fn working_memory_at(product: &Product, f32: F32Level, bf16: Bf16Level, least_tasks: usize) -> WorkingMemory {
    use grid::working_memory;
    match (product.a.dtype, f32_level_of(product, f32), bf16) {
        (DType::F32, F32Level::AmxTiles, _) => working_memory::<amx::TilesOfParts>(product, least_tasks),
        (DType::F32, F32Level::Avx512, _) => working_memory::<f32::Fma>(product, least_tasks),
        (DType::Bf16, _, Bf16Level::AmxTiles) => working_memory::<amx::Tiles>(product, least_tasks),
        (DType::Bf16, _, Bf16Level::Avx512Bf16) => working_memory::<avx512_bf16::Dots>(product, least_tasks),
        _ => WorkingMemory::of_thread(portable::task_floats(product)),
    }
}

/// The length of the fewest equal parts that are no longer than `most`, filled up to whole steps; one step at least.
pub(super) fn even_parts(len: usize, most: usize, step: usize) -> usize {
    len.div_ceil(len.div_ceil(most).max(1)).next_multiple_of(step).max(step)
}

/// The most that any of the products `of(1)` to `of(rows)` needs, which differ in how many rows of `a` they have, in a team that
/// wants so many tasks.
pub(super) fn most_working_memory(of: &dyn Fn(usize) -> Product, rows: usize, least_tasks: usize) -> WorkingMemory {
    most_working_memory_at(of, rows, f32_level(), bf16_level(), least_tasks)
}

#[cfg(target_arch = "x86_64")]
fn most_working_memory_at(
    of: &dyn Fn(usize) -> Product,
    rows: usize,
    f32: F32Level,
    bf16: Bf16Level,
    least_tasks: usize,
) -> WorkingMemory {
    use grid::most_working_memory;
    // Rows of `a` change neither of these.
    let whole = of(rows);
    if thin::is_thin(&whole) {
        return thin::working_memory();
    }
    match (whole.a.dtype, f32_level_of(&whole, f32), bf16) {
        (DType::F32, F32Level::AmxTiles, _) => most_working_memory::<amx::TilesOfParts>(of, rows, least_tasks),
        (DType::F32, F32Level::Avx512, _) => most_working_memory::<f32::Fma>(of, rows, least_tasks),
        (DType::Bf16, _, Bf16Level::AmxTiles) => most_working_memory::<amx::Tiles>(of, rows, least_tasks),
        (DType::Bf16, _, Bf16Level::Avx512Bf16) => most_working_memory::<avx512_bf16::Dots>(of, rows, least_tasks),
        _ => working_memory_at(&whole, f32, bf16, least_tasks),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn most_working_memory_at(
    of: &dyn Fn(usize) -> Product,
    rows: usize,
    f32: F32Level,
    bf16: Bf16Level,
    least_tasks: usize,
) -> WorkingMemory {
    let whole = of(rows);
    if thin::is_thin(&whole) { thin::working_memory() } else { working_memory_at(&whole, f32, bf16, least_tasks) }
}

#[cfg(not(target_arch = "x86_64"))]
fn working_memory_at(product: &Product, _: F32Level, _: Bf16Level, _: usize) -> WorkingMemory {
    WorkingMemory::of_thread(portable::task_floats(product))
}

#[cfg(not(target_arch = "x86_64"))]
fn dispatch<O: Element>(product: &Product, epilogue: &Epilogue<O>, _: F32Level, _: Bf16Level, team: &mut Team) {
    portable::run(product, epilogue, team);
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::team::LEAST_TASKS_ALONE;
    use super::*;
    use crate::kernel::{Order, Term};
    use crate::{Extent, View};
    use half::bf16;

    fn view<E: Element>(values: &[E], rows: usize, cols: usize) -> View {
        assert_eq!(values.len(), rows * cols);
        View::new(values.as_ptr() as u64, Extent { rows, cols, stride: cols, dtype: E::DTYPE })
    }

    fn numbers<E: Element>(len: usize, seed: usize) -> Vec<E> {
        let mut state = seed as u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| E::from_f32(next())).collect()
    }

    /// The relative error by norm of a product computed at the given levels against sums in f64.
    fn error<E: Element>(order: Order, [m, n, k]: [usize; 3], f32: F32Level, bf16: Bf16Level) -> f64 {
        let (a, b) = (numbers::<E>(m * k, 1), numbers::<E>(k * n, 2));
        let mut out = vec![f32::NAN; m * n];
        let (a_view, b_view) = match order {
            Order::NN => (view(&a, m, k), view(&b, k, n)),
            Order::NT => (view(&a, m, k), view(&b, n, k)),
            Order::TN => (view(&a, k, m), view(&b, k, n)),
        };
        let mut team = Team::start("test", 2, |_| ()).unwrap();
        let out_view = View::new(out.as_mut_ptr() as u64, *view(&out, m, n));
        run_at(&Product::new(order, a_view, b_view, out_view), f32, bf16, &mut team);
        let (mut difference, mut size) = (0.0, 0.0);
        for i in 0..m {
            for j in 0..n {
                let left = |p: usize| a[if order == Order::TN { p * m + i } else { i * k + p }].to_f32() as f64;
                let right = |p: usize| b[if order == Order::NT { j * k + p } else { p * n + j }].to_f32() as f64;
                let expected: f64 = (0..k).map(|p| left(p) * right(p)).sum();
                difference += (out[i * n + j] as f64 - expected).powi(2);
                size += expected.powi(2);
            }
        }
        (difference / size).sqrt()
    }

    // Slabs are small in tests, so the deep product takes several of each operand.
    #[test]
    fn every_level_this_cpu_has_computes_every_order() {
        for dims in [
            [1, 1, 1],
            [8, 48, 32],
            [33, 50, 70],
            [70, 130, 1100],
            [40, 31, 3],
            [5, 70, 2112],
            [45, 40, 96],
            [40, 200, 2112],
        ] {
            for order in [Order::NN, Order::NT, Order::TN] {
                for level in [Bf16Level::Widen, Bf16Level::Avx512Bf16, Bf16Level::AmxTiles] {
                    // Tiles and dot products exist beside each other; a CPU may have the upper one without the lower.
                    let lacking = level == Bf16Level::Avx512Bf16 && !is_x86_feature_detected!("avx512bf16");
                    if level <= bf16_level() && !lacking {
                        let error = error::<bf16>(order, dims, f32_level(), level);
                        assert!(error < 2e-6, "bf16 {order:?} {dims:?} at {level:?}: {error:.1e}");
                    }
                }
                for level in [F32Level::Gemm, F32Level::Avx512, F32Level::AmxTiles] {
                    if level <= f32_level() {
                        let error = error::<f32>(order, dims, level, Bf16Level::Widen);
                        assert!(error < 2e-6, "f32 {order:?} {dims:?} at {level:?}: {error:.1e}");
                    }
                }
            }
        }
    }

    // The first term's left operand is copied in slabs of rows; the second's could be read in place, where no slab would find its rows.
    #[test]
    fn a_second_term_follows_the_first_ones_slabs() {
        const M: usize = 70;
        const N: usize = 130;
        let (first_a, first_b) = (numbers::<bf16>(1100 * M, 1), numbers::<bf16>(1100 * N, 2));
        let (second_a, second_b) = (numbers::<bf16>(M * 64, 3), numbers::<bf16>(N * 64, 4));
        let run = |is_joined: bool| {
            let out = vec![0f32; M * N];
            let first = Product::new(Order::TN, view(&first_a, 1100, M), view(&first_b, 1100, N), view(&out, M, N));
            let second = Product::new(Order::NT, view(&second_a, M, 64), view(&second_b, N, 64), view(&out, M, N));
            let mut team = Team::start("test", 2, |_| ()).unwrap();
            if is_joined {
                let also = Some(Term { order: second.order, a: second.a, b: second.b });
                Product { also, ..first }.run(&mut team);
            } else {
                first.run(&mut team);
                second.accumulating().run(&mut team);
            }
            out
        };
        for (i, (joined, separate)) in run(true).into_iter().zip(run(false)).enumerate() {
            assert!((joined - separate).abs() < 1e-3, "element {i}: {joined} and {separate}");
        }
    }

    #[test]
    fn a_products_working_memory_is_known_from_its_shape_at_every_level() {
        for dims in [[1, 1, 1], [8, 48, 32], [33, 50, 70], [300, 130, 1100], [40, 700, 3]] {
            let [m, n, k] = dims;
            for order in [Order::NN, Order::NT, Order::TN] {
                let views = |dtype| {
                    let view = |rows, cols, dtype| View::new(0, Extent { rows, cols, stride: cols, dtype });
                    let (rows, cols) = if order == Order::TN { (k, m) } else { (m, k) };
                    let (b_rows, b_cols) = if order == Order::NT { (n, k) } else { (k, n) };
                    (view(rows, cols, dtype), view(b_rows, b_cols, dtype), view(m, n, DType::F32))
                };
                for f32 in [F32Level::Gemm, F32Level::Avx512, F32Level::AmxTiles] {
                    if f32 <= f32_level() {
                        let (a, b, out) = views(DType::F32);
                        check_working_memory(Product::new(order, a, b, out), f32, Bf16Level::Widen);
                    }
                }
                for bf16 in [Bf16Level::Widen, Bf16Level::Avx512Bf16, Bf16Level::AmxTiles] {
                    let lacking = bf16 == Bf16Level::Avx512Bf16 && !is_x86_feature_detected!("avx512bf16");
                    if bf16 <= bf16_level() && !lacking {
                        let (a, b, out) = views(DType::Bf16);
                        check_working_memory(Product::new(order, a, b, out), f32_level(), bf16);
                    }
                }
            }
        }
    }

    /// Runs the product with a new team, and compares the team's memory with the forecast.
    fn check_working_memory(product: Product, f32: F32Level, bf16: Bf16Level) {
        let memory = [product.a, product.b, product.out].map(|view| vec![0f32; view.rows * view.cols]);
        let at = |view: View, memory: &[f32]| View::new(memory.as_ptr() as u64, *view);
        let [a, b, out] = [(product.a, 0), (product.b, 1), (product.out, 2)].map(|(view, i)| at(view, &memory[i]));
        let product = Product::new(product.order, a, b, out);
        let mut team = Team::start("test", 1, |_| ()).unwrap();
        run_at(&product, f32, bf16, &mut team);
        let dims = product.dims();
        let foretold = working_memory_at(&product, f32, bf16, team.least_tasks());
        assert_eq!(team.working_memory(), foretold, "{:?} {dims:?} at {f32:?}, {bf16:?}", product.order);
    }

    #[test]
    fn the_most_memory_of_some_rows_is_that_of_trying_all() {
        for (rows, inner, cols) in [
            (1, 5, 3),
            (70, 40, 50),
            (1500, 33, 70),
            (1200, 300, 16),
            (5000, 64, 48),
            (300, 64, 200),
            (90, 2112, 70),
            (300, 2112, 192),
        ] {
            for (order, dtype) in
                [Order::NN, Order::NT, Order::TN].into_iter().flat_map(|o| [(o, DType::F32), (o, DType::Bf16)])
            {
                let of = |rows: usize| {
                    let view = |rows, cols| View::new(0, Extent { rows, cols, stride: cols, dtype });
                    let b = match order {
                        Order::NN => view(inner, cols),
                        Order::NT => view(cols, inner),
                        Order::TN => view(rows, cols),
                    };
                    let out = view(if order == Order::TN { inner } else { rows }, cols);
                    Product::new(order, view(rows, inner), b, out)
                };
                let levels = [F32Level::Gemm, F32Level::Avx512, F32Level::AmxTiles].into_iter().flat_map(|f32| {
                    [Bf16Level::Widen, Bf16Level::Avx512Bf16, Bf16Level::AmxTiles].map(|bf16| (f32, bf16))
                });
                for (f32, bf16) in levels {
                    for least_tasks in [LEAST_TASKS, LEAST_TASKS_ALONE] {
                        let need = |rows| match of(rows) {
                            product if thin::is_thin(&product) => thin::working_memory(),
                            product => working_memory_at(&product, f32, bf16, least_tasks),
                        };
                        let all = (1..=rows).map(need).reduce(WorkingMemory::max).unwrap();
                        let found = most_working_memory_at(&of, rows, f32, bf16, least_tasks);
                        assert_eq!(found, all, "{rows} rows, {order:?} {inner} {cols} {dtype:?} {f32:?} {bf16:?}");
                    }
                }
            }
        }
    }

    // Numbers of many sizes, whose three parts reach far down: a missing part or product of parts shows.
    #[test]
    fn tiles_of_parts_err_no_more_than_half_as_much_again_as_fused_multiply_adds() {
        if f32_level() < F32Level::AmxTiles {
            println!("skipped: this CPU has no AMX tiles");
            return;
        }
        for order in [Order::NN, Order::NT, Order::TN] {
            for dims in [[64, 64, 32], [64, 96, 512], [96, 64, 4096]] {
                let of = |level| error::<f32>(order, dims, level, Bf16Level::Widen);
                let (tiles, fused) = (of(F32Level::AmxTiles), of(F32Level::Avx512));
                assert!(tiles <= 1.5 * fused, "{order:?} {dims:?}: {tiles:.2e} by tiles, {fused:.2e} fused");
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_at_every_level() {
        for strange in
            [f32::NAN, f32::from_bits(0x7fff_ffff), f32::from_bits(0xff80_0001), f32::INFINITY, -f32::INFINITY]
        {
            for level in [F32Level::Gemm, F32Level::Avx512, F32Level::AmxTiles] {
                if level <= f32_level() {
                    let (mut a, b) = (numbers::<f32>(40 * 40, 1), numbers::<f32>(40 * 40, 2));
                    a[5 * 40 + 7] = strange;
                    let mut out = vec![0f32; 40 * 40];
                    let out_view = View::new(out.as_mut_ptr() as u64, *view(&out, 40, 40));
                    let mut team = Team::start("test", 1, |_| ()).unwrap();
                    let product = Product::new(Order::NN, view(&a, 40, 40), view(&b, 40, 40), out_view);
                    run_at(&product, level, Bf16Level::Widen, &mut team);
                    let finite: Vec<bool> = out.chunks(40).map(|row| row.iter().all(|x| x.is_finite())).collect();
                    assert!((0..40).all(|row| finite[row] == (row != 5)), "{strange} at {level:?}: {finite:?}");
                }
            }
        }
    }
}
