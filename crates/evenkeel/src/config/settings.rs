//! The table of keys: one line each for the file, `--set`, `--explain` and the struct that a run reads.

use std::path::PathBuf;

use evenkeel_balance::Mode;

use super::setting::{above, choices, from};
use super::table::settings;

choices! {
    Architecture { Llama = "llama" }
    DataSource {
        Synthetic = "synthetic", Text = "text", Jsonl = "jsonl", Json = "json", Parquet = "parquet", Images = "images",
        Cifar10 = "cifar10"
    }
    RecordFormat { Text = "text", Alpaca = "alpaca", Messages = "messages" }
    InstructionPrompt { Chat = "chat", Alpaca = "alpaca" }
    PackingStrategy { BestFit = "best-fit", Cut = "cut" }
    OnBadRecord { Stop = "stop", Skip = "skip" }
    OptimizerName { AdamW = "adamw", Sgd = "sgd", Lion = "lion", Adafactor = "adafactor", Muon = "muon" }
    MuonScale { MatchRmsAdamW = "match_rms_adamw", Original = "original" }
    LrDecay {
        Cosine = "cosine", Linear = "linear", Constant = "constant", CosineRestarts = "cosine-restarts",
        Polynomial = "polynomial", Wsd = "wsd"
    }
    DecayForm { Cosine = "cosine", Linear = "linear", Sqrt = "sqrt" }
    Schedule {
        None = "none", Default = "default", SavedComm = "saved-comm", CrossPass = "cross-pass", Oases = "oases"
    }
    Units { All = "all", Attention = "attention", Mlp = "mlp" }
    Imputation { Zero = "zero", Average = "average", Same = "same" }
    Selection { Priority = "priority", Random = "random" }
    Dtype { F32 = "f32", Bf16 = "bf16" }
    DeviceKind { Cpu = "cpu", Cuda = "cuda" }
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
        /// Architecture of a new model; "llama" where sizes are given.
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
        /// Whether a new model's head is its embedding; false if not set.
        tied: Option<bool>;
        /// Seed of random weights.
        seed: u64 = 0, from(0);
        /// Keys of config.json that are ignored though they are not understood. The model is trained, and saved, without them.
        ignore_keys: Vec<String> = Vec::new();
    }

    /// What it is trained on.
    [data] Data {
        /// Where records come from.
        source: DataSource;
        /// Files to read, for every source but "synthetic".
        paths: Vec<PathBuf> = Vec::new();
        /// Text between two records of a text file; a whole file is one record if not set.
        separator: Option<String>;
        /// What a record holds: plain text, instruction and answer, or a conversation.
        format: RecordFormat = RecordFormat::Text;
        /// Column of the text, in format "text".
        text_column: String = "text".to_owned();
        /// Column of the instruction, in format "alpaca".
        instruction_column: String = "instruction".to_owned();
        /// Column of the instruction's input, in format "alpaca".
        input_column: String = "input".to_owned();
        /// Column of the answer, in format "alpaca".
        output_column: String = "output".to_owned();
        /// Column of the conversation, in format "messages".
        messages_column: String = "messages".to_owned();
        /// Column of the tools that may be called in a conversation, a list of JSON schemas or JSON text of one, in format
        /// "messages". It may be missing if it has this name.
        tools_column: String = "tools".to_owned();
        /// What format "alpaca" asks by: the chat template, with the instruction and, in a line of its own, the input as what the user
        /// says, or Stanford Alpaca's prompt. "chat" if not set and there is a template, else "alpaca".
        instruction_prompt: Option<InstructionPrompt>;
        /// "bytes", a tokenizer.json, or a folder with one; model.path if not set, else "bytes".
        tokenizer: Option<String>;
        /// File with the chat template, in formats "messages" and "alpaca"; the model's own if not set.
        chat_template: Option<PathBuf>;
        /// Tokens of a sequence.
        sequence: usize = 1024, from(2).to(1 << 20);
        /// Whether records share sequences; if not, a record fills one sequence and what is longer is cut off. Not for images.
        packing: bool = true;
        /// How records share sequences: whole, each where it leaves the least free, and the end of what is longer than a sequence is
        /// cut off; or run on from one sequence to the next. If not set, "cut" for plain text and else "best-fit".
        packing_strategy: Option<PackingStrategy>;
        /// Whether the last token before a cut predicts the first one behind it. It does not in transformers.
        label_beyond_cut: bool = false;
        /// What a record that cannot be read does: "stop" ends the run, "skip" passes it over and counts it.
        on_bad_record: OnBadRecord = OnBadRecord::Stop;
        /// Bad records that an epoch may have; with more, the run ends although they are skipped. 100 if not set and they are.
        bad_record_limit: Option<u64>, from(1);
        /// Whether training mirrors every other image.
        flip: bool = true;
        /// Pixels by which training shifts images at random, each way.
        crop: usize = 4, from(0).to(1024);
        /// Whether records come in a new order every epoch.
        shuffle: bool = true;
        /// Seed of the order and of synthetic records.
        seed: u64 = 0, from(0);
        /// Threads that prepare records.
        workers: usize = 1, from(1).to(256);
        /// One record in this many is kept for evaluation; 0 keeps none.
        holdout: u64 = 0, from(0);
        /// Files to evaluate on.
        eval_paths: Vec<PathBuf> = Vec::new();
        /// Records of the synthetic source; 1024 if not set.
        records: Option<u64>, from(1).to(A_BILLION);
    }

    /// How it is trained. Training ends at the first of steps, epochs, tokens and minutes; one of them is needed.
    [train] Train {
        /// Sequences (or images) of a micro-batch.
        batch: usize = 8, from(1).to(65536);
        /// Micro-batches of a step.
        accumulate: usize = 1, from(1).to(65536);
        /// Steps to train.
        steps: Option<u32>, from(1).to(A_BILLION);
        /// Times to go through the data.
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
        /// How the learning rate falls after the warmup. "wsd" leaves it at train.lr until the end is near.
        lr_decay: LrDecay = LrDecay::Cosine;
        /// Cosines of "cosine-restarts", each from train.lr down; 1 if not set.
        lr_cycles: Option<u32>, from(1).to(1_000_000);
        /// Exponent of "polynomial"; 1 if not set, which is linear.
        lr_power: Option<f64>, above(0).to(100);
        /// Share of the run, at its end, in which the learning rate of "wsd" falls; 0.1 if not set.
        lr_decay_share: Option<f64>, above(0).to(1);
        /// How it falls then; "cosine" if not set. "sqrt" is 1 - √ of what is behind.
        lr_decay_form: Option<DecayForm>;
        /// How weights follow gradients. "muon" is for the matrices of hidden layers; embeddings, head, norms and biases follow
        /// AdamW. "adafactor" takes steps relative to a parameter's root mean square.
        optimizer: OptimizerName = OptimizerName::AdamW;
        /// AdamW's and Lion's decay of the mean of gradients; 0.9 if not set.
        beta1: Option<f64>, from(0).to(0.9999999);
        /// AdamW's decay of the mean of squared gradients, 0.95 if not set; Lion's of the mean that it keeps, 0.99 if not set.
        beta2: Option<f64>, from(0).to(0.9999999);
        /// AdamW's term against division by zero; 1e-8 if not set.
        epsilon: Option<f64>, from(1e-30).to(1);
        /// Momentum of "sgd", 0.9 if not set, and of "muon", 0.95 if not set.
        momentum: Option<f64>, from(0).to(0.9999999);
        /// Whether "sgd" or "muon" looks ahead along its momentum; if not set, "muon" does.
        nesterov: Option<bool>;
        /// How the learning rate of "muon" depends on a matrix's shape: changes as large as AdamW's, so that its learning rate
        /// suits (if not set), or √max(1, rows / columns).
        muon_scale: Option<MuonScale>;
        /// Weight decay, of matrices only: lr × this in a step, but with "sgd" a part of the gradient. If not set, 0.1, and 0
        /// with "sgd" and "adafactor".
        weight_decay: Option<f64>, from(0).to(100);
        /// Gradients are scaled down to this global norm; 0 leaves them.
        clip_norm: f64 = 1.0, from(0).to(1_000_000);
        /// Share of the target's probability spread over the vocabulary.
        label_smoothing: f64 = 0.0, from(0).below(1);
        /// What is computed in; weights and sums are kept in f32.
        dtype: Dtype = Dtype::F32;
        /// Whether activations are computed again in backward, to save memory.
        recompute: bool = false;
        /// Seed of what is random in a step.
        seed: u64 = 0, from(0);
        /// Steps in a row whose loss or gradients are not finite, after which a run ends; they change no weight.
        nonfinite_limit: u32 = 10, from(1).to(A_BILLION);
    }

    /// Evaluation on records that are not trained on.
    [eval] Eval {
        /// Steps between evaluations; 100 if not set and there is something to evaluate on.
        every: Option<u32>, from(1).to(A_BILLION);
        /// Micro-batches of one evaluation, each of train.batch sequences or images; 0 takes all there are.
        batches: u64 = 16, from(0);
        /// Evaluations in a row that may be no better than the best before them; then training ends. It never does so early if not
        /// set.
        patience: Option<u32>, from(1).to(1_000_000);
        /// By how much the loss of an evaluation must be below the best for eval.patience to begin anew; 0 if not set.
        min_delta: Option<f64>, from(0).to(1_000_000);
    }

    /// What a run writes.
    [output] Output {
        /// Folder of everything that is written.
        folder: PathBuf = PathBuf::from("run");
        /// Steps between checkpoints; 0 writes one at the end only.
        checkpoint_every: u32 = 500, from(0).to(A_BILLION);
        /// Checkpoints that are kept; older ones are removed.
        keep_checkpoints: usize = 2, from(1).to(1_000_000);
        /// Whether a checkpoint is written after each evaluation with a lower loss than all before it, and the last of those kept
        /// beside output.keep_checkpoints.
        keep_best: bool = false;
        /// Whether the trained model is written as a Hugging Face folder.
        save_model: bool = true;
        /// Whether that model is the one with the lowest loss in an evaluation, not that of the last step; sets output.keep_best.
        save_best: bool = false;
        /// Dtype of the written model; train.dtype if not set.
        save_dtype: Option<Dtype>;
        /// Steps between printed lines.
        log_every: u32 = 10, from(1).to(A_BILLION);
        /// Whether TensorBoard's event files are written.
        tensorboard: bool = false;
        /// Whether an earlier run in the folder is replaced.
        overwrite: bool = false;
    }

    /// Texts that the model continues, or questions that it answers, at the end.
    [sample] Sample {
        /// Beginnings of the texts, or the questions.
        prompts: Vec<String> = Vec::new();
        /// Whether the prompts are asked by the chat template, as what a user says; if not set, where the model has one.
        chat: Option<bool>;
        /// Tokens to continue with.
        tokens: usize = 64, from(1).to(1 << 20);
        /// How far to stray from the likeliest token; 0 never strays.
        temperature: f64 = 0.8, from(0).to(100);
        /// Tokens are drawn from the likeliest that have this probability together.
        top_p: f64 = 0.95, above(0).to(1);
    }

    /// How the work is shared among ranks, each with cores of its own.
    [parallel] Parallel {
        /// Shares of the data that are computed side by side, each by ranks of its own (data parallelism). A step's batch is
        /// train.batch × train.accumulate × parallel.dp.
        dp: usize = 1, from(1).to(1024);
        /// What these ranks split among them instead of keeping it each (ZeRO): 1 the optimizer's state, 2 gradients, too, 3
        /// parameters, too.
        zero: usize = 0, from(0).to(3);
        /// Ranks that share every layer of the model (tensor parallelism).
        tp: usize = 1, from(1).to(1024);
        /// The share of the work that each of these ranks gets, such as [1, 1, 0.5]; equal if not set.
        tp_weights: Vec<f64> = Vec::new(), above(0).to(1_000_000);
        /// A plan of how layers are cut, JSON, of transformers' patterns; wins over the model's own and the automatic cut. Every
        /// pattern must match something.
        tp_plan: Option<PathBuf>;
        /// Whether the residual stream and its norms are split among these ranks by tokens. If not set, a simulation chooses; it
        /// is whole where a plan leaves a part of the model whole. Whole, it takes more memory and often fewer bytes travel.
        sequence_parallel: Option<bool>;
        /// How a step's work and exchanges are arranged; "oases" with train.recompute, else "none". `evenkeel bench
        /// schedules` compares them.
        schedule: Option<Schedule>;
        /// In how many parts a micro-batch is cut, so that one part computes while another's exchange travels. If not set, a
        /// simulation chooses up to 4 where ranks share layers and the schedule overlaps. A run that is resumed keeps both choices.
        parts: Option<usize>, from(1).to(64);
        /// Which sublayers are computed again, by "oases" and "saved-comm".
        recompute_units: Units = Units::All;
        /// Whether a micro-batch begins when the one before it comes to its backward: more overlap, more memory. For several
        /// (train.accumulate) in schedules that overlap.
        ahead: bool = false;
        /// Cores of each rank; the machine's, shared out, if not set.
        cores_per_rank: Option<usize>, from(1).to(4096);
        /// Cores of each rank, beside those, that exchanges have to themselves; they share the others if 0.
        comm_cores: usize = 0, from(0).to(64);
        /// Seconds that a rank waits for another before the run ends.
        timeout_s: f64 = 300.0, above(0).to(1_000_000);
        /// Gigabytes per second of an emulated link between ranks, to study slow ones; not emulated if not set.
        link_gb_per_s: Option<f64>, above(0).to(1_000_000);
        /// Microseconds that every message takes on the emulated link.
        link_latency_us: f64 = 0.0, from(0).to(1_000_000);
    }

    /// What is done where a rank is slower than the others of its tensor-parallel group.
    [balance] Balance {
        /// "reshard" moves weights and their state to faster ranks for good, "migrate" has those do a part of the work in every
        /// step, "resize" has slow ranks leave out a part of their products, "semi" does both of the last two at once, "auto"
        /// takes what pays. With balance.gamma_max = 0 all leave the results as they are.
        mode: Mode = Mode::Off;
        /// The largest share of its products that a slow rank may leave out: accuracy for speed. "resize" needs it.
        gamma_max: f64 = 0.0, from(0).below(1);
        /// What takes the place of gradients that were left out.
        imputation: Imputation = Imputation::Zero;
        /// Which columns are left out: those that change least, or any.
        selection: Selection = Selection::Priority;
        /// Steps after which they are chosen anew.
        period: u32 = 20, from(1).to(A_BILLION);
        /// Whether ranks are timed before the first step, so that it is divided by their speed already.
        calibrate: bool = true;
        /// Emulated slow ranks, to try all this: "RANK:FACTOR", or "RANK:FACTOR@FIRST-LAST" for some steps only.
        stragglers: Vec<String> = Vec::new();
    }

    /// The machine.
    [device] Device {
        /// What computes: the machine's cores, or NVIDIA GPUs: one for each rank, or one that up to 16 ranks share.
        kind: DeviceKind = DeviceKind::Cpu;
        /// The number of each rank's GPU, such as [0, 1, 2, 3]; a single one is for all ranks. If not set, each rank has its own where
        /// there are as many, and else all share the first. Ranks on different GPUs exchange through NCCL.
        cards: Vec<u32> = Vec::new(), from(0).to(1023);
        /// The multiprocessors of the GPU that each rank has for itself, such as [40, 40, 24, 16]; all ranks share all of them if
        /// not set. Of an H200, multiples of 8 that are 120 together at most.
        virtual_gpus: Vec<u32> = Vec::new(), from(1).to(65536);
        /// Whether a GPU replays work that repeats as CUDA graphs; true if not set. It computes the same, with less of the host's time.
        graph: Option<bool>;
        /// Threads that compute; all cores if not set.
        threads: Option<usize>, from(1).to(4096);
    }
}
