//! Converts a file's bytes, little-endian and at any alignment, to the trainer's numbers.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::FileDtype;

/// A number that a file's elements can be read as: `f32` from F64, F32, F16 and BF16; `i32` from BOOL and the integers,
/// as long as each value fits.
pub trait Element: sealed::Convert {}

impl Element for f32 {}
impl Element for i32 {}

/// A value that does not fit the wanted type.
#[derive(Debug)]
pub struct DoesNotFit(pub(crate) i128);

/// Converts exactly as many elements as the destination has.
pub(crate) type Conversion<T> = fn(&[u8], &mut [T]) -> Result<(), DoesNotFit>;

pub(crate) mod sealed {
    use super::{Conversion, FileDtype};

    pub trait Convert: Copy + Sized {
        const NAME: &'static str;

        fn conversion(dtype: FileDtype) -> Option<Conversion<Self>>;
    }
}

impl sealed::Convert for f32 {
    const NAME: &'static str = "f32";

    fn conversion(dtype: FileDtype) -> Option<Conversion<f32>> {
        Some(match dtype {
            FileDtype::F64 => |bytes, into| infallible(bytes, into, |element| f64::from_le_bytes(element) as f32),
            FileDtype::F32 => |bytes, into| infallible(bytes, into, f32::from_le_bytes),
            FileDtype::BF16 => |bytes, into| infallible(bytes, into, bf16_to_f32),
            FileDtype::F16 => |bytes, into| {
                f16_to_f32(bytes, into);
                Ok(())
            },
            _ => return None,
        })
    }
}

impl sealed::Convert for i32 {
    const NAME: &'static str = "i32";

    fn conversion(dtype: FileDtype) -> Option<Conversion<i32>> {
        Some(match dtype {
            FileDtype::BOOL | FileDtype::U8 => |bytes, into| fallible(bytes, into, u8::from_le_bytes),
            FileDtype::I8 => |bytes, into| fallible(bytes, into, i8::from_le_bytes),
            FileDtype::U16 => |bytes, into| fallible(bytes, into, u16::from_le_bytes),
            FileDtype::I16 => |bytes, into| fallible(bytes, into, i16::from_le_bytes),
            FileDtype::U32 => |bytes, into| fallible(bytes, into, u32::from_le_bytes),
            FileDtype::I32 => |bytes, into| fallible(bytes, into, i32::from_le_bytes),
            FileDtype::U64 => |bytes, into| fallible(bytes, into, u64::from_le_bytes),
            FileDtype::I64 => |bytes, into| fallible(bytes, into, i64::from_le_bytes),
            _ => return None,
        })
    }
}

fn infallible<const SIZE: usize, T>(
    bytes: &[u8],
    into: &mut [T],
    convert: impl Fn([u8; SIZE]) -> T,
) -> Result<(), DoesNotFit> {
    for (value, element) in into.iter_mut().zip(elements(bytes)) {
        *value = convert(*element);
    }
    Ok(())
}

fn fallible<const SIZE: usize, Wide>(
    bytes: &[u8],
    into: &mut [i32],
    decode: impl Fn([u8; SIZE]) -> Wide,
) -> Result<(), DoesNotFit>
where
    Wide: Copy + TryInto<i32> + Into<i128>,
{
    for (value, element) in into.iter_mut().zip(elements(bytes)) {
        let wide = decode(*element);
        *value = wide.try_into().map_err(|_| DoesNotFit(wide.into()))?;
    }
    Ok(())
}

fn elements<const SIZE: usize>(bytes: &[u8]) -> &[[u8; SIZE]] {
    let (elements, rest) = bytes.as_chunks();
    assert!(rest.is_empty(), "{} bytes are not a whole number of elements of {SIZE}", bytes.len());
    elements
}

/// The upper half of an f32; unlike the `half` crate's conversion it has no branch for NaN, so it vectorises.
fn bf16_to_f32(element: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(element)) << 16)
}

/// Copies into small aligned batches, which the `half` crate converts with the CPU's own instructions.
fn f16_to_f32(bytes: &[u8], into: &mut [f32]) {
    const BATCH: usize = 256;
    let mut aligned = [f16::ZERO; BATCH];
    for (values, batch) in into.chunks_mut(BATCH).zip(elements(bytes).chunks(BATCH)) {
        let aligned = &mut aligned[..batch.len()];
        for (half, element) in aligned.iter_mut().zip(batch) {
            *half = f16::from_le_bytes(*element);
        }
        aligned.convert_to_f32_slice(values);
    }
}
