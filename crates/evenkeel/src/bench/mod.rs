//! `evenkeel bench`: this machine, measured.

mod roofline;
mod step;

use crate::Mistake;

#[derive(clap::Subcommand)]
pub enum Command {
    /// Times whole training steps of a random Llama, and what each kernel takes of them.
    Step(step::Arguments),
}

pub fn run(command: &Command) -> Result<String, Mistake> {
    match command {
        Command::Step(arguments) => step::run(arguments),
    }
}
