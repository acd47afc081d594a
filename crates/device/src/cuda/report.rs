//! Reports the CUDA installation of this machine, usable or not.

use std::fmt;

use super::CudaError;
use super::attention::{CudnnReport, cudnn_report};
use super::context::{driver_version, properties, start_driver};
use super::modules::nvrtc_version;
use super::nccl::NcclLibrary;
use super::product::cublaslt_version;

/// A GPU as the driver describes it.
#[derive(Clone, Debug)]
pub struct CudaGpu {
    pub name: String,
    pub capability: (i32, i32),
    pub multiprocessors: u32,
    pub memory_bytes: u64,
}

/// The driver, the GPUs and the libraries found, and those missing.
#[derive(Clone, Debug, Default)]
pub struct CudaReport {
    /// The newest CUDA that the driver serves.
    pub driver: Option<String>,
    pub gpus: Vec<CudaGpu>,
    /// Name and version.
    pub libraries: Vec<(&'static str, String)>,
    /// The library that computes attention.
    pub attention: CudnnReport,
    /// Reasons why a GPU cannot be used, each with a remedy.
    pub problems: Vec<String>,
}

/// The number of GPUs that the driver finds.
pub fn cuda_gpus() -> Result<usize, CudaError> {
    start_driver()
}

/// Queries the driver, the GPUs and the libraries. It starts nothing on a GPU.
pub fn cuda_report() -> CudaReport {
    let mut report = CudaReport::default();
    match start_driver() {
        Ok(count) => {
            let version = driver_version();
            report.driver = Some(format!("{}.{}", version / 1000, version % 1000 / 10));
            for ordinal in 0..count {
                match properties(ordinal) {
                    Ok((_, gpu)) => report.gpus.push(CudaGpu {
                        name: gpu.name,
                        capability: gpu.capability,
                        multiprocessors: gpu.multiprocessors,
                        memory_bytes: gpu.total_bytes,
                    }),
                    Err(error) => report.problems.push(error.to_string()),
                }
            }
        }
        Err(error) => report.problems.push(error.to_string()),
    }
    match nvrtc_version() {
        Ok((major, minor)) => report.libraries.push(("NVRTC", format!("{major}.{minor}"))),
        Err(error) => report.problems.push(error.to_string()),
    }
    match cublaslt_version() {
        Ok(version) => {
            let text = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
            report.libraries.push(("cuBLASLt", text));
        }
        Err(error) => report.problems.push(error.to_string()),
    }
    // Ranks on different GPUs report a missing NCCL when they start.
    if let Ok(library) = NcclLibrary::find() {
        report.libraries.push(("NCCL", library.version()));
    }
    report.attention = cudnn_report();
    report
}

impl fmt::Display for CudaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Some(driver) => writeln!(f, "CUDA driver    for CUDA {driver}")?,
            None => writeln!(f, "CUDA driver    none found")?,
        }
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            let gib = gpu.memory_bytes as f64 / (1u64 << 30) as f64;
            let CudaGpu { name, capability: (major, minor), multiprocessors, .. } = gpu;
            let facts = format!("{gib:.1} GiB, {multiprocessors} multiprocessors, compute {major}.{minor}");
            writeln!(f, "CUDA GPU {ordinal}     {name}, {facts}")?;
        }
        let libraries: Vec<String> = self.libraries.iter().map(|(name, version)| format!("{name} {version}")).collect();
        let libraries = if libraries.is_empty() { "none found".to_owned() } else { libraries.join(", ") };
        writeln!(f, "CUDA libraries {libraries}")?;
        write!(f, "CUDA attention {}", self.attention)
    }
}
