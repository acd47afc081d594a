//! Tests of the checked configuration itself, which the binary's tests cannot see.

use super::settings::{DataSource, Dtype};
use super::*;

fn read(text: &str, sets: &[&str]) -> RunConfig {
    let mut raw = RawConfig::new();
    raw.read_file("run.toml", text);
    sets.iter().for_each(|assignment| raw.set("--set", assignment));
    raw.check().unwrap_or_else(|mistakes| panic!("{mistakes:?}\n{text}"))
}

const NEW: &str = "[model]\nhidden = 64\nlayers = 2\nheads = 4\nffn = 96\n";
const SYNTHETIC: &str = "[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\n";

#[test]
fn the_resolved_file_gives_the_same_configuration() {
    let folder = "[model]\npath = 'some \"folder\"'\n";
    let text = "[data]\nsource = \"text\"\npaths = ['a.txt', 'b\\c']\nseparator = '''\n\n\"\n'''\nholdout = 10\n\
                [train]\nepochs = 2\nminutes = 1.5\nlr = 1\nepsilon = 1e-12\nmin_lr = 0.1234567890123\n\
                [sample]\nprompts = [\"a\\nb\", \"\\u0000\\u007f\", '']\n";
    let images = "[data]\nsource = \"cifar10\"\npaths = [\"a\"]\neval_paths = [\"b\"]\n[train]\ntokens = 9_000_000_000\n\
                  dtype = \"bf16\"\n[output]\nsave_model = false\n[device]\nthreads = 3\n";
    let chat = "[data]\nsource = \"jsonl\"\npaths = [\"a\"]\nformat = \"messages\"\nchat_template = \"t.jinja\"\n\
                tokenizer = \"t\"\n[train]\nsteps = 1\nlr_decay = \"constant\"\n";
    let config = "[model]\nconfig = \"config.json\"\nseed = 9223372036854775807\n";
    let card = "[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\n[parallel]\ntp = 2\n\
                [device]\nkind = \"cuda\"\ncards = [1, 1]\nvirtual_gpus = [40, 24]\n";
    for (model, rest) in [(NEW, card), (NEW, SYNTHETIC), (folder, text), (config, images), (folder, chat), (NEW, chat)]
    {
        let first = read(&format!("{model}{rest}"), &[]);
        let again = read(&first.to_toml(), &[]);
        let RunConfig { has_sequence, is_parallel_open, ref adapter_keys, .. } = again;
        assert_eq!(
            RunConfig { has_sequence, is_parallel_open, adapter_keys: adapter_keys.clone(), ..first.clone() },
            again
        );
        assert_eq!(first.to_toml(), again.to_toml());
    }
}

#[test]
fn a_model_limits_sequences_unless_their_length_is_given() {
    let fitted = |sets: &[&str], positions| {
        let mut config = read(&format!("{NEW}{SYNTHETIC}"), sets);
        config.fit_sequence(positions);
        config.settings.data.sequence
    };
    assert_eq!([fitted(&[], None), fitted(&[], Some(256)), fitted(&[], Some(4096))], [1024, 256, 1024]);
    assert_eq!(fitted(&["data.sequence=512"], Some(256)), 512);
}

#[test]
fn what_follows_from_other_keys_is_filled_in() {
    let config = read(&format!("{NEW}{SYNTHETIC}"), &["data.holdout=8", "train.dtype=bf16"]);
    let ModelSource::Sizes(sizes) = &config.source else { panic!("{:?}", config.source) };
    assert_eq!((sizes.kv_heads, sizes.vocab, sizes.tied), (4, None, false));
    assert_eq!(config.tokenizer, Some(TokenizerSource::Bytes));
    let settings = &config.settings;
    assert_eq!((settings.data.records, settings.eval.every), (Some(1024), Some(100)));
    assert_eq!(settings.output.save_dtype, Some(Dtype::Bf16));

    let config = read(&format!("[model]\npath = \"m\"\n{SYNTHETIC}"), &[]);
    assert_eq!(config.tokenizer, Some(TokenizerSource::Path("m".into())));
    assert_eq!(config.settings.eval.every, None);

    let config = read(&format!("[model]\npath = \"m\"\n{SYNTHETIC}"), &["data.source=images", "data.paths=p"]);
    assert_eq!((config.tokenizer, config.settings.data.packing), (None, false));
}

#[test]
fn what_will_not_happen_is_told() {
    let sets = ["parallel.tp=2", "balance.stragglers=[\"1:2@11-20\", \"1:2@10-20\"]"];
    let warnings = read(&format!("{NEW}{SYNTHETIC}"), &sets).warnings;
    assert_eq!(warnings, ["straggler `1:2@11-20` never comes: `train.steps` is 10"]);
}

#[test]
fn words_after_set_need_no_quotes_and_win_over_the_file() {
    let sets = ["train.steps=20", "train.steps = 30", "train.lr=1e-2", "data.shuffle=false", "model.seed=0x10"];
    let texts = ["data.source=text", "data.paths=a b.txt", "data.separator==", "sample.prompts=[\"x\", 'y']"];
    let config = read(&format!("{NEW}{SYNTHETIC}"), &[&sets[..], &texts[..]].concat());
    let Settings { model, data, train, sample, .. } = &config.settings;
    assert_eq!((train.steps, train.lr, data.shuffle, model.seed), (Some(30), 1e-2, false, 16));
    assert_eq!((data.source, &data.paths), (DataSource::Text, &vec![PathBuf::from("a b.txt")]));
    assert_eq!((data.separator.as_deref(), &sample.prompts), (Some("="), &vec!["x".to_owned(), "y".to_owned()]));
    let quoted = read(&format!("{NEW}{SYNTHETIC}"), &["data.tokenizer=\"a\\u0062c\""]);
    assert_eq!(quoted.settings.data.tokenizer.as_deref(), Some("abc"));
}

#[test]
fn every_default_is_within_its_own_bounds() {
    for section in Settings::sections() {
        for key in section.keys {
            let table::UnlessGiven::Default(value) = key.unless_given else { continue };
            let text = format!("[{}]\n{} = {}\n", section.name, key.name, setting::in_toml(&value));
            let mut raw = RawConfig::new();
            raw.read_file("run.toml", &text);
            let mistakes = raw.check().expect_err("there is no model");
            assert!(!mistakes.0.iter().any(|mistake| mistake.what.starts_with("run.toml")), "{text}{mistakes:?}");
        }
    }
}
