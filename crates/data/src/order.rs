//! The global order of records: a function of seed, epoch and position, and the cursor that names a place in it.
//!
//! An epoch visits the chunks in a permuted order. [`WINDOW_CHUNKS`] of them at a time make a window, whose records are
//! shuffled together: memory is bounded by a window, and neighbours come from different chunks.

use std::fmt;

use evenkeel_random::{Random, hash, permuted};
use serde::{Deserialize, Serialize};

use crate::error::{Error, RecordAt};

/// Chunks whose records are shuffled together.
pub const WINDOW_CHUNKS: usize = 8;

// The purposes of keys, so that no two uses share their random numbers.
const CHUNKS: u64 = 1;
const RECORDS: u64 = 2;
const SPLIT: u64 = 3;
const FINGERPRINT: u64 = 4;

/// The records that are read: one side of the split, or all if there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subset {
    Train,
    HeldOut,
}

impl fmt::Display for Subset {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Subset::Train => "training",
            Subset::HeldOut => "held-out",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OrderOptions {
    pub seed: u64,
    /// Otherwise records come in the source's own order.
    pub shuffle: bool,
    /// One record of so many, chosen by a hash of its place, is held out for evaluation.
    pub held_out_every: Option<u64>,
    pub part: Subset,
}

/// A place between two records. The record counts in the window's own order, after the split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    pub epoch: u64,
    pub window: u64,
    pub record: u64,
}

impl fmt::Display for Cursor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "epoch {}, window {}, record {}", self.epoch, self.window, self.record)
    }
}

/// A position in the data: everything before the cursor, and this many tokens of the record at it, are handed out. The rest of
/// that record is the packer's leftover; it is made again from the record, so a state is a few numbers. So is the rest of a group
/// of records that were packed together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPosition {
    pub cursor: Cursor,
    pub tokens: u64,
    /// Tokens of that record, if some were handed out.
    pub record_tokens: u64,
    /// Records of the cursor's window, if some were handed out.
    pub window_records: u64,
    /// The fingerprint of the order: [`RecordOrder::fingerprint`].
    pub order: u64,
    #[serde(default)]
    pub counts: RecordCounts,
    /// The group of records whose rows are being handed out.
    #[serde(default)]
    pub group: Option<PackedGroup>,
}

/// Records that were not read as they are, since the beginning of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordCounts {
    /// Bad records that were passed over.
    pub skipped: u64,
    pub skipped_in_epoch: u64,
    /// Records that were longer than a row and lost their end.
    pub truncated: u64,
}

/// Records that are packed together and partly handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedGroup {
    /// The group's first record.
    pub first: Cursor,
    pub rows: u64,
    /// The counts before it.
    pub counts: RecordCounts,
}

impl DataPosition {
    /// The place from which reading must begin to continue from here.
    pub fn reads_from(&self) -> Cursor {
        self.group.map_or(self.cursor, |group| group.first)
    }

    /// The counts before that place.
    pub(crate) fn counts_before(&self) -> RecordCounts {
        let counts = self.group.map_or(self.counts, |group| group.counts);
        let begins_epoch = self.cursor == Cursor { epoch: self.cursor.epoch, ..Cursor::default() };
        if begins_epoch { RecordCounts { skipped_in_epoch: 0, ..counts } } else { counts }
    }
}

/// The order of a source's records.
#[derive(Clone, Copy, Debug)]
pub struct RecordOrder {
    options: OrderOptions,
    chunks: u64,
}

impl RecordOrder {
    pub fn new(options: OrderOptions, chunks: usize) -> Result<RecordOrder, Error> {
        let bad = |found: String, expected: &str| Error::BadOption {
            what: "held-out share",
            found,
            expected: expected.to_owned(),
        };
        match (options.held_out_every, options.part) {
            (Some(every @ 0..2), _) => return Err(bad(format!("one record of {every}"), "one of 2 or more")),
            (None, Subset::HeldOut) => return Err(bad("none".to_owned(), "one, to read held-out records")),
            _ => (),
        }
        if chunks == 0 {
            return Err(Error::NoChunks);
        }
        Ok(RecordOrder { options, chunks: chunks as u64 })
    }

    pub fn part(&self) -> Subset {
        self.options.part
    }

    /// Windows of an epoch.
    pub fn windows(&self) -> u64 {
        self.chunks.div_ceil(WINDOW_CHUNKS as u64)
    }

    /// A state must have this fingerprint to continue in this order.
    pub fn fingerprint(&self) -> u64 {
        let OrderOptions { seed, shuffle, held_out_every, part } = self.options;
        let every = held_out_every.unwrap_or(0);
        hash(&[FINGERPRINT, seed, shuffle.into(), every, (part == Subset::Train).into(), self.chunks])
    }

    pub fn start(&self) -> DataPosition {
        DataPosition { order: self.fingerprint(), ..DataPosition::default() }
    }

    pub fn check(&self, state: &DataPosition) -> Result<(), Error> {
        if state.order != self.fingerprint() {
            return Err(Error::OtherOrder);
        }
        let cursor = state.reads_from();
        if cursor.window >= self.windows() {
            let detail = format!("an epoch has {} windows", self.windows());
            return Err(Error::BadState { cursor, detail });
        }
        Ok(())
    }

    /// The epoch that comes next, and the share of it that is done.
    pub fn epoch(&self, state: &DataPosition) -> (u64, f64) {
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let Cursor { epoch, window, record } = state.cursor;
        let records = record as f64 + share(state.tokens, state.record_tokens);
        let of_window = if state.window_records == 0 { 0.0 } else { records / state.window_records as f64 };
        let of_epoch = (window as f64 + of_window) / self.windows() as f64;
        if of_epoch < 1.0 { (epoch, of_epoch) } else { (epoch.saturating_add(1), 0.0) }
    }

    /// The chunks of a window.
    pub fn chunks(&self, epoch: u64, window: u64) -> Vec<usize> {
        let first = window * WINDOW_CHUNKS as u64;
        let places = first..(first + WINDOW_CHUNKS as u64).min(self.chunks);
        let key = hash(&[CHUNKS, self.options.seed, epoch]);
        let chunk = |place| if self.options.shuffle { permuted(place, self.chunks, key) } else { place };
        places.map(|place| chunk(place) as usize).collect()
    }

    /// The places of a window's records in reading order, given its chunks and the number of records in each.
    pub fn places(&self, epoch: u64, window: u64, sizes: &[(usize, usize)]) -> Vec<RecordAt> {
        let all = sizes.iter().flat_map(|&(chunk, records)| (0..records).map(move |record| RecordAt { chunk, record }));
        let mut places: Vec<RecordAt> = all.filter(|&place| self.wanted(place)).collect();
        if self.options.shuffle {
            Random::new(&[RECORDS, self.options.seed, epoch, window]).shuffle(&mut places);
        }
        places
    }

    fn wanted(&self, place: RecordAt) -> bool {
        let Some(every) = self.options.held_out_every else { return true };
        let held_out = hash(&[SPLIT, self.options.seed, place.chunk as u64, place.record as u64]).is_multiple_of(every);
        held_out == (self.options.part == Subset::HeldOut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: OrderOptions = OrderOptions { seed: 3, shuffle: true, held_out_every: None, part: Subset::Train };

    fn epoch(options: OrderOptions, chunks: usize, epoch: u64) -> Vec<RecordAt> {
        let order = RecordOrder::new(options, chunks).unwrap();
        let window = |window| {
            let sizes: Vec<_> = order.chunks(epoch, window).into_iter().map(|chunk| (chunk, chunk % 5 + 1)).collect();
            order.places(epoch, window, &sizes)
        };
        (0..order.windows()).flat_map(window).collect()
    }

    fn file_order(chunks: usize) -> Vec<RecordAt> {
        (0..chunks).flat_map(|chunk| (0..chunk % 5 + 1).map(move |record| RecordAt { chunk, record })).collect()
    }

    #[test]
    fn every_epoch_visits_every_record_once_in_an_order_of_its_own() {
        for chunks in [1, 7, 8, 9, 31] {
            let epochs: Vec<_> = (0..3).map(|number| epoch(PLAIN, chunks, number)).collect();
            for places in &epochs {
                let mut sorted = places.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, file_order(chunks), "{chunks} chunks");
            }
            let differ = chunks == 1 || (epochs[0] != epochs[1] && epochs[1] != epochs[2] && epochs[0] != epochs[2]);
            assert!(differ, "{chunks} chunks");
        }
        assert_ne!(epoch(PLAIN, 31, 0), epoch(OrderOptions { seed: 4, ..PLAIN }, 31, 0));
        let one_chunk = RecordOrder::new(PLAIN, 1).unwrap();
        assert_ne!(one_chunk.places(0, 0, &[(0, 50)]), one_chunk.places(1, 0, &[(0, 50)]));
    }

    #[test]
    fn without_shuffling_records_come_in_file_order() {
        let options = OrderOptions { shuffle: false, ..PLAIN };
        assert_eq!(epoch(options, 19, 0), file_order(19));
        assert_eq!(epoch(options, 19, 5), file_order(19));
    }

    #[test]
    fn training_and_held_out_records_share_none_and_are_all() {
        let split = OrderOptions { held_out_every: Some(5), ..PLAIN };
        let train: std::collections::BTreeSet<_> = epoch(split, 200, 0).into_iter().collect();
        let held_out: std::collections::BTreeSet<_> =
            epoch(OrderOptions { part: Subset::HeldOut, ..split }, 200, 7).into_iter().collect();
        assert!(train.is_disjoint(&held_out));
        assert_eq!(train.union(&held_out).copied().collect::<Vec<_>>(), file_order(200));
        assert!((90..150).contains(&held_out.len()), "{} of 600 held out, one of five", held_out.len());
    }

    #[test]
    fn a_state_of_another_order_is_refused() {
        let order = |options, chunks| RecordOrder::new(options, chunks).unwrap();
        let here = order(PLAIN, 20);
        let others = [
            order(OrderOptions { seed: 4, ..PLAIN }, 20),
            order(OrderOptions { shuffle: false, ..PLAIN }, 20),
            order(OrderOptions { held_out_every: Some(9), ..PLAIN }, 20),
            order(PLAIN, 21),
        ];
        here.check(&here.start()).unwrap();
        for other in others {
            assert!(matches!(here.check(&other.start()), Err(Error::OtherOrder)), "{other:?}");
        }
        let mut state = here.start();
        state.cursor.window = 3;
        assert!(here.check(&state).unwrap_err().to_string().contains("3 windows"));
    }

    #[test]
    fn a_share_that_holds_out_everything_is_refused() {
        for every in [0, 1] {
            let error = RecordOrder::new(OrderOptions { held_out_every: Some(every), ..PLAIN }, 1).unwrap_err();
            assert!(error.to_string().contains("one of 2 or more"), "{error}");
        }
        assert!(matches!(RecordOrder::new(PLAIN, 0), Err(Error::NoChunks)));
        assert!(RecordOrder::new(OrderOptions { part: Subset::HeldOut, ..PLAIN }, 1).is_err());
    }
}
