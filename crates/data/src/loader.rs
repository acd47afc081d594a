//! Rows and batches, read ahead by threads.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};

use crate::encode::Encoder;
use crate::error::Error;
use crate::images::{ImageBatch, Images};
use crate::order::{DataPosition, OrderOptions, RecordCounts, RecordOrder};
use crate::packing::{Packer, Packing, Row};
use crate::pipeline::{self, Assemble, BATCHES_AHEAD, Decode, OnBadRecord, Plan, Ready};
use crate::source::Source;

#[derive(Clone, Copy, Debug)]
pub struct LoaderOptions {
    pub order: OrderOptions,
    /// Without a limit, epochs follow each other for ever.
    pub epochs: Option<u64>,
    /// Threads that read and decode. Their number changes speed and memory, never what is read.
    pub workers: usize,
    pub on_bad_record: OnBadRecord,
}

/// Hands out rows of tokens, or batches of images, that threads have prepared.
pub struct Loader<Item> {
    ready: Option<Receiver<Ready<Item>>>,
    threads: Vec<JoinHandle<()>>,
    state: DataPosition,
    order: RecordOrder,
    epochs: Option<u64>,
    skipped: Vec<Error>,
}

impl Loader<Row> {
    /// Rows of tokens, from the beginning or from a state.
    pub fn rows(
        source: Arc<dyn Source>,
        encoder: Arc<Encoder>,
        packing: Packing,
        options: LoaderOptions,
        from: Option<DataPosition>,
    ) -> Result<Loader<Row>, Error> {
        let plan = plan(&*source, options, from)?;
        let packer = Packer::new(packing, encoder.tokenizer().padding(), plan.start)?;
        Loader::start(source, encoder, packer, plan)
    }
}

impl Loader<ImageBatch> {
    /// Batches of images, from the beginning or from a state.
    pub fn images(
        source: Arc<dyn Source>,
        images: Images,
        batch: usize,
        options: LoaderOptions,
        from: Option<DataPosition>,
    ) -> Result<Loader<ImageBatch>, Error> {
        let plan = plan(&*source, options, from)?;
        let batches = images.batches(batch)?;
        Loader::start(source, Arc::new(images.keyed(options.order.seed)), batches, plan)
    }
}

impl<Item: Send + 'static> Loader<Item> {
    /// The next row or batch; `None` after the last epoch. Nothing follows an error.
    #[expect(clippy::should_implement_trait, reason = "an iterator's item cannot be a result that ends it")]
    pub fn next(&mut self) -> Result<Option<Item>, Error> {
        loop {
            let Some(ready) = &self.ready else { return Err(Error::Stopped) };
            match ready.recv() {
                Ok(Ready::Item(item, state)) => {
                    self.state = state;
                    return Ok(Some(item));
                }
                Ok(Ready::Skipped(error)) => self.skipped.push(error),
                Ok(Ready::Failed(error)) => {
                    self.stop();
                    return Err(error);
                }
                // The channel closes after the end.
                Ok(Ready::End) | Err(_) => return Ok(None),
            }
        }
    }

    /// Records passed over or cut before the items handed out so far.
    pub fn counts(&self) -> RecordCounts {
        self.state.counts
    }

    /// Why bad records were passed over: the first few of a run, each reported once.
    pub fn take_skipped(&mut self) -> Vec<Error> {
        std::mem::take(&mut self.skipped)
    }

    /// The place behind the items handed out so far, without those that wait. A loader started from it continues with the very
    /// next item.
    pub fn state(&self) -> DataPosition {
        self.state
    }

    /// Epochs done, such as 1.25. A function of the state alone.
    pub fn epoch(&self) -> f64 {
        let (epoch, share) = self.order.epoch(&self.state);
        epoch as f64 + share
    }

    /// The share of the epochs that is done, if their number is limited. A function of the state alone.
    pub fn progress(&self) -> Option<f64> {
        let epochs = self.epochs?;
        Some((self.epoch() / epochs as f64).min(1.0))
    }

    fn start<D, A>(source: Arc<dyn Source>, decode: Arc<D>, mut assembler: A, plan: Plan) -> Result<Loader<Item>, Error>
    where
        D: Decode,
        A: Assemble<Piece = D::Piece, Item = Item>,
    {
        let (sender, ready) = sync_channel(A::ITEMS_AHEAD);
        let Plan { order, start, epochs, .. } = plan;
        let skipped = Vec::new();
        let mut loader = Loader { ready: Some(ready), threads: Vec::new(), state: start, order, epochs, skipped };
        let mut inputs = Vec::new();
        for worker in 0..plan.workers {
            let (sender, input) = sync_channel(BATCHES_AHEAD);
            inputs.push(input);
            let (source, decode) = (source.clone(), decode.clone());
            let work = move || pipeline::work(&plan, worker, &*source, &*decode, &sender);
            loader.spawn(format!("data-{worker}"), work)?;
        }
        let assemble = move || pipeline::assemble(&plan, &mut assembler, &inputs, &sender);
        loader.spawn("data-rows".to_owned(), assemble)?;
        Ok(loader)
    }

    fn spawn(&mut self, name: String, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let thread = thread::Builder::new().name(name.clone()).spawn(work);
        self.threads.push(thread.map_err(|error| Error::Thread { name, detail: error.to_string() })?);
        Ok(())
    }
}

impl<Item> Loader<Item> {
    /// Ends all threads: without a listener, each stops at its next message.
    fn stop(&mut self) {
        self.ready = None;
        for thread in self.threads.drain(..) {
            thread.join().expect("panics are caught inside");
        }
    }
}

impl<Item> Drop for Loader<Item> {
    fn drop(&mut self) {
        self.stop();
    }
}

fn plan(source: &dyn Source, options: LoaderOptions, from: Option<DataPosition>) -> Result<Plan, Error> {
    const MOST_WORKERS: usize = 1024;
    if !(1..=MOST_WORKERS).contains(&options.workers) {
        let found = options.workers.to_string();
        return Err(Error::BadOption { what: "number of workers", found, expected: format!("1 to {MOST_WORKERS}") });
    }
    let order = RecordOrder::new(options.order, source.chunks())?;
    let start = from.unwrap_or_else(|| order.start());
    order.check(&start)?;
    let LoaderOptions { epochs, workers, on_bad_record, .. } = options;
    Ok(Plan { order, start, epochs, workers, on_bad_record })
}
