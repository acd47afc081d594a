//! Golden models and batches for them.

#![allow(dead_code, unused_imports, reason = "every test file uses its own part")]

#[path = "../../../device/tests/support/device.rs"]
mod under_test;

#[path = "../../../device/tests/support/nccl.rs"]
pub mod nccl;
pub mod ranks;

use std::path::Path;

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{DType, Device, Queue};
use evenkeel_model::{Batch, Images, Input, Model};
use evenkeel_step::schedule::PartSize;
use evenkeel_store::Folder;

pub use under_test::on_cuda;

pub fn golden(case: &str) -> Folder {
    // The folder where cargo runs the tests, or where a bundle was unpacked.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo or a bundle's script runs the tests");
    Folder::open(Path::new(&package).join("../../golden").join(case)).expect("golden folders are sound")
}

/// A device of one thread for a rank.
pub fn device(rank: usize) -> Device {
    let device = under_test::device_of_rank(rank, 1, 1 << 28);
    if on_cuda() && nccl::folder().is_some() {
        [device.compute(), device.comm()].into_iter().for_each(nccl::load_kernels);
    }
    device
}

/// A device for one rank alone.
pub fn device_of(threads: usize) -> Device {
    under_test::device(threads, 1 << 28)
}

/// Sequences of a micro-batch.
const LENGTHS: [usize; 4] = [7, 5, 6, 5];

/// A micro-batch in up to 4 parts: four sequences of different lengths or four images, which differ from micro-batch to
/// micro-batch.
pub fn parts(model: &Model, micro: usize, count: usize, dtype: DType, queue: &Queue) -> Vec<Batch> {
    let first_token = |sequence: usize| LENGTHS[..sequence].iter().sum::<usize>();
    let samples_of = |index: usize| index * LENGTHS.len() / count..(index + 1) * LENGTHS.len() / count;
    let part = |index: usize| match model.config.input {
        Input::Tokens { .. } => {
            let (samples, lengths) = (samples_of(index), &LENGTHS[samples_of(index)]);
            let tokens = first_token(samples.start)..first_token(samples.end);
            let id = |i: usize| ((i * 7 + micro * 31) % model.config.classes) as u32;
            let ends: Vec<usize> = (1..=LENGTHS.len()).map(first_token).collect();
            let label = |i: usize| if ends.contains(&(i + 1)) { IGNORE } else { id(i + 1) };
            let (ids, labels): (Vec<u32>, Vec<u32>) = tokens.map(|i| (id(i), label(i))).unzip();
            let offsets = (0..=lengths.len()).map(|sequence| lengths[..sequence].iter().sum()).collect();
            Batch::tokens(queue, &ids, &labels, Segments::new(offsets))
        }
        Input::Texts { vocabulary, types, .. } => {
            let (samples, lengths) = (samples_of(index), &LENGTHS[samples_of(index)]);
            let tokens = first_token(samples.start)..first_token(samples.end);
            let ids: Vec<u32> = tokens.clone().map(|i| ((i * 7 + micro * 31) % vocabulary) as u32).collect();
            let of_types: Vec<u32> = tokens.map(|i| (i / 3 % types) as u32).collect();
            let labels: Vec<u32> = samples.map(|text| ((text + micro) % model.config.classes) as u32).collect();
            let offsets = (0..=lengths.len()).map(|sequence| lengths[..sequence].iter().sum()).collect();
            Batch::texts(queue, &ids, &of_types, &labels, Segments::new(offsets))
        }
        Input::Images { size, channels, .. } => {
            let pixels_of_image = channels * size * size;
            let images = samples_of(index);
            let pixels = images.start * pixels_of_image..images.end * pixels_of_image;
            let pixels: Vec<f32> = pixels.map(|i| ((i + micro) % 17) as f32 / 17.0).collect();
            let labels: Vec<u32> = images.map(|image| (image % 2) as u32).collect();
            Batch::images(queue, Images { pixels: &pixels, count: labels.len() }, &labels, model.config.input, dtype)
        }
    };
    (0..count).map(part).collect()
}

pub fn sizes(model: &Model, micros: &[Vec<Batch>]) -> Vec<Vec<PartSize>> {
    micros.iter().map(|parts| parts.iter().map(|batch| PartSize::of(model, batch)).collect()).collect()
}
