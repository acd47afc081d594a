//! The functions of NCCL used here. cudarc's bindings look for other file names than NCCL's package installs.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUstream;
use libloading::Library;

use crate::cuda::CudaError;

/// The file that NCCL's package installs and the loader looks for.
const FILE: &str = "libnccl.so.2";
/// The first version for CUDA 12 whose non-blocking communicators lack early defects.
const LEAST_VERSION: i32 = 21_800;

pub(super) type RawCommunicator = *mut c_void;
pub(super) type Result = c_int;

pub(super) const SUCCESS: Result = 0;
pub(super) const IN_PROGRESS: Result = 7;
/// NCCL's type of raw bytes.
pub(super) const BYTES: c_int = 1;
const ID_BYTES: usize = 128;

/// `ncclUniqueId`, handed over by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId(pub [c_char; ID_BYTES]);

/// `ncclConfig_t` as of 2.14, which later versions read as such by its size and version.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// Not set; later versions have a number here.
    padding: c_int,
}

impl Config {
    pub fn that_does_not_block() -> Config {
        Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21_400, blocking: 0, padding: c_int::MIN }
    }
}

macro_rules! functions {
    ($($field:ident = $name:literal ($($argument:ty),*) -> $result:ty;)*) => {
        pub(super) struct Functions {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// The library is NCCL, and stays loaded as long as the functions are called.
            unsafe fn of(library: &Library) -> std::result::Result<Functions, libloading::Error> {
                // SAFETY: the types are those of nccl.h.
                unsafe { Ok(Functions { $($field: *library.get(concat!($name, "\0"))?,)* }) }
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion" (*mut c_int) -> Result;
    get_unique_id = "ncclGetUniqueId" (*mut RawId) -> Result;
    init = "ncclCommInitRankConfig" (*mut RawCommunicator, c_int, RawId, c_int, *mut Config) -> Result;
    async_error = "ncclCommGetAsyncError" (RawCommunicator, *mut Result) -> Result;
    finalize = "ncclCommFinalize" (RawCommunicator) -> Result;
    destroy = "ncclCommDestroy" (RawCommunicator) -> Result;
    abort = "ncclCommAbort" (RawCommunicator) -> Result;
    error_string = "ncclGetErrorString" (Result) -> *const c_char;
    last_error = "ncclGetLastError" (RawCommunicator) -> *const c_char;
    group_start = "ncclGroupStart" () -> Result;
    group_end = "ncclGroupEnd" () -> Result;
    send = "ncclSend" (*const c_void, usize, c_int, c_int, RawCommunicator, CUstream) -> Result;
    receive = "ncclRecv" (*mut c_void, usize, c_int, c_int, RawCommunicator, CUstream) -> Result;
    broadcast = "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, CUstream) -> Result;
}

/// NCCL, loaded.
pub struct NcclLibrary {
    pub(super) functions: Functions,
    version: i32,
    /// The functions are its own.
    _library: Library,
}

impl NcclLibrary {
    /// The library that the system's loader finds, loaded at the first call.
    pub fn find() -> std::result::Result<Arc<NcclLibrary>, CudaError> {
        static FOUND: OnceLock<std::result::Result<Arc<NcclLibrary>, CudaError>> = OnceLock::new();
        FOUND.get_or_init(|| NcclLibrary::load(FILE.as_ref())).clone()
    }

    /// The library in this file. Another file is another library, with its own state.
    pub fn open(file: &Path) -> std::result::Result<Arc<NcclLibrary>, CudaError> {
        NcclLibrary::load(file.as_os_str())
    }

    fn load(file: &OsStr) -> std::result::Result<Arc<NcclLibrary>, CudaError> {
        let missing = |error: libloading::Error| CudaError::NoNccl {
            file: file.to_string_lossy().into_owned(),
            error: error.to_string(),
            folders: std::env::var("LD_LIBRARY_PATH").ok().filter(|folders| !folders.is_empty()),
        };
        // SAFETY: loading NCCL runs nothing but its own beginnings, and it is kept until the process ends or nobody has a
        // function of it any more.
        let (library, functions) = unsafe {
            let library = Library::new(file).map_err(missing)?;
            let functions = Functions::of(&library).map_err(missing)?;
            (library, functions)
        };
        let mut version = 0;
        // SAFETY: a pointer to a number.
        let result = unsafe { (functions.get_version)(&mut version) };
        if result != SUCCESS || version < LEAST_VERSION {
            let what = "NCCL library";
            let needed = "NCCL 2.18";
            return Err(CudaError::TooOld { what, found: version_text(version), needed });
        }
        Ok(Arc::new(NcclLibrary { functions, version, _library: library }))
    }

    /// Such as 2.28.9.
    pub fn version(&self) -> String {
        version_text(self.version)
    }

    /// NCCL's message for a result, with the last one that it would have logged.
    pub(super) fn words(&self, result: Result, communicator: RawCommunicator) -> String {
        let text = |words: *const c_char| {
            // SAFETY: NCCL's texts end with a zero and are not changed by this thread meanwhile.
            let words = if words.is_null() { None } else { Some(unsafe { CStr::from_ptr(words) }) };
            words.map(|words| words.to_string_lossy().trim().to_owned()).unwrap_or_default()
        };
        // SAFETY: any result has a text; the communicator is a live one or none.
        let (what, last) =
            unsafe { (text((self.functions.error_string)(result)), text((self.functions.last_error)(communicator))) };
        let last = if last.is_empty() { last } else { format!(": {last}") };
        format!("NCCL {}: {what}{last}\n  hint: NCCL_DEBUG=INFO in the environment has it say more", self.version())
    }
}

fn version_text(version: i32) -> String {
    // Before 2.9 the minor version had one digit.
    let (major, minor) = if version < 10_000 {
        (version / 1000, version % 1000 / 100)
    } else {
        (version / 10_000, version % 10_000 / 100)
    };
    format!("{major}.{minor}.{}", version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_nccl_writes_them() {
        for (code, expected) in [(22_809, "2.28.9"), (21_801, "2.18.1"), (2_803, "2.8.3"), (0, "0.0.0")] {
            assert_eq!(version_text(code), expected);
        }
    }

    #[test]
    fn a_library_that_is_not_there_or_is_another_is_told_with_where_it_was_looked_for() {
        let folder = std::env::temp_dir();
        // Every Linux program has a C library, which is no NCCL.
        for file in [folder.join("no-such-nccl.so.2"), "libc.so.6".into()] {
            let error = NcclLibrary::open(&file).err().expect("there is no NCCL in it").to_string();
            let expected = format!("NCCL ({}) cannot be loaded: ", file.display());
            assert!(error.starts_with(&expected) && error.contains("\n  hint: install NCCL 2.18 or later"), "{error}");
            assert!(error.contains("LD_LIBRARY_PATH"), "{error}");
        }
    }
}
