//! Names of layers that differ between checkpoints and PEFT's files: newer versions of transformers rename them in memory, and PEFT
//! writes what it finds there.

/// ViT since transformers 5. The first part begins the path of every layer.
const OF_VIT: [(&str, &str); 7] = [
    ("vit.encoder.layer.", "vit.layers."),
    (".attention.attention.query", ".attention.q_proj"),
    (".attention.attention.key", ".attention.k_proj"),
    (".attention.attention.value", ".attention.v_proj"),
    (".attention.output.dense", ".attention.o_proj"),
    (".intermediate.dense", ".mlp.fc1"),
    (".output.dense", ".mlp.fc2"),
];

/// The newer name of a module or a parameter.
pub(super) fn renamed(name: &str) -> String {
    let (old_path, _) = OF_VIT[0];
    if !name.starts_with(old_path) {
        return name.to_owned();
    }
    OF_VIT.iter().fold(name.to_owned(), |name, (old, new)| name.replacen(old, new, 1))
}

/// Whether a name is one of those.
pub(super) fn is_new(name: &str) -> bool {
    let (_, new_path) = OF_VIT[0];
    name.starts_with(new_path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_vit_alone_are_renamed() {
        let layer = |name: &str| renamed(&format!("vit.encoder.layer.3.{name}.lora_A.weight"));
        assert_eq!(layer("attention.attention.key"), "vit.layers.3.attention.k_proj.lora_A.weight");
        assert_eq!(layer("attention.output.dense"), "vit.layers.3.attention.o_proj.lora_A.weight");
        assert_eq!(layer("output.dense"), "vit.layers.3.mlp.fc2.lora_A.weight");
        assert_eq!(renamed("classifier.weight"), "classifier.weight");
        assert_eq!(renamed("bert.encoder.layer.3.output.dense"), "bert.encoder.layer.3.output.dense");
        assert!(is_new(&layer("intermediate.dense")) && !is_new("vit.encoder.layer.3.output.dense"));
    }
}
