//! The command line.

mod arrange;
mod bench;
mod config;
mod data;
mod device;
mod doctor;
mod drawing;
mod eval;
mod export;
mod failure;
mod generate;
mod hub;
mod inputs;
mod inspect;
mod interruption;
mod kernel_cache;
mod launch;
mod log;
mod memory;
mod placement;
mod plan;
mod planning;
mod process;
mod profile;
mod program;
mod stages;
mod strategy;
mod traced_step;
mod train;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use evenkeel_report::text;
use failure::{EXIT_FAULT, Failure, Mistake, Mistakes, warn};

/// Trains and fine-tunes Hugging Face transformers.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows the hardware and libraries of this machine, and which of them are used.
    Doctor,
    /// Describes a model folder and what training it takes.
    Inspect(inspect::Arguments),
    /// Trains a model from a configuration.
    Train(train::Arguments),
    /// Evaluates a model on held-out data.
    Eval(eval::Arguments),
    /// Writes a checkpoint as a Hugging Face folder.
    Export(export::Arguments),
    /// Generates text with a model.
    Generate(generate::Arguments),
    /// Checks a run's configuration and prints it with every default filled in.
    Config(config::Arguments),
    /// Shows the first samples that a run trains on, token by token, and which tokens the loss counts.
    Data(data::Arguments),
    /// Prints or draws the tasks of a run's step, in order, on every rank.
    Program(program::Arguments),
    /// Measures this machine and says which strategies train a run fastest on it.
    Plan(plan::Arguments),
    /// Measures this machine without a model, as a host for `plan --cluster`, or joins such hosts to a cluster.
    Profile(profile::Arguments),
    /// Runs benchmarks on this machine.
    #[command(subcommand)]
    Bench(bench::Command),
}

fn main() -> ExitCode {
    let file_or_folder =
        |file: clap::Arg| file.help("The run's configuration, TOML, or the folder of a run or of a model");
    let command = Arguments::command().mut_subcommand("eval", |eval| eval.mut_arg("file", file_or_folder));
    let matches = with_negative_numbers(command).try_get_matches().unwrap_or_else(|error| refuse(&error));
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    if let Err(failure) = log::start() {
        return failure.report();
    }
    match run(&arguments.command) {
        Ok(text) => print(&text),
        Err(failure) => failure.report(),
    }
}

/// Ends with clap's message and, for a flag that is a key, with how to set it.
fn refuse(error: &clap::Error) -> ! {
    let _ = error.print();
    let takes_keys = std::env::args()
        .nth(1)
        .is_some_and(|name| ["train", "eval", "config", "data", "program", "plan"].contains(&&*name));
    if let Some(clap::error::ContextValue::String(flag)) = error.get(clap::error::ContextKind::InvalidArg)
        && error.kind() == clap::error::ErrorKind::UnknownArgument
        && takes_keys
        && let Some(key) = config::key_of_flag(flag)
    {
        eprintln!("  hint: use --set {key}=…");
    }
    std::process::exit(error.exit_code())
}

/// Lets every value be negative, so that the code that knows its meaning refuses it, instead of clap taking it for an option.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let with_value = |argument: clap::Arg| {
        let takes_values = argument.get_action().takes_values();
        argument.allow_negative_numbers(takes_values)
    };
    command.mut_args(with_value).mut_subcommands(with_negative_numbers)
}

fn run(command: &Command) -> Result<String, Failure> {
    Ok(match command {
        Command::Doctor => doctor::run()?,
        Command::Inspect(arguments) => inspect::run(arguments)?,
        Command::Train(arguments) => train::run(arguments)?,
        Command::Eval(arguments) => eval::run(arguments)?,
        Command::Export(arguments) => export::run(arguments)?,
        Command::Generate(arguments) => generate::run(arguments)?,
        Command::Config(arguments) => config::run(arguments)?,
        Command::Data(arguments) => data::run(arguments)?,
        Command::Program(arguments) => program::run(arguments)?,
        Command::Plan(arguments) => plan::run(arguments)?,
        Command::Profile(arguments) => profile::run(arguments)?,
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
