//! `evenkeel generate MODEL --prompt TEXT`: text from a model, printed as it comes.

use std::io::Write;
use std::path::PathBuf;

use evenkeel_device::DType;
use evenkeel_model::{GenerateOptions, Generator, Model, Sampling};
use evenkeel_store::Folder;
use evenkeel_train::data::Tokenizer;

use crate::config::TokenizerSource;
use crate::train::feed::Text;
use crate::{Failure, Mistake, device};

#[derive(clap::Args)]
pub struct Arguments {
    /// A Hugging Face model folder.
    model: PathBuf,
    /// The beginning of the text.
    #[arg(long, short, allow_hyphen_values = true)]
    prompt: String,
    /// New tokens at most.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: u32,
    /// How far to stray from the likeliest token; 0 never strays.
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Draw from the likeliest tokens that have this probability together.
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    /// Draw from this many of the likeliest tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Always take the likeliest token.
    #[arg(long, conflicts_with_all = ["temperature", "top_p", "top_k"])]
    greedy: bool,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// What is computed in.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: crate::bench::Precision,
    /// A folder with tokenizer.json, or "bytes"; the model's own by default.
    #[arg(long)]
    tokenizer: Option<String>,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let folder = Folder::open(&arguments.model)?;
    let model = Model::open(&folder)?;
    let text = Text::from_source(&match arguments.tokenizer.as_deref() {
        Some("bytes") => TokenizerSource::Bytes,
        Some(path) => TokenizerSource::Path(path.into()),
        None => TokenizerSource::Path(arguments.model.clone()),
    })?;
    let tokenizer = &text.tokenizer;
    let prompt = tokenizer.encode(&arguments.prompt, true)?;
    let device = device::start(None)?;
    let parameters = model.load(&folder, DType::from(arguments.dtype), device.compute())?;
    let max_tokens = arguments.tokens as usize;
    let capacity = prompt.len() + max_tokens;
    let mut generator = Generator::new(&model, &parameters, device.compute(), 1, capacity).map_err(mistake)?;
    let sampling = Sampling {
        temperature: if arguments.greedy { 0.0 } else { arguments.temperature },
        top_p: arguments.top_p,
        top_k: arguments.top_k,
        seed: arguments.seed,
    };
    let end_tokens: Vec<u32> = tokenizer.end().into_iter().collect();
    let options = GenerateOptions { sampling, max_tokens, end_tokens };
    let mut stream = Stream { tokenizer, end: tokenizer.end(), tokens: Vec::new(), printed: 0 };
    options.sampling.check().map_err(|error| mistake(error.into()))?;
    put(&arguments.prompt);
    generator.generate(&[prompt], &options, |_, token| stream.push(token)).map_err(mistake)?;
    stream.finish();
    Ok(String::new())
}

fn mistake(error: evenkeel_model::GenerateError) -> Mistake {
    Mistake { what: error.to_string(), hint: error.hint().map(str::to_owned) }
}

/// Prints text as far as it is certain: a character may take several tokens.
struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    end: Option<u32>,
    tokens: Vec<u32>,
    printed: usize,
}

impl Stream<'_> {
    fn push(&mut self, token: u32) {
        if Some(token) != self.end {
            self.tokens.push(token);
            self.print(|text| text.trim_end_matches('\u{fffd}').len());
        }
    }

    fn finish(&mut self) {
        self.print(str::len);
    }

    fn print(&mut self, certain: impl Fn(&str) -> usize) {
        let text = self.tokenizer.decode(&self.tokens).unwrap_or_default();
        let end = certain(&text);
        if let Some(new) = text.get(self.printed..end) {
            put(new);
            self.printed = end;
        }
    }
}

/// Who has stopped reading is not told.
fn put(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
