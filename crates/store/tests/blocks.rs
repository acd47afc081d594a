//! Reading against a plain twin that decodes one element at a time.

mod forge;

use std::panic::{AssertUnwindSafe, catch_unwind};

use evenkeel_store::{Defect, Element, FileDtype, RawTensor, SafeTensorsFile};
use fastrand::Rng;
use forge::{entry, file, header, open};
use half::{bf16, f16};

const SHAPES: [&[usize]; 9] = [&[], &[1], &[7], &[5, 3], &[1, 300], &[517, 1], &[3, 5, 7], &[2, 0, 3], &[0, 4]];

/// A file with tensor `t` of these bytes, which start at an odd address.
fn misaligned(dtype: FileDtype, shape: &[usize], bytes: &[u8]) -> SafeTensorsFile {
    let entries = [entry("pad", "U8", &[1], 0, 1), entry("t", dtype.name(), shape, 1, 1 + bytes.len())];
    let mut header = header(&entries);
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let file = open(file(&header, &[&[0], bytes].concat())).unwrap();
    assert_eq!(file.tensor("t").unwrap().bytes().as_ptr() as usize % 2, 1);
    file
}

fn random_file(dtype: FileDtype, shape: &[usize], rng: &mut Rng) -> SafeTensorsFile {
    let count: usize = shape.iter().product();
    let bytes: Vec<u8> = (0..count)
        .flat_map(|_| match dtype {
            // Random bits would not fit an i32.
            FileDtype::U32 => (rng.u32(..) >> 1).to_le_bytes().to_vec(),
            FileDtype::U64 => u64::from(rng.u32(..) >> 1).to_le_bytes().to_vec(),
            FileDtype::I64 => i64::from(rng.i32(..)).to_le_bytes().to_vec(),
            _ => (0..dtype.size_bytes()).map(|_| rng.u8(..)).collect(),
        })
        .collect();
    misaligned(dtype, shape, &bytes)
}

/// The plain twin: decodes one element. `None` if the dtype cannot be read as f32.
fn f32_at(tensor: &RawTensor, index: usize) -> Option<f32> {
    Some(match tensor.dtype() {
        FileDtype::F64 => f64::from_le_bytes(element(tensor, index)) as f32,
        FileDtype::F32 => f32::from_le_bytes(element(tensor, index)),
        FileDtype::F16 => f16::from_le_bytes(element(tensor, index)).to_f32(),
        FileDtype::BF16 => bf16::from_le_bytes(element(tensor, index)).to_f32(),
        _ => return None,
    })
}

fn i32_at(tensor: &RawTensor, index: usize) -> Option<i32> {
    Some(match tensor.dtype() {
        FileDtype::BOOL | FileDtype::U8 => u8::from_le_bytes(element(tensor, index)).into(),
        FileDtype::I8 => i8::from_le_bytes(element(tensor, index)).into(),
        FileDtype::U16 => u16::from_le_bytes(element(tensor, index)).into(),
        FileDtype::I16 => i16::from_le_bytes(element(tensor, index)).into(),
        FileDtype::U32 => u32::from_le_bytes(element(tensor, index)).try_into().unwrap(),
        FileDtype::I32 => i32::from_le_bytes(element(tensor, index)),
        FileDtype::U64 => u64::from_le_bytes(element(tensor, index)).try_into().unwrap(),
        FileDtype::I64 => i64::from_le_bytes(element(tensor, index)).try_into().unwrap(),
        _ => return None,
    })
}

fn element<const SIZE: usize>(tensor: &RawTensor, index: usize) -> [u8; SIZE] {
    tensor.bytes()[index * SIZE..(index + 1) * SIZE].try_into().unwrap()
}

fn random_range(limit: usize, rng: &mut Rng) -> std::ops::Range<usize> {
    let (a, b) = (rng.usize(..=limit), rng.usize(..=limit));
    a.min(b)..a.max(b)
}

#[test]
fn blocks_equal_plain_indexing_for_every_dtype_and_shape() {
    let mut rng = Rng::with_seed(1);
    for dtype in FileDtype::ALL {
        for shape in SHAPES {
            let file = random_file(dtype, shape, &mut rng);
            let tensor = file.tensor("t").unwrap();
            let same_f32 = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            for _ in 0..20 {
                check_block(&tensor, &mut rng, f32_at, same_f32, -7.5);
                check_block(&tensor, &mut rng, i32_at, |a, b| a == b, -7);
            }
        }
    }
}

fn check_block<T: Element + std::fmt::Debug>(
    tensor: &RawTensor,
    rng: &mut Rng,
    twin: fn(&RawTensor, usize) -> Option<T>,
    same: fn(T, T) -> bool,
    untouched: T,
) {
    let (rows, cols) = match rng.u8(..4) {
        0 => (0..tensor.rows(), 0..tensor.cols()),
        1 => (random_range(tensor.rows(), rng), 0..tensor.cols()),
        _ => (random_range(tensor.rows(), rng), random_range(tensor.cols(), rng)),
    };
    let stride = cols.len() + rng.usize(..3);
    let mut into = vec![untouched; rows.len() * stride];
    let read = tensor.read_block(rows.clone(), cols.clone(), &mut into, stride);
    if rows.is_empty() || cols.is_empty() {
        return;
    }
    if twin(tensor, 0).is_none() {
        assert!(matches!(read.unwrap_err().defect, Defect::CannotConvert { .. }));
        return;
    }
    read.unwrap();
    for (i, &found) in into.iter().enumerate() {
        let row = rows.start + i / stride;
        let col = cols.start + i % stride;
        let expected = if col < cols.end { twin(tensor, row * tensor.cols() + col).unwrap() } else { untouched };
        assert!(same(found, expected), "{} {:?} at {row}, {col}: {found:?}", tensor.dtype(), tensor.shape());
    }
}

#[test]
fn every_half_float_is_read_exactly() {
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dtype in [FileDtype::F16, FileDtype::BF16] {
        let file = misaligned(dtype, &[1 << 16], &bytes);
        let tensor = file.tensor("t").unwrap();
        let mut values = vec![0f32; 1 << 16];
        tensor.read(0..1 << 16, &mut values).unwrap();
        for (index, value) in values.iter().enumerate() {
            let expected = f32_at(&tensor, index).unwrap();
            assert!(value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan()), "{dtype} {index}");
        }
    }
}

#[test]
fn rows_are_the_first_dim_and_columns_the_others() {
    let cases: [(&[usize], usize, usize); 5] =
        [(&[], 1, 1), (&[7], 1, 7), (&[5, 3], 5, 3), (&[3, 5, 7], 3, 35), (&[0, usize::MAX, 2], 0, usize::MAX)];
    for (shape, rows, cols) in cases {
        let bytes = vec![0; shape.iter().product()];
        let file = misaligned(FileDtype::U8, shape, &bytes);
        let tensor = file.tensor("t").unwrap();
        assert_eq!((tensor.rows(), tensor.cols()), (rows, cols), "{shape:?}");
    }
}

#[test]
fn an_integer_that_does_not_fit_is_an_error_with_its_value() {
    let check = |dtype, bytes: &[u8], expected: i128| {
        let file = misaligned(dtype, &[1], bytes);
        let error = file.tensor("t").unwrap().read(0..1, &mut [0i32]).unwrap_err();
        assert!(matches!(error.defect, Defect::DoesNotFit { value, .. } if value == expected), "{error:?}");
    };
    check(FileDtype::I64, &(-1i64 << 31).wrapping_sub(1).to_le_bytes(), -(1 << 31) - 1);
    check(FileDtype::I64, &(1i64 << 31).to_le_bytes(), 1 << 31);
    check(FileDtype::U32, &u32::MAX.to_le_bytes(), u32::MAX.into());
    check(FileDtype::U64, &u64::MAX.to_le_bytes(), u64::MAX.into());
}

#[test]
fn reading_outside_a_tensor_panics() {
    let file = misaligned(FileDtype::F32, &[2, 3], &[0; 24]);
    let tensor = file.tensor("t").unwrap();
    let panics = |read: &dyn Fn(&mut [f32])| {
        let outcome = catch_unwind(AssertUnwindSafe(|| read(&mut [0.0; 6])));
        assert!(outcome.is_err());
    };
    panics(&|into| tensor.read(1..7, into).unwrap());
    panics(&|into| tensor.read(0..5, into).unwrap());
    panics(&|into| tensor.read(1 << 62..(1 << 62) + 6, into).unwrap());
    panics(&|into| tensor.read_block(0..3, 0..2, into, 2).unwrap());
    panics(&|into| tensor.read_block(0..1, 2..4, into, 2).unwrap());
    panics(&|into| tensor.read_block(0..2, 0..3, into, 2).unwrap());
    panics(&|into| tensor.read_block(0..2, 0..3, into, 4).unwrap());
    panics(&|into| tensor.read_block(0..2, 0..3, &mut into[..5], 3).unwrap());
}
