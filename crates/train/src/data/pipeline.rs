//! The threads of a loader. Workers read windows and decode their records; one more puts the pieces together.
//!
//! Window n goes to worker n modulo their number, and each worker has a channel of its own, from which the assembling
//! thread takes windows in turn. So the order of pieces never depends on who was faster or how many there are.
//! All channels are bounded: a loader holds a window a worker and a few pieces more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender};

use super::error::{Error, Place};
use super::order::{Cursor, Order, State};
use super::source::{Record, Source};

/// Pieces travel together, so that a channel is not used for each.
const BATCH_PIECES: usize = 256;
const BATCH_BYTES: usize = 1 << 20;
/// Batches that may wait in a worker's channel.
pub(crate) const BATCHES_AHEAD: usize = 4;

/// What a worker makes of a record.
pub(crate) trait Decode: Send + Sync + 'static {
    type Piece: Send + 'static;
    /// Nothing where the record is to be passed over.
    fn decode(&self, record: Record, cursor: Cursor) -> Result<Option<Self::Piece>, Error>;
    /// About how much memory a piece takes.
    fn bytes(piece: &Self::Piece) -> usize;
}

/// Puts pieces together in their order.
pub(crate) trait Assemble: Send + 'static {
    type Piece: Send + 'static;
    type Item: Send + 'static;
    /// Finished items that may wait for the caller.
    const ITEMS_AHEAD: usize;
    /// Whether the piece was of use.
    fn add(&mut self, cursor: Cursor, piece: Self::Piece, emit: Emit<Self::Item>) -> Result<bool, Stop>;
    fn finish(&mut self, end: Cursor, emit: Emit<Self::Item>) -> Result<(), Stop>;
}

/// Hands on an item and the place behind it.
pub(crate) type Emit<'a, Item> = &'a mut dyn FnMut(Item, Reached) -> Result<(), Stop>;

/// A cursor, and how many tokens of the record there, of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    pub(crate) cursor: Cursor,
    pub(crate) tokens: u64,
    pub(crate) record_tokens: u64,
}

impl Reached {
    /// Everything up to the record at a cursor.
    pub(crate) fn through(cursor: Cursor) -> Reached {
        Reached::before(Cursor { record: cursor.record + 1, ..cursor })
    }

    pub(crate) fn before(cursor: Cursor) -> Reached {
        Reached { cursor, tokens: 0, record_tokens: 0 }
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

/// From a worker to the assembling thread.
pub(crate) enum Read<Piece> {
    WindowBegin { records: u64 },
    Pieces(Vec<(Cursor, Piece)>),
    WindowEnd,
    Failed(Error),
}

/// From the assembling thread to the caller.
pub(crate) enum Ready<Item> {
    Item(Item, State),
    End,
    Failed(Error),
}

/// What all threads know.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) order: Order,
    pub(crate) start: State,
    pub(crate) epochs: Option<u64>,
    pub(crate) workers: usize,
}

impl Plan {
    /// Epoch and window of everything still to be read.
    fn windows(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let windows = u128::from(self.order.windows());
        let first = u128::from(self.start.cursor.epoch) * windows + u128::from(self.start.cursor.window);
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
        for (epoch, window) in plan.windows().skip(worker).step_by(plan.workers) {
            read_window(plan, epoch, window, source, decode, out)?;
            out.send(Read::WindowEnd).map_err(|_| Stop::Gone)?;
        }
        Ok(())
    };
    if let Err(Stop::Failed(error)) = guarded(all) {
        // Nobody listening is no reason to fail.
        let _ = out.send(Read::Failed(error));
    }
}

fn read_window<D: Decode>(
    plan: &Plan,
    epoch: u64,
    window: u64,
    source: &dyn Source,
    decode: &D,
    out: &SyncSender<Read<D::Piece>>,
) -> Result<(), Stop> {
    let mut chunks = Vec::new();
    for chunk in plan.order.chunks(epoch, window) {
        let records: Vec<Option<Record>> = source.read(chunk).map_err(Error::from)?.into_iter().map(Some).collect();
        chunks.push((chunk, records));
    }
    let sizes: Vec<(usize, usize)> = chunks.iter().map(|(chunk, records)| (*chunk, records.len())).collect();
    let places = plan.order.places(epoch, window, &sizes);
    let first = first_record(plan, epoch, window, places.len())?;
    out.send(Read::WindowBegin { records: places.len() as u64 }).map_err(|_| Stop::Gone)?;
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for (index, &place) in places.iter().enumerate().skip(first) {
        let cursor = Cursor { epoch, window, record: index as u64 };
        let record = take(&mut chunks, place);
        let Some(piece) = decode.decode(record, cursor).map_err(|error| error.at(source.origin(place)))? else {
            continue;
        };
        bytes += D::bytes(&piece);
        batch.push((cursor, piece));
        if batch.len() == BATCH_PIECES || bytes >= BATCH_BYTES {
            bytes = 0;
            out.send(Read::Pieces(std::mem::take(&mut batch))).map_err(|_| Stop::Gone)?;
        }
    }
    out.send(Read::Pieces(batch)).map_err(|_| Stop::Gone)
}

/// Where to begin in a window of so many records: at the first, or where the state says.
fn first_record(plan: &Plan, epoch: u64, window: u64, records: usize) -> Result<usize, Stop> {
    let cursor = plan.start.cursor;
    if (cursor.epoch, cursor.window) != (epoch, window) {
        return Ok(0);
    }
    if cursor.record > records as u64 {
        return Err(Error::BadState { cursor, detail: format!("that window has {records} records") }.into());
    }
    Ok(cursor.record as usize)
}

fn take(chunks: &mut [(usize, Vec<Option<Record>>)], place: Place) -> Record {
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
        let emit = &mut |item, Reached { cursor, tokens, record_tokens }: Reached, window_records| {
            let state = State { cursor, tokens, record_tokens, window_records, order: plan.start.order };
            out.send(Ready::Item(item, state)).map_err(|_| Stop::Gone)
        };
        // An epoch of which nothing is of use would otherwise be read for ever. One that is continued may be at its end.
        let mut useful = plan.start != plan.order.start();
        for (number, (epoch, window)) in plan.windows().enumerate() {
            useful |= assemble_window(assembler, &inputs[number % inputs.len()], emit)?;
            if window + 1 == plan.order.windows() {
                if !useful {
                    return Err(Error::NothingToRead { epoch, part: plan.order.part() }.into());
                }
                useful = false;
            }
        }
        assembler.finish(plan.end(), &mut |item, reached| emit(item, reached, 0))
    };
    let last = match guarded(all) {
        Ok(()) => Ready::End,
        Err(Stop::Failed(error)) => Ready::Failed(error),
        Err(Stop::Gone) => return,
    };
    let _ = out.send(last);
}

/// Whether anything in the window was of use.
fn assemble_window<A: Assemble>(
    assembler: &mut A,
    input: &Receiver<Read<A::Piece>>,
    emit: &mut dyn FnMut(A::Item, Reached, u64) -> Result<(), Stop>,
) -> Result<bool, Stop> {
    let (mut useful, mut records) = (false, 0);
    loop {
        match input.recv() {
            Ok(Read::WindowBegin { records: count }) => records = count,
            Ok(Read::Pieces(pieces)) => {
                for (cursor, piece) in pieces {
                    useful |= assembler.add(cursor, piece, &mut |item, reached| emit(item, reached, records))?;
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
