//! The CUDA sources, compiled for real where NVRTC is there. No GPU is needed.

use evenkeel_device::{CudaError, compile_all_kernels, kernel_sources};

/// A100, and H100 and H200 with the instructions of their own.
const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];

#[test]
fn every_source_compiles_for_every_architecture() {
    for architecture in ARCHITECTURES {
        match compile_all_kernels(architecture) {
            Ok(sizes) => {
                assert_eq!(sizes.len(), kernel_sources().len(), "{sizes:?}");
                assert!(sizes.iter().all(|&(_, bytes)| bytes > 0), "{sizes:?}");
            }
            Err(CudaError::Missing { .. }) => return println!("skipped: no NVRTC"),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn every_source_has_a_name_of_its_own_and_kernels() {
    let sources = kernel_sources();
    assert!(!sources.is_empty());
    for (i, (name, text)) in sources.iter().enumerate() {
        assert!(sources[i + 1..].iter().all(|(other, _)| other != name), "{name} is there twice");
        assert!(text.contains("__global__"), "{name} has no kernel");
    }
}
