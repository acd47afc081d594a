//! All ranks of a run: a thread each, with its trainer, which do what they are asked to together.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use evenkeel_balance::Observation;
use evenkeel_comm::{Communicator, Options, RankFailure, run_ranks};
use evenkeel_model::{Held, Model, Move, ParamId, ParamSpec, Slice, Widths, moves};

use crate::Error;
use crate::resize::Resize;
use crate::samples::Samples;
use crate::state_kind::StateKind;
use crate::trainer::{Evaluation, Observe, StepOutcome, Trainer};

type Job = Box<dyn FnOnce(&mut Trainer) + Send>;

/// The ranks of a run. Dropping it ends their threads.
pub struct Ranks {
    /// Empty once the ranks are to end.
    jobs: Mutex<Vec<Sender<Job>>>,
    count: usize,
    threads: Mutex<Threads>,
    specs: Vec<ParamSpec>,
    /// By rank and parameter: which elements it keeps, where it speaks for them.
    spoken_for: Mutex<Vec<Vec<Option<Held>>>>,
}

/// The thread that joins all others, until it has said how they ended.
enum Threads {
    Running(JoinHandle<Result<Vec<()>, RankFailure>>),
    Ended(Option<RankFailure>),
}

impl Ranks {
    /// Starts `count` ranks, each with the trainer that `make` makes it.
    pub fn start<E, Make>(count: usize, options: &Options, make: Make) -> Result<Ranks, E>
    where
        E: From<RankFailure> + Send + 'static,
        Make: Fn(&Communicator) -> Result<Trainer, E> + Send + Sync + 'static,
    {
        let (jobs, queues): (Vec<Sender<Job>>, Vec<Receiver<Job>>) = (0..count).map(|_| channel()).unzip();
        let queues: Mutex<Vec<Option<Receiver<Job>>>> = Mutex::new(queues.into_iter().map(Some).collect());
        let (made, starts) = channel();
        // Each rank has a sender of its own, which goes when it ends, so that nobody waits for one that has failed.
        let senders: Mutex<Vec<Option<Sender<_>>>> = Mutex::new((0..count).map(|_| Some(made.clone())).collect());
        drop(made);
        let options = options.clone();
        let serve = move |communicator: Communicator| {
            let rank = communicator.rank();
            let queue = queues.lock().expect("no panic under this lock")[rank].take();
            let made = senders.lock().expect("no panic under this lock")[rank].take().expect("a rank is made once");
            let mut trainer = match make(&communicator) {
                Ok(trainer) => trainer,
                Err(error) => return drop(made.send(Err(error))),
            };
            if made.send(Ok((rank, trainer.model.specs.clone(), spoken_for(&trainer)))).is_ok() {
                drop(made);
                queue.into_iter().flatten().for_each(|job| job(&mut trainer));
            }
        };
        let threads = std::thread::Builder::new().name("ranks".to_owned());
        let threads = threads.spawn(move || run_ranks(count, &options, serve)).expect("the system starts a thread");
        let (jobs, threads) = (Mutex::new(jobs), Mutex::new(Threads::Running(threads)));
        let spoken_for = Mutex::new(vec![Vec::new(); count]);
        let mut ranks = Ranks { jobs, count, threads, specs: Vec::new(), spoken_for };
        for _ in 0..count {
            match starts.recv() {
                Ok(started) => {
                    let (rank, specs, spoken_for) = started?;
                    if rank == 0 {
                        ranks.specs = specs;
                    }
                    ranks.spoken_for.get_mut().expect("no panic under this lock")[rank] = spoken_for;
                }
                Err(_) => return Err(ranks.failure().into()),
            }
        }
        Ok(ranks)
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// The model's parameters; what their slices say is of rank 0, and of how the model was cut at the beginning.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// Has every rank do the same; what each returns, in their order.
    pub fn each<R: Send + 'static>(
        &self,
        work: impl Fn(&mut Trainer) -> R + Send + Sync + 'static,
    ) -> Result<Vec<R>, RankFailure> {
        let work = Arc::new(work);
        let jobs = self.jobs.lock().expect("no panic under this lock").clone();
        if jobs.is_empty() {
            return Err(self.failure());
        }
        let answers: Vec<Receiver<R>> = jobs
            .iter()
            .map(|jobs| {
                let (answer, answered) = channel();
                let work = work.clone();
                // A rank that has ended takes no job and its answer does not come. Nor does that of one whose exchanges were
                // ended by another's failure: GPUs go on without what they waited for.
                let _ = jobs.send(Box::new(move |trainer| {
                    let done = work(trainer);
                    match trainer.communicator().failure() {
                        Some(failure) => std::panic::resume_unwind(Box::new(failure.message)),
                        None => drop(answer.send(done)),
                    }
                }));
                answered
            })
            .collect();
        // Ranks end when nobody can give them jobs any more.
        drop(jobs);
        answers.into_iter().map(|answer| answer.recv().map_err(|_| self.failure())).collect()
    }

    /// One step of all ranks on their shares of these samples; see [`Trainer::step`].
    pub fn step(&self, micros: Vec<Samples>, lr: f64) -> Result<StepOutcome, Error> {
        Ok(all_or_first_error(self.each(move |trainer| trainer.step(&micros, lr))?)?.swap_remove(0))
    }

    /// The same, and what each rank computed.
    pub fn observed_step(&self, micros: Vec<Samples>, lr: f64) -> Result<(StepOutcome, Vec<Observation>), Error> {
        let step = move |trainer: &mut Trainer| {
            let mut prepared = trainer.prepare(&micros)?;
            Ok(trainer.step_on(&mut prepared, lr, Observe::Work))
        };
        let steps = all_or_first_error(self.each(step)?)?;
        Ok((steps[0].outcome, steps.into_iter().map(|step| step.work).collect()))
    }

    /// Has every rank's kernels take so many times as long, by working for nothing behind them; see
    /// [`Device::throttle`](evenkeel_device::Device::throttle).
    pub fn throttle(&self, factors: Vec<f64>) -> Result<(), Error> {
        Ok(self.each(move |trainer| trainer.device.throttle(factors[trainer.rank()])).map(drop)?)
    }

    /// Cuts the model in other shards, for good; see [`Trainer::reshard`].
    pub fn reshard(&self, shards: Vec<Model>) -> Result<(), Error> {
        let spoken_for = self.each(move |trainer| {
            trainer.reshard(&shards);
            spoken_for(trainer)
        });
        *self.spoken_for.lock().expect("no panic under this lock") = spoken_for?;
        Ok(())
    }

    /// Has ranks compute in other widths than they keep, or in those again; see [`Trainer::migrate`].
    pub fn migrate(&self, work: Option<Widths>) -> Result<(), Error> {
        Ok(self.each(move |trainer| trainer.migrate(work.clone())).map(drop)?)
    }

    /// By shard: what ranks leave out of their products; see [`Trainer::resize`].
    pub fn resize(&self, by_shard: Vec<Option<Resize>>) -> Result<(), Error> {
        Ok(self.each(move |trainer| trainer.resize(by_shard[trainer.model.shard.index])).map(drop)?)
    }

    /// What one batch says; see [`Trainer::evaluate`].
    pub fn evaluate(&self, samples: Samples) -> Result<Evaluation, Error> {
        Ok(self.each(move |trainer| trainer.evaluate(&samples))?.swap_remove(0))
    }

    /// Some rows of a whole parameter, or of a kind of state that every element has, put together from the ranks' slices.
    pub fn read_rows(&self, kind: StateKind, id: ParamId, rows: Range<usize>) -> Result<Vec<f32>, Error> {
        let cols = self.specs[id.0].whole[1];
        let wanted = Held::all(Slice::of_rows(rows, cols));
        let spoken_for = self.spoken_for.lock().expect("no panic under this lock");
        let keepers = (0..self.count).filter_map(|rank| Some((rank, spoken_for[rank][id.0].clone()?)));
        let (keepers, held): (Vec<usize>, Vec<Held>) = keepers.unzip();
        drop(spoken_for);
        let moves = moves(&held, &wanted, cols).expect("the ranks keep every element of a parameter");
        let mut by_rank = vec![Vec::new(); self.count];
        for Move { from, from_start, to_start, len } in moves {
            by_rank[keepers[from]].push((from_start..from_start + len, to_start));
        }
        let mut whole = vec![0.0; wanted.len()];
        for (to_start, values) in self.each(move |trainer| read(trainer, kind, id, &by_rank))?.into_iter().flatten() {
            whole[to_start..to_start + values.len()].copy_from_slice(&values);
        }
        Ok(whole)
    }

    /// Ends the ranks and says why they have.
    fn failure(&self) -> RankFailure {
        self.jobs.lock().expect("no panic under this lock").clear();
        let mut threads = self.threads.lock().expect("no panic under this lock");
        let failure = match std::mem::replace(&mut *threads, Threads::Ended(None)) {
            Threads::Running(joined) => joined.join().expect("ranks' panics are caught").err(),
            Threads::Ended(failure) => failure,
        };
        *threads = Threads::Ended(failure.clone());
        failure.unwrap_or_else(|| RankFailure { rank: 0, message: "the rank has ended".to_owned() })
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.failure();
    }
}

/// What all ranks returned, or what the first that failed says.
pub(crate) fn all_or_first_error<R>(results: Vec<Result<R, Error>>) -> Result<Vec<R>, Error> {
    results.into_iter().collect()
}

/// By parameter: which elements a rank keeps, where it speaks for them.
fn spoken_for(trainer: &Trainer) -> Vec<Option<Held>> {
    let ids = trainer.parameters.ids();
    ids.map(|id| Some(trainer.kept(StateKind::Weight, id).filter(|_| trainer.speaks_for(StateKind::Weight, id))?.0))
        .collect()
}

/// Stretches of what a rank keeps of a parameter, each with where it is to go.
fn read(
    trainer: &Trainer,
    kind: StateKind,
    id: ParamId,
    by_rank: &[Vec<(Range<usize>, usize)>],
) -> Vec<(usize, Vec<f32>)> {
    let wanted = &by_rank[trainer.rank()];
    let (Some(first), Some(last)) =
        (wanted.iter().map(|(range, _)| range.start).min(), wanted.iter().map(|(range, _)| range.end).max())
    else {
        return Vec::new();
    };
    // One transfer for all of them: single rows would be many.
    let (_, kept) = trainer.kept(kind, id).expect("it speaks for some");
    let values = trainer.device.compute().read(&kept.col_range(first..last));
    let stretch = |(range, to): &(Range<usize>, usize)| (*to, values[range.start - first..range.end - first].to_vec());
    wanted.iter().map(stretch).collect()
}
