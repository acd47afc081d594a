//! A team: the threads of one queue, which share the tasks of one kernel at a time.

use std::any::TypeId;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use memmap2::MmapMut;

use super::working::PAGE_BYTES;
use crate::View;

type Work<'a> = dyn Fn(usize, &mut Scratch) + Sync + 'a;

/// How often a thread looks for work before it sleeps: some tens of microseconds, about the gap between two kernels.
const SPINS_BEFORE_SLEEP: usize = 400;

/// The threads of a queue. The thread that owns the team works too.
pub(crate) struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    scratch: Scratch,
    /// Memory for one kernel's use across all its tasks, such as partial sums.
    common: Scratch,
    /// The left and the right operand of the last product, packed: the next one often has one of them again.
    operands: [PackedOperand; 2],
    least_tasks: usize,
}

/// Tasks that a kernel should have at least, if its work can be cut so small: for any number of threads, so that results and memory
/// do not depend on that...
pub(super) const LEAST_TASKS: usize = 32;
/// ...and for one that computes alone.
pub(super) const LEAST_TASKS_ALONE: usize = 1;

#[derive(Default)]
struct Shared {
    /// Counts the jobs so far; a helper that sees it change takes part in the job.
    epoch: AtomicUsize,
    job: Mutex<Option<Job>>,
    wake: Condvar,
    next_task: AtomicUsize,
    helpers_busy: AtomicUsize,
    failure: Mutex<Option<Box<dyn std::any::Any + Send>>>,
    stop: AtomicBool,
}

#[derive(Clone, Copy)]
struct Job {
    tasks: usize,
    work: *const Work<'static>,
}

// SAFETY: the closure is Sync, and `Team::tasks` does not return while a helper may still call it.
unsafe impl Send for Job {}

impl Team {
    /// A team of `threads`, the caller included. Helper threads are named after `name`; helper i runs `setup(i)` first.
    pub fn start(name: &str, threads: usize, setup: impl Fn(usize) + Clone + Send + 'static) -> std::io::Result<Team> {
        let mut team = Team::alone();
        team.least_tasks = LEAST_TASKS;
        for index in 1..threads {
            let shared = team.shared.clone();
            let setup = setup.clone();
            let builder = std::thread::Builder::new().name(format!("{name}-{index}"));
            let helper = builder.spawn(move || {
                setup(index);
                shared.help();
            });
            team.helpers.push(helper?);
        }
        Ok(team)
    }

    /// A team of the caller.
    fn alone() -> Team {
        Team {
            shared: Arc::default(),
            helpers: Vec::new(),
            scratch: Scratch::default(),
            common: Scratch::default(),
            operands: Default::default(),
            least_tasks: LEAST_TASKS_ALONE,
        }
    }

    pub fn least_tasks(&self) -> usize {
        self.least_tasks
    }

    /// Runs `work(0..tasks)`, each once, on whichever thread is free, and returns when all are done.
    ///
    /// A task's result must depend on its number alone.
    pub fn tasks(&mut self, tasks: usize, work: impl Fn(usize, &mut Scratch) + Sync) {
        if tasks <= 1 || self.helpers.is_empty() {
            (0..tasks).for_each(|task| work(task, &mut self.scratch));
            return;
        }
        let work: &Work<'_> = &work;
        // SAFETY: only the lifetime changes, and no helper holds the closure once `join` has returned.
        let work: &Work<'static> = unsafe { std::mem::transmute(work) };
        self.shared.publish(Job { tasks, work }, self.helpers.len());
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.take_tasks(tasks, work, &mut self.scratch)));
        self.shared.join();
        let helpers_failure = self.shared.failure.lock().expect("no panic under this lock").take();
        if let Some(panic) = own.err().or(helpers_failure) {
            resume_unwind(panic);
        }
    }

    /// The same, each with a team of its thread alone.
    pub fn tasks_alone(&mut self, tasks: usize, work: impl Fn(usize, &mut Team) + Sync) {
        self.tasks(tasks, |task, scratch| {
            let team = scratch.alone.get_or_insert_with(|| Box::new(Team::alone()));
            work(task, team);
            // The operands that it packed may change before its next task.
            team.forget_operands();
        });
    }

    /// Runs `work` on `0..len` cut in blocks of `block`.
    pub fn blocks(&mut self, len: usize, block: usize, work: impl Fn(Range<usize>, &mut Scratch) + Sync) {
        self.tasks(len.div_ceil(block), |task, scratch| work(task * block..len.min((task + 1) * block), scratch));
    }

    /// Takes the operands that the last product left; hand them back with [`Team::return_operands`].
    pub fn take_operands(&mut self) -> [PackedOperand; 2] {
        std::mem::take(&mut self.operands)
    }

    pub fn return_operands(&mut self, operands: [PackedOperand; 2]) {
        self.operands = operands;
    }

    /// Call it when the source of a packed operand may have changed.
    pub fn forget_operands(&mut self) {
        self.operands.iter_mut().for_each(|operand| operand.source = None);
    }

    /// Takes the memory that one kernel may use across its tasks; hand it back with [`Team::return_common`].
    pub fn take_common(&mut self) -> Scratch {
        std::mem::take(&mut self.common)
    }

    pub fn return_common(&mut self, common: Scratch) {
        self.common = common;
    }

    /// The working memory in use, without that of helpers.
    #[cfg(test)]
    pub fn working_memory(&self) -> super::WorkingMemory {
        super::WorkingMemory {
            thread_bytes: self.scratch.bytes() as u64,
            common_bytes: self.common.bytes() as u64,
            operand_bytes: [0, 1].map(|side: usize| self.operands[side].memory.bytes() as u64),
            alone_bytes: self.scratch.alone.as_ref().map_or([0; 4], |team| team.working_memory().parts()),
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.announce();
        for helper in self.helpers.drain(..) {
            let _ = helper.join();
        }
    }
}

impl Shared {
    fn publish(&self, job: Job, helpers: usize) {
        self.next_task.store(0, Ordering::Relaxed);
        self.helpers_busy.store(helpers, Ordering::Relaxed);
        *self.job.lock().expect("no panic under this lock") = Some(job);
        self.announce();
    }

    fn announce(&self) {
        let _guard = self.job.lock().expect("no panic under this lock");
        self.epoch.fetch_add(1, Ordering::Release);
        self.wake.notify_all();
    }

    fn join(&self) {
        let mut looks = 0usize;
        while self.helpers_busy.load(Ordering::Acquire) > 0 {
            looks += 1;
            if looks < SPINS_BEFORE_SLEEP { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    fn take_tasks(&self, tasks: usize, work: &Work<'_>, scratch: &mut Scratch) {
        loop {
            let task = self.next_task.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            work(task, scratch);
        }
    }

    fn help(&self) {
        let mut scratch = Scratch::default();
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let job = self.job.lock().expect("no panic under this lock").expect("an epoch begins with its job");
            // SAFETY: `Team::tasks` keeps the closure alive until `helpers_busy` is back at zero, below.
            let work = unsafe { &*job.work };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_tasks(job.tasks, work, &mut scratch))) {
                self.next_task.store(job.tasks, Ordering::Relaxed);
                *self.failure.lock().expect("no panic under this lock") = Some(panic);
            }
            self.helpers_busy.fetch_sub(1, Ordering::Release);
        }
    }

    fn next_epoch(&self, seen: usize) -> usize {
        for _ in 0..SPINS_BEFORE_SLEEP {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.job.lock().expect("no panic under this lock");
        while self.epoch.load(Ordering::Acquire) == seen {
            guard = self.wake.wait(guard).expect("no panic under this lock");
        }
        self.epoch.load(Ordering::Acquire)
    }
}

/// A packed operand, and its source as long as that is known to be unchanged.
#[derive(Default)]
pub(crate) struct PackedOperand {
    pub memory: Scratch,
    source: Option<Source>,
}

/// The source of a packed operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub view: View,
    pub level: TypeId,
    /// Whether the view's rows run along the product's depth.
    pub along: bool,
}

impl PackedOperand {
    pub fn is_of(&self, source: &Source) -> bool {
        self.source.as_ref() == Some(source)
    }

    pub fn set_source(&mut self, source: Option<Source>) {
        self.source = source;
    }

    /// Call it for every view that a product writes.
    pub fn forget_if_within(&mut self, written: &View) {
        let written = written.reach();
        let overlaps = |read: Range<u64>| read.start < written.end && written.start < read.end;
        if self.source.is_some_and(|source| overlaps(source.view.reach())) {
            self.source = None;
        }
    }
}

/// A thread's working memory: grows to the largest request and keeps its contents from use to use. It is a map of whole pages
/// and no part of the allocator's memory, which would round it up and keep it after it was freed.
#[derive(Default)]
pub(crate) struct Scratch {
    memory: Option<MmapMut>,
    /// The thread's own team, once it has worked alone.
    alone: Option<Box<Team>>,
}

impl Scratch {
    /// `len` numbers, aligned for vectors, holding whatever was left there.
    pub fn floats(&mut self, len: usize) -> &mut [f32] {
        let bytes = len * size_of::<f32>();
        if !self.has_floats(len) {
            // Frees the old memory first, so that both never exist together.
            self.memory = None;
            let bytes = bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
            let map = MmapMut::map_anon(bytes);
            self.memory = Some(map.unwrap_or_else(|error| panic!("{bytes} bytes of working memory: {error}")));
        }
        let first = self.memory.as_mut().expect("made above").as_mut_ptr().cast::<f32>();
        // SAFETY: the map is at least that long, begins with a page, is zeroed, any bits are an f32, and `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }

    /// Whether so many numbers fit into the memory that is there.
    pub fn has_floats(&self, len: usize) -> bool {
        self.memory.is_some() && self.bytes() >= len * size_of::<f32>()
    }

    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |map| map.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            let mut team = Team::start("test", threads, |_| ()).unwrap();
            for tasks in [0, 1, 2, 7, 1000] {
                let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                team.tasks(tasks, |task, _| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    runs.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                    "{tasks} tasks, {threads} threads"
                );
            }
        }
    }

    #[test]
    fn a_panicking_task_panics_the_caller_and_leaves_the_team_usable() {
        let mut team = Team::start("test", 4, |_| ()).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| team.tasks(100, |task, _| assert_ne!(task, 63))));
        assert!(result.is_err());
        let result = catch_unwind(AssertUnwindSafe(|| team.tasks(100, |_, _| panic!("every task fails"))));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        team.tasks(10, |task, _| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
