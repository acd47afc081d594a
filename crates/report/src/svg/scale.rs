//! The places of values on a page.

use super::ticks::Ticks;

/// A range of values over a range of pixels, which may run the other way. The range of values is not empty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    pub values: (f64, f64),
    pub pixels: (f64, f64),
}

impl Scale {
    pub fn place(&self, value: f64) -> f64 {
        let (low, high) = self.values;
        let (first, last) = self.pixels;
        first + (value - low) / (high - low) * (last - first)
    }

    /// About `wanted` round values.
    pub fn ticks(&self, wanted: usize) -> Ticks {
        Ticks::between(self.values.0, self.values.1, wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_in_proportion_either_way() {
        let right = Scale { values: (1.0, 3.0), pixels: (100.0, 200.0) };
        let up = Scale { values: (1.0, 3.0), pixels: (200.0, 100.0) };
        for (value, expected) in [(1.0, 100.0), (2.0, 150.0), (3.0, 200.0)] {
            assert_eq!((right.place(value), up.place(value)), (expected, 300.0 - expected), "{value}");
        }
    }
}
