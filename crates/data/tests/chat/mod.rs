//! A small Hugging Face tokenizer and two chat templates, in the manner of those that models come with.

#![allow(dead_code, reason = "each test uses its own part")]

use evenkeel_data::{Tokenizer, TokenizerConfig};
use serde_json::{Value, json};

pub const SPECIALS: [&str; 6] =
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|endheader|>"];

pub const CHATML: &str = "\
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\nBe kind.<|im_end|>\n' -}}
{%- endif -%}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' -}}
{% endif %}";

pub const HEADERS: &str = "\
{{- bos_token }}
{%- set ns = namespace(first=true) %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {%- if ns.first and message.role == 'system' %}
        {%- set ns.first = false %}
        {{- '<|header|>system<|endheader|>\n\nDate: ' + strftime_now('%d %b %Y') + '\n' + message.content.strip() }}
    {%- else %}
        {{- '<|header|>' + message.role + '<|endheader|>\n\n' + message.content | trim }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|endheader|>\n\n' }}
{%- endif %}";

pub fn config() -> TokenizerConfig {
    TokenizerConfig {
        begin_token: Some("<|begin|>".into()),
        end_token: Some("<|endoftext|>".into()),
        chat_template: None,
        tool_template: None,
    }
}

/// Byte-level BPE with a few merges, among them ones that reach over lines and spaces.
pub fn tokenizer_json() -> Value {
    let mut symbols: Vec<String> = (0..=255u8).map(|byte| symbol(byte).to_string()).collect();
    let pairs = [(b'h', b'e'), (b'l', b'o'), (b'\n', b'\n'), (b' ', b' '), (b' ', b'w')];
    let merges: Vec<Value> = pairs.iter().map(|&(a, b)| json!([symbol(a), symbol(b)])).collect();
    symbols.extend(pairs.iter().map(|&(a, b)| [symbol(a), symbol(b)].iter().collect::<String>()));
    let count = symbols.len();
    let vocabulary: serde_json::Map<String, Value> =
        symbols.into_iter().enumerate().map(|(id, symbol)| (symbol, id.into())).collect();
    let special = |(index, content): (usize, &&str)| {
        json!({"id": count + index, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "normalizer": null,
        "added_tokens": SPECIALS.iter().enumerate().map(special).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": merges},
    })
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::hugging_face(tokenizer_json().to_string().as_bytes(), &config()).unwrap()
}

pub fn messages(turns: &[(&str, &str)]) -> Vec<Value> {
    turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
}

/// The visible character that byte-level tokenizers write for a byte.
fn symbol(byte: u8) -> char {
    let visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if visible(&byte) {
        return byte.into();
    }
    let hidden_before = (0..byte).filter(|byte| !visible(byte)).count() as u32;
    char::from_u32(256 + hidden_before).unwrap()
}
