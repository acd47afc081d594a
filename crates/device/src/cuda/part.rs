//! Parts of a GPU: some of its multiprocessors, on which all kernels of a device run.
//!
//! The driver cuts a GPU once into groups of multiprocessors that share hardware, and joins some of them into a green context.
//! Memory, compiled kernels and events stay those of the GPU's own context, which stays current; only streams belong to the
//! part. All parts share the GPU's memory bandwidth and its clocks.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use super::CudaError;
use super::context::{Context, succeed};

/// Some of a GPU's multiprocessors. [`cuda_parts`] makes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaPart {
    /// Its groups.
    groups: Range<usize>,
    /// How many multiprocessors they have.
    multiprocessors: u32,
}

impl CudaPart {
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
}

/// Disjoint parts of a GPU with exactly these numbers of multiprocessors. The error says what is possible.
pub fn cuda_parts(ordinal: usize, multiprocessors: &[u32]) -> Result<Vec<CudaPart>, CudaError> {
    let context = Context::of(ordinal, None)?;
    let groups = context.groups()?;
    let sizes: Vec<u32> = groups.iter().map(multiprocessors_of).collect();
    cut(&sizes, multiprocessors).ok_or_else(|| CudaError::Parts {
        device: context.properties().name.clone(),
        multiprocessors: context.properties().multiprocessors,
        wanted: multiprocessors.to_vec(),
        group: sizes.first().copied().unwrap_or(0),
        groups: sizes.len(),
    })
}

/// Consecutive groups for each part, if they come out even.
fn cut(groups: &[u32], wanted: &[u32]) -> Option<Vec<CudaPart>> {
    let mut next = 0;
    let part = |&multiprocessors: &u32| {
        let first = next;
        let mut found = 0;
        while found < multiprocessors {
            found += groups.get(next)?;
            next += 1;
        }
        (found == multiprocessors && found > 0).then_some(CudaPart { groups: first..next, multiprocessors })
    };
    wanted.iter().map(part).collect()
}

fn multiprocessors_of(group: &sys::CUdevResource) -> u32 {
    // SAFETY: the driver wrote a resource of multiprocessors.
    unsafe { group.__bindgen_anon_1.sm.smCount }
}

/// The smallest equal groups of multiprocessors that the GPU can be cut into, without the remainder. On an H200 these are 15 of
/// 8, and 12 remain. If it ignores which of them are neighbours, the driver finds 16, but cuBLASLt's cluster kernels fail in
/// such parts.
///
/// # Safety
/// The device exists.
pub(super) unsafe fn groups(
    device: sys::CUdevice,
    capability: (i32, i32),
) -> Result<Vec<sys::CUdevResource>, CudaError> {
    // As CUDA documents them.
    let least = if capability >= (9, 0) { 8 } else { 4 };
    // SAFETY: the device exists; a resource is plain data, for which zeros are one of no type; there is room for as many as the
    // driver is told.
    unsafe {
        let mut whole: sys::CUdevResource = std::mem::zeroed();
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        succeed("asking for multiprocessors", sys::cuDeviceGetDevResource(device, &mut whole, kind))?;
        let mut count = multiprocessors_of(&whole) / least;
        let mut groups: Vec<sys::CUdevResource> = vec![std::mem::zeroed(); count as usize];
        let first = groups.as_mut_ptr();
        let mut rest = std::mem::zeroed();
        let split = sys::cuDevSmResourceSplitByCount(first, &mut count, &whole, &mut rest, 0, least);
        succeed("cutting the GPU in groups of multiprocessors", split)?;
        groups.truncate(count as usize);
        Ok(groups)
    }
}

/// A part in use: its streams are made here.
pub(crate) struct GreenContext {
    raw: sys::CUgreenCtx,
    /// The same as a context that can be made current.
    as_context: sys::CUcontext,
    multiprocessors: u32,
    context: Arc<Context>,
}

// SAFETY: the driver's handles may be used from any thread; streams are made by one at a time.
unsafe impl Send for GreenContext {}
// SAFETY: as above.
unsafe impl Sync for GreenContext {}

impl GreenContext {
    pub fn new(context: Arc<Context>, part: &CudaPart) -> Result<GreenContext, CudaError> {
        let mut joined = context.groups()?[part.groups.clone()].to_vec();
        let mut description = std::ptr::null_mut();
        let mut raw = std::ptr::null_mut();
        let mut as_context = std::ptr::null_mut();
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: the groups are those of one division of this GPU, whose context is open.
        unsafe {
            let count = joined.len() as u32;
            let joins = sys::cuDevResourceGenerateDesc(&mut description, joined.as_mut_ptr(), count);
            succeed("joining groups of multiprocessors", joins)?;
            let creates = sys::cuGreenCtxCreate(&mut raw, description, context.device(), flags);
            succeed("taking a part of the GPU", creates)?;
        }
        let mut part = GreenContext { raw, as_context, multiprocessors: part.multiprocessors, context };
        // SAFETY: the green context lives.
        let converts = unsafe { sys::cuCtxFromGreenCtx(&mut as_context, raw) };
        succeed("entering a part of the GPU", converts)?;
        part.as_context = as_context;
        Ok(part)
    }

    pub fn as_context(&self) -> sys::CUcontext {
        self.as_context
    }

    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// A stream whose kernels run in this part.
    pub fn stream(&self) -> Result<sys::CUstream, CudaError> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the green context lives.
        succeed("creating a stream", unsafe { sys::cuGreenCtxStreamCreate(&mut raw, self.raw, flags, 0) })?;
        Ok(raw)
    }
}

impl Drop for GreenContext {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: its streams, which hold it, have ended.
        let _ = unsafe { sys::cuGreenCtxDestroy(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_made_of_whole_groups_that_none_shares() {
        let gpu = [8; 15];
        // The ends of the parts, in groups.
        let cases: [(&[u32], Option<&[usize]>); 8] = [
            (&[40, 40, 24, 16], Some(&[5, 10, 13, 15])),
            (&[56, 64], Some(&[7, 15])),
            (&[120], Some(&[15])),
            (&[8], Some(&[1])),
            (&[64, 64], None),
            (&[132], None),
            (&[20, 20], None),
            (&[0, 8], None),
        ];
        for (wanted, expected) in cases {
            let found = cut(&gpu, wanted);
            let ends = found.as_ref().map(|parts| parts.iter().map(|part| part.groups.end).collect::<Vec<_>>());
            assert_eq!(ends.as_deref(), expected, "{wanted:?}");
            let mut next = 0;
            for part in found.iter().flatten() {
                assert_eq!(part.groups.start, next, "{wanted:?}");
                next = part.groups.end;
            }
            for (part, wanted) in found.iter().flatten().zip(wanted) {
                assert_eq!(part.multiprocessors, *wanted);
            }
        }
    }
}
