//! `evenkeel export RUN`: a checkpoint as a Hugging Face folder, or an adapter merged into its model.

use std::path::{Path, PathBuf};

use evenkeel_model::{ADAPTER_CONFIG, ParamId};
use evenkeel_store::exists;
use evenkeel_train::checkpoint::Opened;

use crate::config::{AdapterBase, Dtype, Overrides, RUN_CONFIG, names_a_file};
use crate::device::Precision;
use crate::inputs::feed::Text;
use crate::inputs::model::{ModelInput, SavedTokenizer};
use crate::inputs::model_folder::ModelFolder;
use crate::inputs::run_folder::{RUN_MODEL, Which, find_checkpoint};
use crate::{Failure, Mistake};

#[derive(clap::Args)]
pub struct Arguments {
    /// The folder of a run, or, with --merge, of an adapter as PEFT saves it.
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
    /// Dtype of the written weights; if not given, the run's, or that of an adapter's model.
    #[arg(long, value_enum)]
    dtype: Option<Precision>,
    /// The folder of the model that an adapter's folder belongs to; the one that it names if not given.
    #[arg(long, value_name = "FOLDER", requires = "merge")]
    model: Option<PathBuf>,
    /// How the model of an adapter's folder was held in training: "nf4", as with adapter.base = "nf4".
    #[arg(long, value_name = "FORMAT", requires = "merge", value_parser = AdapterBase::named)]
    base: Option<AdapterBase>,
    /// Keys of the config.json of an adapter's model to ignore although Evenkeel does not understand them.
    #[arg(long, value_name = "KEY", requires = "merge", value_delimiter = ',')]
    ignore_keys: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    if let Some((what, hint)) = arguments.output.as_deref().and_then(names_a_file) {
        return Err(Mistake { what: format!("--output is {what}"), hint: Some(hint.to_owned()) }.into());
    }
    if exists(arguments.run.join(ADAPTER_CONFIG)) { of_adapter(arguments) } else { of_run(arguments) }
}

fn of_run(arguments: &Arguments) -> Result<String, Failure> {
    let of_adapters = [
        ("--model", arguments.model.is_some()),
        ("--base", arguments.base.is_some()),
        ("--ignore-keys", !arguments.ignore_keys.is_empty()),
    ];
    if let Some((option, _)) = of_adapters.iter().find(|(_, is_given)| *is_given) {
        let run = arguments.run.display();
        let what = format!("{option} is for the folder of an adapter, and `{run}` has no {ADAPTER_CONFIG}");
        let hint = format!("leave {option} out: the configuration of a run says it");
        return Err(Mistake { what, hint: Some(hint) }.into());
    }
    let which = match arguments.step {
        _ if arguments.best => Which::Best,
        Some(step) => Which::Step(step),
        None => Which::Newest,
    };
    let checkpoint = find_checkpoint(&arguments.run, which)?;
    let output = arguments.output.clone().unwrap_or_else(|| arguments.run.join(RUN_MODEL));
    check_output(&output, arguments)?;
    let mut config = Overrides::of_file(arguments.run.join(RUN_CONFIG)).read()?;
    if let Some(dtype) = arguments.dtype {
        config.settings.output.save_dtype = Some(dtype.into());
    }
    let text = Text::open(&config)?;
    let input = ModelInput::read(&mut config, text.as_ref().map(|text| &text.tokenizer))?;
    let opened = Opened::new(&checkpoint)?;
    let specs = &input.model.specs;
    opened.check_trained(specs)?;
    let tokenizer = text.map(|text| SavedTokenizer::of(&text, &config.settings)).transpose()?;
    let read_rows = |id: ParamId, rows| opened.read_rows(&specs[id.0], rows);
    if arguments.merge {
        let dtype = config.settings.save_dtype();
        input.save_merged(&output, dtype, tokenizer.as_ref(), read_rows, arguments.overwrite)?;
    } else {
        input.save(&output, &config.settings, tokenizer.as_ref(), specs, read_rows, arguments.overwrite)?;
    }
    let step = opened.state.progress.step;
    let told = format!("step {step} of `{}` is now in `{}`", arguments.run.display(), output.display());
    Ok(if arguments.merge { told + of_4_bits(&input) } else { told })
}

/// Merges an adapter that is no run's, or no longer one's.
fn of_adapter(arguments: &Arguments) -> Result<String, Failure> {
    let folder = arguments.run.display();
    let mistake = |what: String, hint: &str| Mistake { what, hint: Some(hint.to_owned()) };
    if !arguments.merge {
        let what = format!("`{folder}` is the folder of an adapter, which is a Hugging Face folder already");
        return Err(mistake(what, "merge it into its model with --merge, or give the folder of a run").into());
    }
    if arguments.best || arguments.step.is_some() {
        let what = format!("`{folder}` is the folder of an adapter, which has no checkpoints");
        return Err(mistake(what, "leave out --step and --best, or give the folder of a run").into());
    }
    let no_output = || mistake("--output is missing".to_owned(), "name a folder for the merged model: --output FOLDER");
    let output = arguments.output.as_ref().ok_or_else(no_output)?;
    check_output(output, arguments)?;
    let saved = match &arguments.model {
        Some(model) => ModelFolder::open(model, Some(&arguments.run))?,
        None => ModelFolder::of_adapter(&arguments.run, "give the model's folder with --model FOLDER")?,
    };
    let tokenizer = SavedTokenizer::of_folder(&saved);
    let input = ModelInput::saved(saved, &arguments.ignore_keys, arguments.base == Some(AdapterBase::Nf4))?;
    let dtype = arguments.dtype.map_or_else(|| input.saved_dtype(), Dtype::from);
    input.save_saved_merged(output, dtype, tokenizer.as_ref(), arguments.overwrite)?;
    let told = format!("the adapter in `{folder}` is merged into its model, which is now in `{}`", output.display());
    Ok(told + of_4_bits(&input))
}

fn check_output(output: &Path, arguments: &Arguments) -> Result<(), Mistake> {
    if !exists(output) || arguments.overwrite {
        return Ok(());
    }
    let what = format!("`{}` exists already", output.display());
    Err(Mistake { what, hint: Some("choose another --output, or --overwrite it".to_owned()) })
}

/// What to know of a merged model.
fn of_4_bits(input: &ModelInput) -> &'static str {
    if input.model.is_packed() {
        "; its adapter is merged into what the 4-bit weights stand for, not into the original ones"
    } else {
        ""
    }
}
