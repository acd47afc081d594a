//! `evenkeel bench busy`: a neighbour that keeps a core busy while it is told to.

use std::io::BufRead;
use std::sync::mpsc::{self, TryRecvError};

use evenkeel_device::kernel::{Order, Product};
use evenkeel_device::{CpuOptions, DType, Device};

use crate::{Failure, Mistake};

#[derive(clap::Args)]
pub struct Arguments {
    /// The core.
    #[arg(long)]
    core: usize,
}

/// Lines of its standard input.
pub const WORK: &str = "work";
pub const REST: &str = "rest";

/// Multiplies matrices from the beginning, and from every line `work` of the standard input to the next `rest`. Ends with the
/// standard input, so also when the process that started it has gone.
pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    // A product takes a fraction of a millisecond, so the few under way are soon done when it is told to rest.
    const SIZE: usize = 256;
    // A core that waited for its next product, however shortly, would also have to wait for its neighbour's turn to end.
    const AHEAD: usize = 4;
    let options = CpuOptions { cores: vec![arguments.core], memory_bytes: 1 << 24, ..CpuOptions::with_threads(1) };
    let device = Device::cpu(&options).map_err(|error| {
        Failure::Fault(Mistake { what: format!("core {} cannot be used: {error}", arguments.core), hint: None })
    })?;
    let queue = device.compute();
    let [a, b, out] = [(); 3].map(|()| queue.zeros(SIZE, SIZE, DType::F32));
    let (said, orders) = mpsc::sync_channel(1);
    let reader = std::thread::Builder::new().name("orders".to_owned()).spawn(move || {
        let lines = std::io::stdin().lock().lines().map_while(Result::ok);
        lines.map_while(|line| said.send(line == WORK).ok()).for_each(drop);
    });
    let reader = reader.map_err(|error| {
        Failure::Fault(Mistake { what: format!("a thread cannot be started: {error}"), hint: None })
    })?;
    let (done, products_done) = mpsc::sync_channel(AHEAD);
    (0..AHEAD).for_each(|_| done.send(()).expect("there is room for all"));
    let mut works = true;
    loop {
        let order = if works { orders.try_recv() } else { orders.recv().map_err(|_| TryRecvError::Disconnected) };
        match order {
            Ok(order) => works = order,
            Err(TryRecvError::Disconnected) => {
                // The standard input has ended, and the reader with it.
                let _ = reader.join();
                return Ok(String::new());
            }
            Err(TryRecvError::Empty) => {
                let _ = products_done.recv();
                queue.launch(Product::new(Order::NN, &a, &b, &out));
                let done = done.clone();
                queue.call(move || _ = done.send(()));
            }
        }
    }
}
