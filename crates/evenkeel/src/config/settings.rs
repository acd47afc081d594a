//! The table of keys: one line each for the file, `--set`, `--explain` and the struct that a run reads.

use std::path::PathBuf;

use evenkeel_balance::{Mode, Selection};
use evenkeel_device::{DType, DeviceKind};
use evenkeel_model::{AdapterInit, Imputation};
use evenkeel_step::PipelineOrder;
use evenkeel_step::schedule::{CROSS_PASS, DEFAULT, NONE, OASES, SAVED_COMM, Schedule, Units};

use crate::device::Precision;

use super::setting::{above, choices, from, named};
use super::table::settings;

choices! {
    Architecture { Llama = "llama" }
    DataSource {
        Synthetic = "synthetic", Text = "text", Jsonl = "jsonl", Json = "json", Parquet = "parquet", Images = "images",
        Cifar10 = "cifar10"
    }
    RecordFormat { Text = "text", Alpaca = "alpaca", Messages = "messages", Labelled = "labelled" }
    InstructionPrompt { Chat = "chat", Alpaca = "alpaca" }
    PackingStrategy { BestFit = "best-fit", Cut = "cut" }
    OnBadRecord { Stop = "stop", Skip = "skip" }
    OptimizerName { AdamW = "adamw", Sgd = "sgd", Lion = "lion", Adafactor = "adafactor", Muon = "muon" }
    MuonScale { MatchRmsAdamW = "match_rms_adamw", Original = "original" }
    LrDecay {
        Cosine = "cosine", Linear = "linear", Constant = "constant", CosineRestarts = "cosine-restarts",
        Polynomial = "polynomial", Wsd = "wsd"
    }
    AdapterKind { Lora = "lora" }
    AdapterBase { Bf16 = "bf16", Nf4 = "nf4" }
    StageCut { Cost = "cost", Uniform = "uniform" }
    DecayForm { Cosine = "cosine", Linear = "linear", Sqrt = "sqrt" }
    Dtype { F32 = "f32", Bf16 = "bf16" }
}

named! {
    Schedule {
        NONE => "none", DEFAULT => "default", SAVED_COMM => "saved-comm", CROSS_PASS => "cross-pass", OASES => "oases"
    }
    PipelineOrder {
        PipelineOrder::Gpipe => "gpipe", PipelineOrder::OneForwardOneBackward => "1f1b", PipelineOrder::Interleaved => "interleaved",
        PipelineOrder::ZbH1 => "zb-h1", PipelineOrder::ZbV => "zb-v"
    }
    Units { Units::All => "all", Units::Attention => "attention", Units::Mlp => "mlp" }
    Imputation { Imputation::Zero => "zero", Imputation::Average => "average", Imputation::Same => "same" }
    AdapterInit { AdapterInit::Uniform => "uniform", AdapterInit::Gaussian => "gaussian" }
    Selection { Selection::Priority => "priority", Selection::Random => "random" }
    DeviceKind { DeviceKind::Cpu => "cpu", DeviceKind::Cuda => "cuda" }
}

const MOST_SIZE: u32 = 1 << 24;
const A_BILLION: u32 = 1_000_000_000;

settings! {
    /// What is trained: a folder, a config.json, or the sizes of a new model.
    [model] Model {
        /// Folder of a Hugging Face model to fine-tune.
        path: Option<PathBuf>;
        /// A config.json to pre-train from random weights.
        config: Option<PathBuf>;
        /// Architecture of a new model; "llama" if sizes are given.
        architecture: Option<Architecture>;
        /// Width of the residual stream of a new model.
        hidden: Option<usize>, from(1).to(MOST_SIZE);
        /// Layers of a new model.
        layers: Option<usize>, from(1).to(4096);
        /// Attention heads of a new model.
        heads: Option<usize>, from(1).to(MOST_SIZE);
        /// Heads for keys and values of a new model; as many as heads if not set.
        kv_heads: Option<usize>, from(1).to(MOST_SIZE);
        /// Width of the feed-forward layers of a new model.
        ffn: Option<usize>, from(1).to(MOST_SIZE);
        /// Vocabulary of a new model; the tokenizer's if not set.
        vocab: Option<usize>, from(2).to(MOST_SIZE);
        /// Whether a new model's head shares its embedding's weights; false if not set.
        tied: Option<bool>;
        /// Seed of random weights.
        seed: u64 = 0, from(0);
        /// Keys of config.json to ignore although Evenkeel does not understand them. The model is trained and saved without them.
        ignore_keys: Vec<String> = Vec::new();
        /// Whether the head of model.path, a classifier, begins anew with random numbers: for data with other labels.
        new_head: bool = false;
    }

    /// Adapters: small matrices beside frozen layers, trained instead of the model and saved as PEFT does.
    [adapter] Adapter {
        /// Begins a new adapter: "lora". If neither this nor adapter.path is set, the whole model is trained.
        kind: Option<AdapterKind>;
        /// Folder of a saved adapter to continue. Keys that describe an adapter are then taken from it, and refused if they
        /// contradict it.
        path: Option<PathBuf>;
        /// How the frozen linear layers are held: "bf16", or in 4 bits as bitsandbytes has them, "nf4" (QLoRA). If not set, in
        /// train.dtype, or in 4 bits if model.path is a folder that bitsandbytes has quantised.
        base: Option<AdapterBase>;
        /// Rank of an adapter: columns of one of its two matrices and rows of the other.
        rank: usize = 16, from(1).to(16384);
        /// An adapter's output is multiplied by alpha / rank; 2 × rank if not set.
        alpha: Option<f64>, above(0).to(1_000_000);
        /// Share of an adapter's inputs that training drops.
        dropout: f64 = 0.0, from(0).below(1);
        /// Layers to adapt: whole names, or ends of names behind a dot, such as ["q_proj", "v_proj"]; every linear layer but the
        /// head if not set, or with "all-linear"; none with "none".
        targets: Vec<String> = Vec::new();
        /// A regular expression of the whole names of layers to adapt, instead of adapter.targets.
        target_pattern: Option<String>;
        /// Parameters of experts to adapt, named like adapter.targets: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] or one of
        /// them. Neither adapter.exclude nor adapter.layers concerns them. Without this, experts stay as they are.
        target_parameters: Vec<String> = Vec::new();
        /// Layers not to adapt, named like adapter.targets.
        exclude: Vec<String> = Vec::new();
        /// Numbers of the model's layers to adapt; all if not set.
        layers: Vec<u32> = Vec::new(), from(0).to(4096);
        /// Other ranks for some layers, "PATTERN=RANK"; the pattern is a regular expression of a name's end behind a dot, and the
        /// first that matches counts.
        rank_pattern: Vec<String> = Vec::new();
        /// Other alphas for some layers, "PATTERN=ALPHA".
        alpha_pattern: Vec<String> = Vec::new();
        /// Whether an adapter's output is multiplied by alpha / √rank instead (rsLoRA).
        rslora: bool = false;
        /// Whether each output of an adapted layer also has a trained magnitude (DoRA).
        dora: bool = false;
        /// Random numbers that an adapter begins with: "uniform" within ±1/√inputs, or "gaussian" with deviation 1/rank.
        init: AdapterInit = AdapterInit::Uniform;
        /// Modules that are trained whole beside the adapters, such as ["embed_tokens", "lm_head", "norm"], by the ends of their
        /// names.
        modules_to_save: Vec<String> = Vec::new();
        /// Whether a head that is tied to a trained embedding is trained with it; if not, the head keeps the base's weights.
        keep_tie: bool = false;
    }

    /// What the model is trained on.
    [data] Data {
        /// Where records come from.
        source: DataSource;
        /// Files to read, for every source but "synthetic".
        paths: Vec<PathBuf> = Vec::new();
        /// Text between two records of a text file; a whole file is one record if not set.
        separator: Option<String>;
        /// What a record holds: plain text, instruction and answer, a conversation, or a text with its label.
        format: RecordFormat = RecordFormat::Text;
        /// Column of the text, in formats "text" and "labelled".
        text_column: String = "text".to_owned();
        /// Column of a second text, in format "labelled": the model reads both together.
        second_text_column: Option<String>;
        /// Column of the label, in format "labelled": its number or its name.
        label_column: String = "label".to_owned();
        /// Names of the labels, in format "labelled", by number; the model's own (`id2label` in config.json) if not set. They are
        /// saved with the model.
        labels: Vec<String> = Vec::new();
        /// Column of the instruction, in format "alpaca".
        instruction_column: String = "instruction".to_owned();
        /// Column of the instruction's input, in format "alpaca".
        input_column: String = "input".to_owned();
        /// Column of the answer, in format "alpaca".
        output_column: String = "output".to_owned();
        /// Column of the conversation, in format "messages".
        messages_column: String = "messages".to_owned();
        /// Column of the tools that a conversation may call, in format "messages": a list of JSON schemas, or JSON text of one.
        /// The column "tools" may be missing, any other must be there.
        tools_column: String = "tools".to_owned();
        /// Prompt of format "alpaca". "chat" renders the chat template, with the instruction and, on a line of its own, the input
        /// as the user's message; "alpaca" is Stanford Alpaca's prompt. If not set, "chat" if there is a template, else "alpaca".
        instruction_prompt: Option<InstructionPrompt>;
        /// "bytes", a tokenizer.json, or a folder with one; model.path if not set, else "bytes".
        tokenizer: Option<String>;
        /// File with the chat template, in formats "messages" and "alpaca"; the model's own if not set.
        chat_template: Option<PathBuf>;
        /// Tokens of a sequence. A labelled text that is longer loses its end.
        sequence: usize = 1024, from(2).to(1 << 20);
        /// Whether records share sequences. If not, each record gets a sequence of its own and loses what does not fit. Not for
        /// images.
        packing: bool = true;
        /// How records share sequences. "best-fit" keeps records whole, puts each where it leaves the least room, and cuts off
        /// the end of a record longer than a sequence; "cut" continues a record in the next sequence. If not set, "cut" for plain
        /// text, else "best-fit".
        packing_strategy: Option<PackingStrategy>;
        /// Whether the last token before a cut is trained to predict the first one after it. transformers does not do so.
        label_beyond_cut: bool = false;
        /// What to do with a record that cannot be read: "stop" ends the run, "skip" skips the record and counts it.
        on_bad_record: OnBadRecord = OnBadRecord::Stop;
        /// Bad records allowed in an epoch; with more, the run ends even with "skip". 100 if not set and bad records are skipped.
        bad_record_limit: Option<u64>, from(1);
        /// Whether training mirrors every other image.
        flip: bool = true;
        /// Pixels by which training shifts images at random, each way.
        crop: usize = 4, from(0).to(1024);
        /// Whether each epoch reads the records in a new order.
        shuffle: bool = true;
        /// Seed of the order and of synthetic records.
        seed: u64 = 0, from(0);
        /// Threads that prepare records.
        workers: usize = 1, from(1).to(256);
        /// Keeps one record in this many for evaluation; 0 keeps none.
        holdout: u64 = 0, from(0);
        /// Files to evaluate on.
        eval_paths: Vec<PathBuf> = Vec::new();
        /// Records of the synthetic source; 1024 if not set.
        records: Option<u64>, from(1).to(A_BILLION);
    }

    /// How the model is trained. Training ends at the first of steps, epochs, tokens and minutes; set at least one.
    [train] Train {
        /// Sequences (or images) of a micro-batch.
        batch: usize = 8, from(1).to(65536);
        /// Micro-batches of a step.
        accumulate: usize = 1, from(1).to(65536);
        /// Steps to train.
        steps: Option<u32>, from(1).to(A_BILLION);
        /// Passes over the data.
        epochs: Option<u32>, from(1).to(1_000_000);
        /// Tokens to train on.
        tokens: Option<u64>, from(1);
        /// Minutes to train.
        minutes: Option<f64>, above(0).to(10_000_000);
        /// Learning rate after the warmup.
        lr: f64 = 3e-4, above(0).to(100);
        /// Learning rate at the end of the run.
        min_lr: f64 = 0.0, from(0).to(100);
        /// Steps over which the learning rate rises.
        warmup_steps: u32 = 0, from(0).to(A_BILLION);
        /// How the learning rate falls after the warmup. "wsd" keeps it at train.lr until near the end.
        lr_decay: LrDecay = LrDecay::Cosine;
        /// Cycles of "cosine-restarts", each starting at train.lr; 1 if not set.
        lr_cycles: Option<u32>, from(1).to(1_000_000);
        /// Exponent of "polynomial"; 1 if not set, which is linear.
        lr_power: Option<f64>, above(0).to(100);
        /// Fraction of the run, at its end, over which "wsd" lowers the learning rate; 0.1 if not set.
        lr_decay_share: Option<f64>, above(0).to(1);
        /// Form of the "wsd" decay; "cosine" if not set. "sqrt" is 1 - √x after a fraction x of the decay.
        lr_decay_form: Option<DecayForm>;
        /// The optimizer. "muon" updates the matrices of hidden layers; embeddings, head, norms and biases use AdamW. "adafactor"
        /// takes steps relative to a parameter's root mean square.
        optimizer: OptimizerName = OptimizerName::AdamW;
        /// Decay of the mean of gradients, of AdamW and Lion; 0.9 if not set.
        beta1: Option<f64>, from(0).to(0.9999999);
        /// AdamW's decay of the mean of squared gradients, 0.95 if not set; Lion's decay of its momentum, 0.99 if not set.
        beta2: Option<f64>, from(0).to(0.9999999);
        /// AdamW's term against division by zero; 1e-8 if not set.
        epsilon: Option<f64>, from(1e-30).to(1);
        /// Momentum of "sgd", 0.9 if not set, and of "muon", 0.95 if not set.
        momentum: Option<f64>, from(0).to(0.9999999);
        /// Whether "sgd" or "muon" uses Nesterov momentum; if not set, "muon" does.
        nesterov: Option<bool>;
        /// How "muon" scales the learning rate by a matrix's shape. "match_rms_adamw", if not set, makes updates as large as
        /// AdamW's, so that its learning rate suits; "original" multiplies by √max(1, rows / columns).
        muon_scale: Option<MuonScale>;
        /// Weight decay, for matrices only: a step subtracts lr × this × the weight; "sgd" adds it to the gradient instead. If
        /// not set, 0.1, and 0 with "sgd" and "adafactor".
        weight_decay: Option<f64>, from(0).to(100);
        /// Gradients are scaled down to this global norm; 0 does not clip.
        clip_norm: f64 = 1.0, from(0).to(1_000_000);
        /// Share of the target's probability spread over the vocabulary.
        label_smoothing: f64 = 0.0, from(0).below(1);
        /// Compute dtype; master weights and sums are f32.
        dtype: Dtype = Dtype::F32;
        /// Whether backward recomputes activations, to save memory.
        recompute: bool = false;
        /// Seed of what is random in a step, such as dropout.
        seed: u64 = 0, from(0);
        /// The run ends after this many steps in a row whose loss or gradients are not finite. Such steps change no weight.
        nonfinite_limit: u32 = 10, from(1).to(A_BILLION);
    }

    /// Evaluation on records that training does not see.
    [eval] Eval {
        /// Steps between evaluations; 100 if not set and there is something to evaluate on.
        every: Option<u32>, from(1).to(A_BILLION);
        /// Micro-batches of one evaluation, each of train.batch sequences or images; 0 takes all.
        batches: u64 = 16, from(0);
        /// Training ends after this many evaluations in a row that are no better than the best before them; if not set, it never
        /// ends early.
        patience: Option<u32>, from(1).to(1_000_000);
        /// How far below the best loss an evaluation must be to reset eval.patience; 0 if not set.
        min_delta: Option<f64>, from(0).to(1_000_000);
    }

    /// What a run writes.
    [output] Output {
        /// Folder for everything that the run writes.
        folder: PathBuf = PathBuf::from("run");
        /// Steps between checkpoints; 0 writes one at the end only.
        checkpoint_every: u32 = 500, from(0).to(A_BILLION);
        /// Checkpoints to keep; older ones are removed.
        keep_checkpoints: usize = 2, from(1).to(1_000_000);
        /// Whether to write a checkpoint after each evaluation with a new lowest loss, and to keep the last of these beside
        /// output.keep_checkpoints.
        keep_best: bool = false;
        /// Whether to write the trained model as a Hugging Face folder.
        save_model: bool = true;
        /// Whether that model is the one with the lowest evaluation loss, not that of the last step; sets output.keep_best.
        save_best: bool = false;
        /// Dtype of the written model; train.dtype if not set.
        save_dtype: Option<Dtype>;
        /// Steps between printed lines.
        log_every: u32 = 10, from(1).to(A_BILLION);
        /// Whether to write TensorBoard event files.
        tensorboard: bool = false;
        /// Whether to replace an earlier run in the folder.
        overwrite: bool = false;
    }

    /// Texts that the model continues, or questions that it answers, when the run ends.
    [sample] Sample {
        /// Beginnings of the texts, or the questions.
        prompts: Vec<String> = Vec::new();
        /// Whether the chat template turns each prompt into a user's message; if not set, it does where the model has one.
        chat: Option<bool>;
        /// Most tokens to generate.
        tokens: usize = 64, from(1).to(1 << 20);
        /// Sampling temperature; 0 always takes the likeliest token.
        temperature: f64 = 0.8, from(0).to(100);
        /// Tokens are drawn from the likeliest ones that together have this probability.
        top_p: f64 = 0.95, above(0).to(1);
    }

    /// How ranks share the work.
    [parallel] Parallel {
        /// Whether the run plans how to share the work before it begins: with as many sequences a step, it takes the fastest
        /// strategy that `evenkeel plan` finds, and measures what this machine's profile lacks. Also written parallel = "auto".
        auto: bool = false;
        /// Replicas of the model, each on ranks of its own and on its part of the batch (data parallelism). A step's batch is
        /// train.batch × train.accumulate × parallel.dp.
        dp: usize = 1, from(1).to(1024);
        /// ZeRO stage, what replicas split instead of each keeping a copy: 1 optimizer state, 2 gradients too, 3 parameters too.
        zero: usize = 0, from(0).to(3);
        /// Ranks that share every layer of the model (tensor parallelism).
        tp: usize = 1, from(1).to(1024);
        /// Places of a pipeline: each has a run of the model's layers, on ranks of its own (pipeline parallelism). Micro-batches
        /// (train.accumulate) go through them one behind another.
        pp: usize = 1, from(1).to(1024);
        /// The order in which a place of the pipeline computes its micro-batches.
        order: PipelineOrder = PipelineOrder::OneForwardOneBackward;
        /// Stages at each place; if not set, 2 with "interleaved" and "zb-v", else 1.
        chunks: Option<usize>, from(1).to(64);
        /// Where the model is cut in stages: so that they take equally long ("cost"), or have equally many parameters
        /// ("uniform").
        stages: StageCut = StageCut::Cost;
        /// Layers of each stage, such as [10, 14], instead.
        stage_layers: Vec<usize> = Vec::new(), from(0).to(A_BILLION);
        /// Relative share of the work of each tensor-parallel rank, such as [1, 1, 0.5]; equal if not set.
        tp_weights: Vec<f64> = Vec::new(), above(0).to(1_000_000);
        /// A sharding plan, JSON, in transformers' patterns; wins over the model's own and over automatic sharding. Every pattern
        /// must match something.
        tp_plan: Option<PathBuf>;
        /// Whether each tensor-parallel rank has some experts of a mixture whole instead of some columns of every expert.
        whole_experts: bool = false;
        /// Whether tensor-parallel ranks split the residual stream and its norms by tokens. If not set, a simulation chooses; the
        /// stream stays whole where a plan leaves a part of the model whole. A whole stream takes more memory and often moves
        /// fewer bytes.
        sequence_parallel: Option<bool>;
        /// How a step's computation and communication are arranged; if not set, "none", or with train.recompute "oases" where ranks
        /// share layers and "cross-pass" where they do not. `evenkeel bench schedules` compares them.
        schedule: Option<Schedule>;
        /// Parts that a micro-batch is cut in, so that one part computes while another communicates. If not set, a simulation
        /// chooses up to 4 where ranks share layers and the schedule overlaps. A resumed run keeps what was chosen.
        parts: Option<usize>, from(1).to(64);
        /// Sublayers that "oases" and "saved-comm" recompute.
        recompute_units: Units = Units::All;
        /// Whether a micro-batch begins while the one before it is in its backward: more overlap, more memory. Needs
        /// train.accumulate above 1 and a schedule that overlaps.
        ahead: bool = false;
        /// Cores of each rank; if not set, ranks divide the machine's cores.
        cores_per_rank: Option<usize>, from(1).to(4096);
        /// More cores of each rank, for communication alone; with 0, communication shares the compute cores.
        comm_cores: usize = 0, from(0).to(64);
        /// Seconds that a rank waits for another before the run ends.
        timeout_s: f64 = 300.0, above(0).to(1_000_000);
        /// Bandwidth of an emulated link between ranks in gigabytes per second, to study slow links; not emulated if not set.
        link_gb_per_s: Option<f64>, above(0).to(1_000_000);
        /// Latency of every message on the emulated link in microseconds.
        link_latency_us: f64 = 0.0, from(0).to(1_000_000);
    }

    /// What to do when a rank is slower than the others of its tensor-parallel group.
    [balance] Balance {
        /// "reshard" moves weights and their optimizer state to faster ranks; "migrate" moves a part of the work in every step;
        /// "resize" prunes a part of a slow rank's products; "semi" migrates and prunes; "auto" takes what pays. With
        /// balance.gamma_max = 0, no mode changes the results.
        mode: Mode = Mode::Off;
        /// The largest fraction of its products that a slow rank may prune: accuracy for speed. "resize" needs it.
        gamma_max: f64 = 0.0, from(0).below(1);
        /// What replaces the gradients of pruned columns.
        imputation: Imputation = Imputation::Zero;
        /// Whether the weights of pruned columns stay as they are, with what the optimizer keeps of them. If not, updates change them
        /// by imputed gradients, which also count in the norm of all gradients.
        freeze: bool = true;
        /// Which columns are pruned: those that change least, or random ones.
        selection: Selection = Selection::Priority;
        /// Steps between two selections of columns.
        period: u32 = 20, from(1).to(A_BILLION);
        /// Whether to time ranks before the first step, so that it already divides the work by their speed.
        calibrate: bool = true;
        /// Emulated slow ranks, to try balancing: "RANK:FACTOR", or "RANK:FACTOR@FIRST-LAST" for some steps only.
        stragglers: Vec<String> = Vec::new();
    }

    /// What computes.
    [device] Device {
        /// "cpu" computes on the machine's cores; "cuda" on NVIDIA GPUs: one for each rank, or one that up to 16 ranks share.
        kind: DeviceKind = DeviceKind::Cpu;
        /// Number of each rank's GPU, such as [0, 1, 2, 3]; a single number is for all ranks. If not set, each rank has its own
        /// GPU where there are as many, else all share the first. Ranks on different GPUs communicate through NCCL.
        cards: Vec<u32> = Vec::new(), from(0).to(1023);
        /// Multiprocessors of the GPU that each rank has for itself, such as [40, 40, 24, 16]; if not set, all ranks share all of
        /// them. On an H200: multiples of 8, at most 120 in total.
        virtual_gpus: Vec<u32> = Vec::new(), from(1).to(65536);
        /// Whether a GPU replays repeated work as CUDA graphs; true if not set. The results are the same, and the host has less
        /// to do.
        graph: Option<bool>;
        /// Threads that compute; all cores if not set.
        threads: Option<usize>, from(1).to(4096);
    }
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> DType {
        match dtype {
            Dtype::F32 => DType::F32,
            Dtype::Bf16 => DType::Bf16,
        }
    }
}

impl From<Precision> for Dtype {
    fn from(precision: Precision) -> Dtype {
        match precision {
            Precision::F32 => Dtype::F32,
            Precision::Bf16 => Dtype::Bf16,
        }
    }
}

impl Settings {
    /// The dtype of the weights that a run writes.
    pub fn save_dtype(&self) -> Dtype {
        self.output.save_dtype.unwrap_or(self.train.dtype)
    }
}
