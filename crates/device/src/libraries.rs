//! Lists the run-time libraries that this machine has.

/// A library's purpose and file name.
const LIBRARIES: [(&str, &str); 5] = [
    ("CUDA driver", "libcuda.so.1"),
    ("cuBLASLt", "libcublasLt.so"),
    ("cuDNN", "libcudnn.so.9"),
    ("NCCL", "libnccl.so.2"),
    ("MPI", "libmpi.so"),
];

/// The names of the libraries found.
pub fn libraries_found() -> Vec<&'static str> {
    LIBRARIES.iter().filter(|(_, file)| can_be_loaded(file)).map(|&(name, _)| name).collect()
}

#[cfg(unix)]
fn can_be_loaded(file: &str) -> bool {
    let Ok(name) = std::ffi::CString::new(file) else { return false };
    // SAFETY: the name ends with a zero; the libraries named above may be loaded and let go at any time.
    unsafe {
        let library = libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
        !library.is_null() && libc::dlclose(library) == 0
    }
}

#[cfg(not(unix))]
fn can_be_loaded(_file: &str) -> bool {
    false
}
