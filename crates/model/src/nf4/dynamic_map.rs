//! The 256 numbers of bitsandbytes' 8-bit codes: both signs of seven decades from 1 downwards, each with half the fractions of the
//! decade above it, and 0 and 1.

use std::sync::LazyLock;

pub(super) const MAP_LEN: usize = 256;

const DECADES: i32 = 7;

pub(super) static DYNAMIC_MAP: LazyLock<[f32; MAP_LEN]> = LazyLock::new(|| {
    let mut numbers = vec![0.0, 1.0];
    for decade in 0..DECADES {
        let scale = 10f64.powi(decade + 1 - DECADES) as f32;
        let bounds = linspace(0.1, 1.0, (1 << decade) + 1);
        let means = bounds.windows(2).map(|ends| scale * ((ends[0] + ends[1]) / 2.0));
        numbers.extend(means.flat_map(|mean| [mean, -mean]));
    }
    numbers.sort_by(f32::total_cmp);
    numbers.try_into().expect("2 · (2⁷ - 1) + 2 numbers")
});

/// Numbers that become the code above are greater than these.
pub(super) static DYNAMIC_MIDPOINTS: LazyLock<[f32; MAP_LEN - 1]> =
    LazyLock::new(|| std::array::from_fn(|code| 0.5 * (DYNAMIC_MAP[code] + DYNAMIC_MAP[code + 1])));

/// As PyTorch computes it: from both ends to the middle.
fn linspace(start: f32, end: f32, steps: usize) -> Vec<f32> {
    let step = (end - start) / (steps - 1) as f32;
    let number = |i: usize| match i < steps / 2 {
        true => step.mul_add(i as f32, start),
        false => (-step).mul_add((steps - 1 - i) as f32, end),
    };
    (0..steps).map(number).collect()
}
