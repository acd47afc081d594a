//! Records to documents: which tokens the loss counts, and what bad records are told.

mod chat;

use chat::{CHATML, HEADERS, config, messages, tokenizer, tokenizer_json};
use evenkeel_data::{
    Document, Encoder, Error, Format, IGNORE, Labels, Record, Template, Tokenizer, TokenizerConfig, alpaca_template,
};
use serde_json::{Value, json};

fn text_format() -> Format {
    Format::Text { column: "text".into() }
}

fn messages_format() -> Format {
    Format::Messages { column: "messages".into(), tools: "tools".into() }
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
            assert_eq!(text.contains("### Input:\nhello\n"), input == "hello", "{text}");
            let expected = asked(encoder.tokenizer(), &document);
            assert_eq!(expected.trim_end_matches("<|endoftext|>"), "hello world");
            assert_eq!(document.labels[document.labels.len() - 2], encoder.tokenizer().end().unwrap());
        }
    }
}

#[test]
fn instructions_without_a_template_are_asked_by_stanfords_prompt() {
    let encoder = encoder(Tokenizer::Bytes, None, instruction_format());
    let text = |input: &str| {
        let fields = json!({"instruction": "Add.", "input": input, "output": "3"});
        encoder.tokenizer().decode(&encoder.encode(&record(fields)).unwrap().unwrap().ids).unwrap()
    };
    let without = "Below is an instruction that describes a task. Write a response that appropriately completes the \
        request.\n\n### Instruction:\nAdd.\n\n### Response:3";
    let with = "Below is an instruction that describes a task, paired with an input that provides further context. Write \
        a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n\
        ### Response:3";
    assert_eq!([text(""), text("1 and 2")], [without, with]);
}

#[test]
fn instructions_with_a_template_are_asked_by_it() {
    for tokenizer in both() {
        let encoder = encoder(tokenizer, Some(CHATML), instruction_format());
        let fields = json!({"instruction": "Add.", "input": "1 and 2", "output": "3"});
        let document = encoder.encode(&record(fields)).unwrap().unwrap();
        let text = encoder.tokenizer().decode(&document.ids).unwrap();
        assert!(
            text.contains("<|im_start|>user\nAdd.\n1 and 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"),
            "{text}"
        );
        assert_eq!(asked(encoder.tokenizer(), &document), "3<|im_end|>\n");
    }
}

/// A tokenizer that begins every text with a token of its own.
fn beginning_tokenizer() -> Tokenizer {
    let mut json = tokenizer_json();
    let begin = |sequence: &str| json!([{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": sequence, "type_id": 0}}]);
    json["post_processor"] = json!({
        "type": "TemplateProcessing", "single": begin("A"), "pair": begin("B"),
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [264], "tokens": ["<|begin|>"]}},
    });
    Tokenizer::hugging_face(json.to_string().as_bytes(), &config()).unwrap()
}

#[test]
fn the_template_of_stanfords_prompt_writes_the_tokens_that_were_trained_on() {
    for make in [|| Tokenizer::Bytes, tokenizer, beginning_tokenizer] {
        let config = if matches!(make(), Tokenizer::Bytes) { TokenizerConfig::default() } else { config() };
        let source = alpaca_template(&make(), &config).unwrap();
        let template = || Template::new(&source, &config, 0).unwrap();
        let chat = Encoder::new(make(), Some(template()), messages_format(), 300).unwrap();
        let plain = Encoder::new(make(), None, instruction_format(), 300).unwrap();
        for input in ["", "1 and 2"] {
            let fields = json!({"instruction": "Add.", "input": input, "output": "3 hello"});
            let trained = plain.encode(&record(fields)).unwrap().unwrap();
            let turns = json!([
                {"role": "user", "content": "Add.", "input": input}, {"role": "assistant", "content": "3 hello"},
            ]);
            assert_eq!(chat.encode(&record(json!({"messages": turns}))).unwrap().unwrap(), trained, "{input}");
            if !input.is_empty() {
                let said = format!("Add.\n\n### Input:\n{input}");
                let turns = json!([{"role": "user", "content": said}, {"role": "assistant", "content": "3 hello"}]);
                assert_eq!(
                    chat.encode(&record(json!({"messages": turns}))).unwrap().unwrap(),
                    trained,
                    "in the content"
                );
            }
            let asked = template().render(&turns.as_array().unwrap()[..1], true).unwrap();
            let asked = make().encode(&asked, false).unwrap();
            assert_eq!(asked, trained.ids[..asked.len()]);
            assert_eq!(trained.labels[asked.len() - 1], trained.ids[asked.len()]);
            assert_eq!(trained.labels[asked.len() - 2], IGNORE);
        }
    }
}

const WITH_TOOLS: &str = "{% if tools is not none %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}\
    {% for m in messages %}{{ m.role }}:{% if m.content %}{{ m.content }}{% endif %}\
    {% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}{% if m.name %}({{ m.name }}){% endif %}{{ '\n' }}{% endfor %}\
    {% if add_generation_prompt %}assistant:{% endif %}";

#[test]
fn tools_and_calls_reach_the_template() {
    let encoder = encoder(Tokenizer::Bytes, Some(WITH_TOOLS), messages_format());
    let turns = json!([
        {"role": "user", "content": "2+2?", "tool_calls": null},
        {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "name": "add", "content": "4", "tool_call_id": "x"},
        {"role": "assistant", "content": "Four."},
    ]);
    let schema = json!({"type": "function", "function": {"name": "add", "default": null}});
    let text = |tools: Value| {
        let document = encoder.encode(&record(json!({"messages": turns, "tools": tools}))).unwrap().unwrap();
        let calls = r#"[{"function": {"name": "add", "arguments": {"a": 2}}}]"#;
        assert_eq!(asked(encoder.tokenizer(), &document), format!("{calls}\n|Four.\n"));
        encoder.tokenizer().decode(&document.ids).unwrap()
    };
    let said = r#"[{"type": "function", "function": {"name": "add", "default": null}}]user:2+2?"#;
    let table = json!({"type": "function", "function": {"name": "add", "default": null}, "strict": null});
    for tools in [json!([schema]), json!(json!([schema]).to_string()), json!([schema.to_string()]), json!([table])] {
        let text = text(tools);
        assert!(text.starts_with(said), "{text}");
    }
    for tools in [json!(null), json!(""), json!("null")] {
        assert!(text(tools).starts_with("user:2+2?\nassistant:[{\"function"));
    }
    assert!(text(json!([])).starts_with("[]user:"));
    for (tools, expected) in [
        (json!({"a": 1}), "column `tools` holds a table, expected a list of tools"),
        (json!("[{]"), "column `tools` holds a text that is not JSON"),
        (json!([7]), "column `tools` holds a number"),
    ] {
        let error = encoder.encode(&record(json!({"messages": turns, "tools": tools}))).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let named = Format::Messages { column: "messages".into(), tools: "functions".into() };
    let named = self::encoder(Tokenizer::Bytes, Some(WITH_TOOLS), named);
    let error = named.encode(&record(json!({"messages": turns, "tools": [schema]}))).unwrap_err();
    assert!(matches!(error, Error::MissingColumn { ref column, .. } if column == "functions"), "{error}");
}

#[test]
fn a_template_for_tools_is_used_where_there_are_tools() {
    let config = TokenizerConfig { tool_template: Some(WITH_TOOLS.into()), ..config() };
    let template = Template::new(CHATML, &config, 0).unwrap();
    let encoder = Encoder::new(Tokenizer::Bytes, Some(template), messages_format(), 300).unwrap();
    let turns = messages(&[("user", "hi"), ("assistant", "ho")]);
    let text = |fields: Value| {
        let ids = encoder.encode(&record(fields)).unwrap().unwrap().ids;
        encoder.tokenizer().decode(&ids).unwrap()
    };
    assert!(text(json!({"messages": turns})).starts_with("<|im_start|>system"));
    assert!(text(json!({"messages": turns, "tools": [{"name": "x"}]})).starts_with("[{\"name\": \"x\"}]user:hi"));
}

#[test]
fn contents_in_parts_are_read_by_any_template() {
    const PRINTS: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}\
        {% if add_generation_prompt %}assistant:{% endif %}";
    // Each part trimmed by itself, texts taken, too.
    const READS: &str = "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content | trim }}{% else %}\
        {% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}\
        {% if add_generation_prompt %}assistant:{% endif %}";
    // Parts alone.
    const NEEDS: &str = "{% for m in messages %}{{ m.role }}:{% for part in m.content if part.type == 'text' %}\
        <{{ part.text }}>{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let parts = json!([{"type": "text", "text": "one "}, {"type": "text", "text": " two"}]);
    let turns = json!([{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]);
    let cases = [
        (PRINTS, "user:one  two\nassistant:one  two\n"),
        (READS, "user:onetwo\nassistant:onetwo\n"),
        (NEEDS, "user:<one >< two>\nassistant:<one >< two>\n"),
    ];
    for (source, expected) in cases {
        let encoder = encoder(Tokenizer::Bytes, Some(source), messages_format());
        let document = encoder.encode(&record(json!({"messages": turns}))).unwrap().unwrap();
        assert_eq!(encoder.tokenizer().decode(&document.ids).unwrap(), expected);
    }
    let encoder = encoder(Tokenizer::Bytes, Some(CHATML), messages_format());
    assert!(encoder.encode(&record(json!({"messages": turns}))).is_ok());
    for (part, expected) in [
        (json!({"type": "image", "url": "x"}), "message 0 has a part of type `image`, but the model reads text alone"),
        (json!({"type": "text"}), "message 0 has no `text`; it has `type`"),
        (json!({"type": "text", "text": 7}), "expected a list of parts whose `text` is a text"),
        (json!(7), "message 0 is a number, expected a list of parts"),
    ] {
        let turns = json!([{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]);
        let error = encoder.encode(&record(json!({"messages": turns}))).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
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

/// A tokenizer of BERT's form: words, and a template that puts `[CLS]` before texts and `[SEP]` behind them.
fn words() -> Tokenizer {
    let special = |id: &str, type_id: u32| json!({"SpecialToken": {"id": id, "type_id": type_id}});
    let text = |id: &str, type_id: u32| json!({"Sequence": {"id": id, "type_id": type_id}});
    let token = |id: &str, number: u32| json!({"id": id, "ids": [number], "tokens": [id]});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "decoder": null,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "c": 5, "d": 6}},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)],
            "pair": [special("[CLS]", 0), text("A", 0), special("[SEP]", 0), text("B", 1), special("[SEP]", 1)],
            "special_tokens": {"[CLS]": token("[CLS]", 1), "[SEP]": token("[SEP]", 2)},
        },
    });
    Tokenizer::hugging_face(file.to_string().as_bytes(), &TokenizerConfig::default()).unwrap()
}

fn labelled(second: bool, sequence: usize, names: &[&str], types: usize) -> Encoder {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    let labels = Labels { count: 3, names, types, sequence };
    let second = second.then(|| "other".to_owned());
    let format = Format::Labelled { text: "text".into(), second, label: "label".into(), labels };
    Encoder::new(words(), None, format, 7).unwrap()
}

#[test]
fn a_labelled_text_has_its_label_at_its_first_token_and_the_tokenizers_template_around_it() {
    let of = |encoder: &Encoder, fields: Value| encoder.encode(&record(fields)).unwrap().unwrap();
    let document = of(&labelled(false, 16, &[], 2), json!({"text": "a b", "label": 2}));
    assert_eq!((document.ids, document.types, document.is_cut), (vec![1, 3, 4, 2], vec![0; 4], false));
    assert_eq!(document.labels, [2, IGNORE, IGNORE, IGNORE]);
    let pair = of(&labelled(true, 16, &[], 2), json!({"text": "a", "other": "b c", "label": 0}));
    assert_eq!((pair.ids, pair.types), (vec![1, 3, 2, 4, 5, 2], vec![0, 0, 0, 1, 1, 1]));
    // The template's tokens stay; of two texts the longer loses its end.
    let cut = of(&labelled(false, 4, &[], 2), json!({"text": "a b c d", "label": 1}));
    assert_eq!((cut.ids, cut.is_cut), (vec![1, 3, 4, 2], true));
    let cut = of(&labelled(true, 6, &[], 2), json!({"text": "a b c d", "other": "b", "label": 1}));
    assert_eq!((cut.ids, cut.types, cut.is_cut), (vec![1, 3, 4, 2, 4, 2], vec![0, 0, 0, 0, 1, 1], true));
    let empty = of(&labelled(false, 16, &[], 2), json!({"text": "", "label": 0}));
    assert_eq!(empty.ids, [1, 2]);
}

#[test]
fn labels_are_numbers_or_names_and_all_others_are_refused_with_those_there_are() {
    let encoder = labelled(false, 16, &["bad", "good", "7"], 2);
    let label = |label: Value| encoder.encode(&record(json!({"text": "a", "label": label})));
    for (found, expected) in
        [(json!(2), 2), (json!("good"), 1), (json!("1"), 1), (json!("7"), 2), (json!(true), 1), (json!(0), 0)]
    {
        assert_eq!(label(found.clone()).unwrap().unwrap().labels[0], expected, "{found}");
    }
    for found in [json!(3), json!(-1), json!("ugly"), json!("3"), json!(0.5), json!(null), json!([1]), json!(1e20)] {
        let error = label(found.clone()).unwrap_err();
        assert!(error.is_of_record(), "{error}");
        let expected = "expected a number from 0 to 2, or \"bad\", \"good\", \"7\"";
        assert!(error.to_string().contains(expected), "{found}: {error}");
        assert!(error.hint().unwrap().contains("data.labels"));
    }
    // The number of one label, and the name of another.
    let stars = labelled(false, 16, &["1", "2", "3"], 2);
    let label = |label: Value| stars.encode(&record(json!({"text": "a", "label": label})));
    assert_eq!(label(json!("1")).unwrap().unwrap().labels[0], 0);
    let error = label(json!(1)).unwrap_err().to_string();
    assert!(error.contains("1 is the name of another label"), "{error}");
    let error = encoder.encode(&record(json!({"text": "a", "labels": 1}))).unwrap_err();
    assert!(matches!(error, Error::MissingColumn { .. }), "{error}");
    let error = labelled(true, 16, &[], 1).encode(&record(json!({"text": "a", "other": "b", "label": 0}))).unwrap_err();
    assert!(error.to_string().contains("token type 1, the model has 1"), "{error}");
    let error = labelled(false, 2, &[], 2).encode(&record(json!({"text": "a", "label": 0}))).unwrap_err();
    assert!(error.to_string().contains("no room"), "{error}");
}
