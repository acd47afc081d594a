//! The threads of a loader. Workers read windows and decode their records; one more thread assembles the pieces.
//!
//! Window n goes to worker n modulo their number, and each worker has a channel of its own, from which the assembling thread
//! takes windows in turn. So the order of pieces does not depend on the workers' speed or number. All channels are bounded: a
//! loader holds a window per worker and a few pieces more.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender};

use crate::error::{Error, RecordAt};
use crate::order::{Cursor, DataPosition, RecordCounts, RecordOrder};
use crate::source::{Record, Source};

/// Pieces travel together, so that a channel is not used for each.
const BATCH_PIECES: usize = 256;
const BATCH_BYTES: usize = 1 << 20;
/// Batches that may wait in a worker's channel.
pub(crate) const BATCHES_AHEAD: usize = 4;
/// Bad records that are named; others are only counted.
const NAMED: u64 = 5;

/// The treatment of records that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBadRecord {
    /// Loading ends with an error.
    Stop,
    /// They are passed over and counted. Loading still ends if an epoch has more than so many.
    Skip { most_in_epoch: u64 },
}

/// A worker's decoding of records.
pub(crate) trait Decode: Send + Sync + 'static {
    type Piece: Send + 'static;
    /// `None` to pass the record over.
    fn decode(&self, record: Record, cursor: Cursor) -> Result<Option<Self::Piece>, Error>;
    /// Approximate memory of a piece.
    fn bytes(piece: &Self::Piece) -> usize;
}

/// Assembles pieces in order.
pub(crate) trait Assemble: Send + 'static {
    type Piece: Send + 'static;
    type Item: Send + 'static;
    /// Finished items that may wait for the caller.
    const ITEMS_AHEAD: usize;
    /// Whether the piece was of use.
    fn add(&mut self, at: At, piece: Self::Piece, emit: Emit<Self::Item>) -> Result<bool, Stop>;
    /// An epoch is over; `next` is the beginning of the one behind it.
    fn end_epoch(&mut self, _next: At, _emit: Emit<Self::Item>) -> Result<(), Stop> {
        Ok(())
    }
    /// Everything is read.
    fn finish(&mut self, end: At, emit: Emit<Self::Item>) -> Result<(), Stop>;
}

/// Passes on an item and the state behind it, without its order and its counts.
pub(crate) type Emit<'a, Item> = &'a mut dyn FnMut(Item, DataPosition) -> Result<(), Stop>;

/// A place, the number of records in its window, and the counts before it.
#[derive(Clone, Copy)]
pub(crate) struct At<'a> {
    pub(crate) cursor: Cursor,
    pub(crate) window_records: u64,
    pub(crate) counts: &'a Cell<RecordCounts>,
}

impl At<'_> {
    /// The state in which everything before it is handed out.
    pub(crate) fn before(self) -> DataPosition {
        DataPosition { cursor: self.cursor, window_records: self.window_records, ..DataPosition::default() }
    }

    /// The state in which everything up to the record there is handed out.
    pub(crate) fn through(self) -> DataPosition {
        let cursor = Cursor { record: self.cursor.record + 1, ..self.cursor };
        At { cursor, ..self }.before()
    }

    pub(crate) fn count_truncated(self) {
        let counts = self.counts.get();
        self.counts.set(RecordCounts { truncated: counts.truncated + 1, ..counts });
    }
}

/// Why a thread ends early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Nobody listens any more.
    Gone,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

/// From a worker to the assembling thread. A bad record that is passed over is sent as its error.
pub(crate) enum Read<Piece> {
    WindowBegin { records: u64 },
    Pieces(Vec<(Cursor, Result<Piece, Error>)>),
    WindowEnd,
    Failed(Error),
}

/// From the assembling thread to the caller.
pub(crate) enum Ready<Item> {
    Item(Item, DataPosition),
    /// A bad record was passed over, with the reason.
    Skipped(Error),
    End,
    Failed(Error),
}

/// The settings that all threads share.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) order: RecordOrder,
    pub(crate) start: DataPosition,
    pub(crate) epochs: Option<u64>,
    pub(crate) workers: usize,
    pub(crate) on_bad_record: OnBadRecord,
}

impl Plan {
    /// Epoch and window of everything still to be read.
    fn windows(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let windows = u128::from(self.order.windows());
        let cursor = self.start.reads_from();
        let first = u128::from(cursor.epoch) * windows + u128::from(cursor.window);
        let end = u128::from(self.epochs.unwrap_or(u64::MAX)) * windows;
        (first..end).map(move |number| ((number / windows) as u64, (number % windows) as u64))
    }

    /// The place behind the last epoch.
    fn end(&self) -> Cursor {
        Cursor { epoch: self.epochs.unwrap_or(u64::MAX), ..Cursor::default() }
    }
}

/// A worker's thread.
pub(crate) fn work<D: Decode>(
    plan: &Plan,
    worker: usize,
    source: &dyn Source,
    decode: &D,
    out: &SyncSender<Read<D::Piece>>,
) {
    let all = || -> Result<(), Stop> {
        let mut named = 0;
        for (epoch, window) in plan.windows().skip(worker).step_by(plan.workers) {
            read_window(plan, epoch, window, source, decode, &mut named, out)?;
            out.send(Read::WindowEnd).map_err(|_| Stop::Gone)?;
        }
        Ok(())
    };
    if let Err(Stop::Failed(error)) = guarded(all) {
        // A missing listener is no reason to fail.
        let _ = out.send(Read::Failed(error));
    }
}

fn read_window<D: Decode>(
    plan: &Plan,
    epoch: u64,
    window: u64,
    source: &dyn Source,
    decode: &D,
    named: &mut u64,
    out: &SyncSender<Read<D::Piece>>,
) -> Result<(), Stop> {
    let mut chunks = Vec::new();
    for chunk in plan.order.chunks(epoch, window) {
        let records = match plan.on_bad_record {
            OnBadRecord::Stop => source.read(chunk).map(|records| records.into_iter().map(Ok).collect()),
            OnBadRecord::Skip { .. } => source.read_each(chunk),
        };
        let records: Vec<Result<Record, _>> = records.map_err(Error::from)?;
        chunks.push((chunk, records.into_iter().map(Some).collect::<Vec<_>>()));
    }
    let sizes: Vec<(usize, usize)> = chunks.iter().map(|(chunk, records)| (*chunk, records.len())).collect();
    let places = plan.order.places(epoch, window, &sizes);
    let first = first_record(plan, epoch, window, places.len())?;
    out.send(Read::WindowBegin { records: places.len() as u64 }).map_err(|_| Stop::Gone)?;
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for (index, &place) in places.iter().enumerate().skip(first) {
        let cursor = Cursor { epoch, window, record: index as u64 };
        let decoded = match take(&mut chunks, place) {
            Ok(record) => decode.decode(record, cursor).map_err(|error| {
                // Finding a record's line reads the file again.
                let is_named = plan.on_bad_record == OnBadRecord::Stop || *named < NAMED;
                *named += 1;
                if is_named { error.at(source.origin(place)) } else { error }
            }),
            Err(error) => Err(error.into()),
        };
        let piece = match decoded {
            Ok(None) => continue,
            Ok(Some(piece)) => Ok(piece),
            Err(error) if plan.on_bad_record == OnBadRecord::Stop || !error.is_of_record() => {
                // The records before it are of use.
                out.send(Read::Pieces(batch)).map_err(|_| Stop::Gone)?;
                return Err(error.into());
            }
            Err(error) => Err(error),
        };
        bytes += piece.as_ref().map_or(0, D::bytes);
        batch.push((cursor, piece));
        if batch.len() == BATCH_PIECES || bytes >= BATCH_BYTES {
            bytes = 0;
            out.send(Read::Pieces(std::mem::take(&mut batch))).map_err(|_| Stop::Gone)?;
        }
    }
    out.send(Read::Pieces(batch)).map_err(|_| Stop::Gone)
}

/// The first record to read in a window of so many records: the first of all, or the state's.
fn first_record(plan: &Plan, epoch: u64, window: u64, records: usize) -> Result<usize, Stop> {
    let cursor = plan.start.reads_from();
    if (cursor.epoch, cursor.window) != (epoch, window) {
        return Ok(0);
    }
    if cursor.record > records as u64 {
        return Err(Error::BadState { cursor, detail: format!("that window has {records} records") }.into());
    }
    Ok(cursor.record as usize)
}

/// A record, or the error of its file.
type Taken = Result<Record, evenkeel_store::Error>;

fn take(chunks: &mut [(usize, Vec<Option<Taken>>)], place: RecordAt) -> Taken {
    let chunk = chunks.iter_mut().find(|(chunk, _)| *chunk == place.chunk);
    let (_, records) = chunk.expect("places are of the window's own chunks");
    records[place.record].take().expect("an order visits a record once")
}

/// The assembling thread. `inputs` has a channel for each worker.
pub(crate) fn assemble<A: Assemble>(
    plan: &Plan,
    assembler: &mut A,
    inputs: &[Receiver<Read<A::Piece>>],
    out: &SyncSender<Ready<A::Item>>,
) {
    let all = || -> Result<(), Stop> {
        let counts = Cell::new(plan.start.counts_before());
        let emit: Emit<A::Item> = &mut |item, state| {
            let state = DataPosition { order: plan.start.order, counts: counts.get(), ..state };
            out.send(Ready::Item(item, state)).map_err(|_| Stop::Gone)
        };
        let mut first_bad = None;
        let skipped = &mut |error| skip(plan, &counts, &mut first_bad, error, out);
        let at = |cursor| At { cursor, window_records: 0, counts: &counts };
        // An epoch in which nothing is of use would otherwise be read for ever. A continued epoch may be at its end.
        let mut useful = plan.start != plan.order.start();
        for (number, (epoch, window)) in plan.windows().enumerate() {
            useful |= assemble_window(assembler, &inputs[number % inputs.len()], &counts, skipped, emit)?;
            if window + 1 == plan.order.windows() {
                let RecordCounts { skipped_in_epoch: skipped, truncated, .. } = counts.get();
                if !useful {
                    let part = plan.order.part();
                    return Err(Error::NothingToRead { epoch, part, skipped, truncated }.into());
                }
                useful = false;
                assembler.end_epoch(at(Cursor { epoch: epoch + 1, ..Cursor::default() }), emit)?;
                counts.set(RecordCounts { skipped_in_epoch: 0, ..counts.get() });
            }
        }
        assembler.finish(at(plan.end()), emit)
    };
    let last = match guarded(all) {
        Ok(()) => Ready::End,
        Err(Stop::Failed(error)) => Ready::Failed(error),
        Err(Stop::Gone) => return,
    };
    let _ = out.send(last);
}

/// Counts a bad record, names it if it is one of the first, and ends the run if there are too many. `first` is the first of all:
/// later ones may not say where they are.
fn skip<Item>(
    plan: &Plan,
    counts: &Cell<RecordCounts>,
    first: &mut Option<String>,
    error: Error,
    out: &SyncSender<Ready<Item>>,
) -> Result<(), Stop> {
    let first = first.get_or_insert_with(|| error.to_string());
    let before = counts.get();
    let RecordCounts { skipped, skipped_in_epoch, .. } = before;
    counts.set(RecordCounts { skipped: skipped + 1, skipped_in_epoch: skipped_in_epoch + 1, ..before });
    let OnBadRecord::Skip { most_in_epoch } = plan.on_bad_record else { return Err(error.into()) };
    if skipped_in_epoch >= most_in_epoch {
        return Err(Error::TooManyBad { limit: most_in_epoch, first: first.clone() }.into());
    }
    if skipped < NAMED {
        out.send(Ready::Skipped(error)).map_err(|_| Stop::Gone)?;
    }
    Ok(())
}

/// Whether anything in the window was of use.
fn assemble_window<A: Assemble>(
    assembler: &mut A,
    input: &Receiver<Read<A::Piece>>,
    counts: &Cell<RecordCounts>,
    skipped: &mut dyn FnMut(Error) -> Result<(), Stop>,
    emit: Emit<A::Item>,
) -> Result<bool, Stop> {
    let (mut useful, mut records) = (false, 0);
    loop {
        match input.recv() {
            Ok(Read::WindowBegin { records: count }) => records = count,
            Ok(Read::Pieces(pieces)) => {
                for (cursor, piece) in pieces {
                    let at = At { cursor, window_records: records, counts };
                    match piece {
                        Ok(piece) => useful |= assembler.add(at, piece, emit)?,
                        Err(error) => skipped(error)?,
                    }
                }
            }
            Ok(Read::WindowEnd) => return Ok(useful),
            Ok(Read::Failed(error)) => return Err(error.into()),
            Err(_) => unreachable!("a worker ends after its last window or after an error"),
        }
    }
}

/// A panic in here, most likely in a library fed with strange data, becomes an error.
fn guarded(work: impl FnOnce() -> Result<(), Stop>) -> Result<(), Stop> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let thread = std::thread::current();
        Err(Error::panicked(thread.name().unwrap_or("data"), &*payload).into())
    })
}
