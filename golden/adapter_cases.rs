//! The adapters that `adapters.py` writes, each with its base, for the tests of every crate.

pub const CASES: [(&str, &str); 16] = [
    ("llama_lora", "llama3"),
    ("qwen2_rslora", "qwen2"),
    ("gpt2_lora", "gpt2"),
    ("llama_dora", "llama2"),
    ("gemma3_dora", "gemma3"),
    ("gpt2_dora", "gpt2"),
    ("vit_lora_old", "vit"),
    ("vit_lora", "vit"),
    ("llama_patterns", "llama3"),
    ("llama_layers", "llama_odd"),
    ("llama_saved_tied", "llama3"),
    ("llama_saved_untied", "llama2"),
    ("qwen2_saved_tied", "qwen2"),
    ("llama_dropout", "llama3"),
    ("llama_qlora", "llama_nf4"),
    ("llama_qdora", "llama_nf4"),
];
