//! Other trainers' names for these keys and values.

/// Their key and ours; those that [`nearest`](evenkeel_store::nearest) finds by itself are not here.
const KEYS: &[(&str, &str)] = &[
    ("warmup_ratio", "train.warmup_steps"),
    ("gradient_accumulation_steps", "train.accumulate"),
    ("grad_accum_steps", "train.accumulate"),
    ("accumulate_grad_batches", "train.accumulate"),
    ("lr_scheduler_type", "train.lr_decay"),
    ("lr_scheduler", "train.lr_decay"),
    ("max_grad_norm", "train.clip_norm"),
    ("gradient_clipping", "train.clip_norm"),
    ("grad_clip", "train.clip_norm"),
    ("gradient_checkpointing", "train.recompute"),
    ("activation_checkpointing", "train.recompute"),
    ("bf16", "train.dtype"),
    ("fp16", "train.dtype"),
    ("torch_dtype", "train.dtype"),
    ("mixed_precision", "train.dtype"),
    ("precision", "train.dtype"),
    ("max_length", "data.sequence"),
    ("max_seq_length", "data.sequence"),
    ("max_seq_len", "data.sequence"),
    ("model_max_length", "data.sequence"),
    ("seq_len", "data.sequence"),
    ("seq_length", "data.sequence"),
    ("sequence_len", "data.sequence"),
    ("sequence_length", "data.sequence"),
    ("block_size", "data.sequence"),
    ("context_length", "data.sequence"),
    ("cutoff_len", "data.sequence"),
    ("dataset", "data.paths"),
    ("dataset_path", "data.paths"),
    ("data_files", "data.paths"),
    ("train_file", "data.paths"),
    ("validation_file", "data.eval_paths"),
    ("tokenizer_name_or_path", "data.tokenizer"),
    ("model_name_or_path", "model.path"),
    ("pretrained_model_name_or_path", "model.path"),
    ("base_model", "model.path"),
    ("eval_steps", "eval.every"),
    ("save_steps", "output.checkpoint_every"),
    ("save_total_limit", "output.keep_checkpoints"),
    ("logging_steps", "output.log_every"),
    ("output_dir", "output.folder"),
    ("report_to", "output.tensorboard"),
    ("tensor_parallel_size", "parallel.tp"),
    ("data_parallel_size", "parallel.dp"),
    ("pipeline_parallel_size", "parallel.pp"),
    ("peft_type", "adapter.kind"),
    ("use_lora", "adapter.kind"),
    ("finetuning_type", "adapter.kind"),
    ("r", "adapter.rank"),
    ("lora_r", "adapter.rank"),
    ("lora_alpha", "adapter.alpha"),
    ("lora_dropout", "adapter.dropout"),
    ("target_modules", "adapter.targets"),
    ("lora_target_modules", "adapter.targets"),
    ("lora_target", "adapter.targets"),
    ("lora_target_linear", "adapter.targets"),
    ("lora_target_parameters", "adapter.target_parameters"),
    ("exclude_modules", "adapter.exclude"),
    ("layers_to_transform", "adapter.layers"),
    ("init_lora_weights", "adapter.init"),
    ("ignore_mismatched_sizes", "model.new_head"),
    ("additional_target", "adapter.modules_to_save"),
    ("ensure_weight_tying", "adapter.keep_tie"),
    ("adapter_name_or_path", "adapter.path"),
    ("lora_model_dir", "adapter.path"),
    ("load_in_4bit", "adapter.base"),
    ("bnb_4bit_quant_type", "adapter.base"),
    ("quantization_bit", "adapter.base"),
];

/// Their value and the nearest one here.
const VALUES: &[(&str, &str)] = &[
    ("bfloat16", "bf16"),
    ("float16", "bf16"),
    ("half", "bf16"),
    ("float32", "f32"),
    ("float", "f32"),
    ("gpu", "cuda"),
    ("sharegpt", "messages"),
    ("chatml", "messages"),
    ("openai", "messages"),
    ("chat", "messages"),
];

/// The `section.key` that another trainer calls by this name.
pub fn key(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase().replace('-', "_");
    KEYS.iter().find(|(theirs, _)| *theirs == name).map(|&(_, ours)| ours)
}

/// The one of these values that another trainer calls by this name.
pub fn value(name: &str, ours: &[&'static str]) -> Option<&'static str> {
    let meant = VALUES.iter().filter(|(theirs, _)| theirs.eq_ignore_ascii_case(name));
    meant.map(|&(_, ours)| ours).find(|meant| ours.contains(meant))
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    #[test]
    fn their_names_are_not_ours_and_what_they_mean_is() {
        let sections = Settings::sections();
        let ours = || sections.iter().flat_map(|section| section.keys.iter().map(move |key| (section.name, key.name)));
        for (theirs, meant) in KEYS {
            assert!(ours().any(|(section, key)| *meant == format!("{section}.{key}")), "{meant}");
            assert!(!ours().any(|(_, key)| key == *theirs), "{theirs}");
        }
    }

    #[test]
    fn a_value_is_found_among_those_that_a_key_has() {
        assert_eq!(value("BFloat16", &["f32", "bf16"]), Some("bf16"));
        assert_eq!(value("gpu", &["f32", "bf16"]), None);
        assert_eq!(value("gpu", &["cpu", "cuda"]), Some("cuda"));
        assert_eq!((key("max-length"), key("batch")), (Some("data.sequence"), None));
    }
}
