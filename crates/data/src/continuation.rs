//! The text of tokens that come one after another.

use crate::{Error, Tokenizer};

/// The text that tokens add to a prompt, as far as it is certain. Everything is decoded together: decoders drop the space before the
/// first word of a text, and a character may take several tokens.
pub struct Continuation<'a> {
    tokenizer: &'a Tokenizer,
    /// The prompt's, and those that follow it.
    tokens: Vec<u32>,
    /// The text so far, the prompt's included.
    certain: String,
}

impl<'a> Continuation<'a> {
    pub fn after(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Continuation<'a>, Error> {
        Ok(Continuation { tokenizer, tokens: prompt.to_vec(), certain: tokenizer.decode(prompt)? })
    }

    /// The text that one more token makes certain; none if its last character may be incomplete.
    pub fn push(&mut self, token: u32) -> Result<String, Error> {
        self.tokens.push(token);
        let mut text = self.tokenizer.decode(&self.tokens)?;
        text.truncate(text.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        let Some(new) = text.strip_prefix(&self.certain).map(str::to_owned) else { return Ok(String::new()) };
        self.certain = text;
        Ok(new)
    }

    /// The rest of the text, with what is incomplete.
    pub fn finish(self) -> Result<String, Error> {
        let text = self.tokenizer.decode(&self.tokens)?;
        let is_same = |((_, one), other): &((usize, char), char)| one == other;
        let same = text.char_indices().zip(self.certain.chars()).take_while(is_same).last();
        Ok(text[same.map_or(0, |((start, last), _)| start + last.len_utf8())..].to_owned())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::TokenizerConfig;

    /// As Llama 2's: a space before every word, bytes for letters that it does not know, and a decoder that drops the first space.
    fn of_words() -> Tokenizer {
        let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
        let symbols = ["<unk>", "▁", "a", "b", "▁a", "▁b"].map(str::to_owned).into_iter().chain(bytes);
        let vocabulary: Map<String, Value> = symbols.enumerate().map(|(id, symbol)| (symbol, id.into())).collect();
        let space = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "pre_tokenizer": null,
            "post_processor": null,
            "normalizer": { "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, space(" ", "▁")] },
            "decoder": { "type": "Sequence", "decoders": [
                space("▁", " "), { "type": "ByteFallback" }, { "type": "Fuse" },
                { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
            ] },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocabulary, "merges": ["▁ a", "▁ b"],
            },
        });
        Tokenizer::hugging_face(json.to_string().as_bytes(), &TokenizerConfig::default()).unwrap()
    }

    /// The text of a prompt's decoding and of what follows, in the pieces in which it comes.
    fn pieces(tokenizer: &Tokenizer, prompt: &str, tokens: &[u32]) -> Vec<String> {
        let prompt = tokenizer.encode(prompt, true).unwrap();
        let mut continuation = Continuation::after(tokenizer, &prompt).unwrap();
        let mut pieces = vec![tokenizer.decode(&prompt).unwrap()];
        pieces.extend(tokens.iter().map(|&token| continuation.push(token).unwrap()));
        pieces.push(continuation.finish().unwrap());
        assert_eq!(pieces.concat(), tokenizer.decode(&[&prompt[..], tokens].concat()).unwrap());
        pieces
    }

    #[test]
    fn a_space_between_a_prompt_and_what_follows_is_kept() {
        let tokenizer = of_words();
        let words = tokenizer.encode("b a", true).unwrap();
        assert_eq!(tokenizer.decode(&words).unwrap(), "b a");
        assert_eq!(pieces(&tokenizer, "a", &words), ["a", " b", " a", ""]);
        assert_eq!(pieces(&tokenizer, "", &words), ["", "b", " a", ""]);
    }

    #[test]
    fn a_character_comes_when_all_its_tokens_are_there() {
        let crab: Vec<u32> = "🦀".bytes().map(|byte| 6 + u32::from(byte)).collect();
        assert_eq!(pieces(&of_words(), "a", &crab), ["a", "", "", "", "🦀", ""]);
        assert_eq!(pieces(&of_words(), "a", &crab[..2]), ["a", "", "", "\u{fffd}\u{fffd}"]);
        let crab: Vec<u32> = "🦀!".bytes().map(u32::from).collect();
        assert_eq!(pieces(&Tokenizer::Bytes, "é", &crab), ["é", "", "", "", "🦀", "!", ""]);
    }

    #[test]
    fn a_token_is_shown_with_its_space() {
        let tokenizer = of_words();
        let ids = tokenizer.encode("a b a", true).unwrap();
        let before = |place: usize| place.checked_sub(1).map(|before| ids[before]);
        let shown: Vec<String> =
            (0..ids.len()).map(|place| tokenizer.token(before(place), ids[place]).unwrap()).collect();
        assert_eq!(shown, ["a", " b", " a"]);
    }
}
