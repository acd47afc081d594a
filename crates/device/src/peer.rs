//! Work on the memory of several devices of one process, by address. Members of a group act on one another's tensors with it.
//!
//! On a CPU it runs where it is called, on a GPU in a queue's order; the bits are the same.

use crate::{DType, host};

/// The most devices whose memory one sum reads or writes on a GPU; also in cuda/kernels/peer.cu.
pub const MOST_PEERS: usize = 16;

/// A sum or a copy, with addresses as [`View::address`](crate::View::address) gives them.
#[derive(Clone, Copy, Debug)]
pub enum PeerWork<'a> {
    /// Adds `len` elements of all sources in f32, in the order given, and writes the sum, rounded once, to each destination.
    Sum { dtype: DType, sources: &'a [u64], destinations: &'a [u64], len: usize },
    /// Copies rows of `row_bytes` bytes, which begin `from_step` and `to_step` bytes one after another.
    Copy { from: u64, to: u64, rows: usize, row_bytes: usize, from_step: usize, to_step: usize },
}

impl PeerWork<'_> {
    /// Copies bytes without gaps.
    pub fn copy(from: u64, to: u64, bytes: usize) -> PeerWork<'static> {
        PeerWork::Copy { from, to, rows: 1, row_bytes: bytes, from_step: bytes, to_step: bytes }
    }

    /// Whether it would change nothing.
    pub(crate) fn is_idle(&self) -> bool {
        match *self {
            PeerWork::Sum { destinations, len, .. } => destinations.is_empty() || len == 0,
            PeerWork::Copy { from, to, rows, row_bytes, .. } => from == to || rows == 0 || row_bytes == 0,
        }
    }

    /// Runs at once, in host memory.
    ///
    /// # Safety
    /// Every source is readable and every destination writable as described, all in this process's memory, and nobody else
    /// accesses a destination or writes a source meanwhile. A destination is one of the sources or overlaps none.
    pub unsafe fn run(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            match *self {
                PeerWork::Sum { dtype, sources, destinations, len } => host::sum(dtype, sources, destinations, len),
                PeerWork::Copy { from, to, rows, row_bytes, from_step, to_step } => {
                    for row in 0..rows {
                        host::copy(from + (row * from_step) as u64, to + (row * to_step) as u64, row_bytes);
                    }
                }
            }
        }
    }
}
