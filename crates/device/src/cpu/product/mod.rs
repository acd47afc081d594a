//! Products of matrices.
//!
//! On AVX-512 and AMX the right operand is packed once by the whole team into panels that every task reads, and the left
//! one is read where it lies if it can be ([`grid`]). A level brings only the multiplication of one panel by another:
//! [`mod@f32`], [`avx512_bf16`], [`amx`]. Every other CPU uses the `gemm` crate, task by task ([`portable`]).
//!
//! Both cut the output in tasks by shape alone and add along K in one fixed order, so the result has the same bits on
//! any number of threads. Bias, activation and rounding happen on each tile while it is hot ([`epilogue`]).

mod epilogue;
mod portable;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod f32;
#[cfg(target_arch = "x86_64")]
mod grid;
#[cfg(target_arch = "x86_64")]
mod pack;

use super::features::{Bf16Level, VectorLevel, bf16_level, vector_level};
use super::matrix::{Element, with_element};
use super::{Run, Team};
use crate::DType;
use crate::kernel::Product;
use epilogue::Epilogue;

impl Run for Product {
    fn run(&self, team: &mut Team) {
        run_at(self, vector_level(), bf16_level(), team);
    }
}

/// Computes with the means of the given levels, which this CPU must have.
fn run_at(product: &Product, vectors: VectorLevel, bf16: Bf16Level, team: &mut Team) {
    let [m, n, _] = product.dims();
    if m > 0 && n > 0 {
        with_element!(product.out.dtype, O => {
            let epilogue = Epilogue::<O>::new(product);
            dispatch(product, &epilogue, vectors, bf16, team);
        });
    }
}

#[cfg(target_arch = "x86_64")]
fn dispatch<O: Element>(
    product: &Product,
    epilogue: &Epilogue<O>,
    vectors: VectorLevel,
    bf16: Bf16Level,
    team: &mut Team,
) {
    use grid::run_tiles;
    match (product.a.dtype, vectors, bf16) {
        // SAFETY: the CPU has the level, as `run_at` requires.
        (DType::F32, VectorLevel::Avx512, _) => unsafe { run_tiles::<f32::Fma, O>(product, epilogue, team) },
        // SAFETY: as above.
        (DType::Bf16, _, Bf16Level::AmxTiles) => unsafe { run_tiles::<amx::Tiles, O>(product, epilogue, team) },
        // SAFETY: as above.
        (DType::Bf16, _, Bf16Level::Avx512Bf16) => unsafe {
            run_tiles::<avx512_bf16::Pairs, O>(product, epilogue, team)
        },
        _ => portable::run(product, epilogue, team),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn dispatch<O: Element>(product: &Product, epilogue: &Epilogue<O>, _: VectorLevel, _: Bf16Level, team: &mut Team) {
    portable::run(product, epilogue, team);
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::View;
    use crate::kernel::Order;
    use half::bf16;

    fn view<E: Element>(values: &[E], rows: usize, cols: usize) -> View {
        assert_eq!(values.len(), rows * cols);
        View { address: values.as_ptr() as u64, rows, cols, stride: cols, dtype: E::DTYPE }
    }

    fn numbers<E: Element>(len: usize, seed: usize) -> Vec<E> {
        (0..len).map(|i| E::from_f32(((i * 7919 + seed * 104729) % 1009) as f32 / 504.5 - 1.0)).collect()
    }

    /// The relative error by norm of a product computed at the given levels against sums in f64.
    fn error<E: Element>(order: Order, [m, n, k]: [usize; 3], vectors: VectorLevel, level: Bf16Level) -> f64 {
        let (a, b) = (numbers::<E>(m * k, 1), numbers::<E>(k * n, 2));
        let out = vec![f32::NAN; m * n];
        let (a_view, b_view) = match order {
            Order::NN => (view(&a, m, k), view(&b, k, n)),
            Order::NT => (view(&a, m, k), view(&b, n, k)),
            Order::TN => (view(&a, k, m), view(&b, k, n)),
        };
        let mut team = Team::start("test", 2, |_| ()).unwrap();
        run_at(&Product::new(order, a_view, b_view, view(&out, m, n)), vectors, level, &mut team);
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
        for dims in [[1, 1, 1], [8, 48, 32], [33, 50, 70], [70, 130, 1100], [40, 31, 3]] {
            for order in [Order::NN, Order::NT, Order::TN] {
                for level in [Bf16Level::Widen, Bf16Level::Avx512Bf16, Bf16Level::AmxTiles] {
                    // Tiles and dot products exist beside each other; a CPU may have the upper one without the lower.
                    let lacking = level == Bf16Level::Avx512Bf16 && !is_x86_feature_detected!("avx512bf16");
                    if level <= bf16_level() && !lacking {
                        let error = error::<bf16>(order, dims, vector_level(), level);
                        assert!(error < 2e-6, "bf16 {order:?} {dims:?} at {level:?}: {error:.1e}");
                    }
                }
                for vectors in [VectorLevel::Portable, VectorLevel::Avx512] {
                    if vectors <= vector_level() {
                        let error = error::<f32>(order, dims, vectors, Bf16Level::Widen);
                        assert!(error < 2e-6, "f32 {order:?} {dims:?} at {vectors:?}: {error:.1e}");
                    }
                }
            }
        }
    }
}
