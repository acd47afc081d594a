//! The sources of our kernels, and their compilation for a GPU.
//!
//! Each file under `kernels/` is compiled by itself, with `prelude.cuh` before it, when its first kernel is launched.

use std::ffi::CString;

use cudarc::nvrtc::{result as nvrtc, sys};

use super::CudaError;
use super::options::KernelCache;

/// One file of kernels.
#[derive(Debug)]
pub(super) struct Source {
    pub name: &'static str,
    /// Its text, in consecutive parts.
    pub parts: &'static [&'static str],
}

const PRELUDE: &str = include_str!("kernels/prelude.cuh");

macro_rules! sources {
    ($($constant:ident = $file:literal $(after $before:literal)*),* $(,)?) => {
        $(pub(super) static $constant: Source = Source {
            name: $file,
            parts: &[$(include_str!(concat!("kernels/", $before)),)* include_str!(concat!("kernels/", $file))],
        };)*
        static FILES: &[&Source] = &[$(&$constant),*];
    };
}

sources! {
    ACTIVATION = "activation.cu",
    BALANCE = "balance.cu",
    ELEMENTWISE = "elementwise.cu",
    EMBEDDING = "embedding.cu",
    EXPERT_BIASES = "expert_biases.cu",
    EXPERTS = "experts.cu",
    GROUPED_HOPPER = "grouped_hopper.cu" after "attention/ptx.cuh" after "attention/hopper_ptx.cuh" after "bulk_copies.cuh"
        after "grouped.cuh",
    GROUPED_PRODUCT = "grouped_product.cu" after "attention/ptx.cuh" after "grouped.cuh",
    LOSS = "loss.cu",
    NF4 = "nf4.cu",
    NORM = "norm.cu",
    OPTIMIZER = "optimizer.cu",
    PEER = "peer.cu",
    PRODUCT = "product.cu",
    RANDOM = "random.cu",
    ROTARY = "rotary.cu",
}

/// A defect that a kernel found in an operand: it writes one word of these three numbers and skips the element. The host checks
/// the word whenever it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    /// A column number outside a matrix.
    Column { column: u32, cols: u32 },
    /// A position outside a rotary table.
    Position { position: u32, rows: u32 },
    /// A row number outside a matrix.
    Row { row: u32, rows: u32 },
}

impl Defect {
    /// The upper 4 bits are the kind, the next 28 the limit, the lower 32 the number found. Zero is no defect.
    pub fn decode(word: u64) -> Option<Defect> {
        let found = word as u32;
        let limit = (word >> 32) as u32 & 0x0fff_ffff;
        match word >> 60 {
            0 => None,
            1 => Some(Defect::Column { column: found, cols: limit }),
            2 => Some(Defect::Position { position: found, rows: limit }),
            _ => Some(Defect::Row { row: found, rows: limit }),
        }
    }
}

impl std::fmt::Display for Defect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Defect::Column { column, cols } => write!(f, "column {column} of a matrix of {cols} columns"),
            Defect::Row { row, rows } => write!(f, "row {row} of a matrix of {rows} rows"),
            Defect::Position { position, rows } => write!(f, "position {position} of a rotary table of {rows} rows"),
        }
    }
}

/// Every file of kernels, but only some of those that attention compiles for a width of heads.
fn sources() -> impl Iterator<Item = &'static Source> {
    FILES.iter().copied().chain(super::attention::sources()).chain(super::delta::sources())
}

fn full_text(source: &Source) -> String {
    format!("{PRELUDE}\n#line 1 \"{}\"\n{}", source.name, source.parts.concat())
}

/// The name and the whole text of every file of kernels.
pub fn kernel_sources() -> Vec<(&'static str, String)> {
    sources().map(|source| (source.name, full_text(source))).collect()
}

/// Compiles every file of kernels for an architecture such as `sm_90a`, and returns the sizes of the results. It needs NVRTC
/// and no GPU.
pub fn compile_all_kernels(architecture: &str) -> Result<Vec<(&'static str, usize)>, CudaError> {
    nvrtc_version()?;
    sources().map(|source| Ok((source.name, compile(source, architecture)?.len()))).collect()
}

/// The architecture that kernels are compiled for. Hopper's own instructions need the `a`.
pub(super) fn architecture(capability: (i32, i32)) -> String {
    match capability {
        (9, 0) => "sm_90a".to_owned(),
        (major, minor) => format!("sm_{major}{minor}"),
    }
}

/// NVRTC's version, once it is known to be there.
pub(super) fn nvrtc_version() -> Result<(i32, i32), CudaError> {
    const LIBRARY: CudaError = CudaError::Missing {
        library: "NVRTC (libnvrtc.so)",
        hint: "install the CUDA toolkit's runtime libraries, or add their folder to LD_LIBRARY_PATH",
    };
    // SAFETY: asks the loader for a library that may be loaded and let go at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err(LIBRARY);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there.
    match unsafe { sys::nvrtcVersion(&mut major, &mut minor) } {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok((major, minor)),
        _ => Err(LIBRARY),
    }
}

/// The code of a source for an architecture: from the cache, or compiled and put there.
pub(super) fn code(
    source: &Source,
    architecture: &str,
    nvrtc: (i32, i32),
    cache: Option<&dyn KernelCache>,
) -> Result<Vec<u8>, CudaError> {
    let key = key(source, architecture, nvrtc);
    if let Some(code) = cache.and_then(|cache| cache.get(&key)).and_then(unwrap_entry) {
        return Ok(code);
    }
    let code = compile(source, architecture)?;
    if let Some(cache) = cache {
        cache.put(&key, &wrap_entry(&code));
    }
    Ok(code)
}

fn key(source: &Source, architecture: &str, (major, minor): (i32, i32)) -> String {
    let digest = digest(full_text(source).as_bytes());
    format!("{}-{architecture}-nvrtc{major}.{minor}-{digest:016x}", source.name.trim_end_matches(".cu"))
}

/// Independent of the compiler that built the program: the cache outlives it.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// An entry of the cache is a digest and its bytes, so a torn or damaged file is recognised.
pub(super) fn wrap_entry(code: &[u8]) -> Vec<u8> {
    let mut entry = digest(code).to_le_bytes().to_vec();
    entry.extend_from_slice(code);
    entry
}

pub(super) fn unwrap_entry(mut entry: Vec<u8>) -> Option<Vec<u8>> {
    let expected = u64::from_le_bytes(entry.get(..8)?.try_into().ok()?);
    let code = entry.split_off(8);
    (digest(&code) == expected).then_some(code)
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `create_program` and destroyed once.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

fn compile(source: &Source, architecture: &str) -> Result<Vec<u8>, CudaError> {
    let failed = |what: &str, error: String| CudaError::Call { what: format!("{what} `{}`", source.name), error };
    let text = CString::new(full_text(source)).map_err(|error| failed("reading", error.to_string()))?;
    let name = CString::new(source.name).map_err(|error| failed("reading", error.to_string()))?;
    let program = nvrtc::create_program(&text, Some(&name)).map_err(|error| failed("preparing", error.to_string()))?;
    let program = Program(program);
    let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
    // SAFETY: the program was just created.
    unsafe {
        if let Err(error) = nvrtc::compile_program(program.0, &options) {
            let log = nvrtc::get_program_log(program.0).unwrap_or_default();
            let log: String = log.iter().map(|&byte| byte as u8 as char).filter(|&letter| letter != '\0').collect();
            return Err(failed("compiling", format!("{error} for {architecture}\n{log}")));
        }
        let mut len = 0;
        let sized = sys::nvrtcGetCUBINSize(program.0, &mut len).result();
        sized.map_err(|error| failed("compiling", error.to_string()))?;
        let mut code = vec![0u8; len];
        let read = sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()).result();
        read.map_err(|error| failed("compiling", error.to_string()))?;
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_cache_entry_is_recognised() {
        let entry = wrap_entry(b"machine code");
        assert_eq!(unwrap_entry(entry.clone()).as_deref(), Some(&b"machine code"[..]));
        for bad in [&entry[..0], &entry[..7], &entry[..8], &entry[..entry.len() - 1]] {
            assert_eq!(unwrap_entry(bad.to_vec()), None, "cut to {} bytes", bad.len());
        }
        for byte in 0..entry.len() {
            let mut bad = entry.clone();
            bad[byte] ^= 4;
            assert_eq!(unwrap_entry(bad), None, "byte {byte} changed");
        }
    }

    #[test]
    fn a_key_differs_with_text_architecture_and_compiler() {
        let of = |source, architecture, version| key(source, architecture, version);
        let keys = [
            of(&NORM, "sm_90a", (13, 0)),
            of(&LOSS, "sm_90a", (13, 0)),
            of(&NORM, "sm_80", (13, 0)),
            of(&NORM, "sm_90a", (13, 1)),
            of(&Source { name: NORM.name, parts: &["another"] }, "sm_90a", (13, 0)),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b), "{a}");
        }
    }

    #[test]
    fn a_defect_is_read_as_a_kernel_writes_it() {
        assert_eq!(Defect::decode(0), None);
        let column = Defect::decode(1 << 60 | 4 << 32 | 9);
        assert_eq!(column.map(|defect| defect.to_string()).as_deref(), Some("column 9 of a matrix of 4 columns"));
        let position = Defect::decode(2 << 60 | 7 << 32 | u32::MAX as u64);
        assert_eq!(position, Some(Defect::Position { position: u32::MAX, rows: 7 }));
    }
}
