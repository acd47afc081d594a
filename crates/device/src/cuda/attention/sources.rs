//! Our own kernels' sources, compiled for a width of heads, with dropout and without.

use super::super::modules::Source;
use crate::DType;

macro_rules! kernels {
    ($file:literal) => {
        include_str!(concat!("../kernels/attention/", $file))
    };
}

/// The same text without dropout and with it.
type ByDropout = [Source; 2];

/// The kernels for heads of up to `width` elements.
pub(super) struct Variant {
    pub width: usize,
    /// Keeping all weights, and dropping some.
    forward: ByDropout,
    backward: ByDropout,
    f32: Source,
}

macro_rules! bf16_source {
    ($name:literal, $file:literal, $width:literal, $drops:literal) => {
        Source {
            name: concat!("attention/", $name, "_", $width, ".cu"),
            parts: &[
                concat!("#define WIDTH ", $width, "\n#define DROPS ", $drops, "\n"),
                kernels!("shared.cuh"),
                kernels!("ptx.cuh"),
                kernels!("bf16.cuh"),
                kernels!("softmax.cuh"),
                kernels!($file),
            ],
        }
    };
}

macro_rules! hopper_source {
    ($name:literal, $file:literal, $drops:literal) => {
        Source {
            name: concat!("attention/", $name, ".cu"),
            parts: &[
                concat!("#define DROPS ", $drops, "\n"),
                kernels!("shared.cuh"),
                kernels!("ptx.cuh"),
                kernels!("hopper_ptx.cuh"),
                kernels!("hopper.cuh"),
                kernels!("bf16.cuh"),
                kernels!("softmax.cuh"),
                kernels!($file),
            ],
        }
    };
}

macro_rules! variants {
    ($($width:literal),*) => {
        [$(Variant {
            width: $width,
            forward: [
                bf16_source!("forward_bf16", "forward_bf16.cu", $width, "false"),
                bf16_source!("forward_dropping_bf16", "forward_bf16.cu", $width, "true"),
            ],
            backward: [
                bf16_source!("backward_bf16", "backward_bf16.cu", $width, "false"),
                bf16_source!("backward_dropping_bf16", "backward_bf16.cu", $width, "true"),
            ],
            f32: Source {
                name: concat!("attention/f32_", $width, ".cu"),
                parts: &[concat!("#define WIDTH ", $width, "\n"), kernels!("shared.cuh"), kernels!("f32.cu")],
            },
        }),*]
    };
}

static VARIANTS: [Variant; 6] = variants!(32, 64, 96, 128, 192, 256);

/// The width of heads that the kernels of warpgroups are written for.
pub(super) const HOPPER_WIDTH: usize = 64;

static HOPPER_FORWARD: ByDropout = [
    hopper_source!("forward_hopper", "forward_hopper.cu", "false"),
    hopper_source!("forward_dropping_hopper", "forward_hopper.cu", "true"),
];

static HOPPER_BACKWARD: ByDropout = [
    hopper_source!("backward_hopper", "backward_hopper.cu", "false"),
    hopper_source!("backward_dropping_hopper", "backward_hopper.cu", "true"),
];

pub(super) fn hopper_forward(drops: bool) -> &'static Source {
    &HOPPER_FORWARD[drops as usize]
}

pub(super) fn hopper_backward(drops: bool) -> &'static Source {
    &HOPPER_BACKWARD[drops as usize]
}

pub(super) static ROWS: Source =
    Source { name: "attention/rows.cu", parts: &[kernels!("shared.cuh"), kernels!("rows.cu")] };

impl Variant {
    pub fn of(dim: usize) -> &'static Variant {
        let variant = VARIANTS.iter().find(|variant| variant.width >= dim);
        variant.unwrap_or_else(|| panic!("attention with heads of {dim} elements, at most 256 are possible"))
    }

    pub fn forward(&'static self, dtype: DType, drops: bool) -> &'static Source {
        if dtype == DType::F32 { &self.f32 } else { &self.forward[drops as usize] }
    }

    pub fn backward(&'static self, dtype: DType, drops: bool) -> &'static Source {
        if dtype == DType::F32 { &self.f32 } else { &self.backward[drops as usize] }
    }
}

/// The sources of the narrowest and the widest heads, which take every branch: the others differ by a number.
pub(in super::super) fn sources() -> impl Iterator<Item = &'static Source> {
    let of_variant = |variant: &'static Variant| variant.forward.iter().chain(&variant.backward).chain([&variant.f32]);
    let of_widths = [&VARIANTS[0], &VARIANTS[VARIANTS.len() - 1]].into_iter().flat_map(of_variant);
    of_widths.chain(&HOPPER_FORWARD).chain(&HOPPER_BACKWARD).chain([&ROWS])
}
