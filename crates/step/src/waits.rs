//! The tasks of its own rank that each task of a program waits for.

use crate::program::{ProgramView, ROOMS, Task, UnitIdx, Value};
use crate::work::{Lane, Work};

/// Goes through a program from its first task on.
pub(crate) struct Waits<'a> {
    program: ProgramView<'a>,
    /// By lane: the last task so far.
    last: [Option<usize>; Lane::ALL.len()],
    /// By unit: the values that exchanges have written and nothing has freed, each with its exchange. There are few at a time.
    arriving: Vec<Vec<(Value, usize)>>,
    boundaries: Vec<Boundary>,
}

impl<'a> Waits<'a> {
    pub fn new(program: ProgramView<'a>) -> Waits<'a> {
        Waits { program, last: Default::default(), arriving: Vec::new(), boundaries: Vec::new() }
    }

    /// Calls `wait` with every task that this one waits for, the one before it on its lane left out: a compute task waits for the
    /// exchanges that write its values or for all, an exchange for a compute task. Tasks must be visited in order.
    pub fn visit(&mut self, index: usize, mut wait: impl FnMut(usize)) {
        let program = self.program;
        let task = &program.tasks[index];
        let lane = task.work.lane();
        if task.exchange.is_some() {
            let computed = if task.receives() { self.arrive(task) } else { self.last[Lane::Compute as usize] };
            computed.into_iter().for_each(wait);
            task.writes.iter().for_each(|&value| self.arriving_at(value.unit).push((value, index)));
        } else {
            for value in &task.reads {
                let found = self.arriving_at(value.unit).iter().find(|(other, _)| other == value);
                found.iter().for_each(|&&(_, exchange)| wait(exchange));
            }
            for lane in [Lane::Comm, Lane::Pass].into_iter().filter(|lane| program.waits_for_all(task, *lane)) {
                self.last[lane as usize].into_iter().for_each(&mut wait);
            }
            task.frees.iter().for_each(|value| self.leave(value, index));
        }
        self.last[lane as usize] = Some(index);
        task.frees.iter().for_each(|value| self.arriving_at(value.unit).retain(|(other, _)| other != value));
    }

    /// The last exchange of any lane so far.
    pub fn issued(&self) -> Option<usize> {
        self.last[Lane::Comm as usize].max(self.last[Lane::Pass as usize])
    }

    /// The last compute task so far.
    pub fn computed(&self) -> Option<usize> {
        self.last[Lane::Compute as usize]
    }

    fn arriving_at(&mut self, unit: UnitIdx) -> &mut Vec<(Value, usize)> {
        if unit.0 >= self.arriving.len() {
            self.arriving.resize_with(unit.0 + 1, Vec::new);
        }
        &mut self.arriving[unit.0]
    }

    /// The task that frees the room into which a pass arrives.
    fn arrive(&mut self, pass: &Task) -> Option<usize> {
        let is_here = |boundary: &Boundary| (boundary.pass, boundary.unit) == (pass.work, pass.unit);
        let place = self.boundaries.iter().position(is_here).unwrap_or_else(|| {
            self.boundaries.push(Boundary { pass: pass.work, unit: pass.unit, arrived: Vec::new() });
            self.boundaries.len() - 1
        });
        self.boundaries[place].arrive(pass.micro.index)
    }

    /// Notes that a compute task frees a value, which may have come from another stage.
    fn leave(&mut self, value: &Value, index: usize) {
        let Some(pass) = value.arrives_by() else { return };
        let here = self.boundaries.iter_mut().find(|boundary| (boundary.pass, boundary.unit) == (pass, value.unit));
        let arrived = here.into_iter().flat_map(|boundary| boundary.arrived.iter_mut().rev());
        for arrival in arrived.filter(|arrival| arrival.micro == value.micro.index).take(1) {
            arrival.freed = Some(index);
        }
    }
}

/// What has arrived before a unit, one way, in the order of arrival.
struct Boundary {
    pass: Work,
    unit: UnitIdx,
    arrived: Vec<Arrival>,
}

struct Arrival {
    micro: usize,
    /// The last task that has freed a part of it.
    freed: Option<usize>,
}

impl Boundary {
    /// The task that frees the room into which a micro-batch arrives.
    fn arrive(&mut self, micro: usize) -> Option<usize> {
        let place = self.arrived.iter().rposition(|arrival| arrival.micro == micro).unwrap_or_else(|| {
            self.arrived.push(Arrival { micro, freed: None });
            self.arrived.len() - 1
        });
        self.arrived[place.checked_sub(ROOMS)?].freed
    }
}
