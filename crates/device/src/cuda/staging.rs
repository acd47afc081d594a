//! Copies between host and GPU, through pinned memory that the GPU can reach by itself.

use std::sync::Arc;

use cudarc::driver::sys;
use half::bf16;

use super::context::Context;
use super::error::must;
use super::event::SharedEvent;
use crate::queue::HostData;
use crate::{DType, View};

const SLOTS: usize = 4;
const SLOT_BYTES: usize = 4 << 20;

/// A few slots of pinned memory, used in turn. A slot is written again once the GPU has read it.
pub(super) struct Staging {
    context: Arc<Context>,
    slots: Vec<Slot>,
    next: usize,
}

struct Slot {
    memory: *mut u8,
    /// Behind the last copy from or to it.
    used: Option<SharedEvent>,
}

// SAFETY: pinned memory is memory; the slots are used by one thread at a time.
unsafe impl Send for Staging {}

/// A rectangle of a view that fits a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
}

/// The pieces of a view in the order of its elements: some rows each, or parts of one row.
fn pieces(rows: usize, cols: usize, capacity: usize) -> Vec<Piece> {
    if rows == 0 || cols == 0 {
        return Vec::new();
    }
    if cols <= capacity {
        let height = capacity / cols;
        return (0..rows)
            .step_by(height)
            .map(|row| Piece { row, rows: height.min(rows - row), col: 0, cols })
            .collect();
    }
    let parts = |row| {
        let starts = (0..cols).step_by(capacity);
        starts.map(move |col| Piece { row, rows: 1, col, cols: capacity.min(cols - col) })
    };
    (0..rows).flat_map(parts).collect()
}

/// A view without gaps as one row.
fn merged(view: View) -> View {
    if view.is_contiguous() && !view.is_empty() { view.reshaped(1, view.len()) } else { view }
}

impl Staging {
    pub fn new(context: Arc<Context>) -> Staging {
        Staging { context, slots: Vec::new(), next: 0 }
    }

    /// A free slot.
    fn slot(&mut self) -> &mut Slot {
        if self.slots.len() < SLOTS {
            let mut memory = std::ptr::null_mut();
            // SAFETY: the context is current.
            must("taking pinned memory", unsafe { sys::cuMemHostAlloc(&mut memory, SLOT_BYTES, 0) });
            self.slots.push(Slot { memory: memory.cast(), used: None });
            return self.slots.last_mut().expect("just pushed");
        }
        let slot = &mut self.slots[self.next];
        self.next = (self.next + 1) % SLOTS;
        if let Some(event) = slot.used.take() {
            event.wait();
        }
        slot
    }

    pub fn upload(&mut self, stream: sys::CUstream, view: View, data: &HostData) {
        let len = match data {
            HostData::Floats(values) => values.len(),
            HostData::Indices(values) => values.len(),
        };
        assert_eq!(len, view.len(), "upload of another size");
        let (view, size) = (merged(view), view.dtype.size_bytes());
        let events = self.context.events(false).clone();
        let mut first = 0;
        for piece in pieces(view.rows, view.cols, SLOT_BYTES / size) {
            let slot = self.slot();
            let range = first..first + piece.rows * piece.cols;
            first = range.end;
            // SAFETY: the piece fits the slot, which nobody else uses.
            unsafe {
                match data {
                    HostData::Floats(values) if view.dtype == DType::Bf16 => {
                        let to = std::slice::from_raw_parts_mut(slot.memory.cast::<u16>(), range.len());
                        round_all(&values[range], to);
                    }
                    HostData::Floats(values) => copy_to(&values[range], slot.memory),
                    HostData::Indices(values) => copy_to(&values[range], slot.memory),
                }
                copy(stream, slot.memory, view, piece, true);
            }
            slot.used = Some(SharedEvent::record(&events, stream));
        }
    }

    /// Waits for everything issued before.
    pub fn download(&mut self, stream: sys::CUstream, view: View) -> HostData {
        let (view, size) = (merged(view), view.dtype.size_bytes());
        let mut floats = Vec::new();
        let mut indices = Vec::new();
        match view.dtype {
            DType::U32 => indices.reserve_exact(view.len()),
            DType::F32 | DType::Bf16 => floats.reserve_exact(view.len()),
        }
        for piece in pieces(view.rows, view.cols, SLOT_BYTES / size) {
            let slot = self.slot();
            let len = piece.rows * piece.cols;
            // SAFETY: the piece fits the slot, which nobody else uses; it is read when the copy has ended.
            unsafe {
                copy(stream, slot.memory, view, piece, false);
                must("reading from the device", sys::cuStreamSynchronize(stream));
                match view.dtype {
                    DType::U32 => indices.extend_from_slice(std::slice::from_raw_parts(slot.memory.cast(), len)),
                    DType::F32 => floats.extend_from_slice(std::slice::from_raw_parts(slot.memory.cast(), len)),
                    DType::Bf16 => {
                        let bits = std::slice::from_raw_parts(slot.memory.cast::<u16>(), len);
                        floats.extend(bits.iter().map(|&bits| bf16::from_bits(bits).to_f32()));
                    }
                }
            }
        }
        match view.dtype {
            DType::U32 => HostData::Indices(indices),
            DType::F32 | DType::Bf16 => HostData::Floats(floats),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        for slot in &self.slots {
            // SAFETY: the stream was waited for, or the device has failed; nothing uses the slot.
            let _ = unsafe { sys::cuMemFreeHost(slot.memory.cast()) };
        }
    }
}

/// To the nearest bf16, ties to even, as [`bf16::from_f32`] does, without a branch: vector instructions do many at once.
fn round_all(values: &[f32], to: &mut [u16]) {
    for (value, to) in values.iter().zip(to) {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        *to = if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded };
    }
}

/// # Safety
/// `to` is writable for as many bytes.
unsafe fn copy_to<T: Copy>(values: &[T], to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, size_of_val(values)) };
}

/// # Safety
/// The piece lies in the view, whose memory lives, and fits the host's memory.
unsafe fn copy(stream: sys::CUstream, host: *mut u8, view: View, piece: Piece, upload: bool) {
    use sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
    let size = view.dtype.size_bytes();
    let width = piece.cols * size;
    let device = view.address + ((piece.row * view.stride + piece.col) * size) as u64;
    let pitch = if piece.rows == 1 { width } else { view.stride * size };
    let [from, to] = match upload {
        true => [(CU_MEMORYTYPE_HOST, width), (CU_MEMORYTYPE_DEVICE, pitch)],
        false => [(CU_MEMORYTYPE_DEVICE, pitch), (CU_MEMORYTYPE_HOST, width)],
    };
    // The driver reads each side's address of its kind of memory.
    let what = sys::CUDA_MEMCPY2D_st {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: from.0,
        srcHost: host.cast(),
        srcDevice: device,
        srcArray: std::ptr::null_mut(),
        srcPitch: from.1,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: to.0,
        dstHost: host.cast(),
        dstDevice: device,
        dstArray: std::ptr::null_mut(),
        dstPitch: to.1,
        WidthInBytes: width,
        Height: piece.rows,
    };
    // SAFETY: the caller's promise.
    let result = unsafe { sys::cuMemcpy2DAsync_v2(&what, stream) };
    must("copying between host and device", result);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_as_everywhere() {
        let patterns = (0..=u16::MAX).flat_map(|high| {
            [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(u32::from(high) << 16 | low))
        });
        let values: Vec<f32> = patterns.collect();
        let mut found = vec![0; values.len()];
        round_all(&values, &mut found);
        for (value, found) in values.iter().zip(found) {
            assert_eq!(found, bf16::from_f32(*value).to_bits(), "{:08x}", value.to_bits());
        }
    }

    #[test]
    fn pieces_cover_every_element_once_in_order_and_fit_a_slot() {
        for [rows, cols, capacity] in
            [[0, 5, 8], [5, 0, 8], [1, 8, 8], [1, 9, 8], [7, 3, 8], [3, 20, 8], [4, 8, 8], [2, 100, 7]]
        {
            let mut expected = 0;
            for piece in pieces(rows, cols, capacity) {
                assert!(piece.rows * piece.cols <= capacity, "{piece:?}");
                for (row, col) in (0..piece.rows).flat_map(|r| (0..piece.cols).map(move |c| (r, c))) {
                    assert_eq!((piece.row + row) * cols + piece.col + col, expected, "{rows} × {cols} by {capacity}");
                    expected += 1;
                }
            }
            assert_eq!(expected, rows * cols);
        }
    }
}
