//! A GPU as this process uses it: its context, its compiled kernels, its library handles.
//!
//! One for each GPU and process, kept until the process ends: devices come and go, compiled kernels stay.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::sys;

use super::event::EventPool;
use super::modules::{self, Source};
use super::options::KernelCache;
use super::product::Products;
use super::{CudaError, part};

/// A GPU's properties, from the driver.
#[derive(Clone, Debug)]
pub(crate) struct Properties {
    pub name: String,
    pub capability: (i32, i32),
    pub multiprocessors: u32,
    pub total_bytes: u64,
    /// The most shared memory that a block can ask for.
    pub shared_bytes: u32,
}

pub(crate) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    /// The groups that parts are made of; cut with the first part.
    groups: Mutex<Option<Arc<[sys::CUdevResource]>>>,
    properties: Properties,
    nvrtc: (i32, i32),
    cache: Mutex<Option<Arc<dyn KernelCache>>>,
    /// By source, then by kernel.
    modules: Mutex<HashMap<&'static str, LoadedModule>>,
    events: [Arc<EventPool>; 2],
    products: Mutex<Products>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; everything that changes is behind a lock.
unsafe impl Sync for Context {}

struct LoadedModule {
    raw: sys::CUmodule,
    functions: HashMap<String, LoadedFunction>,
}

#[derive(Clone, Copy)]
struct LoadedFunction {
    raw: sys::CUfunction,
    /// Whether it may use all shared memory.
    large_shared: bool,
}

/// The oldest driver whose interface is used here.
const LEAST_DRIVER: i32 = 12_080;

/// Starts the driver and counts its GPUs.
pub(super) fn start_driver() -> Result<usize, CudaError> {
    // SAFETY: asks the loader for a library that may be loaded and let go at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::Missing {
            library: "the CUDA driver (libcuda.so.1)",
            hint: "install NVIDIA's driver; in a container, start it with access to the GPUs",
        });
    }
    let found = driver_version();
    if found < LEAST_DRIVER {
        let found = format!("for CUDA {}.{}", found / 1000, found % 1000 / 10);
        return Err(CudaError::TooOld { what: "CUDA driver", found, needed: "one for CUDA 12.8" });
    }
    // SAFETY: the driver is there.
    let result = unsafe { sys::cuInit(0) };
    if result == sys::CUresult::CUDA_ERROR_NO_DEVICE {
        return Ok(0);
    }
    succeed("starting the CUDA driver", result)?;
    let mut count = 0;
    // SAFETY: as above.
    succeed("counting CUDA devices", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count.max(0) as usize)
}

/// The driver's version as CUDA numbers it: 13000 is 13.0.
pub(super) fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: the driver is there, the caller has looked.
    let result = unsafe { sys::cuDriverGetVersion(&mut version) };
    if result == sys::CUresult::CUDA_SUCCESS { version } else { 0 }
}

pub(super) fn succeed(what: &str, result: sys::CUresult) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(CudaError::call(what, result)) }
}

pub(super) fn properties(ordinal: usize) -> Result<(sys::CUdevice, Properties), CudaError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let mut device = 0;
    // SAFETY: the driver was started, and every pointer is to a variable of the right type.
    unsafe {
        succeed("finding the CUDA device", sys::cuDeviceGet(&mut device, ordinal as i32))?;
        let attribute = |attribute| {
            let mut value = 0;
            succeed("asking a CUDA device", sys::cuDeviceGetAttribute(&mut value, attribute, device)).map(|()| value)
        };
        let mut total_bytes = 0;
        succeed("asking for memory", sys::cuDeviceTotalMem_v2(&mut total_bytes, device))?;
        let name = cudarc::driver::result::device::get_name(device);
        let properties = Properties {
            name: name.map_err(|error| CudaError::call("asking for a name", error.0))?,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1) as u32,
            total_bytes: total_bytes as u64,
            shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.max(0) as u32,
        };
        Ok((device, properties))
    }
}

impl Context {
    /// The context of a GPU, the same for all devices on it.
    pub fn of(ordinal: usize, cache: Option<Arc<dyn KernelCache>>) -> Result<Arc<Context>, CudaError> {
        static CONTEXTS: Mutex<Vec<(usize, Arc<Context>)>> = Mutex::new(Vec::new());
        let mut contexts = CONTEXTS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = contexts.iter().find(|(known, _)| *known == ordinal).map(|(_, context)| context.clone());
        let context = match known {
            Some(context) => context,
            None => {
                let context = Arc::new(Context::open(ordinal)?);
                contexts.push((ordinal, context.clone()));
                context
            }
        };
        if cache.is_some() {
            *lock(&context.cache) = cache;
        }
        context.make_current()?;
        Ok(context)
    }

    fn open(ordinal: usize) -> Result<Context, CudaError> {
        let found = start_driver()?;
        if ordinal >= found {
            return Err(CudaError::NoDevice { ordinal, found });
        }
        let (device, properties) = properties(ordinal)?;
        if properties.capability < (8, 0) {
            let Properties { name: device, capability, .. } = properties;
            return Err(CudaError::Architecture { device, capability });
        }
        let nvrtc = modules::nvrtc_version()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device exists.
        unsafe {
            succeed("opening the CUDA device", sys::cuDevicePrimaryCtxRetain(&mut raw, device))?;
            succeed("using the CUDA device", sys::cuCtxSetCurrent(raw))?;
            keep_freed_memory(device)?;
        }
        Ok(Context {
            raw,
            device,
            groups: Mutex::new(None),
            nvrtc,
            cache: Mutex::new(None),
            modules: Mutex::new(HashMap::new()),
            events: [EventPool::new(raw, false), EventPool::new(raw, true)],
            products: Mutex::new(Products::new(&properties)?),
            properties,
        })
    }

    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    pub fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// The driver's calls act on the calling thread's current context.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as the process.
        succeed("using the CUDA device", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Events with a time, or without one.
    pub fn events(&self, timed: bool) -> &Arc<EventPool> {
        &self.events[timed as usize]
    }

    pub fn products(&self) -> MutexGuard<'_, Products> {
        lock(&self.products)
    }

    /// Held while a product's algorithm is chosen: devices on a GPU choose alike and one at a time, and a GPU of the same kind
    /// finds another's choice in the cache.
    pub fn planning() -> MutexGuard<'static, ()> {
        static PLANNING: Mutex<()> = Mutex::new(());
        lock(&PLANNING)
    }

    pub fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// The groups of multiprocessors that parts of the GPU are made of, the same for all.
    pub fn groups(&self) -> Result<Arc<[sys::CUdevResource]>, CudaError> {
        let mut groups = lock(&self.groups);
        if let Some(groups) = &*groups {
            return Ok(groups.clone());
        }
        // SAFETY: the device exists, its context is open.
        let found = unsafe { part::groups(self.device, self.properties.capability)? };
        Ok(groups.insert(found.into()).clone())
    }

    pub fn cache(&self) -> Option<Arc<dyn KernelCache>> {
        lock(&self.cache).clone()
    }

    /// A kernel of ours, compiled if it has not been yet. Panics with the compiler's message if that fails.
    pub(super) fn function(&self, source: &'static Source, name: &str, large_shared: bool) -> sys::CUfunction {
        let mut modules = lock(&self.modules);
        if !modules.contains_key(source.name) {
            let module = self.load(source).unwrap_or_else(|error| panic!("{error}"));
            modules.insert(source.name, module);
        }
        let module = modules.get_mut(source.name).expect("just inserted");
        if let Some(function) = module.functions.get(name)
            && (function.large_shared || !large_shared)
        {
            return function.raw;
        }
        let function = self.find(module.raw, source, name, large_shared).unwrap_or_else(|error| panic!("{error}"));
        module.functions.insert(name.to_owned(), function);
        function.raw
    }

    fn load(&self, source: &'static Source) -> Result<LoadedModule, CudaError> {
        let architecture = modules::architecture(self.properties.capability);
        let code = modules::code(source, &architecture, self.nvrtc, self.cache().as_deref())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: NVRTC made the code; the cache's digest says that it is the same.
        let result = unsafe { sys::cuModuleLoadData(&mut raw, code.as_ptr().cast()) };
        succeed(&format!("loading kernels of `{}`", source.name), result)?;
        Ok(LoadedModule { raw, functions: HashMap::new() })
    }

    fn find(
        &self,
        module: sys::CUmodule,
        source: &Source,
        name: &str,
        large_shared: bool,
    ) -> Result<LoadedFunction, CudaError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as OWN_SHARED;
        let missing = |error: String| CudaError::Call { what: format!("finding `{name}` in `{}`", source.name), error };
        let text = std::ffi::CString::new(name).map_err(|error| missing(error.to_string()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded and never let go.
        unsafe {
            let result = sys::cuModuleGetFunction(&mut raw, module, text.as_ptr());
            succeed("finding a kernel", result).map_err(|error| missing(error.to_string()))?;
            if large_shared {
                // The kernel's own variables lie there, too.
                let mut own = 0;
                succeed("reading a kernel's size", sys::cuFuncGetAttribute(&mut own, OWN_SHARED, raw))?;
                let bytes = self.properties.shared_bytes as i32 - own;
                succeed("asking for shared memory", sys::cuFuncSetAttribute(raw, SHARED, bytes))?;
            }
        }
        Ok(LoadedFunction { raw, large_shared })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under the lock fails the device; the guarded map only ever grows.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Working memory that a stream gives back is kept for the next: the driver would otherwise return it to the system at
/// every wait.
///
/// # Safety
/// The device exists and its context is current.
unsafe fn keep_freed_memory(device: sys::CUdevice) -> Result<(), CudaError> {
    let mut pool = std::ptr::null_mut();
    let mut threshold = u64::MAX;
    // SAFETY: the caller's promise; the attribute is a u64.
    unsafe {
        succeed("finding the memory pool", sys::cuDeviceGetDefaultMemPool(&mut pool, device))?;
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let threshold = std::ptr::from_mut(&mut threshold).cast();
        succeed("keeping freed memory", sys::cuMemPoolSetAttribute(pool, attribute, threshold))
    }
}
