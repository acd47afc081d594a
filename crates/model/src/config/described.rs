//! Decoders that the table does not know. A description beside config.json, architecture.toml, names a known decoder that they are
//! built like, and says what they call otherwise and do otherwise.

mod form;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use evenkeel_device::kernel::{NormKind, Pairs};
use evenkeel_store::{DESCRIPTION, has_description, nearest};
use serde::Deserialize;
use serde_json::Value;

use super::families::{FAMILIES, LLAMA_ROTATION};
use super::family::{Choice, EmbeddingFactor, Factors, Family, Mlp, Names, Positions, QkNorm, Qkv, Rotation, Window};
use super::keys::Keys;
use super::keys::{ACTIVATIONS, activation};
use super::{LARGEST_SIZE, shorten};
use crate::error::Error;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Description {
    /// The `model_type` of the decoder that it is built like.
    like: String,
    /// What keys of config.json are called there.
    keys: BTreeMap<String, String>,
    /// Keys of config.json that change no number.
    unused_keys: Vec<String>,
    names: NewNames,
    options: NewOptions,
}

/// Names of parameters. An empty one says that there is no such norm.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct NewNames {
    base: Option<String>,
    embed: Option<String>,
    embed_norm: Option<String>,
    layer: Option<String>,
    attention_norm: Option<String>,
    mlp_norm: Option<String>,
    post_attention_norm: Option<String>,
    post_mlp_norm: Option<String>,
    qkv: Option<NewQkv>,
    qk_norm: Option<[String; 2]>,
    out: Option<String>,
    gate: Option<String>,
    up: Option<String>,
    gate_up: Option<String>,
    down: Option<String>,
    final_norm: Option<String>,
    head: Option<String>,
    positions: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected one name, or three")]
enum NewQkv {
    Separate([String; 3]),
    Fused(String),
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct NewOptions {
    norm: Option<NewNorm>,
    norm_bias: Option<bool>,
    /// Whether a stored weight w of a norm stands for 1 + w.
    norm_adds_one: Option<bool>,
    epsilon: Option<f64>,
    activation: Option<String>,
    /// How one matrix of queries, keys and values is laid out.
    qkv_order: Option<QkvOrder>,
    /// Whether norms of queries and keys are of each head, or of all heads together.
    qk_norm_of: Option<QkNormOf>,
    qkv_bias: Option<bool>,
    out_bias: Option<bool>,
    mlp_bias: Option<bool>,
    head_bias: Option<bool>,
    one_key_head: Option<bool>,
    parallel: Option<bool>,
    tied: Option<bool>,
    /// Whether weights of linear layers are stored [in, out].
    transposed: Option<bool>,
    scaled_embedding: Option<bool>,
    sliding_window: Option<bool>,
    positions: Option<NewPositions>,
    /// The key of the number of learned positions, and the rows of their table before the first.
    position_key: Option<String>,
    skipped_positions: Option<usize>,
    rotary_pairs: Option<NewPairs>,
    rotary_base: Option<f64>,
    rotary_fraction: Option<f64>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum NewNorm {
    Rms,
    Layer,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum QkvOrder {
    Blocks,
    Groups,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum QkNormOf {
    Heads,
    All,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum NewPositions {
    Rotary,
    Learned,
    Slopes,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum NewPairs {
    Halves,
    Neighbours,
}

/// The decoder that a description makes, for a config.json of this `model_type` and class.
pub(super) fn described(description: &Value, model_type: &str, class: &str) -> Result<&'static Family, Error> {
    /// Each is kept as long as the process runs, once.
    static KNOWN: Mutex<BTreeMap<[String; 3], &'static Family>> = Mutex::new(BTreeMap::new());
    let key = [description.to_string(), model_type.to_owned(), class.to_owned()];
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(family) = known.get(&key) {
        return Ok(family);
    }
    let family = Box::leak(Box::new(read(description)?.family(model_type, class)?));
    known.insert(key, family);
    Ok(family)
}

fn read(description: &Value) -> Result<Description, Error> {
    form::check(description)?;
    Description::deserialize(description).map_err(|error| bad("", shorten(&error.to_string())))
}

/// `key` is that of the mistake, behind its table's name.
fn bad(key: &str, what: String) -> Error {
    bad_with_hint(key, what, None)
}

fn bad_with_hint(key: &str, what: String, hint: Option<String>) -> Error {
    Error::BadArchitecture { key: key.to_owned(), line: None, what, hint }
}

/// "Did you mean" for the candidate that is nearest to a name.
fn meant<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    nearest(name, candidates).map(|meant| format!("did you mean {meant:?}?"))
}

fn kept(text: &str) -> &'static str {
    text.to_owned().leak()
}

/// The new name, or the one that was there.
fn replaced(new: Option<&String>, old: &'static str) -> &'static str {
    new.map_or(old, |name| kept(name))
}

fn replaced_norm(new: Option<&String>, old: Option<&'static str>) -> Option<&'static str> {
    match new {
        Some(name) => (!name.is_empty()).then(|| kept(name)),
        None => old,
    }
}

fn chosen(new: Option<bool>, old: &Choice) -> Choice {
    match new {
        Some(true) => Choice::Always,
        Some(false) => Choice::Never,
        None => old.clone(),
    }
}

impl Description {
    fn family(&self, model_type: &str, class: &str) -> Result<Family, Error> {
        let is_plain = |family: &&Family| {
            let is_dense = family.experts.is_none() && family.linear_attention.is_none();
            let reads_text = family.multimodal.is_none() && !matches!(family.positions, Positions::Image);
            let is_decoder = reads_text && family.classifier.is_none();
            is_dense && is_decoder && family.variant.is_none() && family.sinks.is_none()
        };
        let base = FAMILIES.iter().filter(is_plain).find(|family| family.model_type == self.like).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().filter(is_plain).map(|family| family.model_type).collect();
            let found = if self.like.is_empty() { "missing".to_owned() } else { format!("{:?}", shorten(&self.like)) };
            let what = format!("`like` is {found}, expected one of {}", known.join(", "));
            bad_with_hint("like", what, meant(&self.like, known))
        })?;
        let options = &self.options;
        let names = self.names.replace(&base.names, options)?;
        let renamed = self.keys.iter().map(|(theirs, ours)| (kept(theirs), kept(ours)));
        let family = Family {
            model_type: kept(model_type),
            class: kept(class),
            unused_keys: self.unused_keys.iter().map(|key| kept(key)).collect::<Vec<_>>().leak(),
            aliases: base.aliases.iter().copied().chain(renamed).collect::<Vec<_>>().leak(),
            names,
            is_transposed: options.transposed.unwrap_or(base.is_transposed),
            norm: match options.norm {
                Some(NewNorm::Rms) => NormKind::Rms,
                Some(NewNorm::Layer) => NormKind::Layer,
                None => base.norm,
            },
            has_norm_bias: options.norm_bias.unwrap_or(base.has_norm_bias),
            norm_offset: options.norm_adds_one.map_or(base.norm_offset, |adds| if adds { 1.0 } else { 0.0 }),
            default_epsilon: options.epsilon.unwrap_or(base.default_epsilon),
            default_activation: match &options.activation {
                Some(name) => activation(name).ok_or_else(|| {
                    let what = format!("`options.activation` is {:?}, expected {ACTIVATIONS}", shorten(name));
                    bad_with_hint(
                        "options.activation",
                        what,
                        meant(name, ACTIVATIONS.split([',', ' ']).filter(|name| activation(name).is_some())),
                    )
                })?,
                None => base.default_activation,
            },
            has_one_key_head: options.one_key_head.unwrap_or(base.has_one_key_head),
            qkv_bias: chosen(options.qkv_bias, &base.qkv_bias),
            out_bias: chosen(options.out_bias, &base.out_bias),
            mlp_bias: chosen(options.mlp_bias, &base.mlp_bias),
            has_head_bias: options.head_bias.unwrap_or(base.has_head_bias),
            parallel: chosen(options.parallel, &base.parallel),
            positions: self.positions(&base.positions)?,
            window: match options.sliding_window {
                Some(true) => Window::Everywhere,
                Some(false) => Window::Never,
                None => base.window.clone(),
            },
            factors: Factors {
                embedding: match options.scaled_embedding {
                    Some(true) => EmbeddingFactor::SqrtHidden,
                    Some(false) => EmbeddingFactor::One,
                    None => base.factors.embedding.clone(),
                },
                ..base.factors.clone()
            },
            tied_by_default: options.tied.unwrap_or(base.tied_by_default),
            ..base.clone()
        };
        self.refuse_unknown_keys(&family)?;
        Ok(family)
    }

    fn refuse_unknown_keys(&self, family: &Family) -> Result<(), Error> {
        let known = family.known_keys();
        let is_known = |ours: &str| known.contains(&ours);
        let Some((theirs, ours)) = self.keys.iter().find(|(_, ours)| !is_known(ours)) else { return Ok(()) };
        let [key, value] = [theirs, ours].map(|key| shorten(key));
        let what = format!("`keys.{key}` is {value:?}, which is no key of config.json for a `{}`", self.like);
        Err(bad_with_hint(&format!("keys.{theirs}"), what, meant(ours, known)))
    }

    fn positions(&self, base: &Positions) -> Result<Positions, Error> {
        let NewOptions {
            positions, position_key, skipped_positions, rotary_pairs, rotary_base, rotary_fraction, ..
        } = &self.options;
        let kind = positions.unwrap_or(match base {
            Positions::Rotary(_) => NewPositions::Rotary,
            Positions::Learned { .. } => NewPositions::Learned,
            Positions::Slopes | Positions::Image => NewPositions::Slopes,
        });
        let is_rotary = matches!(kind, NewPositions::Rotary);
        if !is_rotary && (rotary_pairs.is_some() || rotary_base.is_some() || rotary_fraction.is_some()) {
            let what = "options of rotations are set, but `positions` is not \"rotary\"";
            return Err(bad("options", what.to_owned()));
        }
        let is_learned = matches!(kind, NewPositions::Learned);
        if !is_learned && (position_key.is_some() || skipped_positions.is_some() || self.names.positions.is_some()) {
            let what = "a table of positions is described, but `positions` is not \"learned\"";
            return Err(bad("options", what.to_owned()));
        }
        Ok(match kind {
            NewPositions::Slopes => Positions::Slopes,
            NewPositions::Learned => {
                let (old_table, old_count, old_skipped) = match *base {
                    Positions::Learned { table, count, skipped } => (Some(table), count, skipped),
                    _ => (None, "max_position_embeddings", 0),
                };
                let table = self.names.positions.as_ref().map(|name| kept(name)).or(old_table);
                Positions::Learned {
                    table: table.ok_or_else(|| {
                        bad("names", "`names.positions` is missing: the table of positions".to_owned())
                    })?,
                    count: replaced(position_key.as_ref(), old_count),
                    skipped: match *skipped_positions {
                        Some(rows) if rows as u64 > LARGEST_SIZE => {
                            return Err(bad(
                                "options.skipped_positions",
                                format!("`options.skipped_positions` is {rows}, expected at most {LARGEST_SIZE}"),
                            ));
                        }
                        rows => rows.unwrap_or(old_skipped),
                    },
                }
            }
            NewPositions::Rotary => {
                let base = if let Positions::Rotary(rotation) = base { rotation.clone() } else { LLAMA_ROTATION };
                for (name, value, most) in
                    [("rotary_base", rotary_base, f64::from(f32::MAX)), ("rotary_fraction", rotary_fraction, 1.0)]
                {
                    if let Some(value) = value.filter(|value| !(*value > 0.0 && *value <= most)) {
                        return Err(bad(
                            &format!("options.{name}"),
                            format!("`options.{name}` is {value}, expected a number above 0, up to {most}"),
                        ));
                    }
                }
                Positions::Rotary(Rotation {
                    pairs: match rotary_pairs {
                        Some(NewPairs::Halves) => Pairs::Halves,
                        Some(NewPairs::Neighbours) => Pairs::Neighbours,
                        None => base.pairs,
                    },
                    default_base: rotary_base.unwrap_or(base.default_base),
                    default_fraction: rotary_fraction.unwrap_or(base.default_fraction),
                    may_be_partial: true,
                    ..base
                })
            }
        })
    }
}

impl NewNames {
    fn replace(&self, base: &Names, options: &NewOptions) -> Result<Names, Error> {
        let layer = replaced(self.layer.as_ref(), base.layer);
        if layer.matches("{}").count() != 1 {
            return Err(bad(
                "names.layer",
                format!("`names.layer` is {layer:?}, expected one {{}} in place of the layer's number"),
            ));
        }
        let fused = |name: &'static str, order| match order {
            QkvOrder::Blocks => Qkv::FusedBlocks(name),
            QkvOrder::Groups => Qkv::FusedByGroup(name),
        };
        let qkv = match (&self.qkv, options.qkv_order, &base.qkv) {
            (Some(NewQkv::Separate(names)), None, _) => Qkv::Separate([0, 1, 2].map(|index| kept(&names[index]))),
            (Some(NewQkv::Fused(name)), Some(order), _) => fused(kept(name), order),
            (None, Some(order), Qkv::FusedBlocks(name) | Qkv::FusedByGroup(name)) => fused(name, order),
            (None, None, base) => base.clone(),
            (Some(NewQkv::Fused(name)), None, _) => {
                let what = "`options.qkv_order` is missing, expected \"blocks\" (all queries, all keys, all values) or \"groups\"";
                return Err(bad(
                    "names.qkv",
                    format!("{what} (key head by key head), since `names.qkv` is one matrix, {:?}", shorten(name)),
                ));
            }
            (_, Some(_), _) => {
                return Err(bad(
                    "options.qkv_order",
                    "`options.qkv_order` is set, but `names.qkv` is no single matrix".to_owned(),
                ));
            }
        };
        let qk_norm = match (&self.qk_norm, options.qk_norm_of, base.qk_norm) {
            (Some(names), of, _) => {
                let names = [kept(&names[0]), kept(&names[1])];
                Some(if matches!(of, Some(QkNormOf::All)) { QkNorm::Whole(names) } else { QkNorm::Heads(names) })
            }
            (None, None, base) => base,
            (None, Some(_), _) => {
                return Err(bad(
                    "options.qk_norm_of",
                    "`options.qk_norm_of` is set, but `names.qk_norm` is not".to_owned(),
                ));
            }
        };
        let [gate, up, gate_up, down] =
            [&self.gate, &self.up, &self.gate_up, &self.down].map(|name| name.as_ref().map(|name| kept(name)));
        let mlp = match (gate, up, gate_up, down) {
            (None, None, None, None) => base.mlp.clone(),
            (Some(gate), Some(up), None, Some(down)) => Mlp::Gated { gate, up, down },
            (None, None, Some(gate_up), Some(down)) => Mlp::GatedTogether { gate_up, down },
            (None, Some(up), None, Some(down)) => Mlp::Plain { up, down },
            _ => {
                let what = "`names` of an MLP are gate, up and down, or gate_up and down, or up and down";
                return Err(bad("names", what.to_owned()));
            }
        };
        let names = Names {
            base: replaced(self.base.as_ref(), base.base),
            embed: replaced(self.embed.as_ref(), base.embed),
            embed_norm: replaced_norm(self.embed_norm.as_ref(), base.embed_norm),
            layer,
            attention_norm: replaced_norm(self.attention_norm.as_ref(), base.attention_norm),
            mlp_norm: replaced_norm(self.mlp_norm.as_ref(), base.mlp_norm),
            post_attention_norm: replaced_norm(self.post_attention_norm.as_ref(), base.post_attention_norm),
            post_mlp_norm: replaced_norm(self.post_mlp_norm.as_ref(), base.post_mlp_norm),
            qkv,
            qk_norm,
            out: replaced(self.out.as_ref(), base.out),
            mlp,
            final_norm: replaced_norm(self.final_norm.as_ref(), base.final_norm),
            head: replaced(self.head.as_ref(), base.head),
            ..base.clone()
        };
        refuse_repeated(&names)?;
        Ok(names)
    }
}

/// Refuses two parts with one name: they would be one tensor in files.
fn refuse_repeated(names: &Names) -> Result<(), Error> {
    let norms = [names.attention_norm, names.mlp_norm, names.post_attention_norm, names.post_mlp_norm];
    let qkv: &[&str] = match &names.qkv {
        Qkv::Separate(names) | Qkv::SeparateWithGate(names) => names,
        Qkv::FusedBlocks(name) | Qkv::FusedByGroup(name) => &[name],
    };
    let of_heads: &[&str] = match &names.qk_norm {
        Some(QkNorm::Heads(names) | QkNorm::Whole(names)) => names,
        None => &[],
    };
    let mlp: &[&str] = match &names.mlp {
        Mlp::Gated { gate, up, down } => &[gate, up, down],
        Mlp::GatedTogether { gate_up, down } => &[gate_up, down],
        Mlp::Plain { up, down } => &[up, down],
    };
    let lists = [norms.as_slice(), &[Some(names.out)]];
    let mut known = BTreeSet::new();
    let of_layer = lists.concat().into_iter().flatten().chain([qkv, of_heads, mlp].concat());
    for name in of_layer.chain(names.final_norm).chain(names.embed_norm).chain([names.head, names.embed]) {
        if !known.insert(name) {
            let hint = "where two parts share a norm, the second has the empty name";
            return Err(bad("names", format!("two parts are called {:?}; {hint}", shorten(name))));
        }
    }
    Ok(())
}

/// Refuses a description in a folder that speaks of keys that its config.json does not have. A saved model's config.json has lost
/// some of those that its description speaks of.
pub fn check_description(config: &Value, folder: &Path) -> Result<(), Error> {
    if !has_description(folder) {
        return Ok(());
    }
    refuse_absent_keys(config).map_err(|error| error.with_line(folder))
}

fn refuse_absent_keys(config: &Value) -> Result<(), Error> {
    let (Some(description), Some(object)) = (config.get(DESCRIPTION), config.as_object()) else { return Ok(()) };
    let Description { keys, unused_keys, .. } = read(description)?;
    let absent = |key: &str| {
        let has = object.contains_key(key);
        (!has).then(|| meant(key, object.keys().map(String::as_str)))
    };
    for key in keys.keys() {
        if let Some(hint) = absent(key) {
            let key = shorten(key);
            let what = format!("`keys` has `{key}`, which config.json does not have");
            return Err(bad_with_hint(&format!("keys.{key}"), what, hint));
        }
    }
    for key in &unused_keys {
        if let Some(hint) = absent(key) {
            let what = format!("`unused_keys` has {:?}, which config.json does not have", shorten(key));
            return Err(bad_with_hint("unused_keys", what, hint));
        }
    }
    Ok(())
}

/// Refuses a description whose options are not what config.json says.
pub(super) fn refuse_contradictions(keys: &Keys, family: &Family) -> Result<(), Error> {
    let Some(description) = keys.get(DESCRIPTION) else { return Ok(()) };
    let Description { options, .. } = read(description)?;
    let differ = |option: &str, key: &str| -> Result<(), Error> {
        let found = keys.get(key).map_or_else(String::new, |value| shorten(&value.to_string()));
        let what = format!("`options.{option}` is not what config.json says, `{key}` = {found}: leave one of them out");
        Err(bad(&format!("options.{option}"), what))
    };
    let numbers = [
        ("epsilon", options.epsilon, family.keys.epsilon),
        ("rotary_base", options.rotary_base, "rope_theta"),
        ("rotary_fraction", options.rotary_fraction, "partial_rotary_factor"),
    ];
    for (option, said, key) in numbers {
        if said.is_some() && keys.optional_float(key)?.is_some_and(|found| Some(found) != said) {
            return differ(option, key);
        }
    }
    if let (Some(tied), Some(found)) = (options.tied, keys.optional_flag("tie_word_embeddings")?)
        && tied != found
    {
        return differ("tied", "tie_word_embeddings");
    }
    if let (Some(name), Some(found)) = (&options.activation, keys.activation(family.keys.activation)?)
        && activation(name) != Some(found)
    {
        return differ("activation", family.keys.activation);
    }
    Ok(())
}
