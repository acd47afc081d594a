//! Round numbers for an axis.

/// A range and the round numbers in it.
#[derive(Debug, PartialEq)]
pub struct Ticks {
    pub values: Vec<f64>,
    /// Digits after the point that tell neighbours apart.
    decimals: usize,
}

impl Ticks {
    /// About `wanted` multiples of 1, 2 or 5 times a power of ten, all between `low` and `high`.
    pub fn between(low: f64, high: f64, wanted: usize) -> Ticks {
        let Some((step, decimals)) = round_step((high - low) / wanted.max(1) as f64) else {
            return Ticks { values: vec![low], decimals: 2 };
        };
        // Half a thousandth of a step forgives what rounding does to the ends.
        let (first, last) = ((low / step - 5e-4).ceil(), (high / step + 5e-4).floor());
        let count = ((last - first).max(0.0) as usize).min(2 * wanted) + 1;
        let values = (0..count).map(|index| (first + index as f64) * step).collect();
        Ticks { values, decimals }
    }

    pub fn label(&self, value: f64) -> String {
        let magnitude = value.abs();
        let (scale, unit) = match magnitude {
            _ if self.decimals > 0 || magnitude < 1e4 => (1.0, ""),
            _ if magnitude < 1e6 => (1e3, "K"),
            _ if magnitude < 1e9 => (1e6, "M"),
            _ => (1e9, "B"),
        };
        if unit.is_empty() {
            return format!("{:.*}", self.decimals, value + 0.0);
        }
        format!("{}{unit}", value / scale)
    }
}

/// The least of 1, 2 and 5 times a power of ten that is not less than `least`, and the decimals it needs.
pub fn round_step(least: f64) -> Option<(f64, usize)> {
    if !(least.is_finite() && least > 0.0) {
        return None;
    }
    let exponent = least.log10().floor();
    let candidates = [(1.0, exponent), (2.0, exponent), (5.0, exponent), (1.0, exponent + 1.0)];
    let steps =
        candidates.map(|(factor, exponent)| (factor * 10f64.powf(exponent), (-exponent).clamp(0.0, 12.0) as usize));
    steps.into_iter().find(|&(step, _)| step >= least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        let cases: [(f64, f64, &[&str]); 9] = [
            (0.0, 1.0, &["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
            (2.31, 9.7, &["4", "6", "8"]),
            (1.0, 1000.0, &["200", "400", "600", "800", "1000"]),
            (0.0, 25000.0, &["0", "5000", "10K", "15K", "20K", "25K"]),
            (3.4512, 3.4589, &["3.452", "3.454", "3.456", "3.458"]),
            (0.0, 1e6, &["0", "200K", "400K", "600K", "800K", "1M"]),
            (-1.0, 1.0, &["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
            (0.1 + 0.2, 0.8, &["0.3", "0.4", "0.5", "0.6", "0.7", "0.8"]),
            (5.0, 5.0, &["5.00"]),
        ];
        for (low, high, expected) in cases {
            let ticks = Ticks::between(low, high, 5);
            let labels: Vec<String> = ticks.values.iter().map(|&value| ticks.label(value)).collect();
            assert_eq!(labels, expected, "{low} to {high}");
        }
    }

    #[test]
    fn steps_are_round() {
        let cases = [
            (0.11, Some((0.2, 1))),
            (0.5, Some((0.5, 1))),
            (0.7, Some((1.0, 0))),
            (1.0, Some((1.0, 0))),
            (3.4, Some((5.0, 0))),
            (81.0, Some((100.0, 0))),
            (0.0021, Some((0.005, 3))),
            (0.0, None),
            (-1.0, None),
            (f64::NAN, None),
            (f64::INFINITY, None),
        ];
        for (least, expected) in cases {
            let found = round_step(least);
            let is_same = match (found, expected) {
                (Some((a, a_decimals)), Some((b, b_decimals))) => (a - b).abs() < 1e-9 * b && a_decimals == b_decimals,
                (found, expected) => found == expected,
            };
            assert!(is_same, "{least}: {found:?}, expected {expected:?}");
        }
    }

    #[test]
    fn no_range_is_too_strange() {
        for (low, high) in [(f64::NAN, 1.0), (0.0, f64::INFINITY), (2.0, 1.0), (1e300, 1.1e300), (1.0, 1.0 + 1e-15)] {
            assert!(Ticks::between(low, high, 5).values.len() <= 11, "{low} to {high}");
        }
    }
}
