//! All ranks of a run: a thread each, whose trainer answers requests.

mod request;

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use evenkeel_balance::Observation;
use evenkeel_comm::{Communicator, Options, RankFailure, run_ranks};
use evenkeel_model::{Cut, Held, Move, ParamId, ParamSpec, Slice, Widths, moves};
use evenkeel_step::trace::Shares;

pub use request::{Answer, RankMemory, Request, WantedElements};
use request::{answer, spoken_for};

use crate::Error;
use crate::checkpoint::{Opened, RankState};
use crate::prune::Prune;
use crate::samples::Samples;
use crate::state_kind::StateKind;
use crate::trainer::{Evaluation, Proofs, StepOutcome, Trainer};

/// Work for a rank's thread.
enum Job {
    Answer {
        request: Arc<Request>,
        to: Sender<Answer>,
    },
    /// For tests and benchmarks; see [`Ranks::with_trainers`].
    Visit(Box<dyn FnOnce(&mut Trainer) + Send>),
}

/// Unwraps an answer of this kind.
macro_rules! answer_of {
    ($kind:ident) => {
        |answer| match answer {
            Answer::$kind(found) => Ok(found),
            other => Err(other),
        }
    };
}

/// The ranks of a run. Dropping it ends their threads.
pub struct Ranks {
    /// Empty once the ranks are to end.
    jobs: Mutex<Vec<Sender<Job>>>,
    count: usize,
    threads: Mutex<Threads>,
    specs: Vec<ParamSpec>,
    /// By rank and parameter: the elements that it keeps, if it speaks for them.
    spoken_for: Mutex<Vec<Vec<Option<Held>>>>,
}

/// The thread that joins all others, until it has reported how they ended.
enum Threads {
    Running(JoinHandle<Result<Vec<()>, RankFailure>>),
    Ended(Option<RankFailure>),
}

impl Ranks {
    /// Starts `count` ranks, each with a trainer from `make`.
    pub fn start<E, Make>(count: usize, options: &Options, make: Make) -> Result<Ranks, E>
    where
        E: From<RankFailure> + Send + 'static,
        Make: Fn(&Communicator) -> Result<Trainer, E> + Send + Sync + 'static,
    {
        let (jobs, queues): (Vec<Sender<Job>>, Vec<Receiver<Job>>) = (0..count).map(|_| channel()).unzip();
        let queues: Mutex<Vec<Option<Receiver<Job>>>> = Mutex::new(queues.into_iter().map(Some).collect());
        let (made, starts) = channel();
        // Each rank has its own sender, dropped when the rank ends, so that nobody waits for one that has failed.
        let senders: Mutex<Vec<Option<Sender<_>>>> = Mutex::new((0..count).map(|_| Some(made.clone())).collect());
        drop(made);
        let options = options.clone();
        let proofs = [(); 2].map(|()| Arc::new(Proofs::among(count)));
        let serve = move |communicator: Communicator| {
            let rank = communicator.rank();
            let queue = queues.lock().expect("no panic under this lock")[rank].take();
            let made = senders.lock().expect("no panic under this lock")[rank].take().expect("a rank is made once");
            let mut trainer = match make(&communicator) {
                Ok(trainer) => trainer,
                Err(error) => return drop(made.send(Err(error))),
            };
            trainer.share_proofs(&proofs);
            if made.send(Ok((rank, trainer.model.specs.clone(), spoken_for(&trainer)))).is_ok() {
                drop(made);
                queue.into_iter().flatten().for_each(|job| job.run(&mut trainer));
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

    /// The model's parameters; their slices are those of rank 0 in the first cut.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// Sends all ranks the same request. Returns their answers in order, or the error of the first that failed.
    pub fn ask(&self, request: Request) -> Result<Vec<Answer>, Error> {
        let request = Arc::new(request);
        let answers = self.all(|to| Job::Answer { request: request.clone(), to })?;
        let first_error = answers.iter().find_map(|answer| match answer {
            Answer::Failed(error) => Some(error.clone()),
            _ => None,
        });
        if let Some(error) = first_error {
            return Err(error.into());
        }
        for (rank, answer) in answers.iter().enumerate() {
            if let Answer::Resharded(spoken_for) = answer {
                self.spoken_for.lock().expect("no panic under this lock")[rank].clone_from(spoken_for);
            }
        }
        Ok(answers)
    }

    /// For tests and benchmarks, which do with trainers what no command does: every rank runs `work`. Returns the results in rank
    /// order. Closures cross no process border, so commands use requests.
    pub fn with_trainers<R: Send + 'static>(
        &self,
        work: impl Fn(&mut Trainer) -> R + Send + Sync + 'static,
    ) -> Result<Vec<R>, RankFailure> {
        let work = Arc::new(work);
        self.all(|to| {
            let work = work.clone();
            Job::Visit(Box::new(move |trainer| {
                let found = work(trainer);
                end_if_failed(trainer);
                drop(to.send(found));
            }))
        })
    }

    /// Gives every rank a job and waits for all results.
    fn all<R>(&self, job: impl Fn(Sender<R>) -> Job) -> Result<Vec<R>, RankFailure> {
        let jobs = self.jobs.lock().expect("no panic under this lock").clone();
        if jobs.is_empty() {
            return Err(self.failure());
        }
        let give = |jobs: &Sender<Job>| {
            let (to, answer) = channel();
            // A rank that has ended takes no job and sends no answer.
            let _ = jobs.send(job(to));
            answer
        };
        let answers: Vec<Receiver<R>> = jobs.iter().map(give).collect();
        // Ranks end when no sender of jobs is left.
        drop(jobs);
        answers.into_iter().map(|answer| answer.recv().map_err(|_| self.failure())).collect()
    }

    /// One step of all ranks on their micro-batches; see [`Trainer::step`].
    pub fn step(&self, micros: Vec<Samples>, lr: f64) -> Result<StepOutcome, Error> {
        Ok(self.steps(micros, lr, false)?.swap_remove(0).0)
    }

    /// The same, with each rank's observation.
    pub fn observed_step(&self, micros: Vec<Samples>, lr: f64) -> Result<(StepOutcome, Vec<Observation>), Error> {
        let steps = self.steps(micros, lr, true)?;
        Ok((steps[0].0, steps.into_iter().map(|(_, work)| work).collect()))
    }

    /// The same with each rank's time by its use, update included: every task is timed.
    pub fn timed_step(&self, micros: Vec<Samples>, lr: f64) -> Result<(StepOutcome, Vec<Shares>), Error> {
        let steps = self.gather(Request::TimedStep { micros, lr }, answer_of!(TimedStep))?;
        Ok((steps[0].0, steps.into_iter().map(|(_, shares)| shares).collect()))
    }

    fn steps(
        &self,
        micros: Vec<Samples>,
        lr: f64,
        is_observed: bool,
    ) -> Result<Vec<(StepOutcome, Observation)>, Error> {
        self.gather(Request::Step { micros, lr, is_observed }, answer_of!(Step))
    }

    /// By rank and unit: the seconds that the rank computes for it in such a step; see [`Trainer::unit_seconds`].
    pub fn unit_seconds(&self, micros: Vec<Samples>) -> Result<Vec<Vec<f64>>, Error> {
        self.gather(Request::UnitSeconds { micros }, answer_of!(UnitSeconds))
    }

    /// Makes every rank's kernels take so many times as long, by useless work behind them; see
    /// [`Device::throttle`](evenkeel_device::Device::throttle).
    pub fn throttle(&self, factors: Vec<f64>) -> Result<(), Error> {
        self.ask(Request::Throttle { factors }).map(drop)
    }

    /// Cuts the model into other shards, for good; see [`Trainer::reshard`]. The cut must fit the model.
    pub fn reshard(&self, cut: Cut) -> Result<(), Error> {
        self.ask(Request::Reshard { cut }).map(drop)
    }

    /// Cuts the chain in stages that begin at these units, for good; see [`Trainer::recut`].
    pub fn recut(&self, cuts: Vec<usize>) -> Result<(), Error> {
        self.ask(Request::Recut { cuts }).map(drop)
    }

    /// Has ranks compute with other widths than they keep, or with those again; see [`Trainer::migrate`].
    pub fn migrate(&self, work: Option<Widths>) -> Result<(), Error> {
        self.ask(Request::Migrate { work }).map(drop)
    }

    /// By shard: how its ranks prune; see [`Trainer::prune`].
    pub fn prune(&self, by_shard: Vec<Option<Prune>>) -> Result<(), Error> {
        self.ask(Request::Prune { by_shard }).map(drop)
    }

    /// Evaluates one batch; see [`Trainer::evaluate`].
    pub fn evaluate(&self, samples: Samples) -> Result<Evaluation, Error> {
        let evaluations = self.gather(Request::Evaluate { samples }, answer_of!(Evaluation));
        Ok(evaluations?.swap_remove(0))
    }

    /// By rank: the memory of its device.
    pub fn memory(&self) -> Result<Vec<RankMemory>, Error> {
        self.gather(Request::Memory, answer_of!(Memory))
    }

    /// By rank: operations per second of a large product.
    pub fn peak_flops_per_s(&self) -> Result<Vec<f64>, Error> {
        self.gather(Request::PeakFlops, answer_of!(PeakFlops))
    }

    /// By rank: seconds per byte sent to the next rank while all ranks send.
    pub fn exchange_s_per_byte(&self) -> Result<Vec<f64>, Error> {
        self.gather(Request::ExchangeSpeed, answer_of!(ExchangeSpeed))
    }

    /// By rank: the message of a driver that refused to go on with graphs.
    pub fn graph_refusals(&self) -> Result<Vec<Option<String>>, Error> {
        self.gather(Request::GraphRefusal, answer_of!(GraphRefusal))
    }

    /// By rank: its part of a checkpoint.
    pub(crate) fn states(&self, copies: bool) -> Result<Vec<RankState>, Error> {
        Ok(self.gather(Request::State { copies }, answer_of!(State))?.into_iter().map(|state| *state).collect())
    }

    /// Loads a checkpoint into the ranks.
    pub(crate) fn load(&self, opened: Arc<Opened>) -> Result<(), Error> {
        self.ask(Request::Load(opened))?;
        self.ask(Request::CompleteValues).map(drop)
    }

    /// Some rows of a whole parameter, or of a kind of state that every element has, assembled from the ranks' slices.
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
            by_rank[keepers[from]].push(WantedElements { elements: from_start..from_start + len, to_start });
        }
        self.read(kind, id, by_rank, wanted.len())
    }

    /// Some of the elements that a rank keeps of a parameter.
    pub(crate) fn read_kept(
        &self,
        rank: usize,
        kind: StateKind,
        id: ParamId,
        elements: Range<usize>,
    ) -> Result<Vec<f32>, Error> {
        let len = elements.len();
        let mut by_rank = vec![Vec::new(); self.count];
        by_rank[rank].push(WantedElements { elements, to_start: 0 });
        self.read(kind, id, by_rank, len)
    }

    /// `len` elements, assembled from what ranks keep of a parameter.
    fn read(
        &self,
        kind: StateKind,
        id: ParamId,
        by_rank: Vec<Vec<WantedElements>>,
        len: usize,
    ) -> Result<Vec<f32>, Error> {
        let read = self.gather(Request::Read { kind, id, by_rank }, answer_of!(Values))?;
        let mut read: Vec<(usize, Vec<f32>)> = read.into_iter().flatten().collect();
        if let [(_, values)] = &mut read[..]
            && values.len() == len
        {
            return Ok(std::mem::take(values));
        }
        let mut whole = vec![0.0; len];
        for (to_start, values) in read {
            whole[to_start..to_start + values.len()].copy_from_slice(&values);
        }
        Ok(whole)
    }

    /// The ranks' answers to a request, in their order; `take` unwraps each.
    fn gather<T>(&self, request: Request, take: impl Fn(Answer) -> Result<T, Answer>) -> Result<Vec<T>, Error> {
        let take =
            |answer| take(answer).unwrap_or_else(|other| unreachable!("another answer than was asked for: {other:?}"));
        Ok(self.ask(request)?.into_iter().map(take).collect())
    }

    /// Ends the ranks and returns why they ended.
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

impl Job {
    fn run(self, trainer: &mut Trainer) {
        match self {
            Job::Answer { request, to } => {
                let answer = answer(trainer, &request);
                end_if_failed(trainer);
                drop(to.send(answer));
            }
            Job::Visit(visit) => visit(trainer),
        }
    }
}

/// Ends a rank whose exchanges were ended by another's failure: GPUs go on without what they waited for, so its answer would be
/// wrong.
fn end_if_failed(trainer: &Trainer) {
    if let Some(failure) = trainer.communicator().failure() {
        std::panic::resume_unwind(Box::new(failure.message));
    }
}
