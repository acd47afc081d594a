//! The command line.

mod bench;
mod doctor;
mod inspect;
mod text;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Trains Hugging Face transformers with tensor parallelism on unequal, shared hardware.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Says what this machine offers and what of it is used.
    Doctor,
    /// Says what a model folder holds and what it takes to train it.
    Inspect(inspect::Arguments),
    /// Measures this machine.
    #[command(subcommand)]
    Bench(bench::Command),
}

/// A user's mistake: what happened, and what to do about it.
struct Mistake {
    what: String,
    hint: Option<String>,
}

impl From<evenkeel_model::Error> for Mistake {
    fn from(error: evenkeel_model::Error) -> Mistake {
        Mistake { what: error.to_string(), hint: error.hint() }
    }
}

impl From<evenkeel_store::Error> for Mistake {
    fn from(error: evenkeel_store::Error) -> Mistake {
        evenkeel_model::Error::from(error).into()
    }
}

const EXIT_MISTAKE: u8 = 2;

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Doctor => doctor::run(),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Bench(command) => bench::run(&command),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Mistake { what, hint }) => {
            eprintln!("error: {what}");
            if let Some(hint) = hint {
                eprintln!("  hint: {hint}");
            }
            ExitCode::from(EXIT_MISTAKE)
        }
    }
}
