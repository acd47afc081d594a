//! Converts the trainer's f32 to a file's bytes, little-endian: the inverse of `convert`.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::FileDtype;

const BATCH: usize = 1024;

/// Why not all values were written.
pub(crate) enum Stopped<E> {
    /// The dtype cannot hold it.
    Beyond(f32),
    /// The receiver of the bytes failed.
    Failed(E),
}

/// Whether [`round`] can write this dtype.
pub(crate) fn is_writable(dtype: FileDtype) -> bool {
    matches!(dtype, FileDtype::F32 | FileDtype::BF16 | FileDtype::F16)
}

/// Rounds to nearest, ties to even, and hands on the bytes in batches.
///
/// # Panics
/// If the dtype is not [`is_writable`].
pub(crate) fn round<E>(
    values: &[f32],
    dtype: FileDtype,
    mut put: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), Stopped<E>> {
    let mut bytes = [0; BATCH * size_of::<f32>()];
    for batch in values.chunks(BATCH) {
        let bytes = &mut bytes[..batch.len() * dtype.size_bytes()];
        match dtype {
            FileDtype::F32 => fill(bytes, batch.iter().map(|value| value.to_le_bytes())),
            FileDtype::BF16 => {
                let mut rounded = [bf16::ZERO; BATCH];
                let rounded = &mut rounded[..batch.len()];
                rounded.convert_from_f32_slice(batch);
                refuse_new_infinities(batch, rounded.iter().map(|value| value.is_infinite()))?;
                fill(bytes, rounded.iter().map(|value| value.to_le_bytes()));
            }
            FileDtype::F16 => {
                let mut rounded = [f16::ZERO; BATCH];
                let rounded = &mut rounded[..batch.len()];
                rounded.convert_from_f32_slice(batch);
                refuse_new_infinities(batch, rounded.iter().map(|value| value.is_infinite()))?;
                fill(bytes, rounded.iter().map(|value| value.to_le_bytes()));
            }
            other => panic!("f32 is not written as {other}"),
        }
        put(bytes).map_err(Stopped::Failed)?;
    }
    Ok(())
}

fn fill<const SIZE: usize>(bytes: &mut [u8], elements: impl Iterator<Item = [u8; SIZE]>) {
    let (chunks, _) = bytes.as_chunks_mut::<SIZE>();
    for (chunk, element) in chunks.iter_mut().zip(elements) {
        *chunk = element;
    }
}

/// The largest f16 is 65,504; a weight beyond it would silently become infinity.
fn refuse_new_infinities<E>(values: &[f32], are_infinite: impl Iterator<Item = bool>) -> Result<(), Stopped<E>> {
    let first = values.iter().zip(are_infinite).find(|(value, is_infinite)| *is_infinite && value.is_finite());
    first.map_or(Ok(()), |(value, _)| Err(Stopped::Beyond(*value)))
}
