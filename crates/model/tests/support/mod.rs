//! Shared by model tests: the device under test, and the golden folders with their batches and numbers.
#![allow(dead_code, unused_imports)]

#[path = "../../../device/tests/support/device.rs"]
mod device;
#[path = "../../../../golden/numbers.rs"]
mod numbers;

pub mod changed;

use std::path::{Path, PathBuf};

pub use device::{device, device_of_rank, on_cuda};
use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{Batch, Images, Input, Model};
use evenkeel_store::SafeTensorsFile;
pub use numbers::{distance, floats, indices, norm};

/// The golden folders, relative to the package that cargo tests or to a bundle, whose path `run-gpu-tests.sh` sets.
pub fn golden() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo or a bundle's script runs the tests");
    Path::new(&package).join("../../golden")
}

/// The numbers of a golden model.
pub fn expected(case: &str) -> SafeTensorsFile {
    SafeTensorsFile::open(golden().join(case).join("golden.safetensors")).expect("golden files are sound")
}

/// The batch of a golden model.
pub fn golden_batch(case: &str, model: &Model, dtype: DType, queue: &Queue) -> Batch {
    let file = expected(case);
    let labels = indices(&file, "labels");
    match model.config.input {
        Input::Tokens { .. } => {
            let segments = indices(&file, "segments").iter().map(|&offset| offset as usize).collect();
            Batch::tokens(queue, &indices(&file, "input_ids"), &labels, Segments::new(segments))
        }
        Input::Texts { .. } => {
            let segments = indices(&file, "segments").iter().map(|&offset| offset as usize).collect();
            let (ids, types) = (indices(&file, "input_ids"), indices(&file, "token_type_ids"));
            Batch::texts(queue, &ids, &types, &labels, Segments::new(segments))
        }
        Input::Images { .. } => {
            let pixels = floats(&file, "pixel_values");
            let images = Images { pixels: &pixels, count: labels.len() };
            Batch::images(queue, images, &labels, model.config.input, dtype)
        }
    }
}
