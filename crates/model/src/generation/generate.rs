//! Text from a model: the chain runs on new tokens only, which attend to cached keys and values.
//!
//! No architecture has code of its own here. A batch that continues cached sequences says so itself: its positions
//! begin where the cache ends, and its attention reads the cache (see `op`).

use evenkeel_device::kernel::Segments;
use evenkeel_device::{Queue, Tensor};

use crate::chain::batch::Batch;
use crate::chain::body::Context;
use crate::chain::model::Model;
use crate::chain::pass;
use crate::chain::rotary::RotaryTables;
use crate::config::Input;
use crate::generation::cache::Cache;
use crate::generation::sampling::{Sampling, SamplingError};
use crate::parameters::Parameters;

/// More tokens than any model was trained on; positions also fit a u32 with room to spare.
const LARGEST_CACHE: usize = 1 << 28;

/// B sequences in progress on one rank.
pub struct Generator<'a> {
    model: &'a Model,
    parameters: &'a Parameters,
    queue: &'a Queue,
    tables: RotaryTables,
    cache: Cache,
}

/// How tokens are chosen, and when a text ends.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    pub sampling: Sampling,
    /// New tokens per sequence at most.
    pub max_tokens: usize,
    /// Tokens that end a text.
    pub end_tokens: Vec<u32>,
    /// If set, only tokens below it are chosen: a model may have more rows than its tokenizer has tokens.
    pub vocabulary: Option<usize>,
}

/// The text that followed a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// Without the prompt; the token that ended the text is the last.
    pub tokens: Vec<u32>,
    pub finished: Finish,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    EndToken,
    MaxTokens,
    /// The cache has no room for the last token, so nothing can follow it.
    CacheFull,
}

#[derive(Debug, PartialEq, thiserror::Error)]
pub enum GenerateError {
    #[error("a `{model_type}` model reads images and generates no text")]
    NotText { model_type: &'static str },
    #[error("a cache for {sequences} sequences of {capacity} tokens; expected 1 to {LARGEST_CACHE} tokens in all")]
    CacheSize { sequences: usize, capacity: usize },
    #[error("{capacity} tokens, those of the prompt included; the model has positions for {positions}")]
    Positions { capacity: usize, positions: usize },
    #[error("{found} lists of tokens for {expected} sequences")]
    WrongCount { found: usize, expected: usize },
    #[error("prompt {sequence} is empty")]
    EmptyPrompt { sequence: usize },
    #[error("sequence {sequence}: token {token} is outside the vocabulary of {vocabulary}")]
    UnknownToken { sequence: usize, token: u32, vocabulary: usize },
    #[error("sequence {sequence} has {cached} tokens cached and {new} new; the cache holds {capacity}")]
    TooLong { sequence: usize, cached: usize, new: usize, capacity: usize },
    #[error("sequence {sequence}: the logits for position {position} hold no number to choose")]
    NotFinite { sequence: usize, position: usize },
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}

impl GenerateError {
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            GenerateError::EmptyPrompt { .. } => {
                Some("give it a text, or begin with the tokenizer's token for the beginning of one")
            }
            GenerateError::UnknownToken { .. } => Some("the tokenizer and the model are from different folders"),
            GenerateError::TooLong { .. } => Some("make the cache larger or the prompt shorter"),
            GenerateError::NotFinite { .. } => Some("the weights are broken, or bf16 overflowed: try f32"),
            _ => None,
        }
    }
}

impl<'a> Generator<'a> {
    /// Room for `sequences` texts of `capacity` tokens each, prompts included; the last token of a text needs none. The
    /// memory is taken here.
    pub fn new(
        model: &'a Model,
        parameters: &'a Parameters,
        queue: &'a Queue,
        sequences: usize,
        capacity: usize,
    ) -> Result<Generator<'a>, GenerateError> {
        assert!(!model.shard.is_shared_by_samples(), "heads that shards share by samples have no cache");
        let Input::Tokens { learned_positions } = model.config.input else {
            return Err(GenerateError::NotText { model_type: model.config.family.model_type });
        };
        if !sequences.checked_mul(capacity).is_some_and(|tokens| (1..=LARGEST_CACHE).contains(&tokens)) {
            return Err(GenerateError::CacheSize { sequences, capacity });
        }
        if let Some(positions) = learned_positions.filter(|&positions| positions < capacity) {
            return Err(GenerateError::Positions { capacity, positions });
        }
        let cache = Cache::new(model, parameters.dtype(), queue, sequences, capacity);
        let tables = RotaryTables::new(&model.config, queue, capacity);
        Ok(Generator { model, parameters, queue, tables, cache })
    }

    /// The tokens that each sequence holds.
    pub fn lengths(&self) -> &[usize] {
        &self.cache.lengths
    }

    /// Clears the cache and reads one prompt for each sequence. Returns as [`Generator::extend`] does.
    pub fn prefill<P: AsRef<[u32]>>(&mut self, prompts: &[P]) -> Result<Tensor, GenerateError> {
        if let Some(sequence) = prompts.iter().position(|prompt| prompt.as_ref().is_empty()) {
            return Err(GenerateError::EmptyPrompt { sequence });
        }
        let before = self.cache.lengths.clone();
        self.cache.lengths = vec![0; before.len()].into();
        self.extend(prompts).inspect_err(|_| self.cache.lengths = before)
    }

    /// Adds one token to each sequence. Returns as [`Generator::extend`] does.
    pub fn step(&mut self, tokens: &[u32]) -> Result<Tensor, GenerateError> {
        self.extend(&tokens.chunks(1).collect::<Vec<_>>())
    }

    /// Adds any number of tokens to each sequence. Returns the logits of the tokens that follow them, f32 [sequences that got
    /// tokens, vocabulary], in the sequences' order. An error changes nothing.
    pub fn extend<P: AsRef<[u32]>>(&mut self, tokens: &[P]) -> Result<Tensor, GenerateError> {
        self.check(tokens)?;
        if self.cache.lengths.iter().all(|&length| length == 0) {
            self.cache.forget(self.queue);
        }
        let mut offsets = vec![0];
        let mut ids = Vec::new();
        for tokens in tokens {
            ids.extend_from_slice(tokens.as_ref());
            offsets.push(ids.len());
        }
        let batch = Batch::continuing(self.queue, &ids, Segments::new(offsets), self.cache.clone());
        let Generator { model, parameters, queue, ref tables, .. } = *self;
        let logits = pass::next_logits(model, &Context { queue, parameters, tables, batch: &batch, pruning: None });
        let lengths = self.cache.lengths.iter().zip(tokens);
        self.cache.lengths = lengths.map(|(length, tokens)| length + tokens.as_ref().len()).collect();
        Ok(logits)
    }

    fn check<P: AsRef<[u32]>>(&self, tokens: &[P]) -> Result<(), GenerateError> {
        let (capacity, vocabulary) = (self.cache.capacity, self.model.config.classes);
        if tokens.len() != self.cache.lengths.len() {
            return Err(GenerateError::WrongCount { found: tokens.len(), expected: self.cache.lengths.len() });
        }
        for (sequence, (tokens, &cached)) in tokens.iter().zip(self.cache.lengths.iter()).enumerate() {
            let (tokens, new) = (tokens.as_ref(), tokens.as_ref().len());
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
                return Err(GenerateError::UnknownToken { sequence, token, vocabulary });
            }
            if new > capacity - cached {
                return Err(GenerateError::TooLong { sequence, cached, new, capacity });
            }
        }
        Ok(())
    }

    /// Continues every prompt until it ends. Calls `on_token(sequence, token)` with each token as it is chosen.
    pub fn generate<P: AsRef<[u32]>>(
        &mut self,
        prompts: &[P],
        options: &GenerateOptions,
        mut on_token: impl FnMut(usize, u32),
    ) -> Result<Vec<Generated>, GenerateError> {
        options.sampling.check()?;
        let mut logits = self.prefill(prompts)?;
        let finished = if options.max_tokens == 0 { Some(Finish::MaxTokens) } else { None };
        let mut texts = vec![Text { tokens: Vec::new(), finished }; prompts.len()];
        while texts.iter().any(|text| text.finished.is_none()) {
            let rows = self.queue.read(&logits);
            let mut rows = rows.chunks_exact(self.model.config.classes);
            let mut next = vec![None; texts.len()];
            for (sequence, text) in texts.iter_mut().enumerate().filter(|(_, text)| text.finished.is_none()) {
                let (row, position) = (rows.next().expect("a row for each unfinished text"), self.lengths()[sequence]);
                let row = &row[..options.vocabulary.map_or(row.len(), |tokens| tokens.min(row.len()))];
                let token = options.sampling.choose(row, sequence, position);
                let token = token.ok_or(GenerateError::NotFinite { sequence, position })?;
                text.tokens.push(token);
                text.finished = options.finish(token, text.tokens.len(), position == self.cache.capacity);
                on_token(sequence, token);
                next[sequence] = text.finished.is_none().then_some(token);
            }
            if next.iter().any(Option::is_some) {
                logits = self.extend(&next.iter().map(Option::as_slice).collect::<Vec<_>>())?;
            }
        }
        let ended =
            |text: Text| Generated { tokens: text.tokens, finished: text.finished.expect("the loop has ended") };
        Ok(texts.into_iter().map(ended).collect())
    }
}

/// A text in progress.
#[derive(Clone)]
struct Text {
    tokens: Vec<u32>,
    finished: Option<Finish>,
}

impl GenerateOptions {
    /// Whether a text of `count` new tokens ends with this one.
    fn finish(&self, token: u32, count: usize, full: bool) -> Option<Finish> {
        if self.end_tokens.contains(&token) {
            return Some(Finish::EndToken);
        }
        if count == self.max_tokens {
            return Some(Finish::MaxTokens);
        }
        full.then_some(Finish::CacheFull)
    }
}
