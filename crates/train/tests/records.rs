//! Records to documents: which tokens the loss counts, and what bad records are told.

mod chat;

use chat::{CHATML, HEADERS, config, messages, tokenizer, tokenizer_json};
use evenkeel_device::kernel::IGNORE;
use evenkeel_train::data::{Document, Encoder, Error, Format, Record, Template, Tokenizer, TokenizerConfig};
use serde_json::{Value, json};

fn text_format() -> Format {
    Format::Text { column: "text".into() }
}

fn messages_format() -> Format {
    Format::Messages { column: "messages".into() }
}

fn instruction_format() -> Format {
    Format::Instruction { instruction: "instruction".into(), input: "input".into(), output: "output".into() }
}

fn record(fields: Value) -> Record {
    let Value::Object(fields) = fields else { panic!("a table") };
    Record::Fields(fields)
}

fn encoder(tokenizer: Tokenizer, template: Option<&str>, format: Format) -> Encoder {
    let template = template.map(|source| Template::new(source, &config(), 0).unwrap());
    Encoder::new(tokenizer, template, format, 300).unwrap()
}

fn both() -> [Tokenizer; 2] {
    [Tokenizer::Bytes, tokenizer()]
}

/// The text of the tokens that labels ask for, with `|` where labels pause. Labels that are not the next token fail.
fn asked(tokenizer: &Tokenizer, document: &Document) -> String {
    let mut spans = vec![Vec::new()];
    for (index, &label) in document.labels.iter().enumerate() {
        if label == IGNORE {
            spans.push(Vec::new());
        } else {
            assert_eq!(label, document.ids[index + 1]);
            spans.last_mut().unwrap().push(label);
        }
    }
    assert_eq!(document.labels.last(), Some(&IGNORE));
    let texts = spans.iter().filter(|span| !span.is_empty()).map(|span| tokenizer.decode(span).unwrap());
    texts.collect::<Vec<_>>().join("|")
}

#[test]
fn every_token_of_a_plain_text_but_the_first_counts_and_so_does_the_end() {
    for tokenizer in both() {
        let end = tokenizer.end().unwrap();
        let encoder = encoder(tokenizer, None, text_format());
        for record in [Record::Text("hello world".into()), record(json!({"text": "hello world", "more": 1}))] {
            let document = encoder.encode(&record).unwrap().unwrap();
            assert_eq!(document.ids.last(), Some(&end));
            assert_eq!(document.labels[document.labels.len() - 2], end);
            let decoded = encoder.tokenizer().decode(&document.ids).unwrap();
            assert_eq!(decoded.trim_end_matches("<|endoftext|>"), "hello world");
        }
        assert_eq!(encoder.encode(&Record::Text(String::new())).unwrap(), None);
    }
}

#[test]
fn a_text_that_ends_in_the_end_token_does_not_get_another() {
    let encoder = encoder(tokenizer(), None, text_format());
    let ids = |text: &str| encoder.encode(&Record::Text(text.into())).unwrap().unwrap().ids;
    assert_eq!(ids("hello<|endoftext|>"), ids("hello"));
}

#[test]
fn only_assistant_turns_count_in_a_conversation() {
    // Spaces and lines at the edges are where offsets go wrong.
    let turns = messages(&[
        ("system", "Sys  "),
        ("user", "assistant hello\n\n"),
        ("assistant", "  hi wörld 🦀  "),
        ("user", "and?"),
        ("assistant", "lo\n\n"),
    ]);
    let cases =
        [(CHATML, "  hi wörld 🦀  <|im_end|>\n|lo\n\n<|im_end|>\n"), (HEADERS, "hi wörld 🦀<|im_end|>|lo<|im_end|>")];
    for (source, expected) in cases {
        for tokenizer in both() {
            let encoder = encoder(tokenizer, Some(source), messages_format());
            let document = encoder.encode(&record(json!({"messages": turns}))).unwrap().unwrap();
            assert_eq!(asked(encoder.tokenizer(), &document), expected);
        }
    }
}

#[test]
fn a_token_on_the_edge_of_a_turn_counts() {
    // The prompt ends in `l`, the answer begins with `o`, and the tokenizer makes one token of both.
    let source = "{% for m in messages %}{{ m.role + ' l' + m.content + '.' }}{% endfor %}\
        {% if add_generation_prompt %}assistant l{% endif %}";
    let encoder = encoder(tokenizer(), Some(source), messages_format());
    let turns = messages(&[("user", "a"), ("assistant", "ob"), ("user", "c")]);
    let document = encoder.encode(&record(json!({"messages": turns}))).unwrap().unwrap();
    assert_eq!(asked(encoder.tokenizer(), &document), "lob.");
}

#[test]
fn only_the_answer_to_an_instruction_counts_with_its_end() {
    for tokenizer in both() {
        let encoder = encoder(tokenizer, None, instruction_format());
        for input in [json!(null), json!(""), json!("hello")] {
            let fields = json!({"instruction": "Say hello.", "input": input, "output": "hello world"});
            let document = encoder.encode(&record(fields)).unwrap().unwrap();
            let text = encoder.tokenizer().decode(&document.ids).unwrap();
            assert_eq!(text.contains("Material"), input == "hello", "{text}");
            let expected = asked(encoder.tokenizer(), &document);
            assert_eq!(expected.trim_end_matches("<|endoftext|>"), "hello world");
            assert_eq!(document.labels[document.labels.len() - 2], encoder.tokenizer().end().unwrap());
        }
    }
}

#[test]
fn bad_records_say_what_they_have_and_what_was_expected() {
    let cases = [
        (text_format(), json!({"body": "x", "id": 1}), "no column `text`; it has `body`, `id`"),
        (text_format(), json!({"text": 7}), "column `text` holds a number, expected a text"),
        (text_format(), json!({}), "it has none"),
        (messages_format(), json!({"messages": "x"}), "holds a text, expected a list"),
        (messages_format(), json!({"messages": [{"content": "x"}]}), "message 0 has no `role`; it has `content`"),
        (messages_format(), json!({"messages": ["x"]}), "message 0 is a text"),
        (messages_format(), json!({"messages": [{"role": 1}]}), "expected a table whose `role` is a text"),
        (instruction_format(), json!({"instruction": "x", "input": 1, "output": ""}), "column `input` holds a number"),
        (instruction_format(), json!({"instruction": "x"}), "no column `output`"),
    ];
    for (format, fields, expected) in cases {
        let encoder = encoder(Tokenizer::Bytes, Some(CHATML), format);
        let error = encoder.encode(&record(fields)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let image = Record::Image { width: 0, height: 0, rgb: Vec::new(), label: 0 };
    assert!(encoder(Tokenizer::Bytes, None, text_format()).encode(&image).is_err());
    assert!(encoder(Tokenizer::Bytes, Some(CHATML), messages_format()).encode(&Record::Text("x".into())).is_err());
}

#[test]
fn an_id_beyond_the_models_vocabulary_is_named_with_it() {
    let encoder = Encoder::new(tokenizer(), None, text_format(), 265).unwrap();
    let error = encoder.encode(&Record::Text("hello<|endheader|>".into())).unwrap_err();
    assert!(matches!(error, Error::IdBeyondVocabulary { id: 266, vocabulary: 265 }), "{error}");
    assert!(error.hint().is_some());
    let error = Encoder::new(Tokenizer::Bytes, None, text_format(), 257).err().unwrap();
    assert!(matches!(error, Error::IdBeyondVocabulary { id: 257, vocabulary: 257 }), "{error}");
}

#[test]
fn messages_without_a_template_are_refused_at_once() {
    let error = Encoder::new(Tokenizer::Bytes, None, messages_format(), 258).err().unwrap();
    assert!(matches!(error, Error::NoTemplate { .. }));
}

#[test]
fn a_hugging_face_tokenizer_reads_back_what_it_wrote_and_does_not_truncate() {
    let tokenizer = tokenizer();
    assert_eq!((tokenizer.vocabulary(), tokenizer.end()), (267, Some(261)));
    for text in ["hello  world\n\n", "ünï 🦀", "<|im_start|>x<|im_end|>"] {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        let encoded = tokenizer.encode_with_ranges(text, true).unwrap();
        assert_eq!(encoded.ids, ids);
        assert_eq!(encoded.ranges.last().unwrap().end, text.len());
    }
    assert_eq!(tokenizer.encode("<|im_start|>hehe", true).unwrap().len(), 3);
    assert!(tokenizer.decode(&[400]).is_err());
}

#[test]
fn broken_tokenizer_files_are_refused() {
    let whole = tokenizer_json().to_string();
    for bytes in [&b""[..], b"{}", b"null", &[0xff, 0xfe], &whole.as_bytes()[..whole.len() / 2]] {
        assert!(matches!(Tokenizer::hugging_face(bytes, &config()), Err(Error::BadTokenizer { .. })));
    }
    let other = TokenizerConfig { end_token: Some("</s>".into()), ..config() };
    let error = Tokenizer::hugging_face(whole.as_bytes(), &other).err().unwrap().to_string();
    assert!(error.contains("`</s>`") && error.contains("eos_token"), "{error}");
}

#[test]
fn an_input_column_that_somebody_named_must_be_there() {
    let named =
        Format::Instruction { instruction: "instruction".into(), input: "material".into(), output: "output".into() };
    let encoder = encoder(Tokenizer::Bytes, None, named);
    let task = |fields: Value| encoder.encode(&record(fields));
    assert!(task(json!({"instruction": "add", "material": null, "output": "3"})).is_ok());
    let error = task(json!({"instruction": "add", "input": "1 2", "output": "3"})).unwrap_err();
    assert!(matches!(error, Error::MissingColumn { ref column, .. } if column == "material"), "{error}");
}
