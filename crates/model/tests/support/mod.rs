//! Shared by model tests: the device under test, and the path of the golden folders.
#![allow(dead_code, unused_imports)]

#[path = "../../../device/tests/support/device.rs"]
mod device;

use std::path::{Path, PathBuf};

pub use device::{device, device_of_rank, on_cuda};

/// The golden folders, relative to the package that cargo tests or to a bundle, whose path `run-gpu-tests.sh` sets.
pub fn golden() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo or a bundle's script runs the tests");
    Path::new(&package).join("../../golden")
}
