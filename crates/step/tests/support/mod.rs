//! Golden models and batches for them.

#![allow(dead_code, reason = "every test file uses its own part")]

pub mod ranks;

use std::path::{Path, PathBuf};

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{CpuOptions, DType, Device, Queue};
use evenkeel_model::{Batch, Images, Input, Model};
use evenkeel_step::schedule::PartSize;
use evenkeel_store::Folder;

pub fn golden(case: &str) -> Folder {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(case);
    Folder::open(path).expect("golden folders are sound")
}

pub fn cpu(threads: usize) -> Device {
    let options = CpuOptions { memory_bytes: 1 << 30, ..CpuOptions::with_threads(threads) };
    Device::cpu(&options).expect("a CPU device starts")
}

/// Sequences of a micro-batch.
const LENGTHS: [usize; 4] = [7, 5, 6, 5];

/// A micro-batch in 1, 2 or 4 parts: four sequences of different lengths or four images, which differ from micro-batch to
/// micro-batch.
pub fn parts(model: &Model, micro: usize, count: usize, dtype: DType, queue: &Queue) -> Vec<Batch> {
    let per_part = LENGTHS.len() / count;
    let first_token = |sequence: usize| LENGTHS[..sequence].iter().sum::<usize>();
    let part = |index: usize| match model.config.input {
        Input::Tokens { .. } => {
            let lengths = &LENGTHS[index * per_part..][..per_part];
            let first = first_token(index * per_part);
            let tokens = first..first + lengths.iter().sum::<usize>();
            let id = |i: usize| ((i * 7 + micro * 31) % model.config.classes) as u32;
            let ends: Vec<usize> = (1..=LENGTHS.len()).map(first_token).collect();
            let label = |i: usize| if ends.contains(&(i + 1)) { IGNORE } else { id(i + 1) };
            let (ids, labels): (Vec<u32>, Vec<u32>) = tokens.map(|i| (id(i), label(i))).unzip();
            let offsets = (0..=per_part).map(|sequence| lengths[..sequence].iter().sum()).collect();
            Batch::tokens(queue, &ids, &labels, Segments::new(offsets))
        }
        Input::Images { size, channels, .. } => {
            let pixels_of_image = channels * size * size;
            let pixels = index * per_part * pixels_of_image..(index + 1) * per_part * pixels_of_image;
            let pixels: Vec<f32> = pixels.map(|i| ((i + micro) % 17) as f32 / 17.0).collect();
            let labels: Vec<u32> = (0..per_part).map(|image| ((index * per_part + image) % 2) as u32).collect();
            Batch::images(queue, Images { pixels: &pixels, count: per_part }, &labels, model.config.input, dtype)
        }
    };
    (0..count).map(part).collect()
}

pub fn sizes(model: &Model, micros: &[Vec<Batch>]) -> Vec<Vec<PartSize>> {
    micros.iter().map(|parts| parts.iter().map(|batch| PartSize::of(model, batch)).collect()).collect()
}
