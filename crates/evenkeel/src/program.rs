//! `evenkeel program CONFIG`: the program of a run's step, printed or drawn.

use std::path::PathBuf;

use evenkeel_step::schedule::Chain;
use evenkeel_step::simulate::simulate;
use evenkeel_step::{Program, listing, verify};
use evenkeel_store::write_file_atomically;
use evenkeel_train::{Samples, estimate};

use crate::arrange::this_machine;
use crate::config::Overrides;
use crate::drawing::{pipeline_svg, svg};
use crate::inputs::feed::Text;
use crate::inputs::model::ModelInput;
use crate::launch::Launch;
use crate::strategy::strategy;
use crate::train::{arrange_steps, costs};
use crate::{Failure, Mistake, stages, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    overrides: Overrides,
    /// The rank whose program to print.
    #[arg(long, default_value_t = 0)]
    rank: usize,
    /// Draw the programs of all ranks to this file, SVG, instead; times are estimates from counts of operations and
    /// bytes.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Draw every task of every rank, where a pipeline would be drawn as its micro-batches.
    #[arg(long, requires = "svg")]
    tasks: bool,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let mut config = arguments.overrides.read()?;
    let tokenizer = Text::open(&config)?;
    let input = ModelInput::read(&mut config, tokenizer.as_ref().map(|text| &text.tokenizer))?;
    let strategy = strategy(&config.settings, &input.model, &input.json)?;
    let mut launch = Launch::new(strategy, &config.settings.parallel);
    let said = arrange_steps(&mut config.settings, &input.model, &mut launch, None)?;
    let (settings, strategy) = (&config.settings, &launch.strategy);
    let shards = input.model.cut(&strategy.cut)?;
    let arrangement = strategy.arrangement;
    let blank = Samples::blank(input.model.config.input, settings.train.batch, settings.data.sequence);
    let micros = vec![blank.part_sizes(&input.model, arrangement.parts); settings.train.accumulate];
    let chains = Chain::all(&shards, strategy);
    let programs: Vec<Program> = chains.iter().map(|chain| arrangement.step(chain, &micros)).collect();
    let units: Vec<String> = input.model.units.iter().map(|unit| unit.kind.to_string()).collect();
    let (schedule, parts) = (arrangement.schedule.name, micros[0].len());
    let stream = if strategy.cut.split_sequence { "split" } else { "whole" };
    let ranks = programs.len();
    let title = if strategy.pp > 1 {
        let order = strategy.pipeline.order.name();
        format!("order {order}, {} micro-batches, schedule {schedule}, {ranks} ranks", micros.len())
    } else {
        format!("schedule {schedule}, {parts} parts, {ranks} ranks, stream {stream}")
    };
    let unsound =
        |what: String| Failure::Fault(Mistake { what: format!("the programs are unsound: {what}"), hint: None });
    verify(&programs).map_err(|error| unsound(error.to_string()))?;
    if let Some(path) = &arguments.svg {
        let costs =
            estimate(&shards, &chains, strategy, &programs, &vec![&blank; micros.len()], &this_machine(&launch));
        let timeline = simulate(&programs, &costs).map_err(|error| unsound(error.to_string()))?;
        let drawing = if strategy.pp > 1 && !arguments.tasks {
            pipeline_svg(&timeline, strategy, units.len(), &title)
        } else {
            svg(&timeline, &units, &title)
        };
        write_file_atomically(path, |file| file.put(drawing.as_bytes()))?;
        return Ok(format!("{title}: drawn to `{}`", path.display()));
    }
    let Some(program) = programs.get(arguments.rank) else {
        let what = format!("there is no rank {}, the last is {}", arguments.rank, programs.len() - 1);
        return Err(Mistake { what, hint: None }.into());
    };
    let exchanges: Vec<u64> = program.tasks.iter().filter_map(|task| Some(task.exchange?.bytes)).collect();
    let awaited = program.awaited();
    let bare = awaited.iter().filter(|(_, is_hidden)| !is_hidden).count();
    let summary = format!(
        "{title}; rank {}: {} tasks, {} exchanges of {}; {bare} of {} that a task waits for overlap no computation",
        arguments.rank,
        program.tasks.len(),
        exchanges.len(),
        text::bytes(exchanges.iter().sum()),
        awaited.len(),
    );
    let of_places = stages::describe_memory(strategy, &costs(settings, &shards, strategy));
    let said: String = said.iter().chain(&of_places).map(|line| format!("{line}\n")).collect();
    Ok(format!("{said}{summary}\n\n{}", listing(program, &units).trim_end()))
}
