use super::{Operation, assert_indices};
use crate::View;

/// `out[i, h] = x[rows[i], h]`. An index outside `x` is a bug in the caller and ends the queue.
#[derive(Clone, Copy, Debug)]
pub struct GatherRows {
    /// [T, H]
    pub x: View,
    /// u32 [1, C]
    pub rows: View,
    /// [C, H]
    pub out: View,
}

impl Operation for GatherRows {
    fn check(&self) {
        assert_indices("GatherRows", &self.rows, self.out.rows);
        assert_eq!((self.x.cols, self.x.dtype), (self.out.cols, self.out.dtype), "GatherRows");
    }

    fn bytes(&self) -> u64 {
        2 * self.out.bytes() + self.rows.bytes()
    }
}

/// `out[rows[i], h] = x[i, h]`, or `+=`; the rows are distinct.
#[derive(Clone, Copy, Debug)]
pub struct ScatterRows {
    /// [C, H]
    pub x: View,
    /// u32 [1, C]
    pub rows: View,
    /// [T, H]
    pub out: View,
    pub accumulate: bool,
}

impl Operation for ScatterRows {
    fn check(&self) {
        assert_indices("ScatterRows", &self.rows, self.x.rows);
        assert_eq!((self.x.cols, self.x.dtype), (self.out.cols, self.out.dtype), "ScatterRows");
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() * if self.accumulate { 3 } else { 2 } + self.rows.bytes()
    }
}
