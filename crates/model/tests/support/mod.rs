//! What model tests share: the device under test, and where the golden folders lie.
#![allow(dead_code, unused_imports)]

#[path = "../../../device/tests/support/device.rs"]
mod device;

use std::path::{Path, PathBuf};

pub use device::{device, device_of_rank, on_cuda};

/// Where cargo runs the tests, or where a bundle was unpacked: `run-gpu-tests.sh` says so.
pub fn golden() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo or a bundle's script runs the tests");
    Path::new(&package).join("../../golden")
}
