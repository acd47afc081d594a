//! Whether something fits in this machine's memory, asked before any of it is taken.

use evenkeel_device::Device;

use crate::{Mistake, text};

/// Refuses what needs more memory than the machine has. `what` begins the sentence.
pub fn check_fit(what: &str, needed_bytes: u64, hint: &str) -> Result<(), Mistake> {
    let machine_bytes = evenkeel_device::cpu_report().memory_bytes;
    if needed_bytes <= machine_bytes {
        return Ok(());
    }
    let (needed, machine) = (text::bytes(needed_bytes), text::bytes(machine_bytes));
    let what = format!("{what} needs {needed} of memory, this machine has {machine}");
    Err(Mistake { what, hint: Some(hint.to_owned()) })
}

/// The memory that something takes at its worst, from a dry run of it.
pub fn peak_bytes(run: impl FnOnce(&Device)) -> u64 {
    let device = Device::dry();
    run(&device);
    device.usage().peak_bytes
}
