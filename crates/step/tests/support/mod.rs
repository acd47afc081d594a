//! Golden models and batches for them.

use std::path::{Path, PathBuf};

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{CpuOptions, DType, Device, Queue};
use evenkeel_model::{Batch, Images, Input, Model};
use evenkeel_store::Folder;

pub fn golden(case: &str) -> Folder {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(case);
    Folder::open(path).expect("golden folders are sound")
}

pub fn cpu(threads: usize) -> Device {
    let options = CpuOptions { memory_bytes: 1 << 30, ..CpuOptions::with_threads(threads) };
    Device::cpu(&options).expect("a CPU device starts")
}

/// A batch that differs from micro-batch to micro-batch, of two sequences of different lengths.
pub fn batch(model: &Model, micro: usize, dtype: DType, queue: &Queue) -> Batch {
    match model.config.input {
        Input::Tokens { .. } => {
            let ids: Vec<u32> = (0..23).map(|i| ((i * 7 + micro * 31) % model.config.classes) as u32).collect();
            let labels: Vec<u32> = (0..23).map(|i| if i % 12 == 11 || i == 22 { IGNORE } else { ids[i + 1] }).collect();
            Batch::tokens(queue, &ids, &labels, Segments::new(vec![0, 12, 23]))
        }
        Input::Images { size, channels, .. } => {
            let pixels: Vec<f32> = (0..2 * channels * size * size).map(|i| ((i + micro) % 17) as f32 / 17.0).collect();
            let images = Images { pixels: &pixels, count: 2 };
            Batch::images(queue, images, &[1, 0], model.config.input, dtype)
        }
    }
}
