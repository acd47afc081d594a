//! The loader: the same rows from any number of workers, and from any row's state on.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use evenkeel_data::*;
use serde_json::{Map, Value};

/// Texts in chunks of uneven size; every text is different. Chunk `broken`, if any, holds a record without text.
struct Texts {
    chunks: usize,
    broken: Option<usize>,
    reads: AtomicUsize,
}

impl Texts {
    fn new(chunks: usize) -> Arc<Texts> {
        Arc::new(Texts { chunks, broken: None, reads: AtomicUsize::new(0) })
    }
}

impl Source for Texts {
    fn chunks(&self) -> usize {
        self.chunks
    }

    fn read(&self, chunk: usize) -> Result<Vec<Record>, evenkeel_store::Error> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        assert!(chunk < self.chunks, "chunk {chunk} of {}", self.chunks);
        let text = |record: usize| Record::Text(format!("<{chunk}.{record}{}>", "~".repeat(chunk * record % 41)));
        let mut records: Vec<Record> = (0..chunk * 5 % 7 + 1).map(text).collect();
        if self.broken == Some(chunk) {
            records.push(Record::Fields(Map::from_iter([("body".to_owned(), Value::Null)])));
        }
        Ok(records)
    }
}

const ORDER: OrderOptions = OrderOptions { seed: 11, shuffle: true, held_out_every: None, part: Subset::Train };
const OPTIONS: LoaderOptions =
    LoaderOptions { order: ORDER, epochs: Some(2), workers: 2, on_bad_record: OnBadRecord::Stop };
const PACKED: Packing = Packing { sequence: 24, fill: Fill::Cut, label_beyond_cut: false };
const WHOLE: Packing = Packing { fill: Fill::BestFit, ..PACKED };
const SINGLE: Packing = Packing { fill: Fill::Single, ..PACKED };

fn encoder() -> Arc<Encoder> {
    Arc::new(Encoder::new(Tokenizer::Bytes, None, Format::Text { column: "text".into() }, 258).unwrap())
}

fn load(
    chunks: usize,
    packing: Packing,
    options: LoaderOptions,
    from: Option<DataPosition>,
) -> Vec<(Row, DataPosition)> {
    let mut loader = Loader::rows(Texts::new(chunks), encoder(), packing, options, from).unwrap();
    let mut rows = Vec::new();
    while let Some(row) = loader.next().unwrap() {
        rows.push((row, loader.state()));
    }
    assert!(loader.next().unwrap().is_none(), "the end stays the end");
    rows
}

fn texts(rows: &[(Row, DataPosition)]) -> Vec<String> {
    let ids: Vec<u32> = rows.iter().flat_map(|(row, _)| row.ids.iter().copied()).collect();
    let texts = ids.split(|&id| id == 256).map(|ids| Tokenizer::Bytes.decode(ids).unwrap());
    texts.filter(|text| !text.is_empty()).collect()
}

#[test]
fn any_number_of_workers_gives_the_same_rows() {
    for (chunks, packing) in [(1, PACKED), (20, PACKED), (50, PACKED), (50, SINGLE), (1, WHOLE), (50, WHOLE)] {
        for shuffle in [true, false] {
            let options = LoaderOptions { order: OrderOptions { shuffle, ..ORDER }, workers: 1, ..OPTIONS };
            let one = load(chunks, packing, options, None);
            assert!(!one.is_empty());
            for workers in [2, 5, 30] {
                assert_eq!(load(chunks, packing, LoaderOptions { workers, ..options }, None), one, "{workers} workers");
            }
        }
    }
}

#[test]
fn continuing_from_any_rows_state_equals_the_straight_run() {
    for packing in [PACKED, Packing { sequence: 200, ..PACKED }, SINGLE, WHOLE, Packing { sequence: 200, ..WHOLE }] {
        let straight = load(20, packing, OPTIONS, None);
        for (index, (_, state)) in straight.iter().enumerate() {
            let saved = serde_json::to_string(state).unwrap();
            let state: DataPosition = serde_json::from_str(&saved).unwrap();
            let workers = index % 3 + 1;
            let rest = load(20, packing, LoaderOptions { workers, ..OPTIONS }, Some(state));
            assert_eq!(rest, straight[index + 1..], "after row {index}");
        }
    }
}

#[test]
fn the_state_is_that_of_the_rows_handed_out_not_of_those_prepared() {
    let straight = load(20, PACKED, OPTIONS, None);
    let mut loader = Loader::rows(Texts::new(20), encoder(), PACKED, OPTIONS, None).unwrap();
    let before = loader.state();
    loader.next().unwrap();
    // Time for the threads to run ahead; nothing depends on whether they do.
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(loader.state(), straight[0].1);
    assert_eq!(load(20, PACKED, OPTIONS, Some(before)), straight);
}

#[test]
fn every_epoch_reads_every_record_once() {
    let rows = load(20, PACKED, OPTIONS, None);
    let texts = texts(&rows);
    let all: BTreeSet<&String> = texts.iter().collect();
    assert_eq!(texts.len(), 2 * all.len());
    let (first, second) = texts.split_at(all.len());
    assert_eq!(first.iter().collect::<BTreeSet<_>>(), all);
    assert_eq!(second.iter().collect::<BTreeSet<_>>(), all);
    assert_ne!(first, second, "each epoch has an order of its own");
}

#[test]
fn progress_rises_row_by_row_from_nothing_to_all_and_only_the_state_decides_it() {
    // One window, and a document of many rows: neither may hold progress up.
    for (chunks, packing) in [(1, Packing { sequence: 2, ..PACKED }), (20, PACKED), (20, WHOLE)] {
        let mut loader = Loader::rows(Texts::new(chunks), encoder(), packing, OPTIONS, None).unwrap();
        let (mut last, mut rows) = (0.0, 0);
        assert_eq!((loader.progress(), loader.epoch()), (Some(0.0), 0.0));
        while loader.next().unwrap().is_some() {
            let progress = loader.progress().unwrap();
            assert!(progress > last && progress <= 1.0, "{progress} after {last}");
            assert_eq!(loader.epoch(), progress * 2.0);
            let again = Loader::rows(Texts::new(chunks), encoder(), packing, OPTIONS, Some(loader.state())).unwrap();
            assert_eq!(again.progress(), Some(progress));
            (last, rows) = (progress, rows + 1);
        }
        assert!(last == 1.0 && rows > 3, "{last} after {rows} rows");
    }
}

#[test]
fn held_out_records_are_never_trained_on() {
    let part = |part, epochs| {
        let order = OrderOptions { held_out_every: Some(4), part, ..ORDER };
        let options = LoaderOptions { order, epochs: Some(epochs), ..OPTIONS };
        texts(&load(60, PACKED, options, None)).into_iter().collect::<BTreeSet<_>>()
    };
    let (train, held_out) = (part(Subset::Train, 3), part(Subset::HeldOut, 1));
    assert!(train.is_disjoint(&held_out) && !held_out.is_empty());
    let all: BTreeSet<_> = texts(&load(60, PACKED, OPTIONS, None)).into_iter().collect();
    assert_eq!(train.union(&held_out).cloned().collect::<BTreeSet<_>>(), all);
}

#[test]
fn more_epochs_can_be_asked_for_at_the_end() {
    let one = LoaderOptions { epochs: Some(1), ..OPTIONS };
    // No row of these holds the end of one epoch and the beginning of the next.
    for packing in [Packing { sequence: 100, ..SINGLE }, Packing { sequence: 100, ..WHOLE }] {
        let first = load(20, packing, one, None);
        // From the end, and from the middle of what is packed together last.
        for index in [first.len() - 1, first.len() - 2] {
            let (before, (_, state)) = (&first[..=index], &first[index]);
            let both = [before, &load(20, packing, OPTIONS, Some(*state))].concat();
            assert_eq!(both, load(20, packing, OPTIONS, None));
        }
    }
}

#[test]
fn best_fit_reads_every_record_whole_once_an_epoch_with_little_padding() {
    let packing = Packing { sequence: 64, ..WHOLE };
    let (rows, alone) = (load(60, packing, OPTIONS, None), load(60, Packing { sequence: 64, ..SINGLE }, OPTIONS, None));
    let texts = |rows: &[(Row, DataPosition)]| {
        let mut texts: Vec<Vec<u32>> = Vec::new();
        for (row, _) in rows {
            let mut rest = &row.ids[..];
            for &length in &row.segment_lengths {
                let (text, behind) = rest.split_at(length);
                texts.extend((text[0] != 257).then(|| text.to_vec()));
                rest = behind;
            }
        }
        texts.sort();
        texts
    };
    assert_eq!(texts(&rows), texts(&alone));
    assert!(rows.iter().all(|(row, _)| row.ids.len() == 64));
    let padding = rows.iter().flat_map(|(row, _)| &row.ids).filter(|&&id| id == 257).count();
    assert!(padding * 50 < rows.len() * 64, "{padding} of {} tokens are padding", rows.len() * 64);
    assert_eq!(rows.last().unwrap().1.counts, alone.last().unwrap().1.counts);
}

/// Rows, states and what was said of bad records.
fn load_skipping(
    packing: Packing,
    limit: u64,
    workers: usize,
    from: Option<DataPosition>,
) -> (Vec<(Row, DataPosition)>, Vec<String>) {
    let source = Arc::new(Texts { chunks: 30, broken: Some(17), reads: AtomicUsize::new(0) });
    let on_bad_record = OnBadRecord::Skip { most_in_epoch: limit };
    let options = LoaderOptions { workers, on_bad_record, epochs: Some(7), ..OPTIONS };
    let mut loader = Loader::rows(source, encoder(), packing, options, from).unwrap();
    let (mut rows, mut said) = (Vec::new(), Vec::new());
    while let Some(row) = loader.next().unwrap() {
        said.extend(loader.take_skipped().iter().map(Error::to_string));
        assert_eq!(loader.counts(), loader.state().counts);
        rows.push((row, loader.state()));
    }
    (rows, said)
}

#[test]
fn bad_records_are_skipped_counted_and_the_first_few_named() {
    for packing in [PACKED, WHOLE, SINGLE] {
        let (straight, said) = load_skipping(packing, 1, 1, None);
        assert_eq!(straight.last().unwrap().1.counts.skipped, 7, "one in each epoch");
        assert_eq!(said.len(), 5, "{said:?}");
        assert!(said[0].contains("of chunk 17: has no column `text`; it has `body`"), "{said:?}");
        assert_eq!(load_skipping(packing, 1, 3, None), (straight.clone(), said));
        for (index, (_, state)) in straight.iter().enumerate().step_by(3) {
            let (rest, _) = load_skipping(packing, 1, 2, Some(*state));
            assert_eq!(rest, straight[index + 1..], "after row {index}");
        }
    }
}

#[test]
fn too_many_bad_records_end_loading_all_the_same() {
    struct Wrong(usize);
    impl Source for Wrong {
        fn chunks(&self) -> usize {
            1
        }

        fn read(&self, _: usize) -> Result<Vec<Record>, evenkeel_store::Error> {
            Ok((0..self.0).map(|_| Record::Fields(Map::new())).collect())
        }
    }
    let failure = |records, most_in_epoch| {
        let options = LoaderOptions { on_bad_record: OnBadRecord::Skip { most_in_epoch }, ..OPTIONS };
        Loader::rows(Arc::new(Wrong(records)), encoder(), PACKED, options, None).unwrap().next().unwrap_err()
    };
    let error = failure(200, 100);
    assert!(error.to_string().starts_with("an epoch has more than 100 bad records"), "{error}");
    assert!(error.hint().unwrap().contains("data.bad_record_limit"));
    let error = failure(40, 100);
    assert!(error.to_string().ends_with("; 40 bad ones were skipped"), "{error}");
}

#[test]
fn an_error_travels_to_the_caller_with_its_place() {
    for workers in [1, 4] {
        let source = Arc::new(Texts { chunks: 30, broken: Some(17), reads: AtomicUsize::new(0) });
        let options = LoaderOptions { workers, ..OPTIONS };
        let mut loader = Loader::rows(source, encoder(), PACKED, options, None).unwrap();
        let error = loop {
            match loader.next() {
                Ok(row) => assert!(row.is_some(), "an error before the end"),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("of chunk 17: has no column `text`; it has `body`"), "{error}");
        assert!(matches!(loader.next(), Err(Error::Stopped)));
    }
}

#[test]
fn a_panic_in_a_worker_becomes_an_error() {
    struct Panics;
    impl Source for Panics {
        fn chunks(&self) -> usize {
            3
        }

        fn read(&self, _: usize) -> Result<Vec<Record>, evenkeel_store::Error> {
            panic!("the disk is on fire")
        }
    }
    let mut loader = Loader::rows(Arc::new(Panics), encoder(), PACKED, OPTIONS, None).unwrap();
    let error = loader.next().unwrap_err().to_string();
    assert!(error.contains("data-0") && error.contains("the disk is on fire"), "{error}");
}

#[test]
fn data_of_which_nothing_is_of_use_ends_with_an_error() {
    struct Empty;
    impl Source for Empty {
        fn chunks(&self) -> usize {
            9
        }

        fn read(&self, _: usize) -> Result<Vec<Record>, evenkeel_store::Error> {
            Ok(vec![Record::Text(String::new())])
        }
    }
    let options = LoaderOptions { epochs: None, ..OPTIONS };
    let mut loader = Loader::rows(Arc::new(Empty), encoder(), PACKED, options, None).unwrap();
    assert!(matches!(loader.next(), Err(Error::NothingToRead { epoch: 0, .. })));
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let state = load(20, PACKED, OPTIONS, None)[3].1;
    let open = |chunks, state| Loader::rows(Texts::new(chunks), encoder(), PACKED, OPTIONS, Some(state));
    assert!(matches!(open(21, state), Err(Error::OtherOrder)));
    let mut beyond = state;
    beyond.cursor.record = 1 << 40;
    let error = open(20, beyond).unwrap().next().unwrap_err().to_string();
    assert!(error.contains("records"), "{error}");
    let mut beyond = state;
    beyond.tokens = 1 << 40;
    assert!(matches!(open(20, beyond).unwrap().next(), Err(Error::BadState { .. })));
    let mut beyond = state;
    beyond.cursor.epoch = u64::MAX;
    assert!(open(20, beyond).unwrap().next().unwrap().is_none());
}

#[test]
fn reading_ahead_is_bounded() {
    let source = Texts::new(100_000);
    let options = LoaderOptions { workers: 3, ..OPTIONS };
    let mut loader =
        Loader::rows(source.clone(), encoder(), Packing { sequence: 4096, ..PACKED }, options, None).unwrap();
    loader.next().unwrap();
    let reads = || source.reads.load(Ordering::Relaxed);
    // Until the workers have nothing left to do: without bounds, when they have read everything.
    let mut before = usize::MAX;
    while reads() != before {
        before = reads();
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    drop(loader);
    assert!(reads() < 20_000, "{} chunks read for one row", reads());
}

#[test]
fn no_workers_or_no_tokens_are_refused() {
    let open = |packing, workers| {
        Loader::rows(Texts::new(1), encoder(), packing, LoaderOptions { workers, ..OPTIONS }, None).err()
    };
    assert!(open(PACKED, 0).is_some() && open(PACKED, usize::MAX).is_some());
    assert!(open(Packing { sequence: 0, ..PACKED }, 1).is_some());
    assert!(matches!(Loader::rows(Texts::new(0), encoder(), PACKED, OPTIONS, None), Err(Error::NoChunks)));
}

#[test]
fn the_endless_corpus_can_be_loaded_and_continued() {
    let corpus = || Arc::new(Corpus::new(4, None));
    let options = LoaderOptions { epochs: None, ..OPTIONS };
    let packing = Packing { sequence: 512, ..PACKED };
    let mut straight = Loader::rows(corpus(), encoder(), packing, options, None).unwrap();
    for _ in 0..20 {
        straight.next().unwrap().unwrap();
    }
    let mut continued = Loader::rows(corpus(), encoder(), packing, options, Some(straight.state())).unwrap();
    for _ in 0..20 {
        assert_eq!(straight.next().unwrap(), continued.next().unwrap());
    }
}
