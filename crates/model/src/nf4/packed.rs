//! A shard's part of a weight in 4 bits, on a device.

use std::ops::Range;

use evenkeel_device::kernel::{ExpandNf4, NF4_BLOCK, NF4_CODES, NF4_PER_WORD};
use evenkeel_device::{DType, Queue, Tensor};

use super::quantize::{Nested, absmax, codes};
use crate::error::Error;
use crate::parameters::ParamSpec;

/// Codes and factors of the part, as if it were one long row: its blocks are whole, but for the last of a whole weight.
pub(crate) struct PackedWeight {
    matrix: [usize; 2],
    /// u32 [1, ⌈n / 8⌉]
    codes: Tensor,
    /// f32 [1, ⌈n / 64⌉]
    factors: Tensor,
}

impl PackedWeight {
    /// Room for a weight, contents undefined.
    pub fn allocate(spec: &ParamSpec, queue: &Queue) -> PackedWeight {
        let len = spec.len();
        let codes = queue.tensor(1, len.div_ceil(NF4_PER_WORD), DType::U32);
        let factors = queue.tensor(1, len.div_ceil(NF4_BLOCK), DType::F32);
        PackedWeight { matrix: spec.matrix, codes, factors }
    }

    /// The numbers, [rows, columns], in a new tensor.
    pub fn expanded(&self, queue: &Queue, dtype: DType) -> Tensor {
        let [rows, cols] = self.matrix;
        let out = queue.tensor(rows, cols, dtype);
        let flat = out.view().reshaped(1, rows * cols);
        queue.launch(ExpandNf4 { codes: self.codes.view(), absmax: self.factors.view(), out: flat });
        out
    }

    /// Writes the shard's part of a weight.
    pub fn fill(&self, spec: &ParamSpec, weight: &dyn HostWeight, queue: &Queue) -> Result<(), Error> {
        let mut bytes = vec![0u8; self.codes.len() * size_of::<u32>()];
        let mut factors = vec![0f32; self.factors.len()];
        for Stretch { elements, place } in stretches(spec) {
            let blocks = elements.start / NF4_BLOCK..elements.end.div_ceil(NF4_BLOCK);
            factors[place / NF4_BLOCK..][..blocks.len()].copy_from_slice(&weight.factors()[blocks]);
            let codes = &mut bytes[place / 2..][..elements.len().div_ceil(2)];
            weight.codes(elements, codes)?;
        }
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        queue.write_indices(&self.codes, &words);
        queue.write_rows(&self.factors, |_, row| {
            row.copy_from_slice(&factors);
            Ok(())
        })
    }
}

/// Some consecutive elements of the whole weight, and where they lie in the shard's part. Both begin with a block.
struct Stretch {
    elements: Range<usize>,
    place: usize,
}

fn stretches(spec: &ParamSpec) -> Vec<Stretch> {
    let (width, held) = (spec.whole[1], spec.matrix[1]);
    if spec.matrix == spec.whole {
        return vec![Stretch { elements: 0..spec.len(), place: 0 }];
    }
    let of_piece = |piece: crate::sharding::layout::Piece| -> Vec<Stretch> {
        if piece.cols.len() == width {
            let elements = piece.rows.start * width..piece.rows.end * width;
            return vec![Stretch { elements, place: piece.held_rows.start * held }];
        }
        let row = |(row, held_row): (usize, usize)| Stretch {
            elements: row * width + piece.cols.start..row * width + piece.cols.end,
            place: held_row * held + piece.held_cols.start,
        };
        piece.rows.zip(piece.held_rows).map(row).collect()
    };
    spec.slice.pieces().flat_map(of_piece).collect()
}

/// A whole weight in 4 bits on the host.
pub(crate) trait HostWeight {
    /// The factors of all blocks.
    fn factors(&self) -> &[f32];

    /// Writes the codes of some elements, two in a byte; they begin with a block.
    fn codes(&self, elements: Range<usize>, out: &mut [u8]) -> Result<(), Error>;
}

/// Reads some elements as numbers.
pub(crate) fn read_expanded(weight: &dyn HostWeight, elements: Range<usize>, out: &mut [f32]) -> Result<(), Error> {
    let first = elements.start / NF4_BLOCK * NF4_BLOCK;
    let mut codes = vec![0; (elements.end - first).div_ceil(2)];
    weight.codes(first..elements.end, &mut codes)?;
    let number = |element: usize| number(&codes, element - first, weight.factors()[element / NF4_BLOCK]);
    out.iter_mut().zip(elements).for_each(|(out, element)| *out = number(element));
    Ok(())
}

/// The number of the code at a place.
fn number(codes: &[u8], place: usize, factor: f32) -> f32 {
    let byte = codes[place / 2];
    let code = if place.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
    NF4_CODES[code as usize] * factor
}

/// A whole weight in 4 bits, all of it in memory.
pub(crate) struct OwnedWeight {
    codes: Vec<u8>,
    factors: Vec<f32>,
}

impl OwnedWeight {
    pub fn of(weight: &dyn HostWeight, len: usize) -> Result<OwnedWeight, Error> {
        let mut codes = vec![0; len.div_ceil(2)];
        weight.codes(0..len, &mut codes)?;
        Ok(OwnedWeight { codes, factors: weight.factors().to_vec() })
    }

    /// Some elements as numbers.
    pub fn expanded(&self, elements: Range<usize>) -> Vec<f32> {
        elements.map(|element| number(&self.codes, element, self.factors[element / NF4_BLOCK])).collect()
    }
}

/// A weight that is quantised while it is read.
pub(crate) struct QuantizedOnLoading<R> {
    len: usize,
    read: R,
    /// Largest magnitudes of the blocks: codes follow from these.
    absmax: Vec<f32>,
    /// What double quantisation makes of them: numbers are expanded with these.
    factors: Vec<f32>,
}

impl<R: Fn(Range<usize>, &mut [f32]) -> Result<(), Error> + Sync> QuantizedOnLoading<R> {
    /// `read` reads elements of the whole weight.
    pub fn new(spec: &ParamSpec, read: R) -> Result<QuantizedOnLoading<R>, Error> {
        let len = spec.whole.iter().product();
        let absmax = absmax(len, &read)?;
        if absmax.iter().any(|absmax| !absmax.is_finite()) {
            return Err(Error::NotFinite { name: spec.name.clone() });
        }
        let factors = Nested::of(&absmax).expanded();
        Ok(QuantizedOnLoading { len, read, absmax, factors })
    }
}

impl<R: Fn(Range<usize>, &mut [f32]) -> Result<(), Error> + Sync> HostWeight for QuantizedOnLoading<R> {
    fn factors(&self) -> &[f32] {
        &self.factors
    }

    fn codes(&self, elements: Range<usize>, out: &mut [u8]) -> Result<(), Error> {
        codes(elements, self.len, &self.absmax, &self.read, out)
    }
}
