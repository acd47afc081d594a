//! The treatment of each key of a DeepSpeed configuration.

use serde_json::Value as Json;

/// null and "auto" are ignored, whatever the fate.
pub enum Fate {
    /// It is this setting.
    Is(&'static str),
    /// It is read together with others, or means nothing by itself.
    Read,
    /// It changes how DeepSpeed computes, not what.
    Idle,
    Refused {
        unless: fn(&Json) -> bool,
        why: &'static str,
        /// Empty if there is none.
        hint: &'static str,
    },
    Section(Keys),
}

pub type Keys = &'static [(&'static str, Fate)];

/// Whether a value asks for something: neither false nor a section that is switched off.
pub fn is_asked_for(value: &Json) -> bool {
    match value {
        Json::Null | Json::Bool(false) => false,
        Json::String(text) => text != "auto",
        Json::Object(keys) => keys.get("enabled").map_or(!keys.is_empty(), is_asked_for),
        _ => true,
    }
}

/// The key of this name in another section.
pub fn elsewhere(name: &str) -> Option<String> {
    let sections = KEYS.iter().filter_map(|(section, fate)| match fate {
        Fate::Section(keys) => Some((section.to_string(), *keys)),
        _ => None,
    });
    let parameters =
        [("optimizer.params", OPTIMIZER), ("scheduler.params", WARMUP), ("scheduler.params", WARMUP_DECAY)];
    let parameters = parameters.map(|(section, keys)| (section.to_owned(), keys));
    let found = |(section, keys): (String, Keys)| {
        keys.iter().any(|(known, _)| *known == name).then(|| format!("{section}.{name}"))
    };
    let top = KEYS.iter().find(|(known, _)| *known == name).map(|_| name.to_owned());
    top.or_else(|| sections.chain(parameters).find_map(found))
}

const fn refused(why: &'static str, hint: &'static str) -> Fate {
    Fate::Refused { unless: |value| !is_asked_for(value), why, hint }
}

const fn refused_unless(unless: fn(&Json) -> bool, why: &'static str) -> Fate {
    Fate::Refused { unless, why, hint: "" }
}

fn is_zero(value: &Json) -> bool {
    value.as_f64() == Some(0.0)
}

fn at_most_one(value: &Json) -> bool {
    value.as_f64().is_some_and(|number| number <= 1.0)
}

/// DeepSpeed's offload sections have no effect if they name no device.
fn names_no_device(value: &Json) -> bool {
    match value {
        Json::Object(keys) => keys.get("device").is_none_or(|device| device.is_null() || device == "none"),
        value => !is_asked_for(value),
    }
}

const NO_OFFLOAD: &str = "there is no offloading";
const NO_OFFLOAD_HINT: &str = "parallel.zero, parallel.tp and train.recompute save memory";
const EXACT_EXCHANGES: &str = "communication is not quantised";

pub const KEYS: Keys = &[
    ("train_batch_size", Fate::Read),
    ("train_micro_batch_size_per_gpu", Fate::Is("train.batch")),
    ("gradient_accumulation_steps", Fate::Is("train.accumulate")),
    ("gradient_clipping", Fate::Is("train.clip_norm")),
    ("steps_per_print", Fate::Is("output.log_every")),
    ("bf16", Fate::Section(BF16)),
    ("bfloat16", Fate::Section(BF16)),
    ("fp32", Fate::Section(&[("enabled", Fate::Read)])),
    ("fp16", Fate::Section(FP16)),
    ("amp", refused("there is no f16", "set bf16.enabled")),
    ("optimizer", Fate::Read),
    ("scheduler", Fate::Read),
    ("zero_optimization", Fate::Section(ZERO)),
    ("tensor_parallel", Fate::Section(TENSOR_PARALLEL)),
    ("activation_checkpointing", Fate::Section(CHECKPOINTING)),
    ("tensorboard", Fate::Section(TENSORBOARD)),
    ("seed", refused("DeepSpeed has no such key", "use --seed")),
    ("pipeline", refused("stages are not cut as DeepSpeed does", "set parallel.pp")),
    ("sequence_parallel_size", refused_unless(at_most_one, "attention is not split along the sequence")),
    ("sparse_attention", refused("attention is dense", "")),
    ("sparse_gradients", Fate::Idle),
    ("progressive_layer_drop", refused("no layer is dropped", "")),
    ("curriculum_learning", refused("sequences have one length for the whole run", "")),
    ("data_efficiency", refused("there is no data sampling by difficulty and no token dropping", "")),
    ("compression_training", refused("weights are neither pruned nor quantised", "")),
    ("quantize_training", refused("weights are not quantised", "")),
    ("elasticity", refused("the batch is fixed", "a checkpoint resumes on any number of ranks")),
    ("autotuning", refused("there is no autotuning", "")),
    ("hybrid_engine", refused("a run does not generate between steps", "")),
    ("eigenvalue", refused("eigenvalues are not computed", "")),
    ("zero_allow_untested_optimizer", Fate::Idle),
    ("zero_force_ds_cpu_optimizer", Fate::Idle),
    ("wall_clock_breakdown", Fate::Idle),
    ("memory_breakdown", Fate::Idle),
    ("dump_state", Fate::Idle),
    ("prescale_gradients", Fate::Idle),
    ("gradient_predivide_factor", Fate::Idle),
    ("communication_data_type", Fate::Idle),
    ("seq_parallel_comm_data_type", Fate::Idle),
    ("seq_parallel_communication_data_type", Fate::Idle),
    ("fp32_allreduce", Fate::Idle),
    ("disable_allgather", Fate::Idle),
    ("data_types", Fate::Section(&[("grad_accum_dtype", Fate::Idle)])),
    ("dataloader_drop_last", Fate::Idle),
    ("use_data_before_expert_parallelism", Fate::Idle),
    ("graph_harvesting", Fate::Idle),
    ("vocabulary_size", Fate::Idle),
    ("checkpoint", Fate::Idle),
    ("aio", Fate::Idle),
    ("timers", Fate::Idle),
    ("compile", Fate::Idle),
    ("nebula", Fate::Idle),
    ("comms_logger", Fate::Idle),
    ("flops_profiler", Fate::Idle),
    ("wandb", Fate::Idle),
    ("comet", Fate::Idle),
    ("csv_monitor", Fate::Idle),
];

const BF16: Keys = &[
    ("enabled", Fate::Read),
    ("immediate_grad_update", Fate::Idle),
    ("check_grad_overflow", Fate::Idle),
    ("bf16_master_weights_and_grads", refused("master weights and gradients are f32", "")),
    ("bf16_optimizer_states", refused("the optimizer's state is f32", "")),
];

/// These only scale a loss in f16, which is refused.
const FP16: Keys = &[
    ("enabled", refused("there is no f16", "set bf16.enabled")),
    ("auto_cast", Fate::Read),
    ("loss_scale", Fate::Read),
    ("initial_scale_power", Fate::Read),
    ("loss_scale_window", Fate::Read),
    ("hysteresis", Fate::Read),
    ("consecutive_hysteresis", Fate::Read),
    ("min_loss_scale", Fate::Read),
    ("fused_mode", Fate::Read),
    ("fp16_master_weights_and_grads", Fate::Read),
    ("fp16_opt_level", Fate::Read),
];

const ZERO: Keys = &[
    ("stage", Fate::Is("parallel.zero")),
    ("stage3_gather_16bit_weights_on_model_save", Fate::Read),
    ("gather_16bit_weights_on_model_save", Fate::Read),
    ("stage3_gather_fp16_weights_on_model_save", Fate::Read),
    ("offload_optimizer", Fate::Refused { unless: names_no_device, why: NO_OFFLOAD, hint: NO_OFFLOAD_HINT }),
    ("offload_param", Fate::Refused { unless: names_no_device, why: NO_OFFLOAD, hint: NO_OFFLOAD_HINT }),
    ("cpu_offload", refused(NO_OFFLOAD, NO_OFFLOAD_HINT)),
    ("cpu_offload_param", refused(NO_OFFLOAD, NO_OFFLOAD_HINT)),
    ("cpu_offload_params", refused(NO_OFFLOAD, NO_OFFLOAD_HINT)),
    ("zenflow", refused(NO_OFFLOAD, NO_OFFLOAD_HINT)),
    ("zero_quantized_weights", refused(EXACT_EXCHANGES, "")),
    ("zero_quantized_nontrainable_weights", refused(EXACT_EXCHANGES, "")),
    ("zero_quantized_gradients", refused(EXACT_EXCHANGES, "")),
    ("zeropp_loco_param", refused(EXACT_EXCHANGES, "")),
    ("cpu_offload_use_pin_memory", Fate::Idle),
    ("allgather_partitions", Fate::Idle),
    ("allgather_bucket_size", Fate::Idle),
    ("overlap_comm", Fate::Idle),
    ("reduce_scatter", Fate::Idle),
    ("reduce_bucket_size", Fate::Idle),
    ("use_multi_rank_bucket_allreduce", Fate::Idle),
    ("contiguous_gradients", Fate::Idle),
    ("grad_hooks", Fate::Idle),
    ("round_robin_gradients", Fate::Idle),
    ("load_from_fp32_weights", Fate::Idle),
    ("elastic_checkpoint", Fate::Idle),
    ("sub_group_size", Fate::Idle),
    ("prefetch_bucket_size", Fate::Idle),
    ("stage3_prefetch_bucket_size", Fate::Idle),
    ("param_persistence_threshold", Fate::Idle),
    ("stage3_param_persistence_threshold", Fate::Idle),
    ("model_persistence_threshold", Fate::Idle),
    ("stage3_model_persistence_threshold", Fate::Idle),
    ("max_live_parameters", Fate::Idle),
    ("stage3_max_live_parameters", Fate::Idle),
    ("max_reuse_distance", Fate::Idle),
    ("stage3_max_reuse_distance", Fate::Idle),
    ("module_granularity_threshold", Fate::Idle),
    ("stage3_module_granularity_threshold", Fate::Idle),
    ("use_all_reduce_for_fetch_params", Fate::Idle),
    ("stage3_use_all_reduce_for_fetch_params", Fate::Idle),
    ("allgather_sequential", Fate::Idle),
    ("stage3_allgather_sequential", Fate::Idle),
    ("stage3_partition_stream_chunk_size", Fate::Idle),
    ("ignore_unused_parameters", Fate::Idle),
    ("legacy_stage1", Fate::Idle),
    ("zero_hpz_partition_size", Fate::Idle),
    ("mics_shard_size", Fate::Idle),
    ("mics_hierarchical_params_gather", Fate::Idle),
    ("memory_efficient_linear", Fate::Idle),
    ("pipeline_loading_checkpoint", Fate::Idle),
    ("override_module_apply", Fate::Idle),
    ("log_trace_cache_warnings", Fate::Idle),
    ("enable_sanity_checks", Fate::Idle),
    ("leaf_module", Fate::Idle),
];

const TENSOR_PARALLEL: Keys = &[
    ("autotp_size", Fate::Read),
    ("tp_overlap_comm", Fate::Idle),
    ("dtype", Fate::Idle),
    ("preset_model", Fate::Idle),
    ("keep_module_on_host", Fate::Idle),
    ("replace_with_kernel_inject", Fate::Idle),
    ("kernel_inject", Fate::Idle),
    ("tp", refused("it is for inference", "set tensor_parallel.autotp_size")),
    ("partition_config", refused("sharding by patterns comes from a plan of transformers", "set parallel.tp_plan")),
    (
        "injection_policy_tuple",
        refused("sharding by patterns comes from a plan of transformers", "set parallel.tp_plan"),
    ),
];

const CHECKPOINTING: Keys = &[
    ("partition_activations", Fate::Read),
    ("number_checkpoints", Fate::Read),
    ("cpu_checkpointing", refused(NO_OFFLOAD, NO_OFFLOAD_HINT)),
    ("contiguous_memory_optimization", Fate::Idle),
    ("synchronize_checkpoint_boundary", Fate::Idle),
    ("profile", Fate::Idle),
];

const TENSORBOARD: Keys =
    &[("enabled", Fate::Is("output.tensorboard")), ("output_path", Fate::Idle), ("job_name", Fate::Idle)];

pub const OPTIMIZER: Keys = &[
    ("lr", Fate::Read),
    ("betas", Fate::Read),
    ("eps", Fate::Is("train.epsilon")),
    ("weight_decay", Fate::Is("train.weight_decay")),
    ("adam_w_mode", Fate::Read),
    ("bias_correction", refused_unless(|value| value == true, "moments are always corrected")),
    ("amsgrad", refused("the largest variance so far is not kept", "")),
    ("max_grad_norm", refused("DeepSpeed clips by another key", "set gradient_clipping")),
    ("torch_adam", Fate::Idle),
    ("fused", Fate::Idle),
    ("foreach", Fate::Idle),
    ("set_grad_none", Fate::Idle),
    ("fp32_optimizer_states", Fate::Idle),
];

pub const LION: Keys = &[
    ("lr", Fate::Read),
    ("betas", Fate::Read),
    ("weight_decay", Fate::Is("train.weight_decay")),
    ("max_grad_norm", refused("DeepSpeed clips by another key", "set gradient_clipping")),
    ("set_grad_none", Fate::Idle),
    ("fp32_optimizer_states", Fate::Idle),
];

pub const SGD: Keys = &[
    ("lr", Fate::Read),
    ("momentum", Fate::Is("train.momentum")),
    ("nesterov", Fate::Is("train.nesterov")),
    ("weight_decay", Fate::Is("train.weight_decay")),
    ("dampening", refused_unless(is_zero, "momentum is not dampened")),
    ("maximize", refused("losses are minimised", "")),
    ("max_grad_norm", refused("DeepSpeed clips by another key", "set gradient_clipping")),
    ("foreach", Fate::Idle),
    ("fused", Fate::Idle),
    ("differentiable", Fate::Idle),
];

const RISES_FROM_ZERO: &str = "the rate rises from 0";

/// A continued run has its own place in the schedule.
const STARTS: Fate = refused_unless(|value| value.as_i64() == Some(-1), "a run starts at its beginning or resumes");

pub const WARMUP: Keys = &[
    ("warmup_min_lr", refused_unless(is_zero, RISES_FROM_ZERO)),
    ("warmup_max_lr", Fate::Read),
    ("warmup_num_steps", Fate::Is("train.warmup_steps")),
    ("warmup_type", Fate::Read),
    ("last_batch_iteration", STARTS),
];

pub const WARMUP_DECAY: Keys = &[
    ("total_num_steps", Fate::Is("train.steps")),
    ("warmup_min_lr", refused_unless(is_zero, RISES_FROM_ZERO)),
    ("warmup_max_lr", Fate::Read),
    ("warmup_num_steps", Fate::Is("train.warmup_steps")),
    ("warmup_type", Fate::Read),
    ("last_batch_iteration", STARTS),
];

pub const WARMUP_COSINE: Keys = &[
    ("total_num_steps", Fate::Is("train.steps")),
    ("warmup_min_ratio", refused_unless(is_zero, RISES_FROM_ZERO)),
    ("cos_min_ratio", Fate::Read),
    ("warmup_num_steps", Fate::Is("train.warmup_steps")),
    ("warmup_type", Fate::Read),
    ("last_batch_iteration", STARTS),
];
