//! cuDNN's fused attention, if the library is found and takes the problem. Our own kernels compute what it refuses;
//! [`cudnn_report`] lists refusals once.

mod call;
mod descriptor;
mod formulas;
mod graph;
mod plan;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::cudnn::sys;

pub(in super::super) use self::call::AttentionCall;
use self::descriptor::{Refusal, succeed};
use self::formulas::Role;
use self::plan::{Plan, Target};
use super::super::modules::{digest, unwrap_entry, wrap_entry};
use super::super::options::KernelCache;
use super::Stream;
use super::problem::{Layouts, Problem};
use crate::kernel::{Attention, AttentionBackward};

const LEAST_VERSION: usize = 91_002;
/// Older versions have wrong gradients for lengths that are no multiple of [`EVEN_LENGTH`].
const EVERY_LENGTH_VERSION: usize = 91_600;
const EVEN_LENGTH: i64 = 128;
/// Refusals kept for the report.
const MOST_REFUSALS: usize = 16;
/// Working memory is cut at multiples of this.
const CUT_BYTES: u64 = 256;

/// cuDNN's use for attention in this process.
#[derive(Clone, Debug, Default)]
pub struct CudnnReport {
    /// Its version, or why it is not used.
    pub version: Option<Result<String, String>>,
    /// Plans made, one for each shape.
    pub plans: usize,
    /// Problems that it refused, with its messages. Our own kernels computed them.
    pub refusals: Vec<String>,
}

static REPORT: Mutex<CudnnReport> = Mutex::new(CudnnReport { version: None, plans: 0, refusals: Vec::new() });

fn report() -> MutexGuard<'static, CudnnReport> {
    REPORT.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Looks for the library, if no attention has yet.
pub fn cudnn_report() -> CudnnReport {
    let mut report = report();
    if report.version.is_none() {
        report.version = Some(version());
    }
    report.clone()
}

impl fmt::Display for CudnnReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            Some(Ok(version)) => write!(f, "cuDNN {version}, {} plans", self.plans)?,
            Some(Err(why)) => write!(f, "our own kernels: {why}")?,
            None => write!(f, "cuDNN has not been looked for")?,
        }
        self.refusals.iter().try_for_each(|refusal| write!(f, "\n  refused: {refusal}"))
    }
}

fn version() -> Result<String, String> {
    // SAFETY: asks the loader for a library that may be loaded and let go at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err("cuDNN (libcudnn.so.9) cannot be loaded".to_owned());
    }
    let found = version_number();
    let text = format!("{}.{}.{}", found / 10_000, found / 100 % 100, found % 100);
    if found < LEAST_VERSION { Err(format!("cuDNN is {text}, at least 9.10.2 is needed")) } else { Ok(text) }
}

/// 9.19.1 is 91901. The library must be there.
fn version_number() -> usize {
    // SAFETY: the caller has looked.
    unsafe { sys::cudnnGetVersion() }
}

/// Refuses problems that a version computes wrongly.
fn check(problem: &Problem, version: usize) -> Result<(), Refusal> {
    let is_backward = matches!(problem.layouts, Layouts::Backward { .. });
    if is_backward && version < EVERY_LENGTH_VERSION && problem.len % EVEN_LENGTH != 0 {
        return Err(Refusal(format!("gradients of sequences of {} tokens need cuDNN 9.16", problem.len)));
    }
    Ok(())
}

/// The library as one stream uses it. Streams share neither a handle nor plans: `cudnnSetStream` records an event on the stream
/// that a handle leaves, which crashes the driver while another thread captures that stream, and cuDNN does not promise that two
/// threads can run a plan.
#[derive(Default)]
pub(in super::super) struct Cudnn {
    /// Opened at the first problem; `Some(None)` if that failed.
    library: Option<Option<Library>>,
}

struct Library {
    handle: sys::cudnnHandle_t,
    version: String,
    /// `None` for a refused problem.
    plans: HashMap<Problem, Option<Arc<Plan>>>,
}

// SAFETY: a handle may be used from any thread, one at a time.
unsafe impl Send for Library {}

impl Drop for Library {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: the stream has ended, and what was held back for it or captured is gone.
        let _ = unsafe { sys::cudnnDestroy(self.handle) };
    }
}

impl Library {
    fn open(stream: &Stream) -> Result<Library, String> {
        let version = cudnn_report().version.unwrap_or_else(|| Err("cuDNN has not been looked for".to_owned()))?;
        let mut handle = std::ptr::null_mut();
        let refused = |Refusal(why)| format!("cuDNN {version} does not start: {why}");
        // SAFETY: the library is there, and the GPU's context is current.
        succeed("a handle", unsafe { sys::cudnnCreate(&mut handle) }).map_err(refused)?;
        let library = Library { handle, version: version.clone(), plans: HashMap::new() };
        // SAFETY: the stream outlives what it keeps of cuDNN.
        succeed("a stream", unsafe { sys::cudnnSetStream(handle, stream.handle().cast()) }).map_err(refused)?;
        Ok(library)
    }

    /// The problem's plan: made before, kept in the cache, or made now.
    fn plan(&mut self, problem: &Problem, cache: Option<&dyn KernelCache>, gpu: &str) -> Option<Arc<Plan>> {
        if !self.plans.contains_key(problem) {
            let key = format!("cudnn{}-{gpu}-{:016x}", self.version, digest(format!("{problem:?}").as_bytes()));
            let kept = cache.and_then(|cache| cache.get(&key)).and_then(unwrap_entry);
            let plan = check(problem, version_number())
                .and_then(|()| Plan::new(problem, &Target::Gpu(self.handle), kept.as_deref()));
            match &plan {
                Ok(plan) => {
                    report().plans += 1;
                    if let (None, Some(cache), Ok(text)) = (&kept, cache, plan.text()) {
                        cache.put(&key, &wrap_entry(&text));
                    }
                }
                Err(refusal) => note(problem, refusal),
            }
            self.plans.insert(problem.clone(), plan.ok().map(Arc::new));
        }
        self.plans.get(problem).and_then(Clone::clone)
    }
}

fn note(problem: &Problem, Refusal(why): &Refusal) {
    let mut report = report();
    if report.refusals.len() < MOST_REFUSALS {
        report.refusals.push(format!("{problem:?}: {why}"));
    }
}

impl Cudnn {
    /// Whether cuDNN computes it; if not, nothing was written.
    pub(super) fn forward(&mut self, problem: Problem, kernel: &Attention, stream: &mut Stream) -> bool {
        let Attention { q, k, v, out, logsum, scale, .. } = kernel;
        self.run(problem, *scale, stream, |role| match role {
            Role::Q => q.view.address(),
            Role::K => k.view.address(),
            Role::V => v.view.address(),
            Role::Out => out.view.address(),
            Role::Logsum => logsum.address(),
            _ => unreachable!("{role:?} has no part in forward"),
        })
    }

    pub(super) fn backward(&mut self, problem: Problem, kernel: &AttentionBackward, stream: &mut Stream) -> bool {
        let AttentionBackward { q, k, v, out, logsum, dout, dq, dk, dv, scale, .. } = kernel;
        self.run(problem, *scale, stream, |role| match role {
            Role::Q => q.view.address(),
            Role::K => k.view.address(),
            Role::V => v.view.address(),
            Role::Out => out.view.address(),
            Role::Logsum => logsum.address(),
            Role::Dout => dout.view.address(),
            Role::Dq => dq.view.address(),
            Role::Dk => dk.view.address(),
            Role::Dv => dv.view.address(),
            _ => unreachable!("{role:?} is no operand"),
        })
    }

    /// `operand` gives the address of each operand and result.
    fn run(&mut self, problem: Problem, scale: f32, stream: &mut Stream, operand: impl Fn(Role) -> u64) -> bool {
        let library = self.library.get_or_insert_with(|| match Library::open(stream) {
            Ok(library) => Some(library),
            Err(why) => {
                report().version = Some(Err(why));
                None
            }
        });
        let Some(library) = library else { return false };
        let context = stream.context().clone();
        let handle = library.handle;
        let gpu = &context.properties().name;
        let Some(plan) = library.plan(&problem, context.cache().as_deref(), gpu) else { return false };
        // The workspace, then the sums that only the plan uses.
        let bytes = |elements: i64| (elements as u64 * size_of::<f32>() as u64).next_multiple_of(CUT_BYTES);
        let [(_, delta), (_, dq_sums)] = plan.sums;
        let workspace_bytes = plan.workspace_bytes.next_multiple_of(CUT_BYTES);
        let workspace = stream.scratch((workspace_bytes + bytes(delta) + bytes(dq_sums)).max(CUT_BYTES));
        let number = |number: f32| u64::from(number.to_bits());
        let call = AttentionCall::new(plan.clone(), handle, workspace, |role| match role {
            Role::Delta => workspace + workspace_bytes,
            Role::DqSums => workspace + workspace_bytes + bytes(delta),
            Role::Scale => number(scale),
            Role::One => number(1.0),
            Role::Hidden => number(f32::NEG_INFINITY),
            Role::Window => number(problem.window.unwrap_or(0) as f32),
            _ => operand(role),
        });
        // The first run happens now, so that our own kernels can take over if cuDNN refuses. SAFETY: the plan is for these
        // layouts, the operands and the stream's memory live until it has run.
        let outcome = unsafe {
            if plan.has_run() {
                stream.attention(call);
                return true;
            }
            stream.raw();
            call.execute()
        };
        let Err(refusal) = outcome else { return true };
        note(&problem, &refusal);
        library.plans.insert(problem, None);
        false
    }
}

#[cfg(test)]
mod tests {
    use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Name;
    use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as Kind;

    use super::descriptor::Descriptor;
    use super::*;

    /// An H200, as cuDNN describes GPUs.
    const H200: &str = r#"{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
        "multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,
        "reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
        "maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":1980000,
        "memClockRateKHz":3201000,"l2CacheSize":62914560,"deviceName":"NVIDIA H200","deviceVer":900,"driverVer":13000,
        "cudaDeviceId":0,"totalGlobalMem":150000000000}"#;

    fn h200() -> Target {
        let properties = Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR).and_then(|mut properties| {
            properties.set_text(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, H200.as_bytes())?;
            properties.finalize()
        });
        Target::Described(properties.expect("a description of a GPU"))
    }

    #[test]
    fn cudnn_has_kernels_for_masks_groups_and_layouts() {
        if version().is_err() || !has_driver() {
            println!("skipped: no cuDNN, or no driver for it");
            return;
        }
        let target = h200();
        let causal = (true, None);
        for (batch, len, heads, key_heads, dim, (causal, window), fused) in [
            (8, 2048, 32, 8, 64, causal, 1),
            (64, 197, 16, 16, 128, (false, None), 3),
            (4, 4096, 32, 8, 128, (true, Some(100)), 1),
            (3, 333, 6, 2, 40, causal, 3),
        ] {
            let steps = |heads: i64| [heads * dim * fused, dim * fused];
            let [q, k] = [steps(heads), steps(key_heads)];
            let forward = Layouts::Forward { q, k, v: k, out: [heads * dim, dim] };
            let backward = Layouts::Backward { q, k, v: k, out: q, dout: [heads * dim, dim], dq: q, dk: k, dv: k };
            for layouts in [forward, backward] {
                let logsum_stride = heads;
                let problem = Problem { batch, len, heads, key_heads, dim, causal, window, logsum_stride, layouts };
                let plan = Plan::new(&problem, &target, None)
                    .unwrap_or_else(|Refusal(why)| panic!("{problem:?} is refused: {why}"));
                let text = plan.text().expect("the plan's text");
                let again = Plan::new(&problem, &target, Some(&text)).expect("the plan from its text");
                assert_eq!(again.workspace_bytes, plan.workspace_bytes);
            }
        }
    }

    fn has_driver() -> bool {
        // SAFETY: asks the loader for a library that may be loaded and let go at any time.
        unsafe { cudarc::driver::sys::is_culib_present() }
    }
}
