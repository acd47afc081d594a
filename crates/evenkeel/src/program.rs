//! `evenkeel program CONFIG`: the program of a run's step, printed or drawn.

use std::path::PathBuf;

use evenkeel_step::schedule::Chain;
use evenkeel_step::simulate::{Costs, simulate};
use evenkeel_step::trace::svg;
use evenkeel_step::{Program, Work, listing};
use evenkeel_store::write_file_atomically;
use evenkeel_train::Samples;

use crate::config::Overrides;
use crate::launch::{Launch, arrangement};
use crate::train::feed::Text;
use crate::train::model::{ModelInput, device_dtype};
use crate::{Failure, Mistake, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    overrides: Overrides,
    /// Whose program to print.
    #[arg(long, default_value_t = 0)]
    rank: usize,
    /// Draw all ranks' programs to this file instead, every task as long as others of its kind.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let config = arguments.overrides.read()?;
    let settings = &config.settings;
    let tokenizer = Text::open(&config)?;
    let input = ModelInput::read(&config, tokenizer.as_ref().map(|text| &text.tokenizer))?;
    let launch = Launch::of(settings, &input.model, &input.json)?;
    let shards = input.model.cut(&launch.cut)?;
    let arrangement = arrangement(&settings.parallel);
    let blank = Samples::blank(input.model.config.input, settings.train.batch, settings.data.sequence);
    let micros = vec![blank.part_sizes(&input.model, arrangement.parts); settings.train.accumulate];
    let chains = Chain::all(&shards, device_dtype(settings.train.dtype), &launch.mesh(), launch.zero);
    let programs: Vec<Program> = chains.iter().map(|chain| arrangement.write(chain, &micros)).collect();
    let units: Vec<String> = input.model.units.iter().map(|unit| unit.kind.to_string()).collect();
    let (schedule, parts) = (arrangement.schedule.name, micros[0].len());
    let title = format!("schedule {schedule}, {parts} parts, {} ranks", programs.len());
    // Proves them sound, too.
    let timeline = simulate(&programs, &Costs::nominal(&programs)).map_err(|unsound| {
        Failure::Fault(Mistake { what: format!("the programs are unsound: {unsound}"), hint: None })
    })?;
    if let Some(path) = &arguments.svg {
        let drawing = svg(&timeline, &units, &title);
        write_file_atomically(path, |file| file.put(drawing.as_bytes()))?;
        return Ok(format!("{title}: drawn to `{}`", path.display()));
    }
    let Some(program) = programs.get(arguments.rank) else {
        let what = format!("there is no rank {}, the last is {}", arguments.rank, programs.len() - 1);
        return Err(Mistake { what, hint: None }.into());
    };
    let exchanges: Vec<u64> = program.tasks.iter().filter_map(|task| Some(task.exchange?.bytes)).collect();
    let reductions = program.tasks.iter().filter(|task| matches!(task.work, Work::AllReduce | Work::ReduceScatter));
    let summary = format!(
        "{title}; rank {}: {} tasks, {} exchanges of {}, {} of them reductions",
        arguments.rank,
        program.tasks.len(),
        exchanges.len(),
        text::bytes(exchanges.iter().sum()),
        reductions.count(),
    );
    Ok(format!("{summary}\n\n{}", listing(program, &units).trim_end()))
}
