//! From a run's data settings to micro-batches.

mod fingerprint;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use evenkeel_data::{
    Augment, Clock, Corpus, DataPosition, Encoder, Fill, Format, ImageBatch, ImageOptions, Images, Labels, Loader,
    LoaderOptions, OPTIONAL_COLUMNS, OnBadRecord, OrderOptions, Packing, RecordCounts, Row, Source, Subset, Template,
    Tokenizer, TokenizerConfig, alpaca_template,
};
use evenkeel_model::{Config, Input, Model};
use evenkeel_report::Reads;
use evenkeel_store::{exists, read_text};
use evenkeel_train::{Error, Evaluation, Feed, Ranks, Samples};
use serde::{Deserialize, Serialize};

use super::model_folder::{ModelFolder, is_adapter};
use crate::config::{
    self, DataSource, InstructionPrompt, ModelSource, PackingStrategy, RecordFormat, RunConfig, Settings,
    TokenizerSource,
};
use crate::{Failure, Mistake, hub, warn};
use fingerprint::Fingerprint;

/// A tokenizer and its configuration.
pub struct Text {
    pub tokenizer: Tokenizer,
    config: TokenizerConfig,
    /// Its tokenizer.json, and the folder of the files that go with it; `None` for the built-in one.
    pub files: Option<(PathBuf, PathBuf)>,
    /// The contents of its tokenizer.json; empty for the built-in one.
    json: String,
}

const TOKENIZER_BYTES: u64 = 256 << 20;

/// Values of a picture, which are from 0 to 1, are normalised with this mean and deviation.
pub const IMAGE_MEAN: f32 = 0.5;
pub const IMAGE_DEVIATION: f32 = 0.5;

impl Text {
    /// `None` for images.
    pub fn open(config: &RunConfig) -> Result<Option<Text>, Failure> {
        let Some(source) = &config.tokenizer else { return Ok(None) };
        if let ModelSource::Folder(path) = &config.source {
            check_reads_text(path)?;
        }
        let mut text = Text::from_source(source, "data.tokenizer")?;
        if let Some(path) = &config.settings.data.chat_template {
            text.config.chat_template = Some(read_text(path, TOKENIZER_BYTES)?);
            text.config.tool_template = None;
        }
        Ok(Some(text))
    }

    /// The prompt of a run's instructions; `None` if it has no instructions.
    pub fn instruction_prompt(&self, data: &config::Data) -> Result<Option<InstructionPrompt>, Failure> {
        if data.format != RecordFormat::Alpaca {
            return Ok(None);
        }
        let template = self.config.chat_template.as_ref();
        Ok(Some(match (data.instruction_prompt, template) {
            (Some(InstructionPrompt::Chat), None) => {
                let what = "`data.instruction_prompt` is \"chat\", but the tokenizer has no chat template".to_owned();
                let hint = Some("give one with data.chat_template, or use \"alpaca\"".to_owned());
                return Err(Mistake { what, hint }.into());
            }
            (Some(prompt), _) => prompt,
            // A model that was taught Stanford's prompt has it as a template, which knows an input only by its place.
            (None, Some(template)) if *template != alpaca_template(&self.tokenizer, &self.config)? => {
                InstructionPrompt::Chat
            }
            (None, _) => InstructionPrompt::Alpaca,
        }))
    }

    /// The chat template to save with a trained model, if it is not the tokenizer's own: the run's, or the prompt that the model
    /// was taught.
    pub fn template_to_save(&self, data: &config::Data) -> Result<Option<String>, Failure> {
        if self.instruction_prompt(data)? == Some(InstructionPrompt::Alpaca) {
            return Ok(Some(alpaca_template(&self.tokenizer, &self.config)?));
        }
        Ok(data.chat_template.as_ref().and(self.config.chat_template.clone()))
    }

    /// `option` is where the user can name another tokenizer.
    pub fn from_source(source: &TokenizerSource, option: &str) -> Result<Text, Failure> {
        let TokenizerSource::Path(path) = source else {
            let (config, json) = (TokenizerConfig::default(), String::new());
            return Ok(Text { tokenizer: Tokenizer::Bytes, config, files: None, json });
        };
        hub::check(path)?;
        let is_file = path.extension().is_some_and(|extension| extension == "json");
        let folder = match is_file {
            true => path.parent().unwrap_or(Path::new("")).to_owned(),
            // PEFT saves an adapter without a tokenizer: its base has one.
            false if is_adapter(path) => ModelFolder::open(path, None)?.folder_with("tokenizer.json"),
            false => path.clone(),
        };
        let file = if is_file { path.clone() } else { folder.join("tokenizer.json") };
        let beside = folder.join("tokenizer_config.json");
        let mut config = match exists(&beside) {
            true => TokenizerConfig::parse(read_text(&beside, TOKENIZER_BYTES)?.as_bytes())?,
            false => TokenizerConfig::default(),
        };
        let template = folder.join("chat_template.jinja");
        if exists(&template) {
            config.chat_template = Some(read_text(&template, TOKENIZER_BYTES)?);
            config.tool_template = None;
        }
        if !exists(&file) {
            return Err(no_tokenizer(&file, &folder, option).into());
        }
        let json = read_text(&file, TOKENIZER_BYTES)?;
        let tokenizer = Tokenizer::hugging_face(json.as_bytes(), &config)?;
        Ok(Text { tokenizer, config, files: Some((file, folder)), json })
    }

    /// The tokenizer's own chat template, if it came with one.
    pub fn template(&self, clock: impl Into<Clock>) -> Result<Option<Template>, Failure> {
        let source = self.config.chat_template.as_deref();
        Ok(source.map(|source| Template::new(source, &self.config, clock)).transpose()?)
    }
}

/// Training's position in its data, and a fingerprint of the data; part of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeedState {
    place: DataPosition,
    /// The present time for chat templates.
    time_s: u64,
    data: Fingerprint,
}

/// The data that a run trains and evaluates on.
pub struct Data {
    source: Arc<dyn Source>,
    held_out: Option<(Arc<dyn Source>, OrderOptions)>,
    reader: Reader,
    order: OrderOptions,
    batch: usize,
    epochs: Option<u64>,
    workers: usize,
    clock: Clock,
    fingerprint: Fingerprint,
    on_bad_record: OnBadRecord,
    /// Whether bad records of the held-out data were reported.
    told: AtomicBool,
    instruction_prompt: Option<InstructionPrompt>,
    /// Whether each file is one record: text without a separator.
    files_are_records: bool,
}

enum Reader {
    Text { encoder: Arc<Encoder>, packing: Packing, is_labelled: bool },
    Images { training: ImageOptions, evaluation: ImageOptions },
}

impl Data {
    pub fn open(config: &RunConfig, model: &Model, text: Option<Text>) -> Result<Data, Failure> {
        let settings = &config.settings;
        let data = &settings.data;
        let clock = Clock::from(start_of_day());
        let instruction_prompt = text.as_ref().map(|text| text.instruction_prompt(data)).transpose()?.flatten();
        let mut fingerprint = Fingerprint::new(settings);
        let source = open_source(settings, &data.paths, &mut fingerprint)?;
        let held_out_every = (data.holdout > 0).then_some(data.holdout);
        let order = OrderOptions { seed: data.seed, shuffle: data.shuffle, held_out_every, part: Subset::Train };
        let held_out = if !data.eval_paths.is_empty() {
            let whole = OrderOptions { shuffle: false, held_out_every: None, ..order };
            Some((open_source(settings, &data.eval_paths, &mut Fingerprint::default())?, whole))
        } else {
            held_out_every.map(|_| (source.clone(), OrderOptions { part: Subset::HeldOut, ..order }))
        };
        let reader = match (model.config.input, text) {
            (Input::Tokens { .. }, Some(_)) if data.format == RecordFormat::Labelled => {
                let what = "the model predicts the next token of texts, the data are labelled texts".to_owned();
                let hint = "use a classifier of texts, such as BERT, or another data.format".to_owned();
                return Err(Mistake { what, hint: Some(hint) }.into());
            }
            (Input::Texts { .. }, Some(_)) if data.format != RecordFormat::Labelled => {
                let what = "the model labels texts, the data have no labels".to_owned();
                return Err(Mistake { what, hint: Some("set data.format = \"labelled\"".to_owned()) }.into());
            }
            (Input::Tokens { .. } | Input::Texts { .. }, Some(text)) => {
                text_reader(settings, model, text, instruction_prompt, &clock, &mut fingerprint)?
            }
            (Input::Images { size, channels, .. }, None) => {
                image_reader(settings, size, channels, model.config.classes)
            }
            (Input::Tokens { .. } | Input::Texts { .. }, None) => {
                return Err(mismatch("the model reads text", "images").into());
            }
            (Input::Images { .. }, Some(_)) => return Err(mismatch("the model classifies images", "text").into()),
        };
        let epochs = settings.train.epochs.map(u64::from);
        let (batch, workers) = (settings.train.batch, data.workers);
        let on_bad_record = match data.on_bad_record {
            config::OnBadRecord::Stop => OnBadRecord::Stop,
            config::OnBadRecord::Skip => {
                OnBadRecord::Skip { most_in_epoch: data.bad_record_limit.expect("filled in with the key above") }
            }
        };
        Ok(Data {
            source,
            held_out,
            reader,
            order,
            batch,
            epochs,
            workers,
            clock,
            fingerprint,
            on_bad_record,
            told: AtomicBool::new(false),
            instruction_prompt,
            files_are_records: data.source == DataSource::Text && data.separator.is_none(),
        })
    }

    pub fn reads(&self) -> Reads {
        match &self.reader {
            Reader::Text { is_labelled: false, .. } => Reads::Tokens,
            Reader::Text { is_labelled: true, .. } => Reads::Texts,
            Reader::Images { .. } => Reads::Images,
        }
    }

    /// The hint for an error in these data.
    pub fn hint(&self, error: &evenkeel_data::Error) -> Option<String> {
        let evenkeel_data::Error::NothingToRead { skipped: 0, truncated: 0, .. } = error else { return error.hint() };
        let Some(records) = self.order.held_out_every.and_then(|_| self.few_records()) else { return error.hint() };
        let records = if records == 1 { "1 record".to_owned() } else { format!("{records} records") };
        let more = if self.files_are_records {
            "split the text with data.separator, such as \"\\n\\n\" for blank lines"
        } else {
            "add some, or choose another data.holdout"
        };
        Some(format!("the data has only {records}: {more}, or give data.eval_paths"))
    }

    /// The number of records, if it is small.
    fn few_records(&self) -> Option<usize> {
        const FEW: usize = 1000;
        let mut records = 0;
        for chunk in 0..self.source.chunks() {
            records += self.source.read_each(chunk).ok()?.len();
            if records > FEW {
                return None;
            }
        }
        Some(records)
    }

    /// The error of the very first record in place of the given one, if both cannot be used: shuffled data may begin anywhere.
    pub fn first_bad(&self, error: Error) -> Error {
        let Error::Data(found) = &error else { return error };
        if !found.is_of_record() || !self.order.shuffle {
            return error;
        }
        let in_order = OrderOptions { shuffle: false, held_out_every: None, part: Subset::Train, ..self.order };
        match self.samples_in(in_order, 1) {
            Err(Error::Data(first)) if first.is_of_record() => first.into(),
            _ => error,
        }
    }

    /// The prompt of instructions, in words; `None` if there are none.
    pub fn describe_prompt(&self) -> Option<&'static str> {
        Some(match self.instruction_prompt? {
            InstructionPrompt::Chat => "the chat template",
            InstructionPrompt::Alpaca => "Stanford Alpaca's prompt",
        })
    }

    /// The first samples of training, each by itself; empty for images.
    pub fn first_samples(&self, count: usize) -> Result<Vec<Row>, Error> {
        self.samples_in(self.order, count)
    }

    fn samples_in(&self, order: OrderOptions, count: usize) -> Result<Vec<Row>, Error> {
        let Reader::Text { encoder, packing, .. } = &self.reader else { return Ok(Vec::new()) };
        let packing = Packing { fill: Fill::Single, ..*packing };
        let options = LoaderOptions { workers: 1, ..self.options(order, self.epochs) };
        let mut loader = Loader::rows(self.source.clone(), encoder.clone(), packing, options, None)?;
        let mut rows = Vec::new();
        while rows.len() < count
            && let Some(row) = loader.next()?
        {
            rows.push(row);
        }
        Ok(rows)
    }

    fn options(&self, order: OrderOptions, epochs: Option<u64>) -> LoaderOptions {
        LoaderOptions { order, epochs, workers: self.workers, on_bad_record: self.on_bad_record }
    }

    /// `None` for images.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        match &self.reader {
            Reader::Text { encoder, .. } => Some(encoder.tokenizer()),
            Reader::Images { .. } => None,
        }
    }

    /// The micro-batches of training, from the beginning or from a checkpoint's state. The state must be of the same data; from
    /// then on chat templates use the time at which the run began.
    pub fn training(&self, from: Option<FeedState>) -> Result<Box<dyn Feed>, Error> {
        let options = self.options(self.order, self.epochs);
        let from = match from {
            None => None,
            Some(FeedState { place, time_s, data }) => {
                let differences = self.fingerprint.differences(&data);
                if !differences.is_empty() {
                    return Err(evenkeel_data::Error::OtherData { differences }.into());
                }
                self.clock.set(time_s);
                Some(place)
            }
        };
        self.feed(&self.source, options, from, true)
    }

    /// The held-out micro-batches, once.
    pub fn evaluation(&self) -> Result<Option<Box<dyn Feed>>, Error> {
        let Some((source, order)) = &self.held_out else { return Ok(None) };
        let options = LoaderOptions { workers: 1, ..self.options(*order, Some(1)) };
        self.feed(source, options, None, false).map(Some)
    }

    /// Evaluates the model on at most so many held-out micro-batches; `None` if nothing is held out, or on an interruption.
    pub fn evaluate(
        &self,
        ranks: &Ranks,
        batches: Option<u64>,
        interrupted: &AtomicBool,
    ) -> Result<Option<Evaluation>, Error> {
        let Some(mut feed) = self.evaluation()? else { return Ok(None) };
        let mut evaluation = Evaluation::default();
        let mut left = batches.unwrap_or(u64::MAX);
        while left > 0
            && let Some(samples) = feed.next()?
        {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(None);
            }
            evaluation.add(&ranks.evaluate(samples)?);
            left -= 1;
        }
        let notes = feed.take_notes();
        if !notes.is_empty() && !self.told.swap(true, Ordering::Relaxed) {
            notes.iter().for_each(|note| warn(&format!("held out: {note}")));
        }
        Ok(Some(evaluation))
    }

    fn feed(
        &self,
        source: &Arc<dyn Source>,
        options: LoaderOptions,
        from: Option<DataPosition>,
        training: bool,
    ) -> Result<Box<dyn Feed>, Error> {
        let (batch, source) = (self.batch, source.clone());
        let (time_s, data) = (self.clock.seconds(), self.fingerprint.clone());
        Ok(match &self.reader {
            Reader::Text { encoder, packing, is_labelled } => {
                let loader = Loader::rows(source, encoder.clone(), *packing, options, from)?;
                let take = if *is_labelled { take_texts } else { take_rows };
                Box::new(LoaderFeed { loader, take: move |loader: &mut _| take(loader, batch), time_s, data })
            }
            Reader::Images { training: augmented, evaluation } => {
                let images = Images::new(if training { augmented.clone() } else { evaluation.clone() })?;
                let loader = Loader::images(source, images, batch, options, from)?;
                Box::new(LoaderFeed { loader, take: take_images, time_s, data })
            }
        })
    }
}

fn open_source(
    settings: &Settings,
    paths: &[PathBuf],
    fingerprint: &mut Fingerprint,
) -> Result<Arc<dyn Source>, Failure> {
    use evenkeel_store::{Format, Source, SourceSpec};
    let data = &settings.data;
    let format = match data.source {
        DataSource::Synthetic => return Ok(Arc::new(Corpus::new(data.seed, data.records))),
        DataSource::Text => Format::Text { separator: data.separator.clone().unwrap_or_default() },
        DataSource::Jsonl => Format::Jsonl,
        DataSource::Json => Format::Json,
        DataSource::Parquet => Format::Parquet,
        DataSource::Images => Format::Images,
        DataSource::Cifar10 => Format::Cifar10,
    };
    let columns = match data.format {
        RecordFormat::Text => vec![data.text_column.clone()],
        RecordFormat::Alpaca => {
            vec![data.instruction_column.clone(), data.input_column.clone(), data.output_column.clone()]
        }
        RecordFormat::Messages => vec![data.messages_column.clone(), data.tools_column.clone()],
        RecordFormat::Labelled => {
            let texts = [Some(data.text_column.clone()), data.second_text_column.clone()];
            texts.into_iter().flatten().chain([data.label_column.clone()]).collect()
        }
    };
    let is_optional = |column: &String| OPTIONAL_COLUMNS.contains(&column.as_str());
    let (optional_columns, columns) = columns.into_iter().partition(is_optional);
    let spec = SourceSpec { columns, optional_columns, ..SourceSpec::new(format, paths.to_vec()) };
    let source = Source::open(&spec).map_err(evenkeel_data::Error::from)?;
    fingerprint.add_files(&source.files());
    Ok(Arc::new(source))
}

fn text_reader(
    settings: &Settings,
    model: &Model,
    text: Text,
    instruction_prompt: Option<InstructionPrompt>,
    clock: &Clock,
    fingerprint: &mut Fingerprint,
) -> Result<Reader, Failure> {
    let data = &settings.data;
    let format = match data.format {
        RecordFormat::Labelled => Format::Labelled {
            text: data.text_column.clone(),
            second: data.second_text_column.clone(),
            label: data.label_column.clone(),
            labels: labels(model, data.sequence),
        },
        RecordFormat::Text => Format::Text { column: data.text_column.clone() },
        RecordFormat::Messages => {
            Format::Messages { column: data.messages_column.clone(), tools: data.tools_column.clone() }
        }
        RecordFormat::Alpaca => Format::Instruction {
            instruction: data.instruction_column.clone(),
            input: data.input_column.clone(),
            output: data.output_column.clone(),
        },
    };
    let [begin, end] = [&text.config.begin_token, &text.config.end_token].map(|token| token.as_deref().unwrap_or(""));
    fingerprint.add_contents("data.tokenizer", &[text.json.as_bytes(), begin.as_bytes(), end.as_bytes()]);
    if let Some(prompt) = instruction_prompt {
        fingerprint.add("data.instruction_prompt", prompt.name());
    }
    let mut template = None;
    if data.format == RecordFormat::Messages || instruction_prompt == Some(InstructionPrompt::Chat) {
        let sources = [&text.config.chat_template, &text.config.tool_template];
        let sources: Vec<&[u8]> = sources.into_iter().flatten().map(|source| source.as_bytes()).collect();
        fingerprint.add_contents("data.chat_template", &sources);
        template = text.template(clock.clone())?;
    }
    let encoder = Arc::new(Encoder::new(text.tokenizer, template, format, vocabulary(&model.config))?);
    let is_labelled = data.format == RecordFormat::Labelled;
    let fill = match data.packing_strategy {
        Some(PackingStrategy::Cut) => Fill::Cut,
        Some(PackingStrategy::BestFit) => Fill::BestFit,
        None => Fill::Single,
    };
    // The label of a text is that of its first token, which may be its last.
    let label_beyond_cut = data.label_beyond_cut || is_labelled;
    let packing = Packing { sequence: data.sequence, fill, label_beyond_cut };
    Ok(Reader::Text { encoder, packing, is_labelled })
}

/// Tokens that the model knows.
fn vocabulary(config: &Config) -> usize {
    if let Input::Texts { vocabulary, .. } = config.input { vocabulary } else { config.classes }
}

fn labels(model: &Model, sequence: usize) -> Labels {
    let types = if let Input::Texts { types, .. } = model.config.input { types } else { 1 };
    Labels { count: model.config.classes, names: model.config.label_names.clone(), types, sequence }
}

fn image_reader(settings: &Settings, size: usize, channels: usize, classes: usize) -> Reader {
    let data = &settings.data;
    let evaluation = ImageOptions {
        size,
        mean: vec![IMAGE_MEAN; channels],
        deviation: vec![IMAGE_DEVIATION; channels],
        augment: None,
        classes,
    };
    let augment = Some(Augment { flip: data.flip, shift: data.crop });
    Reader::Images { training: ImageOptions { augment, ..evaluation.clone() }, evaluation }
}

/// The present time for chat templates when a run begins: a date, since the time of day would make every run differ.
pub fn start_of_day() -> u64 {
    const DAY: u64 = 24 * 60 * 60;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    now - now % DAY
}

fn no_tokenizer(file: &Path, folder: &Path, option: &str) -> Mistake {
    // Files of tokenizers that transformers can convert.
    const OTHER_FORMS: [&str; 3] = ["tokenizer.model", "vocab.json", "vocab.txt"];
    let hint = if OTHER_FORMS.iter().any(|name| exists(folder.join(name))) {
        format!("transformers makes one: `AutoTokenizer.from_pretrained({folder:?}).save_pretrained({folder:?})`")
    } else {
        format!("copy tokenizer.json from where the model came from, or set {option} to a folder that has one")
    };
    Mistake { what: format!("`{}` does not exist", file.display()), hint: Some(hint) }
}

/// Refuses a folder without a model, and a model that reads no text. A missing tokenizer would say less about either.
fn check_reads_text(path: &Path) -> Result<(), Failure> {
    let folder = ModelFolder::open(path, None)?;
    match Config::from_json(folder.base.config()) {
        Ok(Config { input: Input::Images { .. }, .. }) => {
            Err(mismatch(&format!("the model in `{}` classifies images", path.display()), "text").into())
        }
        _ => Ok(()),
    }
}

fn mismatch(model: &str, data: &str) -> Mistake {
    Mistake {
        what: format!("{model}, the data are {data}"),
        hint: Some("choose another model, or another data.source".to_owned()),
    }
}

/// A loader as a feed; `take` makes a micro-batch of the loader's items.
struct LoaderFeed<Item, Take> {
    loader: Loader<Item>,
    take: Take,
    time_s: u64,
    data: Fingerprint,
}

impl<Item: Send + 'static, Take> Feed for LoaderFeed<Item, Take>
where
    Take: FnMut(&mut Loader<Item>) -> Result<Option<Samples>, Error>,
{
    fn next(&mut self) -> Result<Option<Samples>, Error> {
        (self.take)(&mut self.loader)
    }

    fn progress(&self) -> Option<f64> {
        self.loader.progress()
    }

    fn epoch(&self) -> f64 {
        self.loader.epoch()
    }

    fn counts(&self) -> RecordCounts {
        self.loader.counts()
    }

    fn take_notes(&mut self) -> Vec<String> {
        self.loader.take_skipped().iter().map(|error| format!("skipped a bad record: {error}")).collect()
    }

    fn state(&self) -> serde_json::Value {
        let state = FeedState { place: self.loader.state(), time_s: self.time_s, data: self.data.clone() };
        serde_json::to_value(state).expect("a state is a few numbers and texts")
    }
}

/// A feed whose first samples are already loaded.
pub struct Primed {
    first: Option<Samples>,
    feed: Box<dyn Feed>,
    /// Values before the first samples.
    progress: Option<f64>,
    epoch: f64,
    state: serde_json::Value,
}

impl Primed {
    pub fn new(mut feed: Box<dyn Feed>) -> Result<Primed, Error> {
        let (progress, epoch, state) = (feed.progress(), feed.epoch(), feed.state());
        let first = first_of(&mut *feed)?;
        Ok(Primed { first, feed, progress, epoch, state })
    }
}

/// The first samples. On an error, the notes before it are printed.
pub fn first_of(feed: &mut dyn Feed) -> Result<Option<Samples>, Error> {
    feed.next().inspect_err(|_| feed.take_notes().iter().for_each(|note| warn(note)))
}

impl Feed for Primed {
    fn next(&mut self) -> Result<Option<Samples>, Error> {
        match self.first.take() {
            None => self.feed.next(),
            first => Ok(first),
        }
    }

    fn progress(&self) -> Option<f64> {
        if self.first.is_some() { self.progress } else { self.feed.progress() }
    }

    fn epoch(&self) -> f64 {
        if self.first.is_some() { self.epoch } else { self.feed.epoch() }
    }

    fn counts(&self) -> RecordCounts {
        self.feed.counts()
    }

    fn take_notes(&mut self) -> Vec<String> {
        self.feed.take_notes()
    }

    fn state(&self) -> serde_json::Value {
        if self.first.is_some() { self.state.clone() } else { self.feed.state() }
    }
}

fn take_rows(loader: &mut Loader<Row>, batch: usize) -> Result<Option<Samples>, Error> {
    let (mut ids, mut labels, mut segment_lengths) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..batch {
        let Some(row) = loader.next()? else { break };
        ids.extend(row.ids);
        labels.extend(row.labels);
        segment_lengths.extend(row.segment_lengths);
    }
    Ok((!ids.is_empty()).then_some(Samples::Tokens { ids, labels, segment_lengths }))
}

/// A row's texts, each with the label that its first token has; padding has none.
fn take_texts(loader: &mut Loader<Row>, batch: usize) -> Result<Option<Samples>, Error> {
    let (mut ids, mut types, mut labels, mut segment_lengths) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..batch {
        let Some(row) = loader.next()? else { break };
        let firsts = row.segment_lengths.iter().scan(0, |end, &length| {
            *end += length;
            Some(*end - length)
        });
        labels.extend(firsts.map(|first| row.labels[first]));
        ids.extend(row.ids);
        types.extend(row.types);
        segment_lengths.extend(row.segment_lengths);
    }
    assert_eq!(types.len(), ids.len(), "a type for each token of a labelled text");
    Ok((!ids.is_empty()).then_some(Samples::Texts { ids, types, labels, segment_lengths }))
}

fn take_images(loader: &mut Loader<ImageBatch>) -> Result<Option<Samples>, Error> {
    Ok(loader.next()?.map(|ImageBatch { pixels, labels }| Samples::Images { pixels, labels }))
}
