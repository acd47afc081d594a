//! `evenkeel generate MODEL --prompt TEXT`: text from a model, printed as it comes.

use std::io::{Read, Write};
use std::path::PathBuf;

use evenkeel_data::{Continuation, Tokenizer};
use evenkeel_device::{DType, DeviceKind};
use evenkeel_model::{GenerateOptions, Generator, Model, Parameters, Sampling, ZeroSharding};
use evenkeel_store::{exists, read_json};
use serde_json::{Value, json};

use crate::config::{AdapterBase, TokenizerSource};
use crate::inputs::feed::{Text, start_of_day};
use crate::inputs::model_folder::ModelFolder;
use crate::memory::{check_fit_on, peak_bytes};
use crate::{Failure, Mistake, device, warn};

#[derive(clap::Args)]
pub struct Arguments {
    /// A Hugging Face model folder, or the folder of an adapter.
    model: PathBuf,
    /// The folder of an adapter on the model, as PEFT saves it.
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// The beginning of the text, or "-" to read it from the standard input, without the newline at its end.
    #[arg(long, short, allow_hyphen_values = true, required_unless_present = "message")]
    prompt: Option<String>,
    /// Sends the prompt through the model's chat template, as the user's message, and prints the answer.
    #[arg(long)]
    chat: bool,
    /// A message before the prompt: system=…, user=…, assistant=…; may be repeated.
    #[arg(long, value_name = "ROLE=CONTENT", requires = "chat", value_parser = message)]
    message: Vec<Value>,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: u32,
    /// Sampling temperature; 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Draw from the likeliest tokens that together have this probability.
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    /// Draw from this many of the likeliest tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Always take the likeliest token.
    #[arg(long, conflicts_with_all = ["temperature", "top_p", "top_k"])]
    greedy: bool,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Compute dtype.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: crate::device::Precision,
    /// What computes: the machine's cores, or its first NVIDIA GPU.
    #[arg(long, value_enum, default_value = "cpu")]
    device: device::DeviceChoice,
    /// A folder with tokenizer.json, or "bytes"; the model's own by default.
    #[arg(long)]
    tokenizer: Option<String>,
    /// How to hold the model's linear layers: "nf4", as a base of adapter.base = "nf4" is trained with.
    #[arg(long, value_name = "FORMAT", value_parser = AdapterBase::named)]
    base: Option<AdapterBase>,
    /// Keys of config.json to ignore although Evenkeel does not understand them.
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    ignore_keys: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let folder = ModelFolder::open(&arguments.model, arguments.adapter.as_deref())?;
    let kind = DeviceKind::from(arguments.device);
    let packs = arguments.base == Some(AdapterBase::Nf4);
    let model = folder.model(&arguments.ignore_keys, "--ignore-keys", packs)?.0;
    model.check_device(kind)?;
    let model = model.for_device(kind);
    if model.config.input.is_classified() {
        let inputs = if model.config.input.is_text() { "texts" } else { "images" };
        let what = format!("the model in {:?} classifies {inputs} and generates no text", arguments.model);
        return Err(Mistake { what, hint: Some("`evenkeel eval` tells how often it is right".to_owned()) }.into());
    }
    let tokenizer = match arguments.tokenizer.as_deref() {
        Some("bytes") => TokenizerSource::Bytes,
        Some(path) => TokenizerSource::Path(path.into()),
        None => TokenizerSource::Path(folder.folder_with("tokenizer.json")),
    };
    let text = Text::from_source(&tokenizer, "--tokenizer")?;
    let tokenizer = &text.tokenizer;
    let Prompt { shown, tokens: prompt, template_tokens } = prompt(arguments, &text)?;
    let (max_tokens, dtype) = (arguments.tokens as usize, DType::from(arguments.dtype));
    let options = GenerateOptions {
        sampling: Sampling {
            temperature: if arguments.greedy { 0.0 } else { arguments.temperature },
            top_p: arguments.top_p,
            top_k: arguments.top_k,
            seed: arguments.seed,
        },
        max_tokens,
        end_tokens: end_tokens(&folder, tokenizer)?,
        vocabulary: Some(tokenizer.vocabulary()),
    };
    options.sampling.check().map_err(|error| mistake(error.into()))?;
    let capacity = prompt.len() + max_tokens;
    check_memory(kind, &model, dtype, &prompt, capacity)?;
    if let Some(warning) = model.config.beyond_positions(capacity) {
        let template =
            template_tokens.map_or_else(String::new, |count| format!(", {count} of them the chat template's"));
        warn(&format!("{warning}; the prompt has {}{template}, and up to {max_tokens} are new", prompt.len()));
    }
    let device = device::start_kind(kind, None)?;
    let parameters = folder.load(&model, 0, dtype, ZeroSharding::NONE, device.compute())?;
    let mut generator = Generator::new(&model, &parameters, device.compute(), 1, capacity).map_err(mistake)?;
    // An answer stands alone.
    let mut continuation = Continuation::after(tokenizer, if arguments.chat { &[] } else { &prompt })?;
    // With the first token, so that an error before it stands alone.
    let mut shown = Some(shown);
    let generated = generator.generate(&[prompt], &options, |_, token| {
        shown.take().iter().for_each(|shown| put(shown));
        if !options.end_tokens.contains(&token) {
            put(&continuation.push(token).unwrap_or_default());
        }
    });
    if generated.is_err() && shown.is_none() {
        put("\n");
    }
    generated.map_err(mistake)?;
    put(&continuation.finish()?);
    Ok(String::new())
}

struct Prompt {
    /// The text to print before the model's own.
    shown: String,
    /// The tokens that the model continues.
    tokens: Vec<u32>,
    /// The tokens beside those of the messages; `None` without a chat template.
    template_tokens: Option<usize>,
}

fn prompt(arguments: &Arguments, text: &Text) -> Result<Prompt, Failure> {
    let given = match arguments.prompt.as_deref() {
        Some("-") => Some(from_standard_input()?),
        given => given.map(str::to_owned),
    };
    if !arguments.chat {
        let given = given.unwrap_or_default();
        let tokens = text.tokenizer.encode(&given, true)?;
        return Ok(Prompt { shown: given, tokens, template_tokens: None });
    }
    let asked = given.map(|content| json!({ "role": "user", "content": content }));
    let messages: Vec<Value> = arguments.message.iter().cloned().chain(asked).collect();
    let no_template = || Mistake {
        what: "the tokenizer has no chat template".to_owned(),
        hint: Some("leave out --chat, or add chat_template.jinja to the folder".to_owned()),
    };
    let template = text.template(start_of_day())?.ok_or_else(no_template)?;
    // The template itself writes the tokens that a tokenizer puts around a text.
    let tokens = text.tokenizer.encode(&template.render(&messages, true)?, false)?;
    let mut template_tokens = tokens.len();
    for content in messages.iter().filter_map(|message| message["content"].as_str()) {
        template_tokens = template_tokens.saturating_sub(text.tokenizer.encode(content, false)?.len());
    }
    Ok(Prompt { shown: String::new(), tokens, template_tokens: Some(template_tokens) })
}

fn message(words: &str) -> Result<Value, String> {
    match words.split_once('=') {
        Some((role, content)) if !role.is_empty() => Ok(json!({ "role": role, "content": content })),
        _ => Err("expected role=content, for example system=\"Be brief.\"".to_owned()),
    }
}

fn from_standard_input() -> Result<String, Mistake> {
    const MOST_BYTES: u64 = 16 << 20;
    let unreadable = |what: String| Mistake { what: format!("the prompt on the standard input {what}"), hint: None };
    let mut bytes = Vec::new();
    let read = std::io::stdin().take(MOST_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(unreadable(format!("is longer than {MOST_BYTES} bytes")));
    }
    let mut text = String::from_utf8(bytes).map_err(|_| unreadable("is not UTF-8".to_owned()))?;
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

/// The end tokens of the tokenizer and of generation_config.json: a chat ends with another token than a text.
pub fn end_tokens(folder: &ModelFolder, tokenizer: &Tokenizer) -> Result<Vec<u32>, Failure> {
    const MOST_BYTES: u64 = 1 << 20;
    const FILE: &str = "generation_config.json";
    let path = folder.folder_with(FILE).join(FILE);
    let mut tokens: Vec<u32> = tokenizer.end().into_iter().collect();
    if exists(&path) {
        let config: Value = read_json(&path, MOST_BYTES)?;
        let ends = &config["eos_token_id"];
        let ends = ends.as_array().map_or(std::slice::from_ref(ends), Vec::as_slice);
        tokens.extend(ends.iter().filter_map(|end| u32::try_from(end.as_u64()?).ok()));
    }
    Ok(tokens)
}

/// Refuses, after a dry run, a generation that would not fit.
fn check_memory(kind: DeviceKind, model: &Model, dtype: DType, prompt: &[u32], capacity: usize) -> Result<(), Failure> {
    let needed = peak_bytes(kind, evenkeel_device::cpu_report().cores, |device| {
        let queue = device.compute();
        let parameters = Parameters::allocate(model, dtype, ZeroSharding::NONE, queue);
        // An error here comes again in the real run.
        if let Ok(mut generator) = Generator::new(model, &parameters, queue, 1, capacity) {
            let _ = generator.prefill(&[prompt]);
        }
    });
    check_fit_on(kind, "generating", needed, "use a smaller model, fewer --tokens or a shorter prompt")
}

fn mistake(error: evenkeel_model::GenerateError) -> Mistake {
    Mistake { what: error.to_string(), hint: error.hint().map(str::to_owned) }
}

/// Errors are ignored: the reader may have stopped reading.
fn put(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
