//! Our own kernels' sources, compiled for a width of heads, with and without dropout and changes of scores.

use super::super::modules::Source;
use super::parameters::Options;
use crate::DType;

macro_rules! kernels {
    ($file:literal) => {
        include_str!(concat!("../kernels/attention/", $file))
    };
}

/// The same text without changes of scores and with them.
type ByChanges = [Source; 2];

/// The same without dropout and with it.
type ByOptions = [ByChanges; 2];

/// The kernels for heads of up to `width` elements.
pub(super) struct Variant {
    pub width: usize,
    forward: ByOptions,
    backward: ByOptions,
    f32: ByChanges,
}

macro_rules! bf16_source {
    ($name:literal, $file:literal, $width:literal, $drops:literal, $changes:literal) => {
        Source {
            name: concat!("attention/", $name, "_", $width, ".cu"),
            parts: &[
                concat!("#define WIDTH ", $width, "\n#define DROPS ", $drops, "\n#define CHANGES ", $changes, "\n"),
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
    ($name:literal, $file:literal, $drops:literal, $changes:literal) => {
        Source {
            name: concat!("attention/", $name, ".cu"),
            parts: &[
                concat!("#define DROPS ", $drops, "\n#define CHANGES ", $changes, "\n"),
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

macro_rules! f32_source {
    ($name:literal, $width:literal, $changes:literal) => {
        Source {
            name: concat!("attention/", $name, "_", $width, ".cu"),
            parts: &[
                concat!("#define WIDTH ", $width, "\n#define CHANGES ", $changes, "\n"),
                kernels!("shared.cuh"),
                kernels!("f32.cu"),
            ],
        }
    };
}

/// A source by its options: the names of those without any, with changes, with dropout, and with both.
macro_rules! by_options {
    ($source:ident, [$plain:literal, $changing:literal, $dropping:literal, $both:literal], $($argument:literal),*) => {
        [
            [$source!($plain, $($argument,)* "false", "false"), $source!($changing, $($argument,)* "false", "true")],
            [$source!($dropping, $($argument,)* "true", "false"), $source!($both, $($argument,)* "true", "true")],
        ]
    };
}

macro_rules! variants {
    ($($width:literal),*) => {
        [$(Variant {
            width: $width,
            forward: by_options!(
                bf16_source,
                [
                    "forward_bf16",
                    "forward_changing_bf16",
                    "forward_dropping_bf16",
                    "forward_dropping_changing_bf16"
                ],
                "forward_bf16.cu",
                $width
            ),
            backward: by_options!(
                bf16_source,
                [
                    "backward_bf16",
                    "backward_changing_bf16",
                    "backward_dropping_bf16",
                    "backward_dropping_changing_bf16"
                ],
                "backward_bf16.cu",
                $width
            ),
            f32: [f32_source!("f32", $width, "false"), f32_source!("f32_changing", $width, "true")],
        }),*]
    };
}

static VARIANTS: [Variant; 7] = variants!(32, 64, 96, 128, 192, 256, 512);

/// The width of heads that the kernels of warpgroups are written for.
pub(super) const HOPPER_WIDTH: usize = 64;

static HOPPER_FORWARD: ByOptions = by_options!(
    hopper_source,
    ["forward_hopper", "forward_changing_hopper", "forward_dropping_hopper", "forward_dropping_changing_hopper"],
    "forward_hopper.cu"
);

static HOPPER_BACKWARD: ByOptions = by_options!(
    hopper_source,
    ["backward_hopper", "backward_changing_hopper", "backward_dropping_hopper", "backward_dropping_changing_hopper"],
    "backward_hopper.cu"
);

pub(super) fn hopper_forward(options: Options) -> &'static Source {
    &HOPPER_FORWARD[options.drops as usize][options.changes as usize]
}

pub(super) fn hopper_backward(options: Options) -> &'static Source {
    &HOPPER_BACKWARD[options.drops as usize][options.changes as usize]
}

pub(super) static ROWS: Source =
    Source { name: "attention/rows.cu", parts: &[kernels!("shared.cuh"), kernels!("rows.cu")] };

/// The width of the widest variant.
pub const WIDEST_HEAD: usize = 512;

impl Variant {
    pub fn of(dim: usize) -> &'static Variant {
        let variant = VARIANTS.iter().find(|variant| variant.width >= dim);
        variant.unwrap_or_else(|| panic!("attention with heads of {dim} elements, at most {WIDEST_HEAD} are possible"))
    }

    pub fn forward(&'static self, dtype: DType, options: Options) -> &'static Source {
        self.source(&self.forward, dtype, options)
    }

    pub fn backward(&'static self, dtype: DType, options: Options) -> &'static Source {
        self.source(&self.backward, dtype, options)
    }

    fn source(&'static self, bf16: &'static ByOptions, dtype: DType, options: Options) -> &'static Source {
        let by_changes = if dtype == DType::F32 { &self.f32 } else { &bf16[options.drops as usize] };
        &by_changes[options.changes as usize]
    }
}

/// The sources of the narrowest and the widest heads, and of the widest that are not sliced, which take every branch: the others
/// differ by a number.
pub(in super::super) fn sources() -> impl Iterator<Item = &'static Source> {
    let of_variant =
        |variant: &'static Variant| variant.forward.iter().chain(&variant.backward).flatten().chain(&variant.f32);
    let of_widths = [0, VARIANTS.len() - 2, VARIANTS.len() - 1].map(|i| &VARIANTS[i]).into_iter().flat_map(of_variant);
    of_widths.chain(HOPPER_FORWARD.iter().chain(&HOPPER_BACKWARD).flatten()).chain([&ROWS])
}
