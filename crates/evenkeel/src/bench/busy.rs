//! `evenkeel bench busy`: a neighbour that keeps a core busy until it is stopped.

use evenkeel_device::kernel::{Order, Product};
use evenkeel_device::{CpuOptions, DType, Device};

use crate::{Failure, Mistake};

#[derive(clap::Args)]
pub struct Arguments {
    /// The core.
    #[arg(long)]
    core: usize,
}

/// Multiplies matrices for ever, or until whoever started it has gone.
pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    const SIZE: usize = 256;
    let options = CpuOptions { cores: vec![arguments.core], memory_bytes: 1 << 24, ..CpuOptions::with_threads(1) };
    let device = Device::cpu(&options).map_err(|error| {
        Failure::Fault(Mistake { what: format!("core {} cannot be used: {error}", arguments.core), hint: None })
    })?;
    let queue = device.compute();
    let [a, b, out] = [(); 3].map(|()| queue.zeros(SIZE, SIZE, DType::F32));
    let parent = std::os::unix::process::parent_id();
    while std::os::unix::process::parent_id() == parent {
        for _ in 0..256 {
            queue.launch(Product::new(Order::NN, &a, &b, &out));
        }
        queue.finish();
    }
    Ok(String::new())
}
