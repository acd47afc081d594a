//! Documents to rows of tokens.

use crate::IGNORE;
use crate::best_fit::best_fit;
use crate::encode::Document;
use crate::error::Error;
use crate::order::{Cursor, DataPosition, PackedGroup, RecordCounts};
use crate::pipeline::{Assemble, At, Emit, Stop};

/// How documents become rows of up to `sequence` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packing {
    pub sequence: usize,
    pub fill: Fill,
    /// Whether the last token before a cut has a label, the first token behind it.
    pub label_beyond_cut: bool,
}

/// How documents fill rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fill {
    /// Rows of exactly `sequence` tokens. A document is cut at the end of a row and continues in the next one as a segment of its
    /// own. Only the last row of a run is padded, in a segment without labels.
    Cut,
    /// Whole documents, each in the row where it leaves the least room; the remaining room is padded, in a segment without
    /// labels. A document that is longer than a row loses its end.
    BestFit,
    /// One document a row, cut at `sequence` tokens, never padded.
    Single,
}

/// Rows in a group of documents that best fit is applied to: larger groups fill rows better and take more memory.
const GROUP_ROWS: usize = 128;
const GROUP_TOKENS: usize = 1 << 22;
const GROUP_DOCUMENTS: usize = 1 << 16;

/// Tokens for one sequence of the batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    pub ids: Vec<u32>,
    /// The token that should follow each token inside its document, or [`IGNORE`].
    pub labels: Vec<u32>,
    /// The types of tokens, if texts are labelled; empty otherwise.
    pub types: Vec<u32>,
    /// Attention does not cross segments. Their lengths add up to the row's.
    pub segment_lengths: Vec<usize>,
}

impl Row {
    /// Labels that count.
    pub fn targets(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORE).count()
    }

    fn push(&mut self, document: &Document, range: std::ops::Range<usize>, label_beyond_cut: bool) {
        self.ids.extend_from_slice(&document.ids[range.clone()]);
        self.labels.extend_from_slice(&document.labels[range.clone()]);
        self.types.extend_from_slice(document.types.get(range.clone()).unwrap_or_default());
        self.segment_lengths.push(range.len());
        if let (false, Some(last)) = (label_beyond_cut, self.labels.last_mut()) {
            // The last token of a whole document has no label anyway.
            *last = IGNORE;
        }
    }

    fn pad(&mut self, padding: u32, sequence: usize) {
        let missing = sequence - self.ids.len();
        if missing > 0 {
            self.ids.resize(sequence, padding);
            self.labels.resize(sequence, IGNORE);
            if !self.types.is_empty() {
                self.types.resize(sequence, 0);
            }
            self.segment_lengths.push(missing);
        }
    }
}

/// Fills rows with documents in their order.
pub(crate) struct Packer {
    packing: Packing,
    padding: u32,
    row: Row,
    /// Documents that wait to be packed together, each with the state before it.
    group: Vec<(DataPosition, Document)>,
    group_tokens: usize,
    /// Counts before the group's first document.
    group_counts: RecordCounts,
    /// The place where a run continues: so many tokens of the document there, or rows of the group, were handed out already.
    resume: Option<DataPosition>,
}

impl Packer {
    pub(crate) fn new(packing: Packing, padding: u32, start: DataPosition) -> Result<Packer, Error> {
        if packing.sequence == 0 {
            return Err(Error::BadOption { what: "sequence", found: "0".into(), expected: "1 token or more".into() });
        }
        let resume = (start.tokens > 0 || start.group.is_some()).then_some(start);
        let (row, group, group_counts) = (Row::default(), Vec::new(), RecordCounts::default());
        Ok(Packer { packing, padding, row, group, group_tokens: 0, group_counts, resume })
    }

    /// The number of tokens to leave out at a document's beginning.
    fn already_handed_out(&mut self, cursor: Cursor, document: &Document) -> Result<usize, Stop> {
        let Some(state) = self.resume.take() else { return Ok(0) };
        if state.cursor == cursor && state.tokens < document.ids.len() as u64 {
            return Ok(state.tokens as usize);
        }
        let detail = format!("after {} tokens of a record that has not so many", state.tokens);
        Err(Stop::Failed(Error::BadState { cursor: state.cursor, detail }))
    }

    fn cut(&mut self, at: At, document: &Document, emit: Emit<Row>) -> Result<(), Stop> {
        let Packing { sequence, label_beyond_cut, .. } = self.packing;
        let mut taken = self.already_handed_out(at.cursor, document)?;
        while taken < document.ids.len() {
            let free = sequence - self.row.ids.len();
            let end = document.ids.len().min(taken + free);
            self.row.push(document, taken..end, label_beyond_cut);
            taken = end;
            if self.row.ids.len() == sequence {
                let rest = taken < document.ids.len();
                let (tokens, record_tokens) = (taken as u64, document.ids.len() as u64);
                let state = if rest { DataPosition { tokens, record_tokens, ..at.before() } } else { at.through() };
                emit(std::mem::take(&mut self.row), state)?;
            }
        }
        Ok(())
    }

    /// A document in a row of its own; `None` if that leaves nothing to learn: a prompt can be longer than a row.
    fn alone(&self, at: At, document: &Document) -> Option<Row> {
        let Packing { sequence, label_beyond_cut, .. } = self.packing;
        let kept = document.ids.len().min(sequence);
        if kept < document.ids.len() || document.is_cut {
            at.count_truncated();
        }
        let mut row = Row::default();
        row.push(document, 0..kept, label_beyond_cut);
        (row.targets() > 0).then_some(row)
    }

    /// Adds to the group, and packs it once it is large enough.
    fn gather(&mut self, at: At, document: &Document, emit: Emit<Row>) -> Result<bool, Stop> {
        if self.group.is_empty() {
            self.group_counts = at.counts.get();
        }
        let Some(Row { ids, labels, types, .. }) = self.alone(at, document) else { return Ok(false) };
        self.group_tokens += ids.len();
        self.group.push((at.before(), Document { ids, labels, types, is_cut: false }));
        let sequence = self.packing.sequence;
        let tokens = (GROUP_ROWS * sequence).min(GROUP_TOKENS.max(2 * sequence));
        if self.group_tokens >= tokens || self.group.len() == GROUP_DOCUMENTS {
            self.pack_group(at.through(), emit)?;
        }
        Ok(true)
    }

    /// Rows in the order of the first document of each, so that all documents before a row's first are in the rows before it.
    /// `end` is the state behind the group.
    fn pack_group(&mut self, end: DataPosition, emit: Emit<Row>) -> Result<(), Stop> {
        let documents = std::mem::take(&mut self.group);
        self.group_tokens = 0;
        let lengths: Vec<usize> = documents.iter().map(|(_, document)| document.ids.len()).collect();
        let rows = best_fit(&lengths, self.packing.sequence);
        let skipped = self.rows_handed_out(&documents, rows.len())?;
        let first = documents.first().map(|(state, _)| state.cursor).unwrap_or_default();
        for (number, members) in rows.iter().enumerate().skip(skipped) {
            let mut row = Row::default();
            for &member in members {
                let document = &documents[member].1;
                // `alone` already cut the document and removed the label at the cut.
                row.push(document, 0..document.ids.len(), true);
            }
            row.pad(self.padding, self.packing.sequence);
            let group = PackedGroup { first, rows: number as u64 + 1, counts: self.group_counts };
            let state = match rows.get(number + 1) {
                Some(next) => DataPosition { group: Some(group), ..documents[next[0]].0 },
                None => end,
            };
            emit(row, state)?;
        }
        Ok(())
    }

    /// Rows of the first group that a continued run has had already.
    fn rows_handed_out(&mut self, documents: &[(DataPosition, Document)], rows: usize) -> Result<usize, Stop> {
        let Some(state) = self.resume.take() else { return Ok(0) };
        let group = state.group.unwrap_or_default();
        let begins_there = documents.first().is_some_and(|(state, _)| state.cursor == group.first);
        if begins_there && group.rows < rows as u64 {
            return Ok(group.rows as usize);
        }
        let detail = format!("after {} rows of a group that has {rows}", group.rows);
        Err(Stop::Failed(Error::BadState { cursor: group.first, detail }))
    }
}

impl Assemble for Packer {
    type Piece = Document;
    type Item = Row;
    const ITEMS_AHEAD: usize = 16;

    fn add(&mut self, at: At, document: Document, emit: Emit<Row>) -> Result<bool, Stop> {
        match self.packing.fill {
            Fill::Cut => self.cut(at, &document, emit)?,
            Fill::BestFit => return self.gather(at, &document, emit),
            Fill::Single => match self.alone(at, &document) {
                Some(row) => emit(row, at.through())?,
                None => return Ok(false),
            },
        }
        Ok(true)
    }

    /// Every epoch is packed by itself.
    fn end_epoch(&mut self, next: At, emit: Emit<Row>) -> Result<(), Stop> {
        if self.group.is_empty() { Ok(()) } else { self.pack_group(next.before(), emit) }
    }

    fn finish(&mut self, end: At, emit: Emit<Row>) -> Result<(), Stop> {
        let mut row = std::mem::take(&mut self.row);
        if row.targets() == 0 {
            return Ok(());
        }
        row.pad(self.padding, self.packing.sequence);
        emit(row, end.before())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const PADDING: u32 = 999;
    const CUT: Packing = Packing { sequence: 8, fill: Fill::Cut, label_beyond_cut: false };
    const WHOLE: Packing = Packing { fill: Fill::BestFit, ..CUT };
    const SINGLE: Packing = Packing { fill: Fill::Single, ..CUT };

    /// Document d of n tokens has the ids 100 d + 0, 1, …: an id tells where it came from.
    fn document(number: u32, tokens: u32) -> Document {
        Document::plain((0..tokens).map(|token| 100 * number + token).collect())
    }

    /// Two epochs of documents, numbered on from one to the other.
    fn rows(packing: Packing, lengths: &[u32], start: DataPosition) -> Vec<(Row, DataPosition)> {
        let mut packer = Packer::new(packing, PADDING, start).unwrap();
        let mut rows = Vec::new();
        let counts = Cell::new(start.counts_before());
        let mut emit = |row, state| {
            rows.push((row, DataPosition { counts: counts.get(), ..state }));
            Ok(())
        };
        let at = |epoch, record| At { cursor: Cursor { epoch, window: 0, record }, window_records: 0, counts: &counts };
        for epoch in 0..2 {
            for (number, &tokens) in lengths.iter().enumerate() {
                let at = at(epoch, number as u64);
                if at.cursor >= start.reads_from() {
                    let number = number + epoch as usize * lengths.len();
                    packer.add(at, document(number as u32, tokens), &mut emit).unwrap();
                }
            }
            packer.end_epoch(at(epoch + 1, 0), &mut emit).unwrap();
        }
        packer.finish(at(2, 0), &mut emit).unwrap();
        rows
    }

    const LENGTHS: [u32; 9] = [3, 20, 1, 8, 2, 2, 17, 8, 5];

    fn tokens_of_both_epochs() -> Vec<u32> {
        (0..18).flat_map(|number| document(number, LENGTHS[number as usize % 9]).ids).collect()
    }

    #[test]
    fn cut_rows_are_full_and_hold_every_token_once_in_order() {
        for sequence in [1, 2, 3, 7, 8, 64, 100] {
            let packing = Packing { sequence, label_beyond_cut: true, ..CUT };
            let rows = rows(packing, &LENGTHS, DataPosition::default());
            let ids: Vec<u32> = rows.iter().flat_map(|(row, _)| row.ids.clone()).collect();
            let expected = tokens_of_both_epochs();
            assert!(rows.iter().all(|(row, _)| row.ids.len() == sequence && row.labels.len() == sequence));
            // The very last token predicts nothing; alone in a row it is left out.
            assert!(ids.len() >= expected.len() - 1, "{sequence}");
            let (tokens, padding) = ids.split_at(expected.len().min(ids.len()));
            assert_eq!(tokens, &expected[..tokens.len()], "{sequence}");
            assert!(padding.iter().all(|&id| id == PADDING), "{sequence}");
        }
    }

    #[test]
    fn labels_and_segments_never_cross_documents_and_only_by_wish_cuts() {
        for packing in [CUT, WHOLE, SINGLE] {
            for (sequence, label_beyond_cut) in [(8, true), (1, true), (13, false), (64, true), (8, false)] {
                let packing = Packing { sequence, label_beyond_cut, ..packing };
                for (row, _) in rows(packing, &LENGTHS, DataPosition::default()) {
                    assert_eq!(row.segment_lengths.iter().sum::<usize>(), row.ids.len());
                    let mut start = 0;
                    for &length in &row.segment_lengths {
                        let ids = &row.ids[start..start + length];
                        assert!(ids.iter().all(|id| id / 100 == ids[0] / 100), "{ids:?}");
                        for (place, (&id, &label)) in ids.iter().zip(&row.labels[start..]).enumerate() {
                            let ends = id == PADDING || id % 100 + 1 == LENGTHS[id as usize / 100 % 9];
                            let is_cut = place + 1 == length && !label_beyond_cut;
                            assert_eq!(label, if ends || is_cut { IGNORE } else { id + 1 }, "{packing:?}");
                        }
                        start += length;
                    }
                }
            }
        }
    }

    #[test]
    fn a_cut_document_continues_as_a_segment_of_its_own() {
        for label_beyond_cut in [true, false] {
            let rows = rows(Packing { label_beyond_cut, ..CUT }, &[3, 20, 1], DataPosition::default());
            let lengths: Vec<_> = rows.iter().take(3).map(|(row, _)| row.segment_lengths.clone()).collect();
            assert_eq!(lengths, [vec![3, 5], vec![8], vec![7, 1]]);
            assert_eq!(rows[0].0.labels[7], if label_beyond_cut { 105 } else { IGNORE });
        }
    }

    #[test]
    fn packing_from_any_rows_state_gives_the_rows_that_follow() {
        for packing in [CUT, WHOLE, SINGLE] {
            let packing = Packing { sequence: 6, ..packing };
            let straight = rows(packing, &LENGTHS, DataPosition::default());
            for (index, (_, state)) in straight.iter().enumerate().take(straight.len() - 1) {
                assert_eq!(rows(packing, &LENGTHS, *state), straight[index + 1..], "{packing:?} after row {index}");
            }
        }
    }

    #[test]
    fn single_rows_are_cut_and_never_padded() {
        let rows = rows(Packing { label_beyond_cut: true, ..SINGLE }, &LENGTHS, DataPosition::default());
        let lengths: Vec<_> = rows.iter().take(8).map(|(row, _)| row.ids.len()).collect();
        assert_eq!(lengths, [3, 8, 8, 2, 2, 8, 8, 5], "a document of one token has nothing to predict");
        assert_eq!(rows[1].0.labels[7], 108);
        assert_eq!(rows.last().unwrap().1.counts.truncated, 4, "two in each epoch");
    }

    #[test]
    fn best_fit_keeps_documents_whole_and_each_epoch_by_itself() {
        let rows = rows(WHOLE, &LENGTHS, DataPosition::default());
        let segments: Vec<Vec<(u32, usize)>> = rows
            .iter()
            .map(|(row, _)| {
                let starts = row.segment_lengths.iter().scan(0, |end, &length| {
                    *end += length;
                    Some(*end - length)
                });
                starts.zip(&row.segment_lengths).map(|(start, &length)| (row.ids[start] / 100, length)).collect()
            })
            .collect();
        let padded = PADDING / 100;
        let first = [vec![(0, 3), (8, 5)], vec![(1, 8)], vec![(3, 8)], vec![(4, 2), (5, 2), (padded, 4)]];
        let first = [&first[..], &[vec![(6, 8)], vec![(7, 8)]]].concat();
        assert_eq!(segments[..6], first);
        assert_eq!(segments.len(), 12);
        assert!(segments[6..].iter().flatten().all(|&(number, _)| number == padded || number >= 9), "{segments:?}");
        assert_eq!(rows.last().unwrap().1.counts.truncated, 4);
    }

    #[test]
    fn a_group_ends_before_it_takes_much_memory() {
        let packing = Packing { sequence: 2, ..WHOLE };
        let mut packer = Packer::new(packing, PADDING, DataPosition::default()).unwrap();
        let counts = Cell::default();
        let mut most = 0;
        for record in 0..1000 {
            let at = At { cursor: Cursor { record, ..Cursor::default() }, window_records: 0, counts: &counts };
            packer.add(at, document(1, 2), &mut |_, _| Ok(())).unwrap();
            most = most.max(packer.group.len());
        }
        assert_eq!(most, GROUP_ROWS - 1);
    }

    #[test]
    fn a_state_beyond_its_record_or_its_group_is_refused() {
        let cursor = Cursor { record: 1, ..Cursor::default() };
        let counts = Cell::default();
        let at = At { cursor, window_records: 0, counts: &counts };
        let state = DataPosition { tokens: 20, cursor, ..DataPosition::default() };
        let mut packer = Packer::new(Packing { sequence: 4, ..CUT }, PADDING, state).unwrap();
        let stop = packer.add(at, document(1, 20), &mut |_, _| Ok(())).unwrap_err();
        assert!(matches!(stop, Stop::Failed(Error::BadState { .. })));
        for (rows, first) in [(1, cursor), (0, Cursor::default())] {
            let group = Some(PackedGroup { first, rows, counts: RecordCounts::default() });
            let mut packer =
                Packer::new(WHOLE, PADDING, DataPosition { cursor, group, ..DataPosition::default() }).unwrap();
            packer.add(at, document(1, 5), &mut |_, _| Ok(())).unwrap();
            let stop = packer.end_epoch(at, &mut |_, _| Ok(())).unwrap_err();
            assert!(matches!(stop, Stop::Failed(Error::BadState { .. })));
        }
    }
}
