//! The models that `make.py` writes, for the tests of every crate.

pub const CASES: [&str; 14] = [
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gpt_neox_serial",
    "llama2",
    "llama3",
    "llama_linear",
    "llama_odd",
    "llama_packed",
    "llama_short",
    "mistral",
    "qwen2",
    "qwen3",
    "vit",
];
