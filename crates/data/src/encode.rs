//! Records to documents: which columns are read, how they become text, and which tokens the loss counts.

use std::ops::Range;

use serde_json::{Map, Value, json};

use crate::IGNORE;
use crate::alpaca::alpaca_prompt;
use crate::conversation;
use crate::error::{Error, printable};
use crate::order::Cursor;
use crate::pipeline::Decode;
use crate::source::Record;
use crate::template::Template;
use crate::tokenizer::{Tokenizer, Whole, kind};

/// The contents of a record's columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// A plain text; every token counts.
    Text { column: String },
    /// A conversation, a list of `{"role": …, "content": …}`, and the tools that may be called in it; the assistant's turns
    /// count. The tools may be missing if their column has the usual name.
    Messages { column: String, tools: String },
    /// A task, its input, and the answer, which counts. The input may be empty, and missing if its column has the usual name.
    Instruction { instruction: String, input: String, output: String },
    /// A text, perhaps a second one, and the label of both.
    Labelled { text: String, second: Option<String>, label: String, labels: Labels },
}

/// The labels that a classifier of texts knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    pub count: usize,
    /// Their names, by number; none if they have no names.
    pub names: Vec<String>,
    /// Types of tokens that the classifier knows.
    pub types: usize,
    /// Tokens that a text may have.
    pub sequence: usize,
}

/// Columns that may be missing, unless they were given another name.
pub const OPTIONAL_COLUMNS: [&str; 2] = ["input", "tools"];

/// The tokens of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    pub ids: Vec<u32>,
    /// The token that should follow each token, or [`IGNORE`]; always that for the last. A labelled text has its label in the
    /// place of its first token's.
    pub labels: Vec<u32>,
    /// The types of the tokens of a labelled text; empty otherwise.
    pub types: Vec<u32>,
    /// Whether the record was longer and has lost its end.
    pub is_cut: bool,
}

/// Turns records into documents.
pub struct Encoder {
    tokenizer: Tokenizer,
    template: Option<Template>,
    format: Format,
    /// The model's.
    vocabulary: usize,
}

impl Document {
    /// Every token but the first is to be predicted.
    pub fn plain(ids: Vec<u32>) -> Document {
        let labels = ids.iter().skip(1).copied().chain((!ids.is_empty()).then_some(IGNORE)).collect();
        Document { ids, labels, ..Document::default() }
    }

    /// The tokens that are `counted` are to be predicted.
    fn masked(ids: Vec<u32>, counted: &[bool]) -> Document {
        let mut document = Document::plain(ids);
        for (label, &counted) in document.labels.iter_mut().zip(counted.iter().skip(1)) {
            if !counted {
                *label = IGNORE;
            }
        }
        document
    }

    fn has_labels(&self) -> bool {
        self.labels.iter().any(|&label| label != IGNORE)
    }
}

impl Encoder {
    /// `vocabulary` is the model's; [`Format::Messages`] needs a `template`, and [`Format::Instruction`] without one uses
    /// Stanford Alpaca's prompt.
    pub fn new(
        tokenizer: Tokenizer,
        template: Option<Template>,
        format: Format,
        vocabulary: usize,
    ) -> Result<Encoder, Error> {
        if let (Format::Messages { column, .. }, None) = (&format, &template) {
            return Err(Error::NoTemplate { column: column.clone() });
        }
        let needed = [tokenizer.padding(), tokenizer.end().unwrap_or(0)];
        if let Some(id) = needed.into_iter().find(|&id| id as usize >= vocabulary) {
            return Err(Error::IdBeyondVocabulary { id, vocabulary });
        }
        Ok(Encoder { tokenizer, template, format, vocabulary })
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tokens of a record; `None` if there is nothing to learn from it.
    pub fn encode(&self, record: &Record) -> Result<Option<Document>, Error> {
        let document = match (record, &self.format) {
            (Record::Text(text), Format::Text { .. }) => self.plain(text)?,
            (Record::Fields(fields), Format::Text { column }) => self.plain(text(fields, column)?)?,
            (Record::Fields(fields), Format::Messages { column, tools }) => self.conversation(fields, column, tools)?,
            (Record::Fields(fields), Format::Instruction { instruction, input, output }) => {
                let input = match optional(fields, input)? {
                    None => None,
                    Some(value) => Some(value.as_str().ok_or_else(|| wrong(input, "a text", value))?),
                };
                let input = input.filter(|input| !input.is_empty());
                self.instruction(text(fields, instruction)?, input, text(fields, output)?)?
            }
            (Record::Fields(fields), Format::Labelled { text: column, second, label, labels }) => {
                let second = second.as_ref().map(|column| text(fields, column)).transpose()?;
                let number = labels.number(get(fields, label)?)?;
                self.labelled(text(fields, column)?, second, number, labels)?
            }
            (Record::Text(_), _) => {
                return Err(Error::WrongRecord { expected: "a row of columns", found: "a plain text" });
            }
            (Record::Image { .. }, _) => return Err(Error::WrongRecord { expected: "text", found: "an image" }),
        };
        if let Some(&id) = document.ids.iter().find(|&&id| id as usize >= self.vocabulary) {
            return Err(Error::IdBeyondVocabulary { id, vocabulary: self.vocabulary });
        }
        Ok(document.has_labels().then_some(document))
    }

    fn plain(&self, text: &str) -> Result<Document, Error> {
        let mut ids = self.tokenizer.encode(text, true)?;
        if let Some(end) = self.tokenizer.end().filter(|end| ids.last() != Some(end)) {
            ids.push(end);
        }
        Ok(Document::plain(ids))
    }

    fn labelled(&self, text: &str, second: Option<&str>, label: u32, labels: &Labels) -> Result<Document, Error> {
        let Whole { ids, types, is_cut } = self.tokenizer.encode_whole(text, second, labels.sequence)?;
        if let Some(&found) = types.iter().find(|&&found| found as usize >= labels.types) {
            return Err(Error::TypeBeyondModel { found, types: labels.types });
        }
        let labels = std::iter::once(label).chain(std::iter::repeat(IGNORE)).take(ids.len()).collect();
        Ok(Document { ids, labels, types, is_cut })
    }

    fn instruction(&self, instruction: &str, input: Option<&str>, output: &str) -> Result<Document, Error> {
        if let Some(template) = &self.template {
            let asked = conversation::instruction(instruction, input);
            let messages = [("user", &*asked), ("assistant", output)];
            let messages = messages.map(|(role, content)| json!({ "role": role, "content": content }));
            return self.spoken(template, &messages, None);
        }
        let mut text = alpaca_prompt(instruction, input);
        let start = text.len();
        text.push_str(output);
        let answer = start..text.len();
        self.spans(&text, std::slice::from_ref(&answer), true, true)
    }

    fn conversation(&self, fields: &Map<String, Value>, column: &str, tools: &str) -> Result<Document, Error> {
        let value = get(fields, column)?;
        let messages = value.as_array().ok_or_else(|| wrong(column, "a list of messages", value))?;
        let tools = optional(fields, tools)?.map(|value| conversation::tools(tools, value)).transpose()?.flatten();
        self.spoken(self.template.as_ref().expect("checked by Encoder::new"), messages, tools.as_ref())
    }

    fn spoken(&self, template: &Template, messages: &[Value], tools: Option<&Value>) -> Result<Document, Error> {
        let turns = template.turns(&conversation::messages(messages, template)?, tools)?;
        // A template writes the model's own end of turn. Bytes have no text for theirs, so it is appended.
        let add_end = matches!(self.tokenizer, Tokenizer::Bytes);
        self.spans(&turns.text, &turns.assistant, false, add_end)
    }

    /// The document of a text in which the tokens of `spans` count, and the end behind the last of them.
    fn spans(&self, text: &str, spans: &[Range<usize>], added: bool, add_end: bool) -> Result<Document, Error> {
        let encoded = self.tokenizer.encode_with_ranges(text, added)?;
        let (mut ids, end) = (encoded.ids, self.tokenizer.end());
        let mut counted = counted(&encoded.ranges, spans);
        let ends_in_span = spans.last().is_some_and(|span| span.end == text.len());
        if end.is_some() && ids.last().copied() == end {
            // The tokenizer may have put it there by itself; then it stands for no bytes.
            if let Some(last) = counted.last_mut() {
                *last |= ends_in_span;
            }
        } else if let Some(end) = end.filter(|_| add_end) {
            ids.push(end);
            counted.push(ends_in_span);
        }
        Ok(Document::masked(ids, &counted))
    }
}

impl Decode for Encoder {
    type Piece = Document;

    fn decode(&self, record: Record, _: Cursor) -> Result<Option<Document>, Error> {
        self.encode(&record)
    }

    fn bytes(document: &Document) -> usize {
        let Document { ids, labels, types, .. } = document;
        [ids, labels, types].map(|numbers| size_of_val(&numbers[..])).iter().sum()
    }
}

impl Labels {
    /// The label that a column holds: its number, or its name.
    fn number(&self, value: &Value) -> Result<u32, Error> {
        let named = |name: &str| self.names.iter().position(|other| other == name);
        let found = match value {
            // Tables without types have numbers as texts.
            Value::String(name) => named(name).or_else(|| name.trim().parse().ok()),
            Value::Bool(label) => Some(usize::from(*label)),
            Value::Number(number) => {
                let label = number.as_u64().and_then(|number| usize::try_from(number).ok());
                if named(&number.to_string()).is_some_and(|of_name| Some(of_name) != label) {
                    let expected = format!("a text: {number} is the name of another label than the one of that number");
                    return Err(Error::UnknownLabel { found: number.to_string(), expected });
                }
                label
            }
            _ => None,
        };
        let found = found.filter(|&label| label < self.count).and_then(|label| u32::try_from(label).ok());
        found.ok_or_else(|| Error::UnknownLabel { found: printable(&value.to_string()), expected: self.described() })
    }

    fn described(&self) -> String {
        const SHOWN: usize = 8;
        let numbers = format!("a number from 0 to {}", self.count - 1);
        let shown: Vec<String> = self.names.iter().take(SHOWN).map(|name| format!("\"{}\"", printable(name))).collect();
        match self.names.len() {
            0 => numbers,
            names if names > SHOWN => format!("{numbers}, or one of {names} names: {}, …", shown.join(", ")),
            _ => format!("{numbers}, or {}", shown.join(", ")),
        }
    }
}

/// Whether each token lies in a span. A token on a span's edge counts: the model has to say it to speak at all.
fn counted(ranges: &[Range<usize>], spans: &[Range<usize>]) -> Vec<bool> {
    let mut span = 0;
    let inside = |range: &Range<usize>| {
        // Tokens come in the text's order, and so do spans.
        while spans.get(span).is_some_and(|span| span.end <= range.start && span.end < range.end) {
            span += 1;
        }
        let Some(span) = spans.get(span) else { return false };
        if range.is_empty() {
            // Spaces whose offsets a tokenizer trimmed: the token ends at its place.
            span.start < range.start && range.start <= span.end
        } else {
            range.start < span.end && span.start < range.end
        }
    };
    ranges.iter().map(inside).collect()
}

fn text<'a>(fields: &'a Map<String, Value>, column: &str) -> Result<&'a str, Error> {
    let value = get(fields, column)?;
    value.as_str().ok_or_else(|| wrong(column, "a text", value))
}

/// The value of a column that may be missing if it has its usual name; a column with another name was asked for.
fn optional<'a>(fields: &'a Map<String, Value>, column: &str) -> Result<Option<&'a Value>, Error> {
    let value = if OPTIONAL_COLUMNS.contains(&column) { fields.get(column) } else { Some(get(fields, column)?) };
    Ok(value.filter(|value| !value.is_null()))
}

fn get<'a>(fields: &'a Map<String, Value>, column: &str) -> Result<&'a Value, Error> {
    let missing = || Error::MissingColumn { column: column.to_owned(), found: fields.keys().cloned().collect() };
    fields.get(column).ok_or_else(missing)
}

fn wrong(column: &str, expected: &'static str, found: &Value) -> Error {
    Error::WrongColumn { column: column.to_owned(), expected, found: kind(found) }
}
