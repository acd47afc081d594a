//! The kernels' sources. Those by tensor units are compiled for a width of keys.

use super::super::modules::Source;

macro_rules! kernels {
    ($file:literal) => {
        include_str!(concat!("../kernels/delta/", $file))
    };
}

macro_rules! wide {
    ($name:literal, $width:literal $(, $file:literal)+) => {
        Source {
            name: concat!("delta/", $name, "_", $width, ".cu"),
            parts: &[
                concat!("#define WIDTH ", $width, "\n"),
                include_str!("../kernels/attention/ptx.cuh"),
                kernels!("shared.cuh"),
                kernels!("tiles.cuh"),
                $(kernels!($file)),+
            ],
        }
    };
}

/// The kernels for keys of up to `width` elements.
pub(super) struct Variant {
    pub width: usize,
    pub prepare: Source,
    pub forward: Source,
    pub backward: Source,
    pub carry: Source,
    pub gradients: Source,
}

macro_rules! variants {
    ($($width:literal),*) => {
        [$(Variant {
            width: $width,
            prepare: wide!("prepare", $width, "prepare.cu"),
            forward: wide!("forward", $width, "turned.cuh", "forward.cu"),
            backward: wide!("backward", $width, "turned.cuh", "backward.cu"),
            carry: wide!("carry", $width, "carry.cu"),
            gradients: wide!("gradients", $width, "gradients.cu"),
        }),*]
    };
}

static VARIANTS: [Variant; 3] = variants!(64, 128, 256);

impl Variant {
    pub fn of(key: usize) -> &'static Variant {
        let variant = VARIANTS.iter().find(|variant| variant.width >= key);
        variant.unwrap_or_else(|| panic!("a delta rule with keys of {key} elements"))
    }
}

pub(super) static TOKENS: Source =
    Source { name: "delta/tokens.cu", parts: &[kernels!("shared.cuh"), kernels!("tokens.cu")] };
pub(super) static EXACT: Source =
    Source { name: "delta/exact_gradients.cu", parts: &[kernels!("shared.cuh"), kernels!("exact_gradients.cu")] };
pub(super) static CONVOLUTION: Source =
    Source { name: "delta/convolution.cu", parts: &[kernels!("convolution.cuh"), kernels!("convolution.cu")] };
pub(super) static DYNAMIC: Source =
    Source { name: "delta/dynamic.cu", parts: &[kernels!("convolution.cuh"), kernels!("dynamic.cu")] };
pub(super) static GATED_NORM: Source = Source { name: "delta/gated_norm.cu", parts: &[kernels!("gated_norm.cu")] };

pub(in super::super) fn sources() -> impl Iterator<Item = &'static Source> {
    let of_variant = |variant: &'static Variant| {
        [&variant.prepare, &variant.forward, &variant.backward, &variant.carry, &variant.gradients]
    };
    VARIANTS.iter().flat_map(of_variant).chain([&TOKENS, &EXACT, &CONVOLUTION, &DYNAMIC, &GATED_NORM])
}
