//! Rows of tables: embeddings of tokens, and what is added by position.

use evenkeel_device::kernel::{Embed, EmbedBackward};
use evenkeel_device::{Tensor, View};

use crate::chain::body::{Context, Slot, Slots};
use crate::parameters::{Gradients, ParamId};

/// `out = scale · table[index]`, or added to earlier lookups in the slot.
#[derive(Clone, Debug)]
pub(crate) struct Lookup {
    pub table: ParamId,
    /// Rows of the table before that of index 0.
    pub skipped: usize,
    pub index: Index,
    /// The index of the first row that the table has here.
    pub first: usize,
    pub scale: f32,
    pub out: Slot,
    pub accumulate: bool,
}

impl Lookup {
    /// Rows of the whole table.
    pub fn of(table: ParamId, index: Index) -> Lookup {
        Lookup { table, skipped: 0, index, first: 0, scale: 1.0, out: Slot(0), accumulate: false }
    }

    /// The rows that have an index.
    fn rows(&self, table: &Tensor) -> View {
        table.view().row_range(self.skipped..table.rows)
    }

    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let table = &context.parameters.value(self.table);
        let indices = self.index.of(context);
        if !self.accumulate {
            values.set(self.out, context.queue.tensor(indices.cols, table.cols, context.dtype()));
        }
        context.queue.launch(Embed {
            table: self.rows(table),
            indices: indices.view(),
            first: self.first as u32,
            scale: self.scale,
            out: values.get(self.out).view(),
            accumulate: self.accumulate,
        });
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, slots: &Slots) {
        let Some(dtable) = gradients.sum_of_trained(context.queue, self.table) else { return };
        context.queue.launch(EmbedBackward {
            dtable: self.rows(&dtable),
            indices: self.index.of(context).view(),
            first: self.first as u32,
            scale: self.scale,
            dout: slots.get(self.out).view(),
        });
    }
}

/// The indices of the batch that a lookup uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Index {
    Tokens,
    Positions,
    /// Types of the tokens of texts.
    Types,
    ClassRows,
    PatchRows,
}

impl Index {
    fn of<'a>(&self, context: &Context<'a>) -> &'a Tensor {
        match self {
            Index::Tokens => &context.batch.ids,
            Index::Positions => &context.batch.positions,
            Index::Types => &context.batch.text_rows().types,
            Index::ClassRows => &context.batch.class_rows,
            Index::PatchRows => &context.batch.patch_rows,
        }
    }
}
