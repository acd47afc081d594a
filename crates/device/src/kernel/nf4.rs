use super::Operation;
use crate::{DType, View};

/// Elements that share a factor.
pub const NF4_BLOCK: usize = 64;

/// Elements in a word of codes.
pub const NF4_PER_WORD: usize = 8;

/// The numbers that codes stand for, before their block's factor: quantiles of a normal distribution, as bitsandbytes has them.
pub const NF4_CODES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// `out[r, c] = NF4_CODES[code[r, c]] · absmax[r, c / 64]`, in f32, rounded once.
///
/// Codes are 4 bits, eight to a word. In memory they are bitsandbytes' bytes: two to a byte, the first in the upper half.
#[derive(Clone, Copy, Debug)]
pub struct ExpandNf4 {
    /// u32 [rows, ⌈cols / 8⌉]
    pub codes: View,
    /// f32 [rows, ⌈cols / 64⌉]
    pub absmax: View,
    /// [rows, cols]
    pub out: View,
}

impl Operation for ExpandNf4 {
    fn check(&self) {
        let [rows, cols] = self.out.shape();
        assert_ne!(self.out.dtype, DType::U32, "ExpandNf4: indices are not numbers");
        assert_eq!(self.codes.shape(), [rows, cols.div_ceil(NF4_PER_WORD)], "ExpandNf4: codes for {rows} × {cols}");
        assert_eq!(self.codes.dtype, DType::U32, "ExpandNf4: codes are words");
        assert_eq!(self.absmax.shape(), [rows, cols.div_ceil(NF4_BLOCK)], "ExpandNf4: factors for {rows} × {cols}");
        assert_eq!(self.absmax.dtype, DType::F32, "ExpandNf4: factors are f32");
    }

    fn bytes(&self) -> u64 {
        self.codes.bytes() + self.absmax.bytes() + self.out.bytes()
    }
}
