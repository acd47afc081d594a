//! Whether something fits in memory, this machine's or a card's, asked before any of it is taken.

use evenkeel_device::{CudaMemory, Device, DeviceKind, cuda_memory};

use crate::{Failure, Mistake, device, text};

/// Refuses what a device of this kind has too little memory for.
pub fn check_fit_on(kind: DeviceKind, what: &str, needed_bytes: u64, hint: &str) -> Result<(), Failure> {
    match kind {
        DeviceKind::Cpu => Ok(check_fit(what, needed_bytes, hint)?),
        DeviceKind::Cuda => check_fit_on_card(0, 1, what, needed_bytes, hint),
    }
}

/// Refuses what one of so many ranks that share a card has too little memory for.
pub fn check_fit_on_card(card: usize, ranks: usize, what: &str, needed_bytes: u64, hint: &str) -> Result<(), Failure> {
    Ok(check_card(ranks, what, needed_bytes, &cuda_memory(card).map_err(device::fault)?, hint)?)
}

/// A part of a card's memory is left to libraries and compiled kernels.
fn check_card(ranks: usize, what: &str, needed_bytes: u64, card: &CudaMemory, hint: &str) -> Result<(), Mistake> {
    let usable_bytes = card.arena_bytes_of(ranks);
    if needed_bytes <= usable_bytes {
        return Ok(());
    }
    let [needed, usable, free, total] =
        [needed_bytes, usable_bytes, card.free_bytes, card.total_bytes].map(text::bytes);
    let (name, of_rank) = (&card.name, if ranks > 1 { format!(" each of {ranks} ranks") } else { String::new() });
    let what =
        format!("{what} needs {needed} of memory, {name} has {usable} to give{of_rank}: {free} of {total} are free");
    let is_busy = needed_bytes <= card.total_bytes / 20 * 19 / ranks as u64;
    let others = if is_busy { "; or end what else uses the card, see `nvidia-smi`" } else { "" };
    Err(Mistake { what, hint: Some(format!("{hint}{others}")) })
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_is_too_small_or_too_busy_is_refused_with_what_was_planned_and_what_is_there() {
        const GIB: u64 = 1 << 30;
        let card = |free: u64| CudaMemory { name: "a card".to_owned(), free_bytes: free * GIB, total_bytes: 80 * GIB };
        let told = |needed: u64, free: u64| check_card(1, "a step", needed * GIB, &card(free), "train less");
        assert_eq!(told(70, 78), Ok(()));
        let expected = "a step needs 70.0 GiB of memory, a card has 26.0 GiB to give: 30.0 GiB of 80.0 GiB are free";
        let hint = "train less; or end what else uses the card, see `nvidia-smi`";
        assert_eq!(told(70, 30), Err(Mistake { what: expected.to_owned(), hint: Some(hint.to_owned()) }));
        let expected = "a step needs 90.0 GiB of memory, a card has 74.0 GiB to give: 78.0 GiB of 80.0 GiB are free";
        assert_eq!(told(90, 78), Err(Mistake { what: expected.to_owned(), hint: Some("train less".to_owned()) }));
        let of_four = |needed: u64| check_card(4, "a step", needed * GIB, &card(70), "train less");
        assert_eq!(of_four(16), Ok(()));
        let expected = "a step needs 17.0 GiB of memory, a card has 16.0 GiB to give each of 4 ranks: 70.0 GiB of 80.0 GiB \
                        are free";
        assert_eq!(of_four(17).map_err(|mistake| mistake.what), Err(expected.to_owned()));
    }
}
