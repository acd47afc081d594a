//! The plan of one kind of product: cuBLASLt's descriptions of it, and the algorithm chosen for it.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::{result as lt, sys};

use super::super::Stream;
use super::super::context::Context;
use super::super::event::SharedEvent;
use super::super::modules::{unwrap_entry, wrap_entry};
use super::WORKSPACE_BYTES;
use crate::kernel::{Order, Product};
use crate::{DType, View};

/// The bias that the library's epilogue adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Bias {
    None,
    F32,
    Bf16,
}

/// Everything that the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    order: [bool; 2],
    dims: [usize; 3],
    /// Strides of a, b and the sums.
    strides: [usize; 3],
    alignments: [u32; 3],
    operands: DType,
    sums: DType,
    scale_bits: u32,
    accumulate: bool,
    bias: Bias,
    /// Stride of the sums kept before GELU by the hyperbolic tangent; `None` if no GELU follows.
    before_stride: Option<usize>,
    /// The multiprocessors of a part; `None` for the whole GPU.
    multiprocessors: Option<u32>,
}

impl PlanKey {
    pub fn of(
        product: &Product,
        sums: View,
        bias: Bias,
        before: Option<View>,
        multiprocessors: Option<u32>,
    ) -> PlanKey {
        let views = [product.a, product.b, sums];
        PlanKey {
            order: [product.order == Order::TN, product.order == Order::NT],
            dims: product.dims(),
            // The stride of a matrix of one row is unused, and may be less than the library accepts.
            strides: views.map(|view| view.stride.max(view.cols)),
            alignments: views.map(|view| alignment(view.address)),
            operands: product.a.dtype,
            sums: sums.dtype,
            scale_bits: product.scale.to_bits(),
            accumulate: product.accumulate,
            bias,
            before_stride: before.map(|before| before.stride.max(before.cols)),
            multiprocessors,
        }
    }

    /// Bytes of the sums kept before an activation.
    fn before_bytes(&self) -> u64 {
        self.before_stride.map_or(0, |stride| (self.dims[0] * stride * self.sums.size_bytes()) as u64)
    }
}

/// The largest power of two up to 16, the bytes that kernels read at once, that divides the address. An arena's blocks begin at
/// multiples of 16, so their addresses change no choice and no bits: ranks with the same work agree.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(4)
}

/// Memory that a product needs: the library's, and a copy of the bias.
pub(super) fn scratch_bytes(bias_cols: usize) -> u64 {
    WORKSPACE_BYTES + (bias_cols * size_of::<f32>()) as u64
}

pub(super) struct Plan {
    key: PlanKey,
    operation: sys::cublasLtMatmulDesc_t,
    /// Layouts of the library's A (our b), B (our a) and C.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    accumulate: bool,
    has_bias: bool,
    keeps_before: bool,
}

/// The addresses of a product's operands; 0 if absent.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub a: u64,
    pub b: u64,
    /// The sums to add to, and the output.
    pub sums: u64,
    pub out: u64,
    pub bias: u64,
    pub before: u64,
    pub workspace: u64,
}

/// A call of a plan with its operands.
#[derive(Clone)]
pub(in super::super) struct ProductCall {
    plan: Arc<Plan>,
    handle: sys::cublasLtHandle_t,
    operands: Operands,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for ProductCall {}

impl ProductCall {
    pub(super) fn new(plan: Arc<Plan>, handle: sys::cublasLtHandle_t, operands: Operands) -> ProductCall {
        ProductCall { plan, handle, operands }
    }

    /// Everything given to the library.
    pub fn identity(&self) -> [u64; 8] {
        let Operands { a, b, sums, out, bias, before, workspace } = self.operands;
        [Arc::as_ptr(&self.plan) as u64, a, b, sums, out, bias, before, workspace]
    }

    /// # Safety
    /// The operands are those that the plan was made for, and live until it has run.
    pub unsafe fn issue(&self, stream: cudarc::driver::sys::CUstream) -> Result<(), String> {
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.plan.run(self.handle, self.operands, stream) };
        outcome.map_err(|error| format!("Product {:?}: {error}", self.plan.key))
    }
}

// SAFETY: descriptions are only changed under the lock of the products, and otherwise read.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `Plan::describe`, and destroyed once.
        unsafe {
            let _ = lt::destroy_matmul_desc(self.operation);
            for layout in self.layouts {
                let _ = lt::destroy_matrix_layout(layout);
            }
        }
    }
}

/// The plan for a key, made on first use; `None` if the library has no algorithm.
pub(super) fn find(
    key: PlanKey,
    product: &Product,
    sums: View,
    bias: Option<View>,
    stream: &mut Stream,
) -> Option<Arc<Plan>> {
    let context = stream.context().clone();
    if let Some(plan) = context.products().plans.get(&key) {
        return plan.clone();
    }
    // Another device may need the same product with the same bits, so one choice is made for both.
    let _alone = Context::planning();
    if let Some(plan) = context.products().plans.get(&key) {
        return plan.clone();
    }
    let plan = make(key, product, sums, bias, &context, stream);
    context.products().plans.insert(key, plan.clone());
    plan
}

/// Algorithms to time, if the choice can be kept.
const CANDIDATES: usize = 16;
/// Runs of each before it is timed, and while it is.
const RUNS: [usize; 2] = [1, 4];
/// A larger output is not written twice just to compare algorithms.
const MOST_TRIED_BYTES: u64 = 1 << 30;
/// Below this many operations any algorithm will do.
const LEAST_TRIED_FLOPS: u64 = 1 << 27;

fn make(
    key: PlanKey,
    product: &Product,
    sums: View,
    bias: Option<View>,
    context: &Context,
    stream: &mut Stream,
) -> Option<Arc<Plan>> {
    let (handle, version) = {
        let products = context.products();
        (products.handle, products.version.clone())
    };
    let mut plan = Plan::describe(key).ok()?;
    let some = stream.scratch(WORKSPACE_BYTES);
    // SAFETY: the descriptions live. Which memory the epilogue's operands will have does not matter yet, only that they have
    // some.
    let candidates = unsafe {
        plan.set_epilogue(some, some).ok()?;
        plan.candidates(handle, key)
    };
    plan.algorithm = candidates.first()?.algo;
    let bytes = (sums.rows * sums.stride * sums.dtype.size_bytes()) as u64;
    let worthwhile = crate::kernel::Operation::flops(product) >= LEAST_TRIED_FLOPS && bytes <= MOST_TRIED_BYTES;
    // Another run must choose alike, or its bits would differ: without a cache for the choice, the library's stands.
    let Some(cache) = context.cache().filter(|_| worthwhile && candidates.len() > 1) else {
        return Some(Arc::new(plan));
    };
    let name = choice_name(key, &version);
    let kept = cache.get(&name).and_then(unwrap_entry).and_then(|entry| entry.first().copied());
    let choice = match kept.map(usize::from).filter(|&choice| choice < candidates.len()) {
        Some(choice) => choice,
        None => {
            let algorithms: Vec<_> = candidates.iter().map(|candidate| candidate.algo).collect();
            let choice = fastest(&mut plan, &algorithms, handle, key, product, sums, bias, stream);
            cache.put(&name, &wrap_entry(&[choice as u8]));
            choice
        }
    };
    plan.algorithm = candidates[choice].algo;
    Some(Arc::new(plan))
}

fn choice_name(key: PlanKey, version: &str) -> String {
    let text = format!("{key:?} {version} {CANDIDATES} {WORKSPACE_BYTES}");
    format!("product-{:016x}", super::super::modules::digest(text.as_bytes()))
}

/// The index of the fastest algorithm. It computes into scratch memory, and waits for the GPU.
#[allow(clippy::too_many_arguments)]
fn fastest(
    plan: &mut Plan,
    algorithms: &[sys::cublasLtMatmulAlgo_t],
    handle: sys::cublasLtHandle_t,
    key: PlanKey,
    product: &Product,
    sums: View,
    bias: Option<View>,
    stream: &mut Stream,
) -> usize {
    let bytes = ((sums.rows * sums.stride * sums.dtype.size_bytes()) as u64).next_multiple_of(256);
    let workspace = stream.scratch(WORKSPACE_BYTES + bytes + key.before_bytes());
    let bias = if plan.has_bias { bias.map_or(0, |bias| bias.address) } else { 0 };
    let events = stream.context().events(true).clone();
    let raw = stream.raw();
    let mut best = (f64::INFINITY, 0);
    for (place, &algorithm) in algorithms.iter().enumerate() {
        plan.algorithm = algorithm;
        let run = |times: usize| {
            let out = workspace + WORKSPACE_BYTES;
            let [a, b, sums] = [product.a, product.b, sums].map(|view| view.address);
            let operands = Operands { a, b, sums, out, bias, before: out + bytes, workspace };
            (0..times).all(|_| {
                // SAFETY: the operands are those that the plan was made for; the output lies behind the workspace. A bias
                // of the wrong width is read as numbers of another type, inside its memory.
                unsafe { plan.run(handle, operands, raw).is_ok() }
            })
        };
        if !run(RUNS[0]) {
            continue;
        }
        let start = SharedEvent::record(&events, raw);
        let ran = run(RUNS[1]);
        let end = SharedEvent::record(&events, raw);
        end.wait();
        let seconds = end.duration_since(&start).map_or(f64::INFINITY, |duration| duration.as_secs_f64());
        if ran && seconds < best.0 {
            best = (seconds, place);
        }
    }
    best.1
}

impl Plan {
    fn describe(key: PlanKey) -> Result<Plan, lt::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::{cublasComputeType_t, cublasLtEpilogue_t};
        let [m, n, k] = key.dims.map(|dim| dim as u64);
        let [a_stride, b_stride, sums_stride] = key.strides.map(|stride| stride as i64);
        let operation =
            lt::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F)?;
        let [a_rows, a_cols] = if key.order[0] { [m, k] } else { [k, m] };
        let [b_rows, b_cols] = if key.order[1] { [k, n] } else { [n, k] };
        let operands = data_type(key.operands);
        let layouts = [
            lt::create_matrix_layout(operands, b_rows, b_cols, b_stride)?,
            lt::create_matrix_layout(operands, a_rows, a_cols, a_stride)?,
            lt::create_matrix_layout(data_type(key.sums), n, m, sums_stride)?,
        ];
        let plan = Plan {
            key,
            operation,
            layouts,
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            accumulate: key.accumulate,
            has_bias: key.bias != Bias::None,
            keeps_before: key.before_stride.is_some(),
        };
        let epilogue = match (plan.has_bias, plan.keeps_before) {
            (false, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (true, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (false, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            (true, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        };
        // CUBLAS_OP_T is 1, CUBLAS_OP_N is 0.
        let transposed = |yes: bool| yes as i32;
        // SAFETY: the description lives, and each attribute has the type that the library documents.
        unsafe {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transposed(key.order[1]))?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transposed(key.order[0]))?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            if let Some(multiprocessors) = key.multiprocessors {
                plan.set(Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, multiprocessors as i32)?;
            }
            if plan.has_bias {
                let bias = if key.bias == Bias::F32 { DType::F32 } else { DType::Bf16 };
                plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(bias))?;
            }
            if let Some(stride) = key.before_stride {
                plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, stride as i64)?;
            }
        }
        Ok(plan)
    }

    /// # Safety
    /// The attribute is of type `T`.
    unsafe fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<(), lt::CublasError> {
        let value = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: the caller's promise.
        unsafe { lt::set_matmul_desc_attribute(self.operation, attribute, value, size_of::<T>()) }
    }

    /// # Safety
    /// Nobody else uses the description meanwhile.
    unsafe fn set_epilogue(&self, bias: u64, before: u64) -> Result<(), lt::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // SAFETY: a pointer is as wide as its address.
        unsafe {
            if self.has_bias {
                self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
            }
            if self.keeps_before {
                self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, before)?;
            }
        }
        Ok(())
    }

    /// The library's proposals, best first by its own estimate.
    ///
    /// # Safety
    /// The descriptions live.
    unsafe fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
        key: PlanKey,
    ) -> Vec<sys::cublasLtMatmulHeuristicResult_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let Ok(preference) = lt::create_matmul_pref() else { return Vec::new() };
        let [a, b, sums] = key.alignments;
        // Parts of a sum are added in f32, never in the output's type.
        let reduction = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let words = [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, sums),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, sums),
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction),
        ];
        let mut found = Vec::with_capacity(CANDIDATES);
        let mut count = 0;
        // SAFETY: every pointer is to a variable of the attribute's type, or to memory for as many results.
        unsafe {
            for (attribute, value) in words {
                let value = std::ptr::from_ref(&value).cast();
                let _ = lt::set_matmul_pref_attribute(preference, attribute, value, size_of::<u32>());
            }
            let bytes = std::ptr::from_ref(&WORKSPACE_BYTES).cast();
            let attribute = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let _ = lt::set_matmul_pref_attribute(preference, attribute, bytes, size_of::<u64>());
            let [b, a, sums] = self.layouts;
            let wanted = CANDIDATES as i32;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.operation,
                b,
                a,
                sums,
                sums,
                preference,
                wanted,
                found.as_mut_ptr(),
                &mut count,
            );
            let _ = lt::destroy_matmul_pref(preference);
            if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
                found.set_len(count.clamp(0, wanted) as usize);
            }
        }
        found.retain(|one| one.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        found
    }

    /// Issues the product, into `out`, which has the layout of `sums`.
    ///
    /// # Safety
    /// The operands are those that the plan was made for, and live until it has run.
    unsafe fn run(
        &self,
        handle: sys::cublasLtHandle_t,
        operands: Operands,
        stream: cudarc::driver::sys::CUstream,
    ) -> Result<(), lt::CublasError> {
        let Operands { a, b, sums, out, bias, before, workspace } = operands;
        let (scale, one, zero) = (f32::from_bits(self.key.scale_bits), 1f32, 0f32);
        let beta = if self.accumulate { &one } else { &zero };
        let [b_layout, a_layout, sums_layout] = self.layouts;
        // SAFETY: the caller's promise. Two queues that run the same plan at once are kept apart by the products' lock,
        // which their threads hold while the epilogue's operands are set and read.
        unsafe {
            let has_operands = self.has_bias || self.keeps_before;
            let _guard = has_operands.then(|| WITH_OPERANDS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
            self.set_epilogue(bias, before)?;
            lt::matmul(
                handle,
                self.operation,
                std::ptr::from_ref(&scale).cast(),
                std::ptr::from_ref(beta).cast(),
                b as *const c_void,
                b_layout,
                a as *const c_void,
                a_layout,
                sums as *const c_void,
                sums_layout,
                out as *mut c_void,
                sums_layout,
                &self.algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES as usize,
                stream.cast(),
            )
        }
    }
}

/// An epilogue's operands are part of a plan's description: they are set and used under this lock.
static WITH_OPERANDS: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::U32 => panic!("indices are not numbers"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_addresss_alignment_is_its_largest_power_of_two_that_matters() {
        for (address, expected) in [(0, 16), (2, 2), (4096, 16), (4096 + 64, 16), (4096 + 8, 8), (4096 + 6, 2)] {
            assert_eq!(alignment(address), expected, "{address}");
        }
    }
}
