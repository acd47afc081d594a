//! Plans that say how a model is cut: `base_model_tp_plan` in config.json, or a table of patterns of one's own.
//!
//! transformers does not save its plans, so a config.json hardly ever has one; most come from a file.
//!
//! A plan names layers and how transformers or DeepSpeed would cut them. It wins over the automatic cut. Layers that feed each
//! other are cut to fit: the outputs of one and the inputs of the next, or neither. If a plan mentions only some of them, the
//! others follow; if it mentions none, they are cut automatically.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::chain::model::Model;
use crate::config::family::{Mlp, Qkv};
use crate::config::shorten;
use crate::error::Error;
use crate::sharding::shard::Part;

/// Patterns of layer names, each with how such layers are cut. The first that matches counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TpPlan {
    entries: Vec<(String, Style)>,
    /// Whether to refuse matrices that no pattern matches.
    strict: bool,
}

/// How a layer is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    Outputs,
    Inputs,
    Vocabulary,
    Whole,
}

/// The names of the styles in transformers (older and newer) and DeepSpeed. Styles that differ only in whether the layer or its
/// parent gathers or reduces an output are the same here: units are reduced once, at their end.
const STYLES: [(&str, Style); 18] = [
    ("colwise", Style::Outputs),
    ("colwise_rep", Style::Outputs),
    ("colwise_gather_output", Style::Outputs),
    ("local_colwise", Style::Outputs),
    ("packed_colwise", Style::Outputs),
    ("local_packed_rowwise", Style::Outputs),
    ("column", Style::Outputs),
    ("rowwise", Style::Inputs),
    ("rowwise_rep", Style::Inputs),
    ("rowwise_split_input", Style::Inputs),
    ("local_rowwise", Style::Inputs),
    ("packed_rowwise", Style::Inputs),
    ("row", Style::Inputs),
    ("embedding_rowwise", Style::Vocabulary),
    ("replicate", Style::Whole),
    ("replicated_with_grad_allreduce", Style::Whole),
    ("sequence_parallel", Style::Whole),
    ("skip", Style::Whole),
];

impl TpPlan {
    /// The plan in a config.json, empty if it has none.
    pub fn of_config(config: &Value) -> Result<TpPlan, Error> {
        match config.get("base_model_tp_plan") {
            None | Some(Value::Null) => Ok(TpPlan::default()),
            Some(plan) => TpPlan::from_json(plan),
        }
    }

    /// `{"layers.*.mlp.up_proj": "colwise", …}`, or, if the order matters,
    /// `{"strict": true, "layers": [["layers.0.*", "skip"], …]}`.
    pub fn from_json<'a>(json: &'a Value) -> Result<TpPlan, Error> {
        let form = || Error::BadPlan {
            what: "it is not an object of patterns and styles, nor one with a list `layers` of such pairs".to_owned(),
        };
        let object = json.as_object().ok_or_else(form)?;
        let Some(Value::Array(layers)) = object.get("layers") else {
            return TpPlan::of_pairs(object.iter().map(|(pattern, style)| (pattern.as_str(), style)), false);
        };
        let pair = |layer: &'a Value| match &layer.as_array()?[..] {
            [pattern, style] => Some((pattern.as_str()?, style)),
            _ => None,
        };
        let pairs: Option<Vec<(&str, &Value)>> = layers.iter().map(pair).collect();
        let strict = object.get("strict").and_then(Value::as_bool).unwrap_or(false);
        TpPlan::of_pairs(pairs.ok_or_else(form)?.into_iter(), strict)
    }

    fn of_pairs<'a>(pairs: impl Iterator<Item = (&'a str, &'a Value)>, strict: bool) -> Result<TpPlan, Error> {
        let entry = |(pattern, style): (&str, &Value)| -> Result<(String, Style), Error> {
            let known = STYLES.iter().find(|(name, _)| style.as_str() == Some(name));
            let (_, known) = known.ok_or_else(|| {
                let names: Vec<&str> = STYLES.iter().map(|(name, _)| *name).collect();
                let (pattern, style) = (shorten(pattern), shorten(&style.to_string()));
                Error::BadPlan { what: format!("`{pattern}` has style {style}, known are {}", names.join(", ")) }
            })?;
            Ok((pattern.to_owned(), *known))
        };
        Ok(TpPlan { entries: pairs.map(entry).collect::<Result<_, Error>>()?, strict })
    }

    /// This plan, followed by another one for the layers that it does not mention.
    pub fn or(mut self, other: TpPlan) -> TpPlan {
        self.entries.extend(other.entries);
        self.strict |= other.strict;
        self
    }

    /// The parts that each of so many shards holds whole.
    pub fn uncut(&self, model: &Model, shards: usize) -> Result<BTreeSet<Part>, Error> {
        let config = &model.config;
        let names = &config.family.names;
        let mut uncut = config.whole_parts(shards);
        let mut keep_whole = |part: Part, is_cut: Option<bool>| {
            if is_cut == Some(false) {
                uncut.insert(part);
            }
        };
        let embed = names.embed.trim_end_matches(".weight");
        let embed: (&str, &[Style]) = (embed, &[Style::Vocabulary, Style::Inputs]);
        let head: (&str, &[Style]) = (names.head, &[Style::Outputs]);
        if config.tied {
            keep_whole(Part::Embedding, self.agree(model, &[embed, head])?);
        } else {
            keep_whole(Part::Embedding, self.agree(model, &[embed])?);
            keep_whole(Part::Head, self.agree(model, &[head])?);
        }
        for layer in 0..config.layers.len() {
            let prefix = names.layer.replace("{}", &layer.to_string());
            let full = |name: &str| format!("{prefix}{name}");
            let attention = match &config.family.linear_attention {
                Some(names) if config.layers[layer].is_linear => {
                    let widening: Vec<String> = names.projections.names().into_iter().map(full).collect();
                    // transformers gathers what each shard computes of these layers; here they are cut like the others.
                    self.unit(model, &widening, &full(names.out), &[Style::Inputs, Style::Outputs])?
                }
                _ => {
                    let widening = match &names.qkv {
                        Qkv::Separate(names) | Qkv::SeparateWithGate(names) => names.map(full).to_vec(),
                        Qkv::FusedBlocks(name) | Qkv::FusedByGroup(name) => vec![full(name)],
                    };
                    self.unit(model, &widening, &full(names.out), &[Style::Inputs])?
                }
            };
            let (widening, down) = match &names.mlp {
                Mlp::Gated { gate, up, down } => (vec![full(gate), full(up)], full(down)),
                Mlp::GatedTogether { gate_up, down } => (vec![full(gate_up)], full(down)),
                Mlp::Plain { up, down } => (vec![full(up)], full(down)),
            };
            let mlp = self.unit(model, &widening, &down, &[Style::Inputs])?;
            if config.parallel && attention.unwrap_or(true) != mlp.unwrap_or(true) {
                let what = format!("attention and MLP of layer {layer} are added up, and only one of them is cut");
                return Err(Error::BadPlan { what });
            }
            keep_whole(Part::Attention(layer), attention);
            keep_whole(Part::Mlp(layer), mlp);
        }
        self.refuse_unmatched(model)?;
        self.refuse_idle(model)?;
        Ok(uncut)
    }

    /// Whether the layers that feed another one, and that one, are cut; `None` if the plan mentions none of them.
    fn unit(
        &self,
        model: &Model,
        widening: &[String],
        narrowing: &str,
        narrowing_ways: &[Style],
    ) -> Result<Option<bool>, Error> {
        let mut expected: Vec<(&str, &[Style])> =
            widening.iter().map(|name| (name.as_str(), &[Style::Outputs][..])).collect();
        expected.push((narrowing, narrowing_ways));
        self.agree(model, &expected)
    }

    /// Whether all of these layers are cut, each in one of its ways, or all whole.
    fn agree(&self, model: &Model, layers: &[(&str, &[Style])]) -> Result<Option<bool>, Error> {
        let mut agreed: Option<(bool, &str)> = None;
        for &(layer, ways) in layers {
            let Some(style) = self.style(model, layer) else { continue };
            let is_cut = style != Style::Whole;
            if is_cut && !ways.contains(&style) {
                let what = format!("`{layer}` cannot be cut by its {}", describe(style));
                return Err(Error::BadPlan { what });
            }
            match agreed {
                Some((before, other)) if before != is_cut => {
                    let what = format!("`{other}` and `{layer}` belong together, and only one of them is cut");
                    return Err(Error::BadPlan { what });
                }
                _ => agreed = Some((is_cut, layer)),
            }
        }
        Ok(agreed.map(|(is_cut, _)| is_cut))
    }

    fn style(&self, model: &Model, layer: &str) -> Option<Style> {
        self.entries.iter().find(|(pattern, _)| is_meant(pattern, model, layer)).map(|&(_, style)| style)
    }

    fn refuse_unmatched(&self, model: &Model) -> Result<(), Error> {
        let matrices = model.specs.iter().filter(|spec| self.strict && spec.shape.len() > 1);
        let mut layers = matrices.map(|spec| spec.name.trim_end_matches(".weight"));
        match layers.find(|layer| self.style(model, layer).is_none()) {
            None => Ok(()),
            Some(layer) => Err(Error::BadPlan { what: format!("it is strict, and no pattern matches `{layer}`") }),
        }
    }

    /// Refuses patterns that match nothing: they are misspelt, or the plan is another model's.
    fn refuse_idle(&self, model: &Model) -> Result<(), Error> {
        let names = &model.config.family.names;
        let modules = model.specs.iter().filter_map(|spec| Some(spec.name.rsplit_once('.')?.0));
        // A tied head has no parameter of its own.
        let modules: BTreeSet<&str> = modules.chain([names.head]).collect();
        let is_idle = |pattern: &String| !modules.iter().any(|module| is_meant(pattern, model, module));
        let idle: Vec<String> =
            self.entries.iter().filter(|(pattern, _)| is_idle(pattern)).map(|(pattern, _)| shorten(pattern)).collect();
        if idle.is_empty() {
            return Ok(());
        }
        let [every, first] = ["*", "0"].map(|layer| names.layer.replace("{}", layer));
        let general = |module: &str| match module.strip_prefix(&first) {
            Some(name) => Some(format!("{every}{name}")),
            None => {
                (!module.starts_with(names.layer.split("{}").next().unwrap_or_default())).then(|| module.to_owned())
            }
        };
        let layers = modules.iter().filter_map(|module| general(module)).collect();
        Err(Error::IdlePatterns { patterns: idle, layers })
    }
}

/// Whether a pattern matches a layer's name, with or without the network's prefix.
fn is_meant(pattern: &str, model: &Model, layer: &str) -> bool {
    let pattern = pattern.trim_end_matches(".weight");
    let short = layer.strip_prefix(model.config.family.names.base);
    matches(pattern, layer) || short.is_some_and(|short| matches(pattern, short))
}

fn describe(style: Style) -> &'static str {
    match style {
        Style::Outputs => "outputs",
        Style::Inputs => "inputs",
        Style::Vocabulary => "vocabulary",
        Style::Whole => "nothing",
    }
}

/// `*` stands for any letters. Matches in one pass, because patterns may come from anywhere.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(first) else { return false };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        match left.split_once(part) {
            Some((_, behind)) if !part.is_empty() => left = behind,
            None => return false,
            Some(_) => (),
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn model(tied: bool) -> Model {
        let config = json!({
            "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 32, "vocab_size": 40, "tie_word_embeddings": tied,
        });
        Model::from_json(&config).unwrap()
    }

    fn uncut(plan: Value) -> Result<Vec<Part>, String> {
        let plan = TpPlan::from_json(&plan).map_err(|error| error.to_string())?;
        plan.uncut(&model(false), 2).map(|parts| parts.into_iter().collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_plan_that_transformers_has_for_llama_is_the_automatic_cut() {
        let plan = json!({
            "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
            "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise",
            "lm_head": "colwise_rep", "embed_tokens": "embedding_rowwise",
        });
        assert_eq!(uncut(plan), Ok(vec![]));
        assert_eq!(uncut(json!({})), Ok(vec![]));
    }

    #[test]
    fn the_first_pattern_that_matches_counts_and_patterns_see_full_names() {
        let plan = json!({"layers": [
            ["model.layers.1.mlp.*", "skip"], ["layers.*.mlp.down_proj", "row"], ["layers.*.mlp.*", "column"],
            ["lm_head.weight", "replicate"],
        ]});
        assert_eq!(uncut(plan), Ok(vec![Part::Mlp(1), Part::Head]));
    }

    #[test]
    fn what_cannot_be_run_is_refused_by_name() {
        for (plan, expected) in [
            (json!({"layers.*.mlp.down_proj": "moe_tp_experts"}), "`layers.*.mlp.down_proj` has style"),
            (
                json!({"layers.*.mlp.down_proj": "colwise"}),
                "`model.layers.0.mlp.down_proj` cannot be cut by its outputs",
            ),
            (
                json!({"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "replicate"}),
                "`model.layers.0.self_attn.q_proj` and `model.layers.0.self_attn.o_proj` belong together",
            ),
            (
                json!({"strict": true, "layers": [["layers.*", "skip"], ["lm_head", "skip"]]}),
                "no pattern matches `model.embed_tokens`",
            ),
            (json!([1, 2]), "it is not an object"),
            (json!({"layers": [["a"]]}), "it is not an object"),
        ] {
            let error = uncut(plan.clone()).unwrap_err();
            assert!(error.contains(expected), "{plan}: {error}");
        }
    }

    #[test]
    fn a_pattern_that_matches_nothing_is_refused_and_told_what_there_is() {
        for (plan, expected) in [
            (json!({"layers.*.mlp.up_porj": "colwise"}), "`layers.*.mlp.up_porj` matches nothing"),
            (json!({"layers.*.mlp.up_proj": "colwise", "h.*.c_fc": "colwise"}), "`h.*.c_fc` matches nothing"),
            (json!({"layers.2.mlp.*": "skip", "x": "skip"}), "`layers.2.mlp.*`, `x` match nothing"),
            (json!({"layers": [["layers.*.mlp.experts.*", "skip"]]}), "`layers.*.mlp.experts.*` matches nothing"),
        ] {
            let error = TpPlan::from_json(&plan).unwrap().uncut(&model(false), 2).unwrap_err();
            assert!(error.to_string().contains(expected), "{plan}: {error}");
            let hint = error.hint().unwrap();
            assert!(hint.contains("model.embed_tokens, model.layers.*.input_layernorm, "), "{hint}");
            assert!(hint.contains("lm_head") && !hint.contains("layers.1"), "{hint}");
        }
        // Norms are never cut; plans may name them, as those of transformers do.
        let plan = json!({"norm": "sequence_parallel", "layers.*.input_layernorm": "replicate", "*": "replicate"});
        assert!(TpPlan::from_json(&plan).unwrap().uncut(&model(false), 2).is_ok());
        assert!(TpPlan::from_json(&json!({"lm_head": "colwise_rep"})).unwrap().uncut(&model(true), 2).is_ok());
    }

    #[test]
    fn a_tied_head_is_held_as_its_embedding_is() {
        let uncut = |plan: Value| TpPlan::from_json(&plan).unwrap().uncut(&model(true), 2);
        assert_eq!(uncut(json!({"lm_head": "replicate"})).unwrap(), BTreeSet::from([Part::Embedding]));
        let error = uncut(json!({"lm_head": "replicate", "embed_tokens": "embedding_rowwise"})).unwrap_err();
        assert!(error.to_string().contains("only one of them is cut"), "{error}");
    }

    #[test]
    fn patterns_match_in_one_pass_whatever_they_are() {
        for (pattern, name, expected) in [
            ("a.*.c", "a.b.c", true),
            ("a.*.c", "a.b.d", false),
            ("*", "anything", true),
            ("a*b*b", "ab", false),
            ("a*b*b", "axbxb", true),
            ("*ab", "aab", true),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} and {name}");
        }
        let stars = "*".repeat(1 << 20);
        assert!(matches(&stars, "name") && !matches(&format!("{stars}Z"), "model.layers.0.mlp"));
    }
}
