//! The element types a safetensors file can hold.

use std::fmt;

/// The type of a tensor's elements in a file, named as the safetensors format names it.
///
/// The format's types of less than a byte are left out: they occur in quantized checkpoints only, which cannot be
/// trained.
///
/// They are ordered as in the `safetensors` crate, which lays out a file's tensors by this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, non_camel_case_types, reason = "the names are the format's")]
pub enum FileDtype {
    BOOL,
    U8,
    I8,
    F8_E5M2,
    F8_E4M3,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    F64,
    I64,
    U64,
}

impl FileDtype {
    /// Every one, smallest first.
    pub const ALL: [FileDtype; 15] = {
        use FileDtype::*;
        [BOOL, U8, I8, F8_E5M2, F8_E4M3, I16, U16, F16, BF16, I32, U32, F32, F64, I64, U64]
    };

    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        use FileDtype::*;
        match self {
            BOOL | U8 | I8 | F8_E5M2 | F8_E4M3 => 1,
            U16 | I16 | F16 | BF16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 => 8,
        }
    }

    /// Its name in the format, and in [`Display`](fmt::Display).
    pub fn name(self) -> &'static str {
        use FileDtype::*;
        match self {
            BOOL => "BOOL",
            U8 => "U8",
            I8 => "I8",
            F8_E5M2 => "F8_E5M2",
            F8_E4M3 => "F8_E4M3",
            U16 => "U16",
            I16 => "I16",
            F16 => "F16",
            BF16 => "BF16",
            U32 => "U32",
            I32 => "I32",
            F32 => "F32",
            U64 => "U64",
            I64 => "I64",
            F64 => "F64",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<FileDtype> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    pub(crate) fn list() -> String {
        Self::ALL.map(FileDtype::name).join(", ")
    }
}

impl fmt::Display for FileDtype {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}
