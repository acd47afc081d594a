//! Text to token ids and back: bytes as they are, or a Hugging Face tokenizer.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;
use tokenizers::{Encoding, PostProcessor, TruncationParams, truncate_encodings};

use crate::error::{Error, printable};

const BYTES_END: u32 = 256;
const BYTES_PADDING: u32 = 257;
const BYTES_VOCABULARY: usize = 258;

/// Turns text into token ids.
pub enum Tokenizer {
    /// Ids 0 to 255 are bytes, 256 is the end of a text, 257 is padding.
    Bytes,
    HuggingFace(Box<HuggingFace>),
}

/// A tokenizer.json with its tokenizer_config.json.
pub struct HuggingFace {
    inner: tokenizers::Tokenizer,
    end: Option<u32>,
    /// One more than the largest id.
    vocabulary: usize,
}

/// The contents of tokenizer_config.json.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    pub begin_token: Option<String>,
    pub end_token: Option<String>,
    pub chat_template: Option<String>,
    /// For conversations with tools, if that is another one.
    pub tool_template: Option<String>,
}

/// Ids and the bytes of the text that each stands for. Tokens that the tokenizer adds, and spaces that it leaves out,
/// have empty ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub ids: Vec<u32>,
    pub ranges: Vec<Range<usize>>,
}

/// A text as a classifier reads it, perhaps with a second one, in the tokenizer's own template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Whole {
    pub ids: Vec<u32>,
    /// The type of each token: which of the texts it is of, if the model tells them apart.
    pub types: Vec<u32>,
    /// Whether it was longer than the tokenizer allows.
    pub is_cut: bool,
}

impl Tokenizer {
    /// From the bytes of a tokenizer.json. Its truncation and padding are not used.
    pub fn hugging_face(tokenizer_json: &[u8], config: &TokenizerConfig) -> Result<Tokenizer, Error> {
        let bad = |detail: String| Error::BadTokenizer { detail: printable(&detail) };
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(tokenizer_json)).map_err(bad)?;
        inner.with_truncation(None).map_err(|error| bad(error.to_string()))?;
        inner.with_padding(None);
        let largest = inner.get_vocab(true).into_values().max();
        let vocabulary = largest.map_or(0, |largest| largest as usize + 1);
        let end = match &config.end_token {
            None => None,
            Some(token) => Some(
                inner
                    .token_to_id(token)
                    .ok_or_else(|| Error::UnknownToken { what: "eos_token", token: printable(token) })?,
            ),
        };
        Ok(Tokenizer::HuggingFace(Box::new(HuggingFace { inner, end, vocabulary })))
    }

    /// The ids of a text. `added` asks for the tokens that a tokenizer puts around a whole text by itself.
    pub fn encode(&self, text: &str, added: bool) -> Result<Vec<u32>, Error> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::HuggingFace(tokenizer) => {
                let encoding = guarded(|| tokenizer.inner.encode_fast(text, added)).map_err(failed)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// A text as a classifier reads it, in at most so many tokens: of two, the longer loses its end first. Bytes have the end of a
    /// text before, between and behind texts.
    pub fn encode_whole(&self, text: &str, second: Option<&str>, most: usize) -> Result<Whole, Error> {
        match self {
            Tokenizer::Bytes => Ok(whole_bytes(text, second, most)),
            Tokenizer::HuggingFace(tokenizer) => guarded(|| tokenizer.encode_whole(text, second, most)).map_err(failed),
        }
    }

    pub fn encode_with_ranges(&self, text: &str, added: bool) -> Result<Encoded, Error> {
        match self {
            Tokenizer::Bytes => {
                Ok(Encoded { ids: self.encode(text, added)?, ranges: (0..text.len()).map(|at| at..at + 1).collect() })
            }
            Tokenizer::HuggingFace(tokenizer) => {
                let encoding = guarded(|| tokenizer.inner.encode(text, added)).map_err(failed)?;
                let ranges = encoding.get_offsets().iter().map(|&(start, end)| start..end).collect();
                Ok(Encoded { ids: encoding.get_ids().to_vec(), ranges })
            }
        }
    }

    /// The text of ids. Bytes that are not UTF-8 become replacement characters.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        let vocabulary = self.vocabulary();
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(Error::IdBeyondVocabulary { id, vocabulary });
        }
        match self {
            Tokenizer::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Tokenizer::HuggingFace(tokenizer) => guarded(|| tokenizer.inner.decode(ids, false)).map_err(failed),
        }
    }

    /// The text of one token, for people; `None` for an unknown id. A decoder drops the first space of a text, so the token before
    /// it is decoded with it.
    pub fn token(&self, before: Option<u32>, id: u32) -> Option<String> {
        match (self, id) {
            (Tokenizer::Bytes, BYTES_END) => return Some("<|end|>".to_owned()),
            (Tokenizer::Bytes, BYTES_PADDING) => return Some("<|pad|>".to_owned()),
            _ => (),
        }
        let in_place = || {
            let before = [before?];
            let both = self.decode(&[before[0], id]).ok()?;
            both.strip_prefix(&self.decode(&before).ok()?).map(str::to_owned)
        };
        in_place().or_else(|| self.decode(&[id]).ok())
    }

    /// The token that ends a text.
    pub fn end(&self) -> Option<u32> {
        match self {
            Tokenizer::Bytes => Some(BYTES_END),
            Tokenizer::HuggingFace(tokenizer) => tokenizer.end,
        }
    }

    /// Fills the last row of a run; no loss and no attention reaches it.
    pub fn padding(&self) -> u32 {
        match self {
            Tokenizer::Bytes => BYTES_PADDING,
            Tokenizer::HuggingFace(tokenizer) => tokenizer.end.unwrap_or(0),
        }
    }

    /// One more than the largest id.
    pub fn vocabulary(&self) -> usize {
        match self {
            Tokenizer::Bytes => BYTES_VOCABULARY,
            Tokenizer::HuggingFace(tokenizer) => tokenizer.vocabulary,
        }
    }
}

impl HuggingFace {
    fn encode_whole(&self, text: &str, second: Option<&str>, most: usize) -> tokenizers::Result<Whole> {
        let encoding = match second {
            None => self.inner.encode_fast(text, true)?,
            Some(second) => self.inner.encode_fast((text, second), true)?,
        };
        let whole = |encoding: &Encoding, is_cut: bool| Whole {
            ids: encoding.get_ids().to_vec(),
            types: encoding.get_type_ids().to_vec(),
            is_cut,
        };
        if encoding.len() <= most {
            return Ok(whole(&encoding, false));
        }
        // Its parts are cut before the template adds its tokens.
        let added = self.inner.get_post_processor().map_or(0, |template| template.added_tokens(second.is_some()));
        let max_length = most.checked_sub(added).filter(|&left| left > 0);
        let max_length =
            max_length.ok_or_else(|| format!("a text of {most} tokens has no room beside {added} added ones"))?;
        let part = |text: &str| self.inner.encode_fast(text, false);
        let (first, second) = (part(text)?, second.map(part).transpose()?);
        let cut = TruncationParams { max_length, ..TruncationParams::default() };
        let (first, second) = truncate_encodings(first, second, &cut)?;
        Ok(whole(&self.inner.post_process(first, second, true)?, true))
    }
}

fn whole_bytes(text: &str, second: Option<&str>, most: usize) -> Whole {
    let parts: Vec<&[u8]> = [Some(text), second].into_iter().flatten().map(str::as_bytes).collect();
    let room = most.saturating_sub(parts.len() + 1);
    let mut lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    let total: usize = lengths.iter().sum();
    for _ in room..total {
        let longest = (0..lengths.len()).max_by_key(|&part| lengths[part]).expect("there is a text");
        lengths[longest] -= 1;
    }
    let (mut ids, mut types) = (vec![BYTES_END], vec![0]);
    for (number, (part, &length)) in parts.iter().zip(&lengths).enumerate() {
        ids.extend(part[..length].iter().map(|&byte| u32::from(byte)).chain([BYTES_END]));
        types.resize(ids.len(), number as u32);
    }
    Whole { ids, types, is_cut: total > room }
}

impl TokenizerConfig {
    /// From the bytes of a tokenizer_config.json.
    pub fn parse(json: &[u8]) -> Result<TokenizerConfig, Error> {
        let bad = |detail: String| Error::BadTokenizerConfig { detail: printable(&detail) };
        let config: Value = serde_json::from_slice(json).map_err(|error| bad(format!("is not JSON: {error}")))?;
        if !config.is_object() {
            return Err(bad(format!("is {}, expected a table of options", kind(&config))));
        }
        let token = |key: &str| match &config[key] {
            Value::Null => Ok(None),
            Value::String(token) => Ok(Some(token.clone())),
            // An added token with its options.
            Value::Object(token) if token.get("content").is_some_and(Value::is_string) => {
                Ok(token["content"].as_str().map(str::to_owned))
            }
            other => Err(bad(format!("`{key}` is {}, expected a token", kind(other)))),
        };
        Ok(TokenizerConfig {
            begin_token: token("bos_token")?,
            end_token: token("eos_token")?,
            chat_template: chat_template(&config["chat_template"]).map_err(bad)?,
            tool_template: named_template(&config["chat_template"], "tool_use"),
        })
    }
}

/// The only template, or the one called `default` of several.
fn chat_template(value: &Value) -> Result<Option<String>, String> {
    match value {
        Value::Null => Ok(None),
        Value::String(template) => Ok(Some(template.clone())),
        Value::Array(_) => {
            let default = named_template(value, "default");
            default.map(Some).ok_or_else(|| "`chat_template` has no template `default`".to_owned())
        }
        other => Err(format!("`chat_template` is {}, expected a text", kind(other))),
    }
}

fn named_template(templates: &Value, name: &str) -> Option<String> {
    let named = templates.as_array()?.iter().find(|entry| entry["name"] == name)?;
    named["template"].as_str().map(str::to_owned)
}

/// The kind of a JSON value, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a table",
    }
}

fn failed(detail: String) -> Error {
    Error::Tokenizer { detail: printable(&detail) }
}

/// The crate panics on some malformed files; a stranger's tokenizer.json must not end the process.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the tokenizers library panicked".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_as_the_text_they_were() {
        for text in ["", "plain", "ünïcödé 🦀\n\0"] {
            let ids = Tokenizer::Bytes.encode(text, true).unwrap();
            assert_eq!(ids.len(), text.len());
            assert_eq!(Tokenizer::Bytes.decode(&ids).unwrap(), text);
        }
        assert_eq!(Tokenizer::Bytes.decode(&[b'a'.into(), 0xff, 256, 257]).unwrap(), "a\u{fffd}");
    }

    #[test]
    fn texts_of_bytes_stand_between_ends_and_the_longer_is_cut() {
        let whole = |second, most| Tokenizer::Bytes.encode_whole("abcd", second, most).unwrap();
        let [a, b, c, d, x, y] = *b"abcdxy";
        let [a, b, c, d, x, y] = [a, b, c, d, x, y].map(u32::from);
        let of = |ids: &[u32], types: &[u32], is_cut| Whole { ids: ids.to_vec(), types: types.to_vec(), is_cut };
        assert_eq!(whole(None, 6), of(&[256, a, b, c, d, 256], &[0; 6], false));
        assert_eq!(whole(None, 4), of(&[256, a, b, 256], &[0; 4], true));
        assert_eq!(whole(Some("xy"), 9), of(&[256, a, b, c, d, 256, x, y, 256], &[0, 0, 0, 0, 0, 0, 1, 1, 1], false));
        assert_eq!(whole(Some("xy"), 7), of(&[256, a, b, 256, x, y, 256], &[0, 0, 0, 0, 1, 1, 1], true));
        assert_eq!(whole(Some("xy"), 6), of(&[256, a, b, 256, x, 256], &[0, 0, 0, 0, 1, 1], true));
    }

    #[test]
    fn an_id_beyond_the_vocabulary_is_named_with_it() {
        let error = Tokenizer::Bytes.decode(&[1, 258]).unwrap_err().to_string();
        assert!(error.contains("258") && error.contains("vocabulary of 258"), "{error}");
    }

    #[test]
    fn config_tokens_may_be_texts_or_tables() {
        let config = TokenizerConfig::parse(
            br#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "chat_template":
                [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]}"#,
        );
        let expected = TokenizerConfig {
            begin_token: Some("<s>".into()),
            end_token: Some("</s>".into()),
            chat_template: Some("a".into()),
            tool_template: Some("b".into()),
        };
        assert_eq!(config.unwrap(), expected);
        assert_eq!(TokenizerConfig::parse(b"{\"bos_token\": null}").unwrap(), TokenizerConfig::default());
    }

    #[test]
    fn malformed_configs_say_what_is_wrong() {
        let cases: [(&[u8], &str); 5] = [
            (b"[]", "a list, expected a table"),
            (b"{", "not JSON"),
            (br#"{"eos_token": 7}"#, "`eos_token` is a number"),
            (br#"{"chat_template": {}}"#, "a table, expected a text"),
            (br#"{"chat_template": []}"#, "no template `default`"),
        ];
        for (json, expected) in cases {
            let error = TokenizerConfig::parse(json).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
