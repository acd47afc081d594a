//! Which modules are meant, by the rules that PEFT has.

use regex::Regex;

use crate::error::Error;

#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// Every linear layer but the head.
    AllLinear,
    /// Whole names, or ends of names behind a dot.
    Names(Vec<String>),
    /// A regular expression of whole names.
    Pattern(String),
}

#[derive(Clone, Debug)]
pub(super) enum Matcher {
    All,
    Names(Vec<String>),
    Pattern(String, Regex),
}

impl Matcher {
    pub fn new(targets: &Targets) -> Result<Matcher, Error> {
        Ok(match targets {
            Targets::AllLinear => Matcher::All,
            Targets::Names(names) => Matcher::Names(names.clone()),
            Targets::Pattern(pattern) => Matcher::Pattern(pattern.clone(), read(pattern, &format!("^(?:{pattern})$"))?),
        })
    }

    /// Ends of names match in the given layers only.
    pub fn matches(&self, module: &str, layers: Option<&[usize]>) -> bool {
        match self {
            Matcher::All => is_in(layers, module),
            Matcher::Names(names) => {
                names.iter().any(|name| module == name || (is_end(module, name) && is_in(layers, module)))
            }
            Matcher::Pattern(_, regex) => regex.is_match(module),
        }
    }

    /// Whether a target, one of these, means a module.
    pub fn means(&self, target: &str, module: &str) -> bool {
        match self {
            Matcher::All => false,
            Matcher::Names(_) => module == target || is_end(module, target),
            Matcher::Pattern(_, regex) => regex.is_match(module),
        }
    }

    /// The target that matches none of these modules.
    pub fn idle(&self, modules: &[String]) -> Option<String> {
        let is_idle = |matches: &dyn Fn(&str) -> bool| !modules.iter().any(|module| matches(module));
        match self {
            Matcher::All => None,
            Matcher::Names(names) => {
                names.iter().find(|name| is_idle(&|module| module == *name || is_end(module, name))).cloned()
            }
            Matcher::Pattern(pattern, regex) => is_idle(&|module| regex.is_match(module)).then(|| pattern.clone()),
        }
    }
}

pub(super) fn is_end(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.ends_with('.'))
}

fn is_in(layers: Option<&[usize]>, module: &str) -> bool {
    layers.is_none_or(|layers| layer_of(module).is_some_and(|layer| layers.contains(&layer)))
}

/// The number behind the name of a list of layers: the last one that is neither the first two parts of a name nor its last.
pub(super) fn layer_of(module: &str) -> Option<usize> {
    let parts: Vec<&str> = module.split('.').collect();
    let inner = parts.get(2..parts.len().checked_sub(1)?)?;
    inner.iter().rev().find_map(|part| part.parse().ok())
}

/// Patterns of the ends of names, behind a dot.
pub(super) fn behind_dots<T: Copy>(patterns: &[(String, T)]) -> Result<Vec<(Regex, T)>, Error> {
    let read = |(pattern, value): &(String, T)| Ok((read(pattern, &format!(r"^(?:.*\.)?(?:{pattern})$"))?, *value));
    patterns.iter().map(read).collect()
}

pub(super) fn first_match<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(regex, _)| regex.is_match(module)).map(|(_, value)| *value)
}

fn read(pattern: &str, anchored: &str) -> Result<Regex, Error> {
    const MOST_BYTES: usize = 1 << 20;
    let read = regex::RegexBuilder::new(anchored).size_limit(MOST_BYTES).build();
    read.map_err(|error| Error::BadAdapter { what: format!("the pattern `{pattern}` cannot be read: {error}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_numbered_as_peft_finds_them() {
        assert_eq!(layer_of("model.layers.11.self_attn.q_proj"), Some(11));
        assert_eq!(layer_of("transformer.h.3.attn.c_attn"), Some(3));
        assert_eq!(layer_of("model.layers.2.mlp.experts.5.up_proj"), Some(5));
        assert_eq!(layer_of("layers.2.up_proj"), None);
        assert_eq!(layer_of("model.layers.2"), None);
        assert_eq!(layer_of("lm_head"), None);
    }

    #[test]
    fn names_match_whole_or_behind_a_dot() {
        let matcher =
            Matcher::new(&Targets::Names(vec!["q_proj".into(), "model.layers.0.mlp.up_proj".into()])).unwrap();
        assert!(matcher.matches("model.layers.1.self_attn.q_proj", None));
        assert!(!matcher.matches("model.layers.1.self_attn.eq_proj", None));
        assert!(!matcher.matches("model.layers.1.self_attn.q_proj", Some(&[0, 2])));
        // A whole name is meant whatever the layers are.
        assert!(matcher.matches("model.layers.0.mlp.up_proj", Some(&[2])));
    }

    #[test]
    fn patterns_match_whole_names_and_ends_behind_dots() {
        let matcher = Matcher::new(&Targets::Pattern(r".*\.(q|v)_proj".into())).unwrap();
        assert!(matcher.matches("model.layers.0.self_attn.v_proj", None));
        assert!(!matcher.matches("model.layers.0.self_attn.v_proj.x", None));
        let ends =
            behind_dots(&[("_proj".to_owned(), 9), ("q_proj".to_owned(), 2), ("^model.layers.1.*".to_owned(), 3)]);
        let ends = ends.unwrap();
        assert_eq!(first_match(&ends, "model.layers.0.self_attn.q_proj"), Some(2));
        assert_eq!(first_match(&ends, "model.layers.0.self_attn.k_proj"), None);
        assert_eq!(first_match(&ends, "model.layers.1.self_attn.k_proj"), Some(3));
        assert!(behind_dots(&[("(?=x)".to_owned(), 1)]).is_err());
    }
}
