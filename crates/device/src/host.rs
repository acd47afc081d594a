//! Sums and copies on the calling thread, for host code run by [`Queue::call`](crate::Queue::call).
//!
//! Addresses are those of [`View::address`](crate::View::address), of contiguous tensors of CPU devices in this process.

use crate::cpu;
use crate::{DType, bf16};

/// Adds `len` elements of all sources in f32, in the order given, and writes the sum, rounded once, to each destination.
///
/// # Safety
/// Every source is readable and every destination writable for `len` elements of `dtype`, and nobody else accesses a
/// destination or writes a source meanwhile. A destination is one of the sources or overlaps none.
pub unsafe fn sum(dtype: DType, sources: &[u64], destinations: &[u64], len: usize) {
    assert!(!sources.is_empty(), "a sum of nothing");
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => cpu::sum::<f32>(sources, destinations, len),
            DType::Bf16 => cpu::sum::<bf16>(sources, destinations, len),
            DType::U32 => panic!("indices are not summed"),
        }
    }
}

/// Copies `bytes` bytes; nothing if `from` is `to`.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes` bytes, they are the same or do not overlap, and nobody else accesses
/// the destination or writes the source meanwhile.
pub unsafe fn copy(from: u64, to: u64, bytes: usize) {
    if from != to {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
    }
}
