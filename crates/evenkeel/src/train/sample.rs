//! Samples that a saved model generates from a run's prompts.

use std::path::Path;

use evenkeel_data::{Continuation, Template};
use evenkeel_device::{DType, Device, DeviceKind};
use evenkeel_model::{GenerateOptions, Generator, Model, Parameters, Sampling, ZeroSharding};
use evenkeel_train::Error;
use serde_json::json;

use crate::config::{Settings, TokenizerSource};
use crate::generate::end_tokens;
use crate::inputs::feed::{Text, start_of_day};
use crate::inputs::model_folder::ModelFolder;
use crate::{Failure, Mistake, device};

/// Whether prompts are asked by a chat template. A broken one that nobody asked for counts as none.
pub fn is_chat(settings: &Settings, text: Option<&Text>) -> Result<bool, Failure> {
    let is_wanted = settings.sample.chat;
    let Some(text) = text.filter(|_| is_wanted != Some(false)) else { return Ok(false) };
    let has_template = text.template_to_save(&settings.data)?.is_some()
        || match text.template(start_of_day()) {
            Ok(template) => template.is_some(),
            Err(failure) if is_wanted.is_some() => return Err(failure),
            Err(_) => false,
        };
    if is_wanted.is_some() && !has_template {
        let what = "`sample.chat` is true, but the tokenizer has no chat template".to_owned();
        let hint = "leave it out, or add chat_template.jinja to the model's folder".to_owned();
        return Err(Mistake { what, hint: Some(hint) }.into());
    }
    Ok(has_template)
}

/// Samples of the model in a folder, on one device: each prompt and its continuation, or, in a chat, the prompt and the answer
/// below it.
pub fn samples(folder: &Path, settings: &Settings, is_chat: bool) -> Result<Vec<String>, Failure> {
    let saved = ModelFolder::open(folder, None)?;
    let kind = settings.device.kind;
    // A saved model's config.json is without these keys; an adapter's base has them.
    let ignored = if saved.adapter.is_some() { &settings.model.ignore_keys[..] } else { &[] };
    let model = saved.model(ignored, "model.ignore_keys", settings.adapter.packs())?.0.for_device(kind);
    let device = start(kind, settings)?;
    let parameters = saved.load(&model, 0, DType::from(settings.train.dtype), ZeroSharding::NONE, device.compute())?;
    let text = Text::from_source(&TokenizerSource::Path(folder.to_owned()), "data.tokenizer")?;
    let template = if is_chat { text.template(start_of_day())? } else { None };
    let options = GenerateOptions {
        sampling: Sampling {
            temperature: settings.sample.temperature as f32,
            top_k: None,
            top_p: settings.sample.top_p as f32,
            seed: settings.train.seed,
        },
        max_tokens: settings.sample.tokens,
        end_tokens: end_tokens(&saved, &text.tokenizer)?,
        vocabulary: Some(text.tokenizer.vocabulary()),
    };
    let sampler = Sampler { model: &model, parameters: &parameters, device: &device, text, template, options };
    let sample = |prompt: &String| {
        let between = if sampler.template.is_some() { "\n" } else { "" };
        match sampler.after(prompt) {
            Ok(words) => format!("{prompt}{between}{words}"),
            // A failed sample does not fail a finished run.
            Err(error) => format!("{prompt} ({error})"),
        }
    };
    Ok(settings.sample.prompts.iter().map(sample).collect())
}

fn start(kind: DeviceKind, settings: &Settings) -> Result<Device, Failure> {
    let device = match (kind, &settings.device.cards[..]) {
        (DeviceKind::Cuda, [card, ..]) => device::start_cuda(*card as usize)?,
        _ => device::start_kind(kind, settings.device.threads)?,
    };
    device.replay_graphs(settings.device.graph.unwrap_or(true));
    Ok(device)
}

struct Sampler<'a> {
    model: &'a Model,
    parameters: &'a Parameters,
    device: &'a Device,
    text: Text,
    template: Option<Template>,
    options: GenerateOptions,
}

impl Sampler<'_> {
    fn after(&self, prompt: &str) -> Result<String, Error> {
        let Sampler { model, parameters, device, text, template, options } = self;
        let tokenizer = &text.tokenizer;
        let tokens = match template {
            Some(template) => {
                let asked = [json!({ "role": "user", "content": prompt })];
                tokenizer.encode(&template.render(&asked, true)?, false)?
            }
            None => tokenizer.encode(prompt, true)?,
        };
        let capacity = tokens.len() + options.max_tokens;
        let mut generator = Generator::new(model, parameters, device.compute(), 1, capacity)?;
        // An answer stands alone.
        let mut continuation = Continuation::after(tokenizer, if template.is_some() { &[] } else { &tokens })?;
        let generated = generator.generate(&[tokens], options, |_, _| ())?.remove(0);
        let kept = generated.tokens.into_iter().filter(|token| !options.end_tokens.contains(token));
        let pieces = kept.map(|token| continuation.push(token)).collect::<Result<String, _>>()?;
        Ok(pieces + &continuation.finish()?)
    }
}
