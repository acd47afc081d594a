//! `evenkeel bench`: this machine, measured.

mod all_reduce;
mod busy;
mod cuda;
mod devices;
mod layers;
mod llama;
mod pipelines;
mod plans;
mod roofline;
mod schedules;
mod step;
mod stragglers;

use evenkeel_step::simulate::median;

use crate::Failure;

#[derive(clap::Subcommand)]
pub enum Command {
    /// Times whole training steps of a random model, and what each kernel takes of them.
    Step(step::Arguments),
    /// Compares the schedules of a training step of a random Llama.
    Schedules(schedules::Arguments),
    /// Compares orders and cuts of a pipeline of a random Llama with one rank on the device of one place.
    Pipelines(pipelines::Arguments),
    /// Predicts steps of a random Llama by strategies that the profile was not measured with, and measures them.
    Plans(plans::Arguments),
    /// Compares the modes of balancing, with slow ranks.
    Stragglers(stragglers::Arguments),
    /// Keeps a core busy, to slow down a rank on it.
    #[command(hide = true)]
    Busy(busy::Arguments),
    /// Times all-reduces between the ranks of one process.
    AllReduce(all_reduce::Arguments),
}

fn between<const LEAST: usize, const MOST: usize>(text: &str) -> Result<usize, String> {
    let value = text.parse().ok().filter(|value| (LEAST..=MOST).contains(value));
    value.ok_or_else(|| format!("a whole number from {LEAST} to {MOST} is needed"))
}

pub fn run(command: &Command) -> Result<String, Failure> {
    match command {
        Command::Step(arguments) => step::run(arguments),
        Command::Schedules(arguments) => schedules::run(arguments),
        Command::Pipelines(arguments) => pipelines::run(arguments),
        Command::Plans(arguments) => plans::run(arguments),
        Command::Stragglers(arguments) => stragglers::run(arguments),
        Command::Busy(arguments) => busy::run(arguments),
        Command::AllReduce(arguments) => all_reduce::run(arguments),
    }
}
