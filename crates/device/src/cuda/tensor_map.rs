//! How Hopper's copy engine finds a matrix.

use cudarc::driver::sys;

use super::error::must;
use crate::{DType, View};

/// A matrix for `copy_box` and `store_box` in kernels/bulk_copies.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct TensorMap([u64; 16]);

impl TensorMap {
    /// Of so many groups of rows, one below the other. A box has so many rows of one group, and as many columns as 128 bytes hold;
    /// in shared memory, the 16-byte chunks of its rows are exchanged by the row's number. Address and stride are multiples of 16
    /// bytes, and the matrix is not empty.
    pub fn new(view: &View, groups: usize, box_rows: usize) -> TensorMap {
        let (kind, box_cols) = match view.dtype {
            DType::Bf16 => (sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 64),
            DType::F32 => (sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 32),
            DType::U32 => panic!("indices for the copy engine"),
        };
        let rows = view.rows / groups;
        let stride_bytes = (view.stride * view.dtype.size_bytes()) as u64;
        let dims = [view.cols as u64, rows as u64, groups as u64];
        let strides = [stride_bytes, stride_bytes * rows as u64];
        let sides = [box_cols, box_rows as u32, 1];
        let steps = [1u32; 3];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many elements as there are dimensions, but one for strides.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                kind,
                dims.len() as u32,
                view.address as *mut std::ffi::c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                sides.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        must("describing a matrix to the copy engine", result);
        TensorMap(map.opaque)
    }
}
