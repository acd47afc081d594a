//! How fast data becomes rows: `cargo bench -p evenkeel-data --bench data`.
//!
//! A round takes a tenth of a second, and one that shares its cores with others can be five times slower. So each case
//! is run in several rounds, in turn with the others, and the spread is printed with the median.

use std::sync::Arc;
use std::time::Instant;

use evenkeel_data::*;

const ROUNDS: usize = 15;
const ROWS: usize = 5000;
const SEQUENCE: usize = 2048;
const RECORDS: u64 = 50_000;

/// What is measured, and in which unit.
type Case = (&'static str, fn() -> f64);

fn main() {
    let cases: [Case; 5] = [
        ("corpus, one thread, MB/s", corpus),
        ("byte rows, 1 worker, M tokens/s", || rows(1, false)),
        ("byte rows, 1 worker, shuffled, M tokens/s", || rows(1, true)),
        ("byte rows, 2 workers, M tokens/s", || rows(2, false)),
        ("byte rows, 2 workers, shuffled, M tokens/s", || rows(2, true)),
    ];
    let mut rates = cases.map(|_| Vec::with_capacity(ROUNDS));
    for _ in 0..ROUNDS {
        cases.iter().zip(&mut rates).for_each(|((_, measure), rates)| rates.push(measure()));
    }
    for ((name, _), mut rates) in cases.iter().zip(rates) {
        rates.sort_by(f64::total_cmp);
        println!("{name}: median {:.0}, {:.0} to {:.0}", rates[ROUNDS / 2], rates[0], rates[ROUNDS - 1]);
    }
}

/// Millions of bytes a second.
fn corpus() -> f64 {
    let corpus = Corpus::new(1, None);
    let start = Instant::now();
    let bytes: usize = (0..RECORDS).map(|index| corpus.text(index).len()).sum();
    bytes as f64 / start.elapsed().as_secs_f64() / 1e6
}

/// Millions of tokens a second, the corpus being written meanwhile.
fn rows(workers: usize, shuffle: bool) -> f64 {
    let order = OrderOptions { seed: 1, shuffle, held_out_every: Some(100), part: Subset::Train };
    let options = LoaderOptions { order, epochs: None, workers, on_bad_record: OnBadRecord::Stop };
    let format = Format::Text { column: "text".into() };
    let encoder = Arc::new(Encoder::new(Tokenizer::Bytes, None, format, 258).expect("a plain encoder"));
    let packing = Packing { sequence: SEQUENCE, fill: Fill::Cut, label_beyond_cut: false };
    // Threads begin to read as soon as there is a loader.
    let start = Instant::now();
    let mut loader = Loader::rows(Arc::new(Corpus::new(1, None)), encoder, packing, options, None).expect("a loader");
    for _ in 0..ROWS {
        loader.next().expect("no error").expect("an endless corpus");
    }
    (ROWS * SEQUENCE) as f64 / start.elapsed().as_secs_f64() / 1e6
}
