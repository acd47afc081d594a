//! The trained model: the benchmarks' Llama, or a vision transformer of such sizes.

use evenkeel_device::DType;
use evenkeel_model::Model;
use evenkeel_step::Strategy;
use evenkeel_train::{Samples, TrainerOptions};

use crate::Mistake;
use crate::bench::llama::{Llama, model_of_options};

#[derive(Clone, clap::Args)]
pub struct Subject {
    #[command(flatten)]
    llama: Llama,
    /// A vision transformer of these sizes on images of 32 × 32 in patches of 4 × 4, --batch of them a step, with an --ffn of
    /// 4 times --hidden by default.
    #[arg(long, conflicts_with_all = ["kv_heads", "vocab", "sequence"])]
    vit: bool,
}

const IMAGE: usize = 32;
const PATCH: usize = 4;

impl Subject {
    pub fn model(&self) -> Result<Model, Mistake> {
        let Llama { hidden, layers, heads, ffn, .. } = self.llama;
        if !self.vit {
            return self.llama.model();
        }
        let labels: serde_json::Map<String, serde_json::Value> =
            (0..10).map(|class| (class.to_string(), format!("class {class}").into())).collect();
        let config = serde_json::json!({
            "model_type": "vit", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": ffn.unwrap_or(4 * hidden), "image_size": IMAGE, "patch_size": PATCH, "num_channels": 3,
            "id2label": labels, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        });
        model_of_options(&config)
    }

    pub fn batch(&self) -> usize {
        self.llama.batch
    }

    pub fn dtype(&self) -> DType {
        self.llama.dtype.into()
    }

    pub fn strategy(&self, tp: usize) -> Strategy {
        self.llama.strategy(1, tp, None)
    }

    pub fn options(&self) -> TrainerOptions {
        self.llama.trainer_options()
    }

    pub fn samples(&self, step: u64) -> Vec<Samples> {
        if !self.vit {
            return self.llama.samples(step, 1);
        }
        let batch = self.llama.batch;
        let pixel = |i: usize| ((i as u64).wrapping_mul(0x9e37_79b9) >> 7).wrapping_add(step) % 255;
        let pixels = (0..batch * 3 * IMAGE * IMAGE).map(|i| pixel(i) as f32 / 127.5 - 1.0).collect();
        let labels = (0..batch as u64).map(|image| ((image + step) % 10) as u32).collect();
        vec![Samples::Images { pixels, labels }]
    }

    pub fn describe(&self) -> String {
        let Llama { hidden, layers, heads, batch, sequence, dtype, .. } = &self.llama;
        let what = if self.vit { "ViT" } else { "Llama" };
        let step = if self.vit { format!("{batch} images") } else { format!("{batch} × {sequence} tokens") };
        format!("{what} of hidden {hidden}, {layers} layers, {heads} heads, {step}, {}", dtype.name())
    }
}
