//! `evenkeel export RUN`: a checkpoint as a Hugging Face folder.

use std::path::PathBuf;

use evenkeel_model::ParamId;
use evenkeel_store::exists;
use evenkeel_train::checkpoint::Opened;

use crate::config::{Dtype, Overrides, RUN_CONFIG, names_a_file};
use crate::inputs::feed::Text;
use crate::inputs::model::{ModelInput, SavedTokenizer};
use crate::inputs::run_folder::{RUN_MODEL, Which, find_checkpoint};
use crate::{Failure, Mistake};

#[derive(clap::Args)]
pub struct Arguments {
    /// The folder of a run.
    run: PathBuf,
    /// The step of the checkpoint; the newest if not given.
    #[arg(long)]
    step: Option<u64>,
    /// The checkpoint with the lowest evaluation loss (output.keep_best).
    #[arg(long, conflicts_with = "step")]
    best: bool,
    /// Folder for the model; `model` in the run's folder if not given.
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Replaces an existing folder.
    #[arg(long)]
    overwrite: bool,
    /// Merges the run's adapter into its model, and writes that.
    #[arg(long)]
    merge: bool,
    /// Dtype of the written weights; the run's if not given.
    #[arg(long, value_enum)]
    dtype: Option<crate::device::Precision>,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    if let Some((what, hint)) = arguments.output.as_deref().and_then(names_a_file) {
        return Err(Mistake { what: format!("--output is {what}"), hint: Some(hint.to_owned()) }.into());
    }
    let which = match arguments.step {
        _ if arguments.best => Which::Best,
        Some(step) => Which::Step(step),
        None => Which::Newest,
    };
    let checkpoint = find_checkpoint(&arguments.run, which)?;
    let output = arguments.output.clone().unwrap_or_else(|| arguments.run.join(RUN_MODEL));
    if exists(&output) && !arguments.overwrite {
        let what = format!("`{}` exists already", output.display());
        return Err(Mistake { what, hint: Some("choose another --output, or --overwrite it".to_owned()) }.into());
    }
    let mut config = Overrides::of_file(arguments.run.join(RUN_CONFIG)).read()?;
    if let Some(dtype) = arguments.dtype {
        config.settings.output.save_dtype = Some(match dtype {
            crate::device::Precision::F32 => Dtype::F32,
            crate::device::Precision::Bf16 => Dtype::Bf16,
        });
    }
    let text = Text::open(&config)?;
    let input = ModelInput::read(&mut config, text.as_ref().map(|text| &text.tokenizer))?;
    let opened = Opened::new(&checkpoint)?;
    let specs = &input.model.specs;
    opened.check_trained(specs)?;
    let tokenizer = text.map(|text| SavedTokenizer::of(&text, &config.settings)).transpose()?;
    let read_rows = |id: ParamId, rows| opened.read_rows(&specs[id.0], rows);
    if arguments.merge {
        input.save_merged(&output, &config.settings, tokenizer.as_ref(), read_rows, arguments.overwrite)?;
    } else {
        input.save(&output, &config.settings, tokenizer.as_ref(), specs, read_rows, arguments.overwrite)?;
    }
    let step = opened.state.progress.step;
    let told = format!("step {step} of `{}` is now in `{}`", arguments.run.display(), output.display());
    if arguments.merge && input.model.is_packed() {
        return Ok(format!(
            "{told}; its adapter is merged into what the 4-bit weights stand for, not into the original ones"
        ));
    }
    Ok(told)
}
