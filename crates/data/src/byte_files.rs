//! The byte tokenizer as the files that `transformers` reads, with the same ids.

use serde_json::{Map, Value, json};

const END: &str = "<|end|>";
const PADDING: &str = "<|pad|>";

/// tokenizer.json and tokenizer_config.json. With `wraps_texts`, texts begin and end as classifiers read them.
pub fn byte_tokenizer_files(wraps_texts: bool) -> (Value, Value) {
    let vocabulary: Map<String, Value> =
        letters().into_iter().enumerate().map(|(byte, letter)| (letter.to_string(), json!(byte))).collect();
    let special = |id: usize, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(256, END), special(257, PADDING)],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": if wraps_texts { wrapping() } else { Value::Null },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [],
        },
    });
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": false,
    });
    (tokenizer, config)
}

/// Ends around a text and behind a second one.
fn wrapping() -> Value {
    let end = |of_type: usize| json!({ "SpecialToken": { "id": END, "type_id": of_type } });
    let text = |name: &str, of_type: usize| json!({ "Sequence": { "id": name, "type_id": of_type } });
    json!({
        "type": "TemplateProcessing",
        "single": [end(0), text("A", 0), end(0)],
        "pair": [end(0), text("A", 0), end(0), text("B", 1), end(1)],
        "special_tokens": { END: { "id": END, "ids": [256], "tokens": [END] } },
    })
}

/// The letter that byte-level tokenizers write for each byte: itself if it can be seen, else one from 256 on.
fn letters() -> Vec<char> {
    let mut next = 256;
    let letter = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1).expect("a letter of the Latin extension")
        }
    };
    (0..=255).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Tokenizer, TokenizerConfig};

    fn read(wraps_texts: bool) -> Tokenizer {
        let (tokenizer, config) = byte_tokenizer_files(wraps_texts);
        let config = TokenizerConfig::parse(config.to_string().as_bytes()).unwrap();
        Tokenizer::hugging_face(tokenizer.to_string().as_bytes(), &config).unwrap()
    }

    #[test]
    fn the_files_of_a_classifier_wrap_texts_as_the_built_in_tokenizer_does() {
        let (read, built_in) = (read(true), Tokenizer::Bytes);
        for (text, second) in [("good", None), ("", None), ("a question?", Some("żółć")), ("longer", Some("than that"))]
        {
            for most in [7, 64] {
                let whole = |tokenizer: &Tokenizer| tokenizer.encode_whole(text, second, most).unwrap();
                let (found, expected) = (whole(&read), whole(&built_in));
                assert_eq!((found.ids, found.types), (expected.ids, expected.types), "{text:?} {second:?} {most}");
            }
        }
    }

    #[test]
    fn the_files_give_the_ids_of_the_built_in_tokenizer() {
        let read = read(false);
        let built_in = Tokenizer::Bytes;
        assert_eq!((read.vocabulary(), read.end()), (built_in.vocabulary(), built_in.end()));
        for text in ["12 + 7 = 19.\n", " two  spaces", "żółć 🚢\t\0\u{7f}", ""] {
            let ids = read.encode(text, true).unwrap();
            assert_eq!(ids, built_in.encode(text, true).unwrap(), "{text:?}");
            assert_eq!(read.decode(&ids).unwrap(), text);
        }
    }
}
