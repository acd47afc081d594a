//! A replica's share of a weight, for work that replicas divide among them: if values are split, it is what this one keeps, so nothing
//! has to be gathered.

use std::ops::Range;

use evenkeel_device::{Queue, Tensor};

use crate::parameters::{ParamId, Parameters, Stretch};
use crate::sharding::layout::even_bounds;
use crate::sharding::layout::moves::rectangles;

/// A part of a weight, by its place in what the shard holds.
pub(crate) struct WeightPart {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    /// [rows, cols]
    pub values: Tensor,
}

impl Parameters {
    /// This replica's share of a linear layer's weight; all of it, unless values are split. A weight in 4 bits is expanded.
    pub(crate) fn share_of_weight(&self, queue: &Queue, id: ParamId) -> Vec<WeightPart> {
        let [rows, width] = self.specs[id.0].matrix;
        if rows * width == 0 {
            return Vec::new();
        }
        let bucket = self.places[id.0].map(|(bucket, _)| bucket);
        let Some(own) = bucket.and_then(|bucket| self.own_values[bucket].as_ref()) else {
            let rows = self.share_of_rows(rows);
            let values = self.packed[id.0].as_ref().map(|packed| packed.expanded(queue, self.dtype));
            let values = values.unwrap_or_else(|| self.kept_value(id)).row_range(rows.clone());
            return if rows.is_empty() { Vec::new() } else { vec![WeightPart { rows, cols: 0..width, values }] };
        };
        let Some(Stretch { elements, place }) = self.own_stretch(id) else { return Vec::new() };
        let own = own.col_range(place);
        let part = |(rows, cols): (Range<usize>, Range<usize>)| {
            let start = rows.start * width + cols.start - elements.start;
            let values = own.col_range(start..start + rows.len() * cols.len()).reshaped(rows.len(), cols.len());
            WeightPart { rows, cols, values }
        };
        rectangles(&elements, width).into_iter().map(part).collect()
    }

    /// This replica's share of rows that all replicas have.
    fn share_of_rows(&self, rows: usize) -> Range<usize> {
        if !self.split.splits_values() {
            return 0..rows;
        }
        let bounds = even_bounds(rows, self.split.replicas);
        bounds[self.split.replica]..bounds[self.split.replica + 1]
    }
}
