//! The byte tokenizer as the files that `transformers` reads, with the same ids.

use serde_json::{Map, Value, json};

const END: &str = "<|end|>";
const PADDING: &str = "<|pad|>";

/// tokenizer.json and tokenizer_config.json.
pub fn byte_tokenizer_files() -> (Value, Value) {
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
        "post_processor": null,
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

    #[test]
    fn the_files_give_the_ids_of_the_built_in_tokenizer() {
        let (tokenizer, config) = byte_tokenizer_files();
        let config = TokenizerConfig::parse(config.to_string().as_bytes()).unwrap();
        let read = Tokenizer::hugging_face(tokenizer.to_string().as_bytes(), &config).unwrap();
        let built_in = Tokenizer::Bytes;
        assert_eq!((read.vocabulary(), read.end()), (built_in.vocabulary(), built_in.end()));
        for text in ["12 + 7 = 19.\n", " two  spaces", "żółć 🚢\t\0\u{7f}", ""] {
            let ids = read.encode(text, true).unwrap();
            assert_eq!(ids, built_in.encode(text, true).unwrap(), "{text:?}");
            assert_eq!(read.decode(&ids).unwrap(), text);
        }
    }
}
