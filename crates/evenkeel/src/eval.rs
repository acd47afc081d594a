//! `evenkeel eval CONFIG`: loss, perplexity and accuracy of a model on data it was not trained on.

use std::path::PathBuf;

use evenkeel_store::exists;
use evenkeel_train::{AdamWOptions, TrainerOptions};

use crate::config::{ModelSource, Overrides};
use crate::launch::Launch;
use crate::train::feed::{Data, Text};
use crate::train::model::{ModelInput, device_dtype};
use crate::{Failure, Mistake};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    overrides: Overrides,
    /// The model folder to evaluate; the run's own result if there is one, else the model that it begins with.
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let mut config = arguments.overrides.read()?;
    let trained = config.settings.output.folder.join("model");
    match &arguments.model {
        Some(path) => config.source = ModelSource::Folder(path.clone()),
        None if exists(&trained) => config.source = ModelSource::Folder(trained),
        None if exists(config.settings.output.folder.join("checkpoints")) => {
            return Err(Mistake {
                what: format!("the run in `{}` has no model yet", config.settings.output.folder.display()),
                hint: Some("finish it with `evenkeel train … --resume`, or give --model".to_owned()),
            }
            .into());
        }
        None => (),
    }
    let text = Text::open(&config)?;
    let input = ModelInput::open(&config, text.as_ref().map(|text| &text.tokenizer))?;
    let data = Data::open(&config, &input.model, text)?;
    let settings = &config.settings;
    let options = TrainerOptions {
        optimizer: AdamWOptions::default(),
        label_smoothing: 0.0,
        recompute: false,
        longest: settings.data.sequence,
    };
    let launch = Launch::of(settings);
    let shards = input.model.cut(&launch.cut)?;
    let (dtype, seed) = (device_dtype(settings.train.dtype), settings.model.seed);
    let ranks = launch.start(shards, options, move |shard, queue| Ok(input.parameters(shard, seed, dtype, queue)?))?;
    let Some(evaluation) = data.evaluate(&ranks, config.eval_batches())? else {
        return Err(Mistake {
            what: "there is nothing to evaluate on".to_owned(),
            hint: Some("give data.eval_paths, or hold records out with data.holdout".to_owned()),
        }
        .into());
    };
    if evaluation.labels == 0 {
        let what = "the held-out records have no label that counts".to_owned();
        return Err(Mistake { what, hint: None }.into());
    }
    Ok(format!(
        "model       {}\nlabels      {}\nloss        {:.4}\nperplexity  {:.3}\naccuracy    {:.1} %",
        match &config.source {
            ModelSource::Folder(path) => path.display().to_string(),
            _ => "random weights".to_owned(),
        },
        evaluation.labels,
        evaluation.loss(),
        evaluation.perplexity(),
        100.0 * evaluation.accuracy(),
    ))
}
