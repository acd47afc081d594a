//! Products of matrices, by cuBLASLt.
//!
//! cuBLASLt's matrices are column-major, so it sees the transposes of ours: outᵀ = bᵀ·aᵀ. Its "A" is our `b`, its "B" our `a`,
//! and a bias along our columns is one along its rows, which its epilogue adds before rounding.
//!
//! GELU by the hyperbolic tangent is another epilogue of it. A kernel of ours does the rest on its output (other activations,
//! f32 operands into bf16, zero depth).

mod plan;

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::cublaslt::{result as lt, sys};

use super::context::Properties;
use super::modules::PRODUCT;
use super::rows::{Matrix, Mixed, Walk};
use super::stream::arguments;
use super::{CudaError, Run, Stream};
use crate::kernel::{Activation, Order, Product, Term};
use crate::{DType, Extent, View};
pub(super) use plan::ProductCall;
use plan::{Bias, Operands, Plan, PlanKey};

/// cuBLASLt's own working memory.
pub(super) const WORKSPACE_BYTES: u64 = 64 << 20;

/// cuBLASLt's handle for a GPU, and the plan of each product seen.
pub(crate) struct Products {
    handle: sys::cublasLtHandle_t,
    /// The GPU and the library, as part of a choice's key.
    version: String,
    plans: HashMap<PlanKey, Option<Arc<Plan>>>,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for Products {}

impl Products {
    pub fn new(gpu: &Properties) -> Result<Products, CudaError> {
        let version = cublaslt_version()?;
        let handle = lt::create_handle().map_err(|error| CudaError::Call {
            what: "starting cuBLASLt".to_owned(),
            error: format!("{error}\n  hint: is enough of the GPU's memory free?"),
        })?;
        Ok(Products { handle, version: format!("{}-{version}", gpu.name), plans: HashMap::new() })
    }
}

/// The library's version, if it is found: 130000 is 13.0.0.
pub(super) fn cublaslt_version() -> Result<usize, CudaError> {
    // SAFETY: asks the loader for a library that may be loaded and let go at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::Missing {
            library: "cuBLASLt (libcublasLt.so)",
            hint: "install the CUDA toolkit's libraries, or add their folder to LD_LIBRARY_PATH",
        });
    }
    // SAFETY: the library is there.
    let version = unsafe { sys::cublasLtGetVersion() };
    // Earlier versions count differently and lack support for Hopper GPUs.
    if version < 120_000 {
        return Err(CudaError::TooOld {
            what: "cuBLASLt library",
            found: version.to_string(),
            needed: "120000 (12.0)",
        });
    }
    Ok(version)
}

impl Run for Product {
    fn run(&self, stream: &mut Stream) {
        if let Some(joined) = self.joined() {
            return joined.run(stream);
        }
        let [m, n, k] = self.dims();
        if m == 0 || n == 0 || (k == 0 && self.accumulate && self.also.is_none()) {
            return;
        }
        let rounded = self.out.dtype == DType::Bf16;
        let small = rounded && (self.bias.is_some() || self.also.is_some()) && m * n <= SMALL_ELEMENTS;
        if k == 0 || small || (rounded && self.a.dtype == DType::F32) {
            return through_scratch(self, stream);
        }
        if self.also.is_none()
            && let Some(before) = kept_before_gelu(self)
            && attempts(self.bias, self.out.dtype, true)
                .iter()
                .any(|&bias| attempt(self, self.out, bias, Some(before), stream))
        {
            return;
        }
        // The sums with the bias go to the preactivation, if backward needs it; an activation reads them there.
        let sums = self.preactivation.filter(|_| self.activation.is_some()).unwrap_or(self.out);
        let bias = multiply(&self.after_second(sums, stream), sums, self.bias, stream);
        let copied = self.activation.is_none() && self.preactivation.is_some();
        if bias == Added::No || self.activation.is_some() || copied {
            let bias = self.bias.filter(|_| bias == Added::No);
            // If the preactivation still lacks the bias, it is written there, too.
            let preactivation = self.preactivation.filter(|_| bias.is_some() || copied);
            finish(Finish { sums: Some(sums), bias, preactivation, ..Finish::of(self) }, stream);
        }
    }
}

impl Product {
    /// Both products as one, if the operands of the second lie where those of the first end.
    fn joined(&self) -> Option<Product> {
        let Term { order, a, b } = self.also.filter(|also| also.order == self.order)?;
        let (a, b) = match order {
            Order::NT => (self.a.joined_to_the_right(&a)?, self.b.joined_to_the_right(&b)?),
            Order::NN => (self.a.joined_to_the_right(&a)?, self.b.joined_below(&b)?),
            Order::TN => (self.a.joined_below(&a)?, self.b.joined_below(&b)?),
        };
        Some(Product { a, b, also: None, ..*self })
    }

    /// Computes the second product into `sums`; returns the first, which is to be added to it. The second, an adapter's, is the
    /// smaller one, so it is the one that is rounded on its own.
    fn after_second(&self, sums: View, stream: &mut Stream) -> Product {
        let Some(second) = self.second() else { return *self };
        Product { out: sums, scale: self.scale, accumulate: self.accumulate, ..second }.run(stream);
        Product { accumulate: true, also: None, ..*self }
    }
}

/// The library adds a bias in the output's dtype: in bf16, an error of 2⁻⁹ of the bias. Outputs of at most this many elements
/// are computed in f32 first and rounded once; for larger ones that would take a multiple of the time.
const SMALL_ELEMENTS: usize = 1 << 16;

/// Whether the library added the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Added {
    Yes,
    No,
}

/// `sums = a·b + bias`, or `sums += a·b`, as far as the library can.
fn multiply(product: &Product, sums: View, bias: Option<View>, stream: &mut Stream) -> Added {
    let product = &Product { bias, ..*product };
    for &choice in attempts(bias, sums.dtype, false) {
        if attempt(product, sums, choice, None, stream) {
            return if choice == Bias::None && bias.is_some() { Added::No } else { Added::Yes };
        }
    }
    panic!("cuBLASLt has no way to compute {:?} {:?} of {:?}", product.order, product.dims(), product.a.dtype);
}

/// The ways for the library to add a bias, best first. Leaving it out is one only if it can be added later.
fn attempts(bias: Option<View>, sums: DType, must_add: bool) -> &'static [Bias] {
    let all: &[Bias] = match (bias, sums) {
        (None, _) => return &[Bias::None],
        (Some(_), DType::F32) => &[Bias::F32, Bias::None],
        (Some(_), _) => &[Bias::F32, Bias::Bf16, Bias::None],
    };
    if must_add { &all[..all.len() - 1] } else { all }
}

/// The destination of the sums, if only GELU by the hyperbolic tangent follows and the library's epilogue can store them.
fn kept_before_gelu(product: &Product) -> Option<View> {
    let before = product.preactivation.filter(|_| product.activation == Some(Activation::GeluTanh))?;
    let is_aligned = before.address.is_multiple_of(EPILOGUE_ALIGNMENT_BYTES)
        && (before.stride * before.dtype.size_bytes()).is_multiple_of(EPILOGUE_ALIGNMENT_BYTES as usize);
    (product.out.dtype == DType::Bf16 && is_aligned).then_some(before)
}

/// Issues the product with a bias of this kind, if the library can: into `sums`, or, with GELU after it, into `before` and its
/// activation into `sums`.
fn attempt(product: &Product, sums: View, choice: Bias, before: Option<View>, stream: &mut Stream) -> bool {
    let context = stream.context().clone();
    let bias = product.bias;
    let key = PlanKey::of(product, sums, choice, before, stream.part_multiprocessors());
    let Some(plan) = plan::find(key, product, sums, bias, stream) else { return false };
    let bias_address = match (choice, bias) {
        (Bias::None, _) | (_, None) => 0,
        (Bias::F32, Some(bias)) if bias.address % EPILOGUE_ALIGNMENT_BYTES == 0 => bias.address,
        (Bias::F32, Some(bias)) => copied_bias(bias, DType::F32, stream),
        (Bias::Bf16, Some(bias)) => copied_bias(bias, DType::Bf16, stream),
    };
    let workspace = stream.scratch(plan::scratch_bytes(if bias.is_some() { sums.cols } else { 0 }));
    let operands = Operands {
        a: product.a.address,
        b: product.b.address,
        sums: sums.address,
        out: sums.address,
        bias: bias_address,
        before: before.map_or(0, |before| before.address),
        workspace,
    };
    let handle = context.products().handle;
    // SAFETY: the operands are those that the plan was made for.
    unsafe { stream.product(ProductCall::new(plan, handle, operands)) };
    true
}

/// The alignment that the library's epilogues need.
const EPILOGUE_ALIGNMENT_BYTES: u64 = 16;

/// The bias, rounded or aligned, behind the library's working memory.
fn copied_bias(bias: View, dtype: DType, stream: &mut Stream) -> u64 {
    let address = stream.scratch(plan::scratch_bytes(bias.cols)) + WORKSPACE_BYTES;
    let copy = View::new(address, Extent { rows: 1, cols: bias.cols, stride: bias.cols, dtype });
    crate::kernel::Copy { x: bias, out: copy }.run(stream);
    address
}

/// Computes in f32, then rounds.
fn through_scratch(product: &Product, stream: &mut Stream) {
    let [m, n, _] = product.dims();
    let terms = [product.second(), Some(Product { also: None, ..*product })].into_iter().flatten();
    let mut sums = None;
    for term in terms.filter(|term| term.dims()[2] > 0) {
        let bytes = WORKSPACE_BYTES + (m * n * size_of::<f32>()) as u64;
        let address = stream.scratch(bytes) + WORKSPACE_BYTES;
        let view = View::new(address, Extent { rows: m, cols: n, stride: n, dtype: DType::F32 });
        multiply(&Product { accumulate: sums.is_some(), scale: product.scale, ..term }, view, None, stream);
        sums = Some(view);
    }
    finish(Finish { sums, ..Finish::of(product) }, stream);
}

/// `out = activation(sums + bias)`, and the same without the activation to `preactivation`.
struct Finish {
    /// Zeros if absent.
    sums: Option<View>,
    bias: Option<View>,
    /// Added to what is there.
    accumulate: bool,
    activation: Option<Activation>,
    preactivation: Option<View>,
    out: View,
}

impl Finish {
    fn of(product: &Product) -> Finish {
        let Product { bias, accumulate, activation, preactivation, out, .. } = *product;
        Finish { sums: None, bias, accumulate, activation, preactivation, out }
    }
}

/// The number by which kernels know an activation; -1 is none.
pub(super) fn activation_number(activation: Option<Activation>) -> i32 {
    match activation {
        None => -1,
        Some(Activation::Silu) => 0,
        Some(Activation::GeluErf) => 1,
        Some(Activation::GeluTanh) => 2,
        Some(Activation::Relu) => 3,
        Some(Activation::Sigmoid) => 4,
        Some(Activation::Tanh) => 5,
    }
}

fn finish(what: Finish, stream: &mut Stream) {
    let Finish { sums, bias, accumulate, activation, preactivation, out } = what;
    let present: Vec<View> = [Some(out), sums, bias, preactivation].into_iter().flatten().collect();
    let Some(walk) = Walk::rows_of(out.dtype, &present) else { return };
    let name = walk.typed("finish", out.dtype);
    let sums = Mixed::optional(&sums);
    let preactivation = Matrix::optional(&preactivation);
    let out = Matrix::of(&out);
    let bias = Matrix::optional(&bias);
    let activation = activation_number(activation);
    let accumulate = accumulate as i32;
    let arguments = arguments![walk.rows, walk.cols, sums, bias, preactivation, out, activation, accumulate];
    // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
    unsafe { stream.launch(&PRODUCT, &name, walk.shape(), arguments) };
}
