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
        let rough = (high - low) / wanted.max(1) as f64;
        if !(rough.is_finite() && rough > 0.0) {
            return Ticks { values: vec![low], decimals: 2 };
        }
        let power = 10f64.powf(rough.log10().floor());
        let round = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= rough).unwrap_or(10.0);
        let step = round * power;
        // Half a thousandth of a step forgives what rounding does to the ends.
        let (first, last) = ((low / step - 5e-4).ceil(), (high / step + 5e-4).floor());
        let count = ((last - first).max(0.0) as usize).min(2 * wanted) + 1;
        let values = (0..count).map(|index| (first + index as f64) * step).collect();
        Ticks { values, decimals: (-step.log10().floor()).clamp(0.0, 12.0) as usize }
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
    fn no_range_is_too_strange() {
        for (low, high) in [(f64::NAN, 1.0), (0.0, f64::INFINITY), (2.0, 1.0), (1e300, 1.1e300), (1.0, 1.0 + 1e-15)] {
            assert!(Ticks::between(low, high, 5).values.len() <= 11, "{low} to {high}");
        }
    }
}
