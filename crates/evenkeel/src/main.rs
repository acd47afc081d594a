//! The command line.

mod bench;
mod config;
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
    /// Checks a run's configuration and prints it with every default filled in.
    Config(config::Arguments),
    /// Measures this machine.
    #[command(subcommand)]
    Bench(bench::Command),
}

/// A user's mistake: what happened, and what to do about it.
#[derive(Debug, PartialEq)]
struct Mistake {
    what: String,
    hint: Option<String>,
}

/// All of a user's mistakes that could be found at once.
#[derive(Debug, PartialEq)]
struct Mistakes(Vec<Mistake>);

impl From<Vec<Mistake>> for Mistakes {
    fn from(mistakes: Vec<Mistake>) -> Mistakes {
        Mistakes(mistakes)
    }
}

impl<M: Into<Mistake>> From<M> for Mistakes {
    fn from(mistake: M) -> Mistakes {
        Mistakes(vec![mistake.into()])
    }
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
    match run(&Arguments::parse().command) {
        Ok(text) => print(&text),
        Err(Mistakes(mistakes)) => {
            for Mistake { what, hint } in mistakes {
                eprintln!("error: {what}");
                if let Some(hint) = hint {
                    eprintln!("  hint: {hint}");
                }
            }
            ExitCode::from(EXIT_MISTAKE)
        }
    }
}

fn run(command: &Command) -> Result<String, Mistakes> {
    Ok(match command {
        Command::Doctor => doctor::run()?,
        Command::Inspect(arguments) => inspect::run(arguments)?,
        Command::Config(arguments) => config::run(arguments)?,
        Command::Bench(command) => bench::run(command)?,
    })
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
