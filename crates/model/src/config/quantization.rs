//! `quantization_config`: what transformers says of weights that are quantised.

use serde_json::{Map, Value};

use crate::config::family::Family;
use crate::config::shorten;
use crate::error::Error;

/// Keys that change no number of a model in 4 bits: the dtype of its products, which is the run's here, how often factors were
/// quantised, which the file tells, what was skipped, which its tensors tell, and options of 8 bits.
const HARMLESS: [&str; 7] = [
    "bnb_4bit_compute_dtype",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
    "modules_to_not_convert",
];

/// How a folder has some of its weights, if not as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// Linear layers in 4 bits by bitsandbytes.
    Nf4,
    /// Experts in 4 bits with scales that are powers of two. They are expanded on loading.
    Mxfp4,
}

/// What it describes; refuses what cannot be read.
pub(super) fn read_quantization(found: Option<&Value>, family: &Family) -> Result<Option<Quantization>, Error> {
    let Some(found) = found else { return Ok(None) };
    let empty = Map::new();
    let keys = found.as_object().unwrap_or(&empty);
    let text = |key: &str| keys.get(key).and_then(Value::as_str);
    let is_set = |key: &str| keys.get(key) == Some(&Value::Bool(true));
    let refused = |what: &str| Err(Error::Quantized { method: shorten(what) });
    let method = text("quant_method").unwrap_or("no method named");
    let has_clamped_experts = family.experts.as_ref().is_some_and(|options| options.clamped.is_some());
    if method == "mxfp4" && has_clamped_experts {
        const READ: [&str; 3] = ["quant_method", "modules_to_not_convert", "dequantize"];
        return match keys.iter().find(|(key, value)| !READ.contains(&key.as_str()) && !value.is_null()) {
            None => Ok(Some(Quantization::Mxfp4)),
            Some((key, value)) => refused(&format!("mxfp4, with the unknown key {key}: {value}")),
        };
    }
    if method != "bitsandbytes" {
        return refused(method);
    }
    if is_set("load_in_8bit") || is_set("_load_in_8bit") {
        return refused("bitsandbytes, 8 bits");
    }
    if !is_set("load_in_4bit") && !is_set("_load_in_4bit") {
        return refused("bitsandbytes, neither 4 nor 8 bits");
    }
    // bitsandbytes' own default is fp4.
    let kind = text("bnb_4bit_quant_type").unwrap_or("fp4");
    if kind != "nf4" {
        return refused(&format!("bitsandbytes, {kind}"));
    }
    let storage = text("bnb_4bit_quant_storage").unwrap_or("uint8");
    if storage != "uint8" {
        return refused(&format!("bitsandbytes, nf4 stored as {storage}"));
    }
    const READ: [&str; 7] = [
        "quant_method",
        "load_in_4bit",
        "_load_in_4bit",
        "load_in_8bit",
        "_load_in_8bit",
        "bnb_4bit_quant_type",
        "bnb_4bit_quant_storage",
    ];
    let is_known = |key: &str| READ.contains(&key) || HARMLESS.contains(&key);
    match keys.iter().find(|(key, value)| !is_known(key) && !value.is_null()) {
        None => Ok(Some(Quantization::Nf4)),
        Some((key, value)) => refused(&format!("bitsandbytes, with the unknown key {key}: {value}")),
    }
}
