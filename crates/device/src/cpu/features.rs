//! The instruction levels of this CPU, and the ones in use.

use std::fmt;
use std::sync::OnceLock;

use crate::tensor::DType;

/// How vectors are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VectorLevel {
    Portable,
    Avx2,
    Avx512,
}

/// How products of f32 are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum F32Level {
    /// By the `gemm-f32` crate, with the available vectors.
    Gemm,
    Avx512,
    /// Each f32 in three parts of bf16.
    AmxTiles,
}

/// How products of bf16 are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Bf16Level {
    /// Operands are widened and multiplied as f32.
    Widen,
    Avx512Bf16,
    AmxTiles,
}

/// Limits the CPU to a lower level, to test the code of other CPUs: one of [`CEILINGS`].
const CEILING: &str = "EVENKEEL_CPU";
const CEILINGS: [&str; 4] = ["portable", "avx2", "avx512", "amx"];

/// The user's ceiling as an index of [`CEILINGS`]; the highest if none is set.
pub(crate) fn ceiling() -> std::io::Result<usize> {
    let Ok(wanted) = std::env::var(CEILING) else { return Ok(CEILINGS.len() - 1) };
    CEILINGS.iter().position(|&name| name == wanted).ok_or_else(|| {
        let known = CEILINGS.join(", ");
        let what = format!("{CEILING} is `{}`, expected one of: {known}", wanted.escape_debug());
        std::io::Error::new(std::io::ErrorKind::InvalidInput, what)
    })
}

fn is_allowed(level: &str) -> bool {
    let ceiling = ceiling().unwrap_or(0);
    CEILINGS[..=ceiling].contains(&level)
}

pub(crate) fn vector_level() -> VectorLevel {
    static LEVEL: OnceLock<VectorLevel> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let avx512 = ["avx512f", "avx512bw", "avx512dq", "avx512vl"];
        if is_allowed("avx512") && has_all(&avx512) {
            VectorLevel::Avx512
        } else if is_allowed("avx2") && has_all(&["avx2", "fma"]) {
            VectorLevel::Avx2
        } else {
            VectorLevel::Portable
        }
    })
}

pub(crate) fn f32_level() -> F32Level {
    match (vector_level(), bf16_level()) {
        (_, Bf16Level::AmxTiles) => F32Level::AmxTiles,
        (VectorLevel::Avx512, _) => F32Level::Avx512,
        _ => F32Level::Gemm,
    }
}

/// About what a core multiplies and adds in a second in large products, by the instructions that it has. For choices that must be
/// the same in every run on the same machine, so nothing is measured; a server's core of 2 to 3 GHz did so in training steps.
pub fn core_flops_per_s(dtype: DType) -> f64 {
    match (dtype, f32_level(), bf16_level()) {
        (DType::Bf16, _, Bf16Level::AmxTiles) => 3.3e11,
        (DType::Bf16, _, Bf16Level::Avx512Bf16) => 1.5e11,
        (_, F32Level::AmxTiles, _) => 1.1e11,
        (_, F32Level::Avx512, _) => 8e10,
        (_, F32Level::Gemm, _) if vector_level() == VectorLevel::Portable => 5e9,
        (_, F32Level::Gemm, _) => 4e10,
    }
}

pub(crate) fn bf16_level() -> Bf16Level {
    static LEVEL: OnceLock<Bf16Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        if vector_level() < VectorLevel::Avx512 {
            Bf16Level::Widen
        } else if is_allowed("amx") && enable_tiles() {
            Bf16Level::AmxTiles
        } else if has_all(&["avx512bf16"]) {
            Bf16Level::Avx512Bf16
        } else {
            Bf16Level::Widen
        }
    })
}

#[cfg(target_arch = "x86_64")]
fn has_all(features: &[&str]) -> bool {
    features.iter().all(|&feature| match feature {
        "avx2" => is_x86_feature_detected!("avx2"),
        "fma" => is_x86_feature_detected!("fma"),
        "avx512f" => is_x86_feature_detected!("avx512f"),
        "avx512bw" => is_x86_feature_detected!("avx512bw"),
        "avx512dq" => is_x86_feature_detected!("avx512dq"),
        "avx512vl" => is_x86_feature_detected!("avx512vl"),
        "avx512bf16" => is_x86_feature_detected!("avx512bf16"),
        _ => false,
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn has_all(_features: &[&str]) -> bool {
    false
}

/// Asks the kernel, once per process, for permission to use the tile registers. False if there are none.
pub(crate) fn enable_tiles() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(request_tiles)
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    let present = features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE;
    // SAFETY: the call takes two integers and changes only which registers this process may use.
    present && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn request_tiles() -> bool {
    false
}

/// The cores that this process may run on.
pub fn allowed_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: an all-zero set is a valid one, and the call writes no more than its size.
        let set = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            (libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) == 0).then_some(set)
        };
        if let Some(set) = set {
            // SAFETY: the numbers asked for are below the set's size.
            return (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect();
        }
    }
    (0..std::thread::available_parallelism().map_or(1, |cores| cores.get())).collect()
}

/// Keeps the calling thread on these cores. A machine that refuses is used unpinned.
pub(crate) fn pin_to_cores(cores: &[usize]) {
    #[cfg(target_os = "linux")]
    // SAFETY: the set is plain data of the size given, and 0 means the calling thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores.iter().filter(|&&core| core < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = cores;
}

pub(crate) fn machine_memory_bytes() -> u64 {
    // SAFETY: reads two constants of the system.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    pages.max(1) as u64 * page_bytes.max(1) as u64
}

/// The levels in use, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuReport {
    pub cores: usize,
    pub memory_bytes: u64,
    pub vectors: &'static str,
    pub f32_products: &'static str,
    pub bf16_products: &'static str,
}

pub fn cpu_report() -> CpuReport {
    let vectors = match vector_level() {
        VectorLevel::Avx512 => "AVX-512",
        VectorLevel::Avx2 => "AVX2 + FMA",
        VectorLevel::Portable => "portable",
    };
    let f32_products = match f32_level() {
        F32Level::AmxTiles => "AMX tiles, each number in three bf16 parts",
        F32Level::Avx512 => "AVX-512",
        F32Level::Gemm => "gemm",
    };
    let bf16_products = match bf16_level() {
        Bf16Level::AmxTiles => "AMX tiles",
        Bf16Level::Avx512Bf16 => "AVX-512 bf16",
        Bf16Level::Widen => "widened to f32",
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    CpuReport { cores, memory_bytes: machine_memory_bytes(), vectors, f32_products, bf16_products }
}

impl fmt::Display for CpuReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cores          {}", self.cores)?;
        writeln!(f, "memory         {:.1} GiB", self.memory_bytes as f64 / (1u64 << 30) as f64)?;
        writeln!(f, "vectors        {}", self.vectors)?;
        writeln!(f, "f32 products   {}", self.f32_products)?;
        write!(f, "bf16 products  {}", self.bf16_products)
    }
}
