//! Chat templates: a conversation as the text a model was taught to read, and where in it the assistant speaks.
//!
//! A template is a program from a stranger. It runs with bounds on its steps, its recursion and its output, and it can
//! reach nothing but the conversation.

use std::ops::Range;
use std::thread;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{AutoEscape, Environment, ErrorKind, Value, context};

use super::error::{Error, printable};
use super::python::{Bounded, check_depth, strftime, to_json};
use super::tokenizer::TokenizerConfig;

/// Real templates take about a hundred steps a message.
const STEPS: u64 = 200_000;
/// A loop can wrap a list into a list at every step, and dropping or joining that takes one call a level: up to 1.3 kB
/// each without optimisation. Only what is used of the stack takes memory.
const STACK_BYTES: usize = 512 << 20;
const RECURSION: usize = 400;
const OUTPUT_BYTES: usize = 64 << 20;
const SOURCE_BYTES: usize = 1 << 20;
const MESSAGES: usize = 1000;

const NAME: &str = "chat_template";

/// A chat template, ready to render.
pub struct Template {
    environment: Environment<'static>,
    begin_token: String,
    end_token: String,
}

/// A conversation's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    pub text: String,
    /// The bytes that the assistant says, turn by turn.
    pub assistant: Vec<Range<usize>>,
}

impl Template {
    /// `now`, in seconds since 1970, is the time `strftime_now` tells. It is the caller's, because a run that is
    /// continued tomorrow must read the same text.
    pub fn new(source: &str, config: &TokenizerConfig, now: u64) -> Result<Template, Error> {
        let bad = |detail: String| Error::BadTemplate { detail: printable(&detail) };
        if source.len() > SOURCE_BYTES {
            return Err(bad(format!("it is {} bytes long, the limit is {SOURCE_BYTES}", source.len())));
        }
        let mut environment = environment(now);
        let source = without_generation_tags(source);
        environment.add_template_owned(NAME, source).map_err(|error| bad(explain(&error)))?;
        Ok(Template {
            environment,
            begin_token: config.begin_token.clone().unwrap_or_default(),
            end_token: config.end_token.clone().unwrap_or_default(),
        })
    }

    /// The text of a conversation, with the words that make the assistant speak next if asked for.
    pub fn render(&self, messages: &[serde_json::Value], generation_prompt: bool) -> Result<String, Error> {
        on_deep_stack(|| self.render_values(&values(messages)?, generation_prompt))
    }

    /// The text of a conversation and the assistant's part of it.
    ///
    /// A turn begins where the text of the messages before it, with the words that make the assistant speak, ends; it
    /// ends where the text of the messages up to it does. Both must be beginnings of the whole text.
    pub fn turns(&self, messages: &[serde_json::Value]) -> Result<Turns, Error> {
        on_deep_stack(|| self.turns_here(messages))
    }

    fn turns_here(&self, messages: &[serde_json::Value]) -> Result<Turns, Error> {
        let values = values(messages)?;
        let text = self.render_values(&values, false)?;
        let mut assistant = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            if message["role"] != "assistant" {
                continue;
            }
            let start = self.beginning(&text, &values, index, true)?;
            let last = index + 1 == messages.len();
            let end = if last { text.len() } else { self.beginning(&text, &values, index + 1, false)? };
            if start > end {
                return Err(Error::NotPrefixStable { cut: index, messages: messages.len(), at: end });
            }
            assistant.push(start..end);
        }
        Ok(Turns { text, assistant })
    }

    /// The length of the text of the first `cut` messages, which `text` must begin with.
    fn beginning(&self, text: &str, values: &[Value], cut: usize, generation_prompt: bool) -> Result<usize, Error> {
        let beginning = self.render_values(&values[..cut], generation_prompt)?;
        if text.starts_with(&beginning) {
            return Ok(beginning.len());
        }
        let at = text.bytes().zip(beginning.bytes()).take_while(|(a, b)| a == b).count();
        Err(Error::NotPrefixStable { cut, messages: values.len(), at })
    }

    fn render_values(&self, messages: &[Value], generation_prompt: bool) -> Result<String, Error> {
        let context = context! {
            messages => messages,
            add_generation_prompt => generation_prompt,
            bos_token => self.begin_token.as_str(),
            eos_token => self.end_token.as_str(),
            tools => (),
            documents => (),
        };
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let mut out = Bounded { bytes: Vec::new(), limit: OUTPUT_BYTES };
        template.render_captured_to(context, &mut out).map(drop).map_err(failed)?;
        String::from_utf8(out.bytes).map_err(|error| Error::Template { detail: error.to_string() })
    }
}

fn on_deep_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    const THREAD: &str = "data-template";
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(THREAD.to_owned()).stack_size(STACK_BYTES).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| Error::Thread { name: THREAD.to_owned(), detail: error.to_string() })?;
        thread.join().unwrap_or_else(|payload| Err(Error::panicked(THREAD, &*payload)))
    })
}

/// Jinja as transformers sets it up.
fn environment(now: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("Jinja's own delimiters"));
    environment.set_fuel(Some(STEPS));
    environment.set_recursion_limit(RECURSION);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, state, value| {
        check_depth(value)?;
        minijinja::escape_formatter(out, state, value)
    });
    environment.add_filter("tojson", |value: &Value, options: Kwargs| to_json(value, options));
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("it says: {message}")))
    });
    environment.add_function("strftime_now", move |format: String| {
        let unknown = || format!("strftime_now does not know the format `{format}`");
        strftime(now, &format).ok_or_else(|| minijinja::Error::new(ErrorKind::InvalidOperation, unknown()))
    });
    environment
}

fn values(messages: &[serde_json::Value]) -> Result<Vec<Value>, Error> {
    if messages.len() > MESSAGES {
        return Err(Error::TooManyMessages { found: messages.len(), limit: MESSAGES });
    }
    Ok(messages.iter().map(|message| Value::from(Serde(message))).collect())
}

/// transformers marks the assistant's part with `{% generation %}`, a tag Jinja does not know. A condition that holds
/// leaves the same text, and the space around it to the same rules.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, behind) = tag.split_at(end);
        match tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = behind;
    }
    out.push_str(rest);
    out
}

fn failed(error: minijinja::Error) -> Error {
    match error.kind() {
        ErrorKind::OutOfFuel => Error::TemplateEndless { steps: STEPS },
        ErrorKind::WriteFailure => Error::TemplateOutput { limit_bytes: OUTPUT_BYTES },
        _ => Error::Template { detail: printable(&explain(&error)) },
    }
}

fn explain(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()));
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}
