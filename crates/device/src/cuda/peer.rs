//! Work on the memory of other devices on the same GPU.

use super::Stream;
use super::modules::PEER;
use super::rows::dtype_name;
use super::stream::{Shape, arguments};
use crate::{DType, MOST_PEERS, PeerWork};

/// The argument of the kernels that sum, as in kernels/peer.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sum {
    sources: [u64; MOST_PEERS],
    destinations: [u64; MOST_PEERS],
    len: i64,
    source_count: i32,
    destination_count: i32,
}

const THREADS: u32 = 256;
/// Bytes that a thread reads or writes at once, if aligned.
const VECTOR_BYTES: u64 = 16;

/// # Safety
/// As for [`Queue::peer`](crate::Queue::peer).
pub(super) unsafe fn run(work: PeerWork<'_>, stream: &mut Stream) {
    // SAFETY: the caller's promise.
    unsafe {
        match work {
            PeerWork::Sum { dtype, sources, destinations, len } => sum(dtype, sources, destinations, len, stream),
            PeerWork::Copy { from, to, rows, row_bytes, from_step, to_step } => {
                let word = word_bytes(from, to, rows, row_bytes, from_step, to_step);
                let words = row_bytes as u64 / word;
                let shape = Shape::linear((rows as u64 * words).div_ceil(THREADS as u64), THREADS);
                let arguments = arguments![rows as i64, words as i64, from, from_step as i64, to, to_step as i64];
                stream.launch(&PEER, &format!("peer_copy_{word}"), shape, arguments);
            }
        }
    }
}

/// # Safety
/// As for [`Queue::peer`](crate::Queue::peer).
unsafe fn sum(dtype: DType, sources: &[u64], destinations: &[u64], len: usize, stream: &mut Stream) {
    assert!(!sources.is_empty(), "a sum of nothing");
    let is_vectored = sources.iter().chain(destinations).all(|address| address.is_multiple_of(VECTOR_BYTES));
    let vector = if is_vectored { VECTOR_BYTES as usize / dtype.size_bytes() } else { 1 };
    let argument = Sum {
        sources: addresses(sources),
        destinations: addresses(destinations),
        len: len as i64,
        source_count: sources.len() as i32,
        destination_count: destinations.len() as i32,
    };
    let name = format!("peer_sum_{}_{vector}", dtype_name(dtype));
    let shape = Shape::linear(len.div_ceil(vector * THREADS as usize) as u64, THREADS);
    // SAFETY: the argument is the kernel's, and the caller's promise.
    unsafe { stream.launch_with(&PEER, &name, shape, &argument) };
}

fn addresses(of: &[u64]) -> [u64; MOST_PEERS] {
    assert!(of.len() <= MOST_PEERS, "memory of {} devices, expected {MOST_PEERS} at most", of.len());
    let mut addresses = [0; MOST_PEERS];
    addresses[..of.len()].copy_from_slice(of);
    addresses
}

/// The widest word that all rows are made of, on both sides.
fn word_bytes(from: u64, to: u64, rows: usize, row_bytes: usize, from_step: usize, to_step: usize) -> u64 {
    let steps = if rows > 1 { from_step as u64 | to_step as u64 } else { 0 };
    let places = from | to | row_bytes as u64 | steps;
    let word = [VECTOR_BYTES, 4, 2].into_iter().find(|&word| places.is_multiple_of(word));
    word.expect("elements of every type lie at even addresses")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_as_wide_as_every_row_allows() {
        let cases = [
            ((256, 512, 3, 64, 128, 64), 16),
            ((256, 512, 3, 64, 72, 64), 4),
            ((256, 512, 1, 64, 72, 64), 16),
            ((256, 512, 3, 60, 64, 64), 4),
            ((260, 512, 3, 64, 64, 64), 4),
            ((256, 514, 3, 64, 64, 64), 2),
            ((256, 512, 3, 6, 64, 64), 2),
        ];
        for ((from, to, rows, row_bytes, from_step, to_step), expected) in cases {
            let found = word_bytes(from, to, rows, row_bytes, from_step, to_step);
            assert_eq!(found, expected, "{from} {to} {rows} × {row_bytes}, {from_step} and {to_step} apart");
        }
    }
}
