//! Chat templates: the text they write, where the assistant speaks, and that hostile ones end.

mod chat;

use chat::{CHATML, HEADERS, config, messages};
use evenkeel_data::{Error, Template, TokenizerConfig};
use serde_json::{Value, json};

/// 29 February 2024.
const NOW: u64 = 1_709_200_000;

fn template(source: &str) -> Template {
    Template::new(source, &config(), NOW).unwrap()
}

fn render(source: &str) -> Result<String, Error> {
    template(source).render(&messages(&[("user", "hi")]), false)
}

const TURNS: [(&str, &str); 5] =
    [("system", "Short."), ("user", "Hello"), ("assistant", "Hi!"), ("user", "Bye"), ("assistant", "So long")];

#[test]
fn a_conversation_reads_as_its_template_says() {
    let messages = messages(&TURNS[..3]);
    let cases = [
        (
            CHATML,
            "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi!\
             <|im_end|>\n",
        ),
        (
            HEADERS,
            "<|begin|><|header|>system<|endheader|>\n\nDate: 29 Feb 2024\nShort.<|im_end|><|header|>user<|endheader|>\
             \n\nHello<|im_end|><|header|>assistant<|endheader|>\n\nHi!<|im_end|>",
        ),
    ];
    for (source, expected) in cases {
        assert_eq!(template(source).render(&messages, false).unwrap(), expected);
    }
    let asked = template(CHATML).render(&messages[..2], true).unwrap();
    assert!(asked.ends_with("Hello<|im_end|>\n<|im_start|>assistant\n"), "{asked}");
}

#[test]
fn assistant_spans_are_what_the_assistant_says_and_its_end_of_turn() {
    for (source, expected) in
        [(CHATML, ["Hi!<|im_end|>\n", "So long<|im_end|>\n"]), (HEADERS, ["Hi!<|im_end|>", "So long<|im_end|>"])]
    {
        for first in [0, 1] {
            let turns = template(source).turns(&messages(&TURNS[first..]), None).unwrap();
            let spoken: Vec<&str> = turns.assistant.iter().map(|span| &turns.text[span.clone()]).collect();
            assert_eq!(spoken, expected);
        }
    }
}

#[test]
fn a_template_that_rewrites_earlier_turns_is_refused() {
    let forgetful = "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.role }}: {{ m.content }}\n\
        {% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    let thinking = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
        {% if add_generation_prompt %}assistant: <think>{% endif %}";
    for source in [forgetful, thinking] {
        let error = template(source).turns(&messages(&TURNS), None).unwrap_err();
        assert!(matches!(error, Error::NotPrefixStable { .. }), "{error}");
        assert!(error.hint().unwrap().contains("rewrites earlier turns"));
    }
}

#[test]
fn templates_can_use_what_python_and_transformers_give_them() {
    let cases = [
        ("{{ '  x '.strip() ~ 'ab'.upper() ~ 'a,b'.split(',')[-1] }}", "xABb"),
        ("{{ 'abc'.startswith('ab') }} {{ none }} {{ 'abc'[::-1] }}", "True None cba"),
        ("{{ {'b': [1, 2.5, 'ü<'], 'a': none} | tojson }}", r#"{"b": [1, 2.5, "ü<"], "a": null}"#),
        ("{{ {'b': [1]} | tojson(indent=2) }}", "{\n  \"b\": [\n    1\n  ]\n}"),
        ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "hi"}"#),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"),
        ("{% generation %}x{% endgeneration %}\n{%- generation -%} y {%- endgeneration -%} z", "xyz"),
        ("{{ '<b>&' }}{{ tools is none }}{{ bos_token }}", "<b>&True<|begin|>"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}", "[1]"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
    ];
    for (source, expected) in cases {
        assert_eq!(render(source).unwrap_or_else(|error| panic!("{source}: {error}")), expected, "{source}");
    }
}

#[test]
fn an_exception_raised_by_a_template_is_told_in_its_words() {
    let error = template(HEADERS).render(&messages(&[("wizard", "x")]), false).unwrap_err().to_string();
    assert!(error.contains("unknown role wizard"), "{error}");
    let error = render("{{ strftime_now('%Q') }}").unwrap_err().to_string();
    assert!(error.contains("%Q"), "{error}");
}

#[test]
fn a_template_without_end_ends_with_an_error() {
    let nested = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let doubling = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(12) }}";
    let doubling = doubling.replace("12", "30");
    for source in [nested, &doubling] {
        let error = render(source).unwrap_err();
        assert!(matches!(error, Error::TemplateEndless { .. } | Error::Template { .. }), "{error}");
    }
    assert!(matches!(render(nested), Err(Error::TemplateEndless { .. })));
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    let error = render(recursive).unwrap_err().to_string();
    assert!(error.contains("recursion"), "{error}");
    let included = render("{% include 'chat_template' %}").unwrap_err().to_string();
    assert!(!included.is_empty());
}

#[test]
fn a_template_that_writes_too_much_ends_with_an_error() {
    let long = "{% set s = 'x' * 1000000 %}{% for i in range(1000) %}{{ s }}{% endfor %}";
    assert!(matches!(render(long), Err(Error::TemplateOutput { .. })));
}

#[test]
fn deeply_nested_values_are_refused_before_they_are_printed() {
    let nest = "{% set ns = namespace(x=[]) %}{% for i in range(N) %}{% set ns.x = [ns.x] %}{% endfor %}";
    for print in ["{{ ns.x }}", "{{ ns.x | tojson }}"] {
        let source = format!("{nest}{print}").replace('N', "2000");
        let error = render(&source).unwrap_err().to_string();
        assert!(error.contains("nested deeper"), "{error}");
    }
}

#[test]
fn malformed_templates_name_the_line() {
    let error = Template::new("a\n{% for x in %}", &TokenizerConfig::default(), 0).err().unwrap().to_string();
    assert!(error.contains("line 2"), "{error}");
    let error = render("a\n\n{{ messages.nothing.more }}").unwrap_err().to_string();
    assert!(error.contains("line 3"), "{error}");
}

#[test]
fn a_conversation_of_too_many_messages_is_refused() {
    let many: Vec<Value> = (0..1001).map(|_| json!({"role": "user", "content": ""})).collect();
    let error = template(CHATML).turns(&many, None).unwrap_err().to_string();
    assert!(error.contains("1001") && error.contains("1000"), "{error}");
}

/// Random bytes put into, cut out of and copied within working templates.
#[test]
fn mangled_templates_neither_panic_nor_hang() {
    let pieces = [
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        " for ",
        " in ",
        " if ",
        "endfor",
        "-",
        "|",
        "[",
        "]",
        "(",
        ")",
        "'",
        "messages",
        "loop.",
        "namespace(",
        "~",
        "**",
        "range(",
        "999999999",
        "\u{1f980}",
        "\0",
        "generation",
        ".",
    ];
    let mut state = 1u64;
    let mut below = |count: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % count
    };
    let (mut read, mut rendered) = (0, 0);
    for round in 0..3000 {
        let mut source: Vec<char> = if round % 2 == 0 { CHATML } else { HEADERS }.chars().collect();
        for _ in 0..1 + below(4) {
            let at = below(source.len());
            match below(3) {
                0 => source.splice(at..at, pieces[below(pieces.len())].chars()).for_each(drop),
                1 => source.drain(at..(at + 1 + below(12)).min(source.len())).for_each(drop),
                _ => {
                    let copy: Vec<char> = source[at..(at + below(30)).min(source.len())].to_vec();
                    let to = below(source.len());
                    source.splice(to..to, copy).for_each(drop);
                }
            }
        }
        let source: String = source.into_iter().collect();
        let Ok(template) = Template::new(&source, &config(), NOW) else { continue };
        read += 1;
        rendered += usize::from(template.turns(&messages(&TURNS), None).is_ok());
    }
    assert!(read > 300 && rendered > 100, "{read} were templates, {rendered} were rendered");
}

/// What is nested here is never printed, but it is dropped, level by level, and joined to a text.
#[test]
fn a_value_nested_without_bound_does_not_exhaust_the_stack() {
    let nest = "{% set ns = namespace(x=[]) %}{% for i in range(N) %}{% set ns.x = WRAPPED %}{% endfor %}{{ (ns.x ~ '') | length }}";
    let wrapped = format!("{}ns.x{}", "[".repeat(20), "]".repeat(20));
    let source = |count: &str| nest.replace('N', count).replace("WRAPPED", &wrapped);
    assert_eq!(render(&source("7000")).unwrap(), "280002");
    assert!(matches!(render(&source("100000")), Err(Error::TemplateEndless { .. })));
}
