//! Texts that a model continues, to be looked at.

use evenkeel_device::Queue;
use evenkeel_model::{GenerateOptions, Generator, Model, Parameters, Sampling};
use evenkeel_train::Error;
use evenkeel_train::data::Tokenizer;

pub struct Prompts<'a> {
    /// Absent for images.
    pub tokenizer: Option<&'a Tokenizer>,
    pub texts: &'a [String],
    pub tokens: usize,
    pub sampling: Sampling,
}

impl Prompts<'_> {
    /// Each prompt with what the model makes of it, or why it makes nothing: a finished run does not fail for it.
    pub fn continue_all(&self, model: &Model, parameters: &Parameters, queue: &Queue) -> Vec<String> {
        let Some(tokenizer) = self.tokenizer else { return Vec::new() };
        let continued = |text: &String| {
            let outcome = self.continued(text, tokenizer, model, parameters, queue);
            outcome.unwrap_or_else(|error| format!("{text} ({error})"))
        };
        self.texts.iter().map(continued).collect()
    }

    fn continued(
        &self,
        text: &str,
        tokenizer: &Tokenizer,
        model: &Model,
        parameters: &Parameters,
        queue: &Queue,
    ) -> Result<String, Error> {
        let prompt = tokenizer.encode(text, true)?;
        let mut generator = Generator::new(model, parameters, queue, 1, prompt.len() + self.tokens)?;
        let end_tokens: Vec<u32> = tokenizer.end().into_iter().collect();
        let vocabulary = Some(tokenizer.vocabulary());
        let options = GenerateOptions { sampling: self.sampling, max_tokens: self.tokens, end_tokens, vocabulary };
        let generated = generator.generate(&[prompt], &options, |_, _| ())?.remove(0);
        let kept = generated.tokens.iter().copied().filter(|token| !options.end_tokens.contains(token));
        Ok(format!("{text}{}", tokenizer.decode(&kept.collect::<Vec<_>>())?))
    }
}
