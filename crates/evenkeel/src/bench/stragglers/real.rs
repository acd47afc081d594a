//! Ranks that are really slowed down.
//!
//! A second set of ranks on the same cores is never slowed down. The two sets take turns, step by step. A step is reported as its
//! ratio to the undisturbed one next to it, over that ratio before anything was slow, so that changes of the machine's own speed
//! cancel out.

use std::io::Write;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Instant;

use evenkeel_balance::{Dim, Mode};
use evenkeel_model::Model;
use evenkeel_train::{Balance, Ranks};

use super::{Arguments, Case, Outcome, Phase, Step, WARM_UP, error, settled, settled_after, typical, when_settled};
use crate::bench::busy;
use crate::launch::Launch;
use crate::{Failure, Mistake};

pub fn run(arguments: &Arguments, model: &Model, case: &Case, mode: Mode) -> Result<Outcome, Failure> {
    let launch = Launch::from(arguments.subject.strategy(arguments.tp));
    let shards = model.cut(&launch.strategy.cut)?;
    let mut course = Course {
        arguments,
        balance: Balance::new(arguments.balance(mode), model, &launch.strategy.cut, &shards, launch.strategy.mesh()),
        ranks: arguments.start(&launch, shards.clone())?,
        undisturbed: arguments.start(&launch, shards)?,
        undisturbed_s: Vec::new(),
        made: Vec::new(),
        neighbours: Vec::new(),
        step: 0,
        moved_bytes: 0,
        migrated_bytes: 0,
    };
    course.balance.start(&course.ranks)?;
    course.steps(Phase::Before, WARM_UP)?;
    course.undisturbed_s.clear();
    course.made.clear();
    // One of two equal sets is some percent faster than the other, because of where their memory lies.
    let before = course.steps(Phase::Before, arguments.steps)?;
    let alike = typical(&before);
    course.moved_bytes = 0;
    let slowed = match arguments.switch_every {
        Some(every) => {
            let swapped = Case([&case.0[case.0.len() - 1..], &case.0[1..case.0.len() - 1], &case.0[..1]].concat());
            let mut ratios = Vec::new();
            for turn in 0..4 {
                ratios.extend(course.slowed(&launch, if turn % 2 == 0 { case } else { &swapped }, every)?);
            }
            ratios
        }
        None => course.slowed(&launch, case, arguments.steps)?,
    };
    let (moved_bytes, migrated_bytes) = (course.moved_bytes, course.migrated_bytes);
    let gamma = course.balance.target().gammas.iter().copied().fold(0.0, f64::max);
    let recovered = match arguments.switch_every {
        Some(_) => None,
        None => Some(settled(&course.steps(Phase::Recovered, arguments.steps)?)),
    };
    let (slowdown, slowed_error) = match arguments.switch_every {
        Some(_) => (slowed.iter().sum::<f64>() / slowed.len() as f64, None),
        None => (settled(&slowed), Some(error(when_settled(&slowed)).hypot(error(&before)))),
    };
    let undisturbed_s = typical(&course.undisturbed_s);
    course.made.iter_mut().for_each(|step| step.ratio /= alike);
    Ok(Outcome {
        mode,
        undisturbed_s,
        slowed_s: slowdown / alike * undisturbed_s,
        recovered_s: recovered.map(|ratio| ratio / alike * undisturbed_s),
        slowed_error,
        settled_after: settled_after(mode, &slowed).filter(|_| arguments.switch_every.is_none()),
        moved_bytes,
        migrated_bytes,
        gamma,
        steps: course.made,
    })
}

struct Course<'a> {
    arguments: &'a Arguments,
    balance: Balance,
    ranks: Ranks,
    undisturbed: Ranks,
    /// Seconds of each of their steps.
    undisturbed_s: Vec<f64>,
    made: Vec<Step>,
    /// Processes that are busy while the slowed ranks step.
    neighbours: Vec<Neighbour>,
    step: u64,
    moved_bytes: u64,
    migrated_bytes: u64,
}

impl Course<'_> {
    /// The times of so many steps, each as a multiple of the undisturbed one behind it.
    fn steps(&mut self, phase: Phase, count: usize) -> Result<Vec<f64>, Failure> {
        let mut ratios = Vec::with_capacity(count);
        for _ in 0..count {
            let [samples, same_samples] = [(); 2].map(|()| self.arguments.subject.samples(self.step));
            self.step += 1;
            let start = Instant::now();
            let (_, observed) = self.ranks.observed_step(samples, 1e-4)?;
            let took = start.elapsed();
            let columns = self.balance.target().work.of(Dim::Columns).to_vec();
            self.migrated_bytes = observed.iter().map(|rank| rank.migrated_bytes).sum();
            let before = self.balance.target().home.clone();
            self.balance.after_step(&self.ranks, self.step, took, &observed, u64::MAX)?;
            let now = &self.balance.target().home;
            let bytes_of = |dim: Dim| now.gained(&before, dim) as f64 * self.balance.state_bytes(dim);
            self.moved_bytes += Dim::ALL.iter().map(|&dim| bytes_of(dim)).sum::<f64>() as u64;
            // Work between two steps counts, too.
            let took_s = start.elapsed().as_secs_f64();
            self.tell_neighbours(busy::REST)?;
            let start = Instant::now();
            self.undisturbed.step(same_samples, 1e-4)?;
            let undisturbed_s = start.elapsed().as_secs_f64();
            self.tell_neighbours(busy::WORK)?;
            self.undisturbed_s.push(undisturbed_s);
            let ratio = took_s / undisturbed_s;
            ratios.push(ratio);
            self.made.push(Step { phase, ratio, columns, observed });
        }
        Ok(ratios)
    }

    fn slowed(&mut self, launch: &Launch, case: &Case, count: usize) -> Result<Vec<f64>, Failure> {
        if self.arguments.neighbour {
            self.neighbours = neighbours(launch, case)?;
        } else {
            self.ranks.throttle(case.0.clone())?;
        }
        let ratios = self.steps(Phase::Slowed, count);
        self.neighbours.clear();
        self.ranks.throttle(vec![1.0; case.0.len()])?;
        ratios
    }

    fn tell_neighbours(&mut self, order: &str) -> Result<(), Failure> {
        for neighbour in &mut self.neighbours {
            writeln!(neighbour.orders, "{order}").map_err(|error| {
                Failure::Fault(Mistake { what: format!("a busy neighbour has ended: {error}"), hint: None })
            })?;
        }
        Ok(())
    }
}

/// A process that keeps a core busy until it is dropped.
struct Neighbour {
    process: Child,
    orders: ChildStdin,
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One neighbour on every core of a slow rank.
fn neighbours(launch: &Launch, case: &Case) -> Result<Vec<Neighbour>, Failure> {
    let fault = |what: String| Failure::Fault(Mistake { what, hint: None });
    let slow = (0..case.0.len()).filter(|&rank| case.0[rank] > 1.0);
    let cores: Vec<usize> = slow.flat_map(|rank| launch.cores(rank)).collect();
    if cores.is_empty() {
        let what = "ranks have no cores of their own for a busy neighbour to be on".to_owned();
        return Err(Mistake { what, hint: Some("use fewer ranks than the machine has cores".to_owned()) }.into());
    }
    let program = std::env::current_exe().map_err(|error| fault(format!("this program cannot be found: {error}")))?;
    let start = |core: usize| {
        let mut command = Command::new(&program);
        command.args(["bench", "busy", "--core", &core.to_string()]).stdin(Stdio::piped()).stdout(Stdio::null());
        let started = command.spawn().and_then(|mut process| {
            let orders = process.stdin.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
            Ok(Neighbour { process, orders })
        });
        started.map_err(|error| fault(format!("a busy neighbour cannot be started: {error}")))
    };
    cores.into_iter().map(start).collect()
}
