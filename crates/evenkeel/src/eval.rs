//! `evenkeel eval CONFIG`, `evenkeel eval MODEL --data FILE`: a model's loss, perplexity and accuracy on data it was not trained
//! on.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use evenkeel_comm::Communicator;
use evenkeel_model::{Model, Parameters, ZeroSharding};
use evenkeel_report::Reads;
use evenkeel_step::schedule::Arrangement;
use evenkeel_step::{Devices, Strategy};
use evenkeel_store::exists;
use evenkeel_train::{Samples, Trainer, TrainerOptions};

use crate::config::{ModelSource, Overrides, RUN_CONFIG, Settings};
use crate::inputs::feed::{Data, Text};
use crate::inputs::model::ModelInput;
use crate::inputs::model_folder::ModelFolder;
use crate::inputs::run_folder::RUN_MODEL;
use crate::launch::Launch;
use crate::memory::{check_fit, check_fit_on_gpus, peak_bytes};
use crate::strategy::strategy;
use crate::{Failure, Mistake, hub};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    overrides: Overrides,
    /// The model folder to evaluate; by default the model that the run saved, else the one that it starts from.
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// A file to evaluate on, all of it: text, JSONL, JSON or Parquet, or a folder of images; may be repeated.
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let (overrides, model) = subject(arguments)?;
    let mut config = overrides.read_to_evaluate(model.as_deref(), &arguments.data)?;
    let trained = config.settings.output.folder.join(RUN_MODEL);
    match model {
        Some(path) => {
            // A model of its own is no base of an adapter.
            if exists(path.join("config.json")) {
                config.settings.adapter.base = None;
            }
            config.evaluate_folder(path);
        }
        None if exists(&trained) => config.evaluate_folder(trained),
        None if exists(config.settings.output.folder.join("checkpoints")) => {
            return Err(Mistake {
                what: format!("the run in `{}` has no model yet", config.settings.output.folder.display()),
                hint: Some("finish it with `evenkeel train … --resume`, or give --model".to_owned()),
            }
            .into());
        }
        None => (),
    }
    // Nothing is updated, so there is nothing to share but the layers.
    let parallel = &mut config.settings.parallel;
    (parallel.pp, parallel.dp, parallel.zero) = (1, 1, 0);
    let text = Text::open(&config)?;
    let input = ModelInput::read(&mut config, text.as_ref().map(|text| &text.tokenizer))?;
    refuse_new_modules(&input)?;
    let data = Data::open(&config, &input.model, text)?;
    let settings = &config.settings;
    let strategy = strategy(settings, &input.model, &input.json)?.arranged(Arrangement::default());
    let shards = input.model.cut(&strategy.cut)?;
    let needed = peak_bytes_of(&shards, settings, &strategy);
    let (what, hint) = ("an evaluation", "use a smaller train.batch or data.sequence, or a smaller model");
    match &strategy.devices {
        Devices::Cpu { .. } => check_fit(what, needed.iter().sum(), hint)?,
        Devices::Cuda { gpus, .. } => check_fit_on_gpus(gpus, what, needed.into_iter().max().unwrap_or(0), hint)?,
    }
    let (dtype, seed) = (strategy.dtype, settings.model.seed);
    let ranks =
        Launch::new(strategy, &settings.parallel).start(shards, options(settings), move |shard, split, queue| {
            Ok(input.parameters(shard, seed, dtype, split, queue)?)
        })?;
    let evaluated = data.evaluate(&ranks, config.eval_batches(), &AtomicBool::new(false));
    let Some(evaluation) = evaluated.map_err(|error| of_data(error, &data))? else {
        return Err(Mistake {
            what: "there is nothing to evaluate on".to_owned(),
            hint: Some("give --data or data.eval_paths, or hold records out with data.holdout".to_owned()),
        }
        .into());
    };
    if evaluation.labels == 0 {
        let what = "the held-out records have no label that counts".to_owned();
        return Err(Mistake { what, hint: None }.into());
    }
    if !evaluation.loss().is_finite() {
        return Err(Failure::Fault(Mistake {
            what: format!(
                "the loss is {}: the model's weights or what it computes of them are not finite",
                evaluation.loss()
            ),
            hint: Some("is the model of a run that diverged? Evaluate an earlier checkpoint".to_owned()),
        }));
    }
    let model = match &config.source {
        ModelSource::Folder(path) => path.display().to_string(),
        _ => "random weights".to_owned(),
    };
    let (labels, loss) = (evaluation.labels.to_string(), format!("{:.4}", evaluation.loss()));
    let accuracy = format!("{:.1} %", 100.0 * evaluation.accuracy());
    let rows = match data.reads() {
        Reads::Tokens => {
            let perplexity = format!("{:.3}", evaluation.perplexity());
            vec![
                ("model", model),
                ("labels", labels),
                ("loss", loss),
                ("perplexity", perplexity),
                ("accuracy", accuracy),
            ]
        }
        Reads::Texts => vec![("model", model), ("texts", labels), ("loss", loss), ("accuracy", accuracy)],
        Reads::Images => vec![("model", model), ("images", labels), ("loss", loss), ("accuracy", accuracy)],
    };
    Ok(rows.iter().map(|(name, value)| format!("{name:<12}{value}")).collect::<Vec<_>>().join("\n"))
}

/// The configuration and the model of these arguments. The folder of a model or of a run may take the place of a configuration.
fn subject(arguments: &Arguments) -> Result<(Overrides, Option<PathBuf>), Failure> {
    let (overrides, model) = (&arguments.overrides, arguments.model.clone());
    let Some(path) = &overrides.file else { return Ok((overrides.clone(), model)) };
    if path.extension().is_none_or(|extension| extension != "toml") {
        hub::check(path)?;
    }
    if !exists(path.join(".")) {
        return Ok((overrides.clone(), model));
    }
    let (config, trained) = (path.join(RUN_CONFIG), path.join(RUN_MODEL));
    if exists(&config) {
        return Ok((overrides.with_file(Some(config)), model.or_else(|| exists(&trained).then_some(trained))));
    }
    if let Some(other) = model {
        let what = format!("two models are given: `{}` and --model `{}`", path.display(), other.display());
        return Err(Mistake { what, hint: Some("leave one of them out".to_owned()) }.into());
    }
    // Problems of the folder are reported before those of the data.
    ModelFolder::open(path, None)?;
    Ok((overrides.with_file(None), Some(path.clone())))
}

/// Refuses a folder without a part of the model: its random numbers would be evaluated.
fn refuse_new_modules(input: &ModelInput) -> Result<(), Mistake> {
    match input.new_modules().first() {
        None => Ok(()),
        Some(module) => Err(Mistake {
            what: format!("the model's folder has no `{module}`, so there is nothing to evaluate"),
            hint: Some("train it first: `evenkeel train` begins with random numbers there".to_owned()),
        }),
    }
}

fn of_data(error: evenkeel_train::Error, data: &Data) -> Failure {
    match error {
        evenkeel_train::Error::Data(error) => Failure::new(error.is_fault(), error.to_string(), data.hint(&error)),
        error => error.into(),
    }
}

fn options(settings: &Settings) -> TrainerOptions {
    TrainerOptions { optimizer: None, label_smoothing: 0.0, longest: settings.data.sequence, dropout_seed: 0 }
}

/// The memory that each rank with one of these shards takes, from dry runs.
fn peak_bytes_of(shards: &[Model], settings: &Settings, strategy: &Strategy) -> Vec<u64> {
    let samples = Samples::blank(shards[0].config.input, settings.train.batch, settings.data.sequence);
    let of_rank = |(rank, shard): (usize, &Model)| {
        let communicator = Communicator::dry(rank, shards.len());
        peak_bytes(strategy.devices.kind(), strategy.devices.cores_per_rank(), |device| {
            let parameters = Parameters::allocate(shard, strategy.dtype, ZeroSharding::NONE, device.compute());
            let mut trainer =
                Trainer::new(shards, strategy, &communicator, device.clone(), parameters, options(settings));
            trainer.evaluate(&samples);
        })
    };
    shards.iter().enumerate().map(of_rank).collect()
}

#[cfg(test)]
mod tests {
    use evenkeel_device::{DType, DeviceKind};
    use evenkeel_train::OptimizerOptions;

    use super::*;

    #[test]
    fn an_evaluation_keeps_neither_gradients_nor_moments() {
        let json = serde_json::json!({
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 96, "vocab_size": 4096,
        });
        let model = Model::from_json(&json).unwrap();
        let bytes_of_weights = 4 * model.parameter_count();
        let peak = |optimizer: Option<OptimizerOptions>| {
            let options = TrainerOptions { optimizer, label_smoothing: 0.0, longest: 4, dropout_seed: 0 };
            peak_bytes(DeviceKind::Cuda, 1, |device| {
                let parameters = Parameters::allocate(&model, DType::F32, ZeroSharding::NONE, device.compute());
                drop(Trainer::alone(model.clone(), device.clone(), parameters, options));
            })
        };
        let training = peak(Some(OptimizerOptions::default()));
        assert!(training >= 4 * bytes_of_weights, "a trainer keeps three numbers beside each weight");
        assert!(peak(None) < bytes_of_weights * 11 / 10);
    }
}
