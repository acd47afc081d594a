//! Errors in data, and their places.

use std::any::Any;
use std::fmt;

use evenkeel_store::Defect;

use crate::order::{Cursor, Subset};

/// A record's place in its source, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordAt {
    pub chunk: usize,
    pub record: usize,
}

impl fmt::Display for RecordAt {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "record {} of chunk {}", self.record, self.chunk)
    }
}

/// Why data cannot be read. [`Error::hint`] says what to do about it. Text quoted from data is shortened and has no control
/// characters.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] evenkeel_store::Error),

    #[error("tokenizer.json cannot be read: {detail}")]
    BadTokenizer { detail: String },
    #[error("tokenizer_config.json: {detail}")]
    BadTokenizerConfig { detail: String },
    #[error("tokenizer_config.json names `{token}` as {what}, tokenizer.json has no such token")]
    UnknownToken { what: &'static str, token: String },
    #[error("the tokenizer failed: {detail}")]
    Tokenizer { detail: String },
    #[error("token id {id} is beyond the vocabulary of {vocabulary}")]
    IdBeyondVocabulary { id: u32, vocabulary: usize },

    #[error("the chat template cannot be read: {detail}")]
    BadTemplate { detail: String },
    #[error("the chat template failed: {detail}")]
    Template { detail: String },
    #[error("the chat template did not end within {steps} steps")]
    TemplateEndless { steps: u64 },
    #[error("the chat template makes more than {limit_bytes} bytes of text")]
    TemplateOutput { limit_bytes: usize },
    #[error("a conversation has {found} messages, the limit is {limit}")]
    TooManyMessages { found: usize, limit: usize },
    #[error(
        "the chat template is not prefix-stable: with {cut} of {messages} messages it writes a text that the whole \
         conversation's does not begin with, from byte {at} on"
    )]
    NotPrefixStable { cut: usize, messages: usize, at: usize },

    #[error("{origin}: {error}")]
    At { origin: String, error: Box<Error> },
    #[error("has no column `{column}`; it has {}", list(found))]
    MissingColumn { column: String, found: Vec<String> },
    #[error("column `{column}` holds {found}, expected {expected}")]
    WrongColumn { column: String, expected: &'static str, found: &'static str },
    #[error("message {message} has no `{key}`; it has {}", list(found))]
    MissingKey { message: usize, key: &'static str, found: Vec<String> },
    #[error("message {message} is {found}, expected {expected}")]
    WrongMessage { message: usize, expected: &'static str, found: &'static str },
    #[error("message {message} has a part of type `{kind}`, but the model reads text alone")]
    NotText { message: usize, kind: String },
    #[error("is {found}, expected {expected}")]
    WrongRecord { expected: &'static str, found: &'static str },
    #[error("no chat template for column `{column}` of messages")]
    NoTemplate { column: String },

    #[error("is an image of {width} by {height} with {found_bytes} bytes, expected {expected}")]
    BadImage { width: usize, height: usize, found_bytes: usize, expected: String },
    #[error("has label {label}, the model has {classes} classes")]
    BadLabel { label: usize, classes: usize },

    #[error("has label {found}, expected {expected}")]
    UnknownLabel { found: String, expected: String },
    #[error("the tokenizer gives a token type {found}, the model has {types}")]
    TypeBeyondModel { found: u32, types: usize },

    #[error("the data files hold no records")]
    NoChunks,
    #[error("epoch {epoch} has no {part} record with anything in it{}", left_out(*skipped, *truncated))]
    NothingToRead { epoch: u64, part: Subset, skipped: u64, truncated: u64 },
    #[error("an epoch has more than {limit} bad records; the first of them: {first}")]
    TooManyBad { limit: u64, first: String },
    #[error("the {what} is {found}, expected {expected}")]
    BadOption { what: &'static str, found: String, expected: String },
    #[error("the saved dataset position is of other data or options")]
    OtherOrder,
    #[error("the run to resume had other data: {}", differences.join("; "))]
    OtherData { differences: Vec<String> },
    #[error("the saved dataset position is {cursor}, {detail}")]
    BadState { cursor: Cursor, detail: String },
    #[error("cannot start the thread `{name}`: {detail}")]
    Thread { name: String, detail: String },
    #[error("the thread `{thread}` panicked: {detail}")]
    Panicked { thread: String, detail: String },
    #[error("loading has stopped after an error")]
    Stopped,
}

impl Error {
    pub(crate) fn at(self, origin: String) -> Error {
        Error::At { origin, error: Box::new(self) }
    }

    pub(crate) fn panicked(thread: &str, payload: &(dyn Any + Send)) -> Error {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let detail = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Error::Panicked { thread: thread.to_owned(), detail: printable(detail) }
    }

    /// Whether the machine is at fault, rather than the contents of the data.
    pub fn is_fault(&self) -> bool {
        match self {
            Error::Store(error) => error.is_fault(),
            Error::At { error, .. } => error.is_fault(),
            Error::Thread { .. } => true,
            _ => false,
        }
    }

    /// Whether it is about one record, so that others may still be read.
    pub fn is_of_record(&self) -> bool {
        match self {
            Error::Store(error) => is_of_record(&error.defect),
            Error::At { error, .. } => error.is_of_record(),
            Error::Template { .. } | Error::TemplateEndless { .. } | Error::TemplateOutput { .. } => true,
            Error::TooManyMessages { .. } | Error::NotPrefixStable { .. } | Error::Tokenizer { .. } => true,
            Error::MissingColumn { .. } | Error::WrongColumn { .. } | Error::WrongRecord { .. } => true,
            Error::MissingKey { .. } | Error::WrongMessage { .. } | Error::NotText { .. } => true,
            Error::BadImage { .. } | Error::BadLabel { .. } | Error::UnknownLabel { .. } => true,
            _ => false,
        }
    }

    /// What to do about it, for the `hint:` line.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::Store(error) => match &error.defect {
                Defect::NoSuchColumn { present, .. } => return Some(hint_at_columns(present.split(", "))),
                _ => return error.hint().map(str::to_owned),
            },
            Error::At { error, .. } => return error.hint(),
            Error::BadTokenizer { .. } => "expected the file that `save_pretrained` of a fast tokenizer writes",
            Error::UnknownToken { .. } | Error::IdBeyondVocabulary { .. } => {
                "the tokenizer and the model are from different folders"
            }
            Error::TemplateEndless { .. } | Error::TemplateOutput { .. } => "does the template loop without end?",
            Error::NotPrefixStable { .. } => {
                "the template rewrites earlier turns, so the loss cannot be limited to the assistant's; \
                 use another template or a text column"
            }
            Error::UnknownLabel { .. } => {
                "name the labels in data.labels, by number; a model's own are in config.json (`id2label`)"
            }
            Error::TypeBeyondModel { .. } => "is data.tokenizer the model's own?",
            Error::MissingColumn { found, .. } => return Some(hint_at_columns(found.iter().map(String::as_str))),
            Error::WrongColumn { .. } => return Some(hint_at_columns([])),
            Error::NoTemplate { .. } => {
                "the tokenizer has no chat template: give one with data.chat_template, or use data.format = \"text\""
            }
            Error::NothingToRead { part: Subset::HeldOut, .. } => {
                "lower data.holdout, which holds back one record of so many, or give data.eval_paths"
            }
            Error::NothingToRead { skipped: 1.., .. } => {
                "look at the records that were named; data.on_bad_record = \"stop\" ends at the first"
            }
            Error::NothingToRead { truncated: 1.., .. } => {
                "prompts that fill a sequence leave no room for answers; raise data.sequence"
            }
            Error::TooManyBad { .. } => {
                "is this the right file, and data.format what it holds? data.bad_record_limit lets more be skipped"
            }
            Error::NothingToRead { .. } => "is every record empty, held out, or without an assistant's message?",
            Error::OtherData { .. } => {
                "give it the data and the options that it had, or begin another run in another --output"
            }
            Error::OtherOrder => "seed, shuffling, held-out share and files must stay the same to continue",
            Error::BadState { .. } => "the data or the tokenizer changed since the checkpoint was written",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// How records with these columns are read.
fn hint_at_columns<'a>(columns: impl IntoIterator<Item = &'a str>) -> String {
    let columns: Vec<&str> = columns.into_iter().collect();
    let has = |column: &str| columns.contains(&column);
    let format = if has("instruction") && has("output") {
        "these are instructions: set data.format = \"alpaca\""
    } else if has("label") && has("text") {
        "these are labelled texts: set data.format = \"labelled\""
    } else if has("messages") {
        "these are conversations: set data.format = \"messages\""
    } else if has("conversations") {
        "these are conversations: set data.format = \"messages\" and data.messages_column = \"conversations\""
    } else {
        "set data.format to what the records hold"
    };
    let columns = "data.text_column, data.second_text_column, data.label_column, data.messages_column, \
                   data.instruction_column, data.input_column, data.output_column";
    format!("{format}, or name the columns: {columns}")
}

fn is_of_record(defect: &Defect) -> bool {
    match defect {
        Defect::RecordNotUtf8 { .. } | Defect::RecordTooLong { .. } | Defect::RecordNotJson { .. } => true,
        Defect::RecordNotObject { .. } | Defect::UnknownLabel { .. } => true,
        // About a picture, which is a file of its own.
        Defect::NotAnImage { .. } | Defect::ImageTooLarge { .. } | Defect::FileTooLarge { .. } => true,
        _ => false,
    }
}

fn left_out(skipped: u64, truncated: u64) -> String {
    let told = [(skipped, "bad ones were skipped"), (truncated, "were cut at the length of a sequence")];
    told.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("; {count} {what}")).collect()
}

/// Text from data made safe to print.
pub(crate) fn printable(text: &str) -> String {
    evenkeel_store::shortened(text, 200)
}

fn list(names: &[String]) -> String {
    const SHOWN: usize = 16;
    if names.is_empty() {
        return "none".to_owned();
    }
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("`{}`", printable(name))).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_that_are_missing_hint_at_the_format_of_those_that_are_there() {
        let of_table = |present: &str| {
            let defect = Defect::NoSuchColumn { column: "text".to_owned(), present: present.to_owned() };
            Error::Store(evenkeel_store::Error { file: "a.parquet".into(), defect })
        };
        let of_record = |found: &[&str]| Error::MissingColumn {
            column: "text".to_owned(),
            found: found.iter().map(|name| (*name).to_owned()).collect(),
        };
        for (error, expected) in [
            (of_table("id, instruction, output"), "data.format = \"alpaca\","),
            (of_record(&["instruction", "output"]), "data.format = \"alpaca\","),
            (of_record(&["messages"]), "data.format = \"messages\","),
            (of_record(&["text", "label"]), "data.format = \"labelled\","),
            (of_table("conversations"), "data.messages_column = \"conversations\","),
            (of_record(&["instruction"]), "set data.format to what the records hold,"),
        ] {
            let hint = error.hint().unwrap_or_default();
            assert!(hint.contains(expected), "{error}: {hint}");
        }
    }
}
