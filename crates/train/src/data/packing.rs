//! Documents to rows of tokens.

use evenkeel_device::kernel::IGNORE;

use super::encode::Document;
use super::error::Error;
use super::order::{Cursor, State};
use super::pipeline::{Assemble, Emit, Reached, Stop};

/// How documents fill rows of up to `sequence` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Rows of exactly `sequence` tokens. A document is cut where a row ends and continues in the next one as a segment
    /// of its own. Only the last row of a run is padded, in a segment without labels.
    Packed { sequence: usize },
    /// One document a row, cut at `sequence` tokens, never padded.
    Single { sequence: usize },
}

/// Tokens for one sequence of the batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    pub ids: Vec<u32>,
    /// What should follow each token inside its document, or [`IGNORE`].
    pub labels: Vec<u32>,
    /// Attention does not cross from one segment to another. They add up to the row.
    pub segment_lengths: Vec<usize>,
}

impl Row {
    /// Labels that count.
    pub fn targets(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORE).count()
    }

    fn push(&mut self, document: &Document, range: std::ops::Range<usize>) {
        self.ids.extend_from_slice(&document.ids[range.clone()]);
        self.labels.extend_from_slice(&document.labels[range.clone()]);
        self.segment_lengths.push(range.len());
    }

    fn pad(&mut self, padding: u32, sequence: usize) {
        let missing = sequence - self.ids.len();
        if missing > 0 {
            self.ids.resize(sequence, padding);
            self.labels.resize(sequence, IGNORE);
            self.segment_lengths.push(missing);
        }
    }
}

/// Fills rows with documents in their order.
pub(crate) struct Packer {
    packing: Packing,
    padding: u32,
    row: Row,
    /// Where a run continues: so many tokens of the document there were handed out already.
    resume: Option<State>,
}

impl Packer {
    pub(crate) fn new(packing: Packing, padding: u32, start: State) -> Result<Packer, Error> {
        let (Packing::Packed { sequence } | Packing::Single { sequence }) = packing;
        if sequence == 0 {
            return Err(Error::BadOption { what: "sequence", found: "0".into(), expected: "1 token or more".into() });
        }
        let resume = (start.tokens > 0).then_some(start);
        Ok(Packer { packing, padding, row: Row::default(), resume })
    }

    /// How much of a document to leave out at the beginning.
    fn already_handed_out(&mut self, cursor: Cursor, document: &Document) -> Result<usize, Stop> {
        let Some(state) = self.resume.take() else { return Ok(0) };
        if state.cursor == cursor && state.tokens < document.ids.len() as u64 {
            return Ok(state.tokens as usize);
        }
        let detail = format!("after {} tokens of a record that has not so many", state.tokens);
        Err(Stop::Failed(Error::BadState { cursor: state.cursor, detail }))
    }

    fn pack(&mut self, cursor: Cursor, document: &Document, sequence: usize, emit: Emit<Row>) -> Result<(), Stop> {
        let mut taken = self.already_handed_out(cursor, document)?;
        while taken < document.ids.len() {
            let free = sequence - self.row.ids.len();
            let end = document.ids.len().min(taken + free);
            self.row.push(document, taken..end);
            taken = end;
            if self.row.ids.len() == sequence {
                let rest = taken < document.ids.len();
                let (tokens, record_tokens) = (taken as u64, document.ids.len() as u64);
                let reached = if rest { Reached { cursor, tokens, record_tokens } } else { Reached::through(cursor) };
                emit(std::mem::take(&mut self.row), reached)?;
            }
        }
        Ok(())
    }
}

impl Assemble for Packer {
    type Piece = Document;
    type Item = Row;
    const ITEMS_AHEAD: usize = 16;

    fn add(&mut self, cursor: Cursor, document: Document, emit: Emit<Row>) -> Result<bool, Stop> {
        match self.packing {
            Packing::Packed { sequence } => self.pack(cursor, &document, sequence, emit)?,
            Packing::Single { sequence } => {
                let mut row = Row::default();
                row.push(&document, 0..document.ids.len().min(sequence));
                if row.targets() == 0 {
                    // A prompt longer than the row leaves nothing to learn.
                    return Ok(false);
                }
                emit(row, Reached::through(cursor))?;
            }
        }
        Ok(true)
    }

    fn finish(&mut self, end: Cursor, emit: Emit<Row>) -> Result<(), Stop> {
        let mut row = std::mem::take(&mut self.row);
        match self.packing {
            Packing::Packed { sequence } if row.targets() > 0 => {
                row.pad(self.padding, sequence);
                emit(row, Reached::before(end))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PADDING: u32 = 999;

    /// Document d of n tokens has the ids 100 d + 0, 1, …: an id tells where it came from.
    fn document(number: u32, tokens: u32) -> Document {
        Document::plain((0..tokens).map(|token| 100 * number + token).collect())
    }

    fn rows(packing: Packing, lengths: &[u32], start: State) -> Vec<(Row, State)> {
        let mut packer = Packer::new(packing, PADDING, start).unwrap();
        let mut rows = Vec::new();
        let mut emit = |row, Reached { cursor, tokens, .. }: Reached| {
            rows.push((row, State { cursor, tokens, ..State::default() }));
            Ok(())
        };
        for (number, &tokens) in lengths.iter().enumerate().skip(start.cursor.record as usize) {
            let cursor = Cursor { record: number as u64, ..Cursor::default() };
            packer.add(cursor, document(number as u32, tokens), &mut emit).unwrap();
        }
        packer.finish(Cursor { epoch: 1, ..Cursor::default() }, &mut emit).unwrap();
        rows
    }

    const LENGTHS: [u32; 9] = [3, 20, 1, 8, 2, 2, 17, 8, 5];

    #[test]
    fn packed_rows_are_full_and_hold_every_token_once_in_order() {
        for sequence in [1, 2, 3, 7, 8, 64, 100] {
            let rows = rows(Packing::Packed { sequence }, &LENGTHS, State::default());
            let ids: Vec<u32> = rows.iter().flat_map(|(row, _)| row.ids.clone()).collect();
            let expected: Vec<u32> = (0..9).flat_map(|number| document(number, LENGTHS[number as usize]).ids).collect();
            assert!(rows.iter().all(|(row, _)| row.ids.len() == sequence && row.labels.len() == sequence));
            // The very last token predicts nothing; alone in a row it is left out.
            assert!(ids.len() >= expected.len() - 1, "{sequence}");
            let (tokens, padding) = ids.split_at(expected.len().min(ids.len()));
            assert_eq!(tokens, &expected[..tokens.len()], "{sequence}");
            assert!(padding.iter().all(|&id| id == PADDING), "{sequence}");
        }
    }

    #[test]
    fn labels_and_segments_never_cross_documents() {
        for packing in [8, 1, 13, 64].map(|sequence| Packing::Packed { sequence }) {
            for (row, _) in rows(packing, &LENGTHS, State::default()) {
                assert_eq!(row.segment_lengths.iter().sum::<usize>(), row.ids.len());
                let mut start = 0;
                for &length in &row.segment_lengths {
                    let ids = &row.ids[start..start + length];
                    assert!(ids.iter().all(|id| id / 100 == ids[0] / 100), "{ids:?}");
                    start += length;
                }
                for (&id, &label) in row.ids.iter().zip(&row.labels) {
                    let last = id == PADDING || id % 100 + 1 == LENGTHS[id as usize / 100];
                    assert_eq!(label, if last { IGNORE } else { id + 1 });
                }
            }
        }
    }

    #[test]
    fn a_cut_document_continues_as_a_segment_of_its_own() {
        let rows = rows(Packing::Packed { sequence: 8 }, &[3, 20, 1], State::default());
        let lengths: Vec<_> = rows.iter().map(|(row, _)| row.segment_lengths.clone()).collect();
        assert_eq!(lengths, [vec![3, 5], vec![8], vec![7, 1]]);
        assert_eq!(rows[0].0.labels[7], 105, "the token before the cut still predicts the one behind it");
    }

    #[test]
    fn packing_from_any_rows_state_gives_the_rows_that_follow() {
        for packing in [Packing::Packed { sequence: 6 }, Packing::Single { sequence: 6 }] {
            let straight = rows(packing, &LENGTHS, State::default());
            for (index, (_, state)) in straight.iter().enumerate().take(straight.len() - 1) {
                assert_eq!(rows(packing, &LENGTHS, *state), straight[index + 1..], "{packing:?} after row {index}");
            }
        }
    }

    #[test]
    fn single_rows_are_cut_and_never_padded() {
        let rows = rows(Packing::Single { sequence: 8 }, &LENGTHS, State::default());
        let lengths: Vec<_> = rows.iter().map(|(row, _)| row.ids.len()).collect();
        assert_eq!(lengths, [3, 8, 8, 2, 2, 8, 8, 5], "a document of one token has nothing to predict");
        assert_eq!(rows[1].0.labels[7], 108);
    }

    #[test]
    fn a_state_beyond_its_record_is_refused() {
        let state = State { tokens: 20, cursor: Cursor { record: 1, ..Cursor::default() }, ..State::default() };
        let mut packer = Packer::new(Packing::Packed { sequence: 4 }, PADDING, state).unwrap();
        let stop = packer.add(state.cursor, document(1, 20), &mut |_, _| Ok(())).unwrap_err();
        assert!(matches!(stop, Stop::Failed(Error::BadState { .. })));
    }
}
