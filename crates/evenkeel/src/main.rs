//! The command line.

mod bench;
mod config;
mod device;
mod doctor;
mod eval;
mod generate;
mod inspect;
mod launch;
mod process;
mod train;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use evenkeel_train::report::text;

/// Trains and fine-tunes Hugging Face transformers.
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
    /// Trains a model as a configuration says.
    Train(train::Arguments),
    /// Evaluates a model on held-out data.
    Eval(eval::Arguments),
    /// Continues a text.
    Generate(generate::Arguments),
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

/// Why a command did not do what it was asked for.
enum Failure {
    /// The user's; nothing was started.
    Mistakes(Mistakes),
    /// The machine's, or of a run that went wrong.
    Fault(Mistake),
    /// A signal's.
    Interrupted { mistake: Mistake, code: u8 },
}

impl<M: Into<Mistakes>> From<M> for Failure {
    fn from(mistakes: M) -> Failure {
        Failure::Mistakes(mistakes.into())
    }
}

impl From<evenkeel_train::data::Error> for Mistake {
    fn from(error: evenkeel_train::data::Error) -> Mistake {
        Mistake { what: error.to_string(), hint: error.hint() }
    }
}

impl From<evenkeel_train::Error> for Failure {
    fn from(error: evenkeel_train::Error) -> Failure {
        let is_fault = error.is_fault();
        let mistake = Mistake { what: error.to_string(), hint: error.hint() };
        if is_fault { Failure::Fault(mistake) } else { mistake.into() }
    }
}

impl From<evenkeel_comm::RankFailure> for Failure {
    fn from(failure: evenkeel_comm::RankFailure) -> Failure {
        evenkeel_train::Error::from(failure).into()
    }
}

const EXIT_MISTAKE: u8 = 2;
const EXIT_FAULT: u8 = 3;

fn main() -> ExitCode {
    let (mistakes, code) = match run(&Arguments::parse().command) {
        Ok(text) => return print(&text),
        Err(Failure::Mistakes(Mistakes(mistakes))) => (mistakes, EXIT_MISTAKE),
        Err(Failure::Fault(mistake)) => (vec![mistake], EXIT_FAULT),
        Err(Failure::Interrupted { mistake, code }) => (vec![mistake], code),
    };
    for Mistake { what, hint } in mistakes {
        eprintln!("error: {what}");
        if let Some(hint) = hint {
            eprintln!("  hint: {hint}");
        }
    }
    ExitCode::from(code)
}

fn run(command: &Command) -> Result<String, Failure> {
    Ok(match command {
        Command::Doctor => doctor::run()?,
        Command::Inspect(arguments) => inspect::run(arguments)?,
        Command::Train(arguments) => train::run(arguments)?,
        Command::Eval(arguments) => eval::run(arguments)?,
        Command::Generate(arguments) => generate::run(arguments)?,
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
