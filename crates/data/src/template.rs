//! Chat templates: a conversation as the text a model was taught to read, and the assistant's part of it.
//!
//! A template is a program from a stranger. It runs with bounds on its steps, its recursion and its output, and it can
//! reach nothing but the conversation.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, eval, make_string_output, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{AutoEscape, Environment, ErrorKind, Value, context};

use crate::error::{Error, printable};
use crate::meter;
use crate::python::{check_depth, strftime, to_json};
use crate::tokenizer::TokenizerConfig;

/// Real templates take about a hundred steps a message.
const STEPS: u64 = 200_000;
/// A loop can wrap a list into a list at every step, and dropping or joining that takes one call a level: up to 1.3 kB each
/// without optimisation. Only the used part of the stack takes memory.
const STACK_BYTES: usize = 512 << 20;
const RECURSION: usize = 400;
const SOURCE_BYTES: usize = 1 << 20;
/// Most bytes of a template's own words. Real ones have up to some thousand bytes in a row.
const RAW_BYTES: usize = 1 << 30;
const MESSAGES: usize = 1000;

const NAME: &str = "chat_template";

/// A chat template, ready to render.
pub struct Template {
    environment: Environment<'static>,
    program: Program,
    /// For conversations with tools, if that is another one.
    tool_program: Option<Program>,
    begin_token: String,
    end_token: String,
    reads_parts: OnceLock<bool>,
}

/// A compiled source.
struct Program {
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

/// The time for `strftime_now`, in seconds since 1970. Clones share it: a run that is continued tomorrow must read the same text,
/// and learns from its checkpoint when it began.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl From<u64> for Clock {
    fn from(seconds: u64) -> Clock {
        Clock(Arc::new(AtomicU64::new(seconds)))
    }
}

impl Clock {
    pub fn seconds(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub fn set(&self, seconds: u64) {
        self.0.store(seconds, Ordering::Relaxed);
    }
}

/// A conversation's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    pub text: String,
    /// The bytes that the assistant says, turn by turn.
    pub assistant: Vec<Range<usize>>,
}

impl Template {
    pub fn new(source: &str, config: &TokenizerConfig, clock: impl Into<Clock>) -> Result<Template, Error> {
        let (mut environment, syntax) = environment(clock.into());
        let program = Program::new(source, &syntax)?;
        let tool_program = config.tool_template.as_ref().map(|source| Program::new(source, &syntax)).transpose()?;
        environment.set_fuel([Some(&program), tool_program.as_ref()].into_iter().flatten().map(Program::steps).min());
        Ok(Template {
            environment,
            program,
            tool_program,
            begin_token: config.begin_token.clone().unwrap_or_default(),
            end_token: config.end_token.clone().unwrap_or_default(),
            reads_parts: OnceLock::new(),
        })
    }

    /// The text of a conversation, with the words that make the assistant speak next if asked for.
    pub fn render(&self, messages: &[serde_json::Value], generation_prompt: bool) -> Result<String, Error> {
        on_deep_stack(|| self.render_values(&values(messages)?, &Value::from(()), generation_prompt))
    }

    /// Whether contents may be lists of parts: a part's text is written as the same text would be, or texts are not written at
    /// all.
    pub fn reads_parts(&self) -> bool {
        *self.reads_parts.get_or_init(|| {
            const TEXT: &str = "evenkeel";
            let said = |content: serde_json::Value| {
                let said = |role: &str| serde_json::json!({ "role": role, "content": content });
                let rendered = self.render(&[said("user"), said("assistant")], false).ok();
                rendered.filter(|text| text.matches(TEXT).count() == 2)
            };
            match said(serde_json::json!([{ "type": "text", "text": TEXT }])) {
                Some(parts) => said(TEXT.into()).is_none_or(|text| text == parts),
                None => false,
            }
        })
    }

    /// The text of a conversation, with the tools that may be called in it, and the assistant's part of it.
    ///
    /// A turn begins at the end of the text of the messages before it, with the words that make the assistant speak; it ends at
    /// the end of the text of the messages up to it. Both must be beginnings of the whole text.
    pub fn turns(&self, messages: &[serde_json::Value], tools: Option<&serde_json::Value>) -> Result<Turns, Error> {
        on_deep_stack(|| self.turns_here(messages, &tools.map_or(Value::from(()), |tools| Value::from(Serde(tools)))))
    }

    fn turns_here(&self, messages: &[serde_json::Value], tools: &Value) -> Result<Turns, Error> {
        let values = values(messages)?;
        let text = self.render_values(&values, tools, false)?;
        let beginning = |cut, generation_prompt| {
            let beginning = self.render_values(&values[..cut], tools, generation_prompt)?;
            beginning_of(&text, &beginning).map_err(|at| Error::NotPrefixStable { cut, messages: values.len(), at })
        };
        let mut assistant = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            if message["role"] != "assistant" {
                continue;
            }
            let start = beginning(index, true)?;
            let last = index + 1 == messages.len();
            let end = if last { text.len() } else { beginning(index + 1, false)? };
            if start > end {
                return Err(Error::NotPrefixStable { cut: index, messages: messages.len(), at: end });
            }
            assistant.push(start..end);
        }
        Ok(Turns { text, assistant })
    }

    fn render_values(&self, messages: &[Value], tools: &Value, generation_prompt: bool) -> Result<String, Error> {
        let program = self.tool_program.as_ref().filter(|_| !tools.is_none()).unwrap_or(&self.program);
        let context = context! {
            messages => messages,
            add_generation_prompt => generation_prompt,
            bos_token => self.begin_token.as_str(),
            eos_token => self.end_token.as_str(),
            tools => tools,
            documents => (),
        };
        meter::begin();
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        let rendered =
            eval(&self.environment, &program.instructions, context, &program.blocks, &mut out, AutoEscape::None)
                .map(drop);
        rendered.map_err(|error| self.failed(error))?;
        Ok(text)
    }

    fn failed(&self, error: minijinja::Error) -> Error {
        match error.kind() {
            ErrorKind::OutOfFuel => Error::TemplateEndless { steps: self.environment.fuel().unwrap_or(STEPS) },
            ErrorKind::WriteFailure => Error::TemplateOutput { limit_bytes: meter::exceeded() },
            _ => Error::Template { detail: printable(&explain(&error)) },
        }
    }
}

impl Program {
    fn new(source: &str, syntax: &SyntaxConfig) -> Result<Program, Error> {
        let bad = |detail: String| Error::BadTemplate { detail: printable(&detail) };
        if source.len() > SOURCE_BYTES {
            return Err(bad(format!("it is {} bytes long, the limit is {SOURCE_BYTES}", source.len())));
        }
        // The compiled template borrows from the source, and a run has one template as long as it lasts.
        let source: &'static str = with_late_products(&without_generation_tags(source), syntax).leak();
        let parsed = parse(source, NAME, syntax.clone()).map_err(|error| bad(explain(&error)))?;
        let mut generator = CodeGenerator::new(NAME, source);
        generator.compile_stmt(&parsed);
        let (mut instructions, mut blocks) = generator.finish();
        blocks.values_mut().chain([&mut instructions]).for_each(meter::replace_operators);
        Ok(Program { instructions, blocks })
    }

    /// The usual limit, or fewer steps if a template has so many words of its own that they could fill the memory.
    fn steps(&self) -> u64 {
        let all = |instructions: &Instructions| (0..).map_while(|at| instructions.get(at).map(raw_bytes)).max();
        let longest = self.blocks.values().chain([&self.instructions]).filter_map(all).max().unwrap_or(0);
        STEPS.min((RAW_BYTES / longest.max(1)) as u64)
    }
}

/// The length of `beginning` if the text begins with it, else the place where they differ.
fn beginning_of(text: &str, beginning: &str) -> Result<usize, usize> {
    if text.starts_with(beginning) {
        return Ok(beginning.len());
    }
    Err(text.bytes().zip(beginning.bytes()).take_while(|(a, b)| a == b).count())
}

fn raw_bytes(instruction: &Instruction) -> usize {
    if let Instruction::EmitRaw(text) = instruction { text.len() } else { 0 }
}

/// Products of constants are computed when a template is read, without a bound. With a variable of value 1 in between, they wait
/// until it is rendered.
fn with_late_products(source: &str, syntax: &SyntaxConfig) -> String {
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    for (token, span) in tokenize(source, false, syntax.clone()).map_while(Result::ok) {
        if matches!(token, Token::Mul) {
            let end = span.end_offset as usize;
            out.push_str(&source[copied..end]);
            out.push_str(meter::TIMES_ONE);
            copied = end;
        }
    }
    out.push_str(&source[copied..]);
    out
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
fn environment(clock: Clock) -> (Environment<'static>, SyntaxConfig) {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    meter::install(&mut environment);
    environment.set_recursion_limit(RECURSION);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(|out, state, value| {
        check_depth(value)?;
        meter::write(value)?;
        minijinja::escape_formatter(out, state, value)
    });
    environment.add_filter("tojson", |value: &Value, options: Kwargs| to_json(value, options));
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("it says: {message}")))
    });
    environment.add_function("strftime_now", move |format: String| {
        let unknown = || format!("strftime_now does not know the format `{format}`");
        strftime(clock.seconds(), &format).ok_or_else(|| minijinja::Error::new(ErrorKind::InvalidOperation, unknown()))
    });
    (environment, syntax.expect("Jinja's own delimiters"))
}

fn values(messages: &[serde_json::Value]) -> Result<Vec<Value>, Error> {
    if messages.len() > MESSAGES {
        return Err(Error::TooManyMessages { found: messages.len(), limit: MESSAGES });
    }
    Ok(messages.iter().map(|message| Value::from(Serde(message))).collect())
}

/// transformers marks the assistant's part with `{% generation %}`, a tag Jinja does not know. A condition that holds leaves the
/// same text, and the space around it to the same rules.
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

fn explain(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()));
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}
