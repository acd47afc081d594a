//! The proof that a program may run.

use std::collections::HashSet;

use crate::program::{Program, Task, Value};

/// Why a program may not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsound {
    #[error("task {index}, `{task}`, reads {value}, which nothing has written or which is freed")]
    ReadsNothing { index: usize, task: String, value: Value },
    #[error("task {index}, `{task}`, writes {value}, which is there already")]
    WritesTwice { index: usize, task: String, value: Value },
    #[error("task {index}, `{task}`, frees {value}, which is not there")]
    FreesNothing { index: usize, task: String, value: Value },
    #[error("{value} is never freed")]
    NeverFreed { value: Value },
}

/// Checks that every value is written before it is read, read before it is freed, and freed once.
pub fn verify(program: &Program) -> Result<(), Unsound> {
    let mut live: HashSet<Value> = HashSet::new();
    for (index, task) in program.tasks.iter().enumerate() {
        step(task, &mut live).map_err(|defect| defect(index, task.to_string()))?;
    }
    match live.into_iter().min_by_key(|value| (value.micro, value.unit)) {
        Some(value) => Err(Unsound::NeverFreed { value }),
        None => Ok(()),
    }
}

type Defect = Box<dyn FnOnce(usize, String) -> Unsound>;

fn step(task: &Task, live: &mut HashSet<Value>) -> Result<(), Defect> {
    for &value in &task.reads {
        if !live.contains(&value) {
            return Err(Box::new(move |index, task| Unsound::ReadsNothing { index, task, value }));
        }
    }
    for &value in &task.writes {
        if !live.insert(value) {
            return Err(Box::new(move |index, task| Unsound::WritesTwice { index, task, value }));
        }
    }
    for &value in &task.frees {
        if !live.remove(&value) {
            return Err(Box::new(move |index, task| Unsound::FreesNothing { index, task, value }));
        }
    }
    Ok(())
}
