//! The command line.

mod bench;
mod doctor;
mod inspect;
mod text;

use std::io::Write;
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
const EXIT_FAULT: u8 = 3;

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Doctor => doctor::run(),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Bench(command) => bench::run(&command),
    };
    match outcome {
        Ok(text) => print(&text),
        Err(Mistake { what, hint }) => {
            eprintln!("error: {what}");
            if let Some(hint) = hint {
                eprintln!("  hint: {hint}");
            }
            ExitCode::from(EXIT_MISTAKE)
        }
    }
}

/// A reader that has seen enough is no error; a full disk is.
fn print(text: &str) -> ExitCode {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("error: cannot write the output: {error}");
            ExitCode::from(EXIT_FAULT)
        }
        _ => ExitCode::SUCCESS,
    }
}
