//! Keys of `[data]` against each other.

use super::super::raw::RawConfig;
use super::super::settings::{DataSource, InstructionPrompt, OnBadRecord, PackingStrategy, RecordFormat, Settings};
use super::SIZES;

pub fn check_data(raw: &mut RawConfig, settings: &Settings) {
    let data = &settings.data;
    let source = data.source.name();
    let synthetic = data.source == DataSource::Synthetic;
    let of_records = matches!(data.source, DataSource::Jsonl | DataSource::Json | DataSource::Parquet);
    let has_files = !data.paths.is_empty() || raw.evaluates && !data.eval_paths.is_empty();
    if !synthetic && !has_files {
        let what = format!("`data.source` is \"{source}\", but `data.paths` has no files");
        let hint = raw.evaluates.then_some("name them: --data FILE");
        raw.note_contradiction(&["data.source", "data.paths"], what, hint);
    }
    let useless = [
        ("data.paths", synthetic && !data.paths.is_empty(), "reads no files"),
        ("data.eval_paths", synthetic && !data.eval_paths.is_empty(), "reads no files"),
        ("data.records", !synthetic && data.records.is_some(), "has as many records as its files"),
        ("data.separator", data.source != DataSource::Text && data.separator.is_some(), "needs no separator"),
        ("data.format", !of_records && data.format != RecordFormat::Text, "has no records of several columns"),
    ];
    for (key, useless, why) in useless {
        if useless {
            let what = format!("`{key}` is set, but the source \"{source}\" {why}");
            raw.note_contradiction(&[key, "data.source"], what, None);
        }
    }
    if data.separator.as_deref() == Some("") {
        let what = "`data.separator` is empty, expected a text".to_owned();
        let hint = "leave it out to make each file one record";
        raw.note_contradiction(&["data.separator"], what, Some(hint));
    }
    check_prompts(raw, settings);
    check_labels(raw, settings);
    if data.packing_strategy.is_some() && !data.packing {
        let what = "`data.packing_strategy` is set, but `data.packing` is false".to_owned();
        raw.note_contradiction(&["data.packing_strategy", "data.packing"], what, None);
    }
    if data.bad_record_limit.is_some() && data.on_bad_record == OnBadRecord::Stop {
        let what = "`data.bad_record_limit` is set, but `data.on_bad_record` is \"stop\"".to_owned();
        let hint = "set data.on_bad_record = \"skip\", too";
        raw.note_contradiction(&["data.bad_record_limit", "data.on_bad_record"], what, Some(hint));
    }
    if data.tokenizer.as_deref() == Some("") {
        let what = "`data.tokenizer` is empty, expected \"bytes\" or a path".to_owned();
        raw.note_contradiction(&["data.tokenizer"], what, None);
    }
}

fn check_prompts(raw: &mut RawConfig, settings: &Settings) {
    let data = &settings.data;
    let format = data.format.name();
    if data.chat_template.is_some() && matches!(data.format, RecordFormat::Text | RecordFormat::Labelled) {
        let what = format!("`data.chat_template` is set, but `data.format` is \"{format}\"");
        let hint = "a template is for formats \"messages\" and \"alpaca\"";
        raw.note_contradiction(&["data.chat_template", "data.format"], what, Some(hint));
    }
    if data.instruction_prompt.is_some() && data.format != RecordFormat::Alpaca {
        let what = format!("`data.instruction_prompt` is set, but `data.format` is \"{format}\"");
        let hint = "it is for format \"alpaca\"";
        raw.note_contradiction(&["data.instruction_prompt", "data.format"], what, Some(hint));
    } else if data.instruction_prompt == Some(InstructionPrompt::Alpaca) && data.chat_template.is_some() {
        let what = "`data.chat_template` is set, but `data.instruction_prompt` is \"alpaca\"".to_owned();
        raw.note_contradiction(&["data.chat_template", "data.instruction_prompt"], what, None);
    }
}

fn check_labels(raw: &mut RawConfig, settings: &Settings) {
    let data = &settings.data;
    let format = data.format.name();
    let is_labelled = data.format == RecordFormat::Labelled;
    let of_labels = [
        ("data.second_text_column", data.second_text_column.is_some()),
        ("data.label_column", data.label_column != "label"),
        ("data.labels", !data.labels.is_empty()),
    ];
    let others = [
        ("sample.prompts", !settings.sample.prompts.is_empty()),
        ("data.label_beyond_cut", data.label_beyond_cut),
        ("data.packing_strategy", data.packing_strategy == Some(PackingStrategy::Cut)),
    ];
    for (key, _) in of_labels.into_iter().filter(|(_, is_set)| *is_set && !is_labelled) {
        let what = format!("`{key}` is set, but `data.format` is \"{format}\"");
        raw.note_contradiction(&[key, "data.format"], what, Some("it is for format \"labelled\""));
    }
    for (key, _) in others.into_iter().filter(|(_, is_set)| *is_set && is_labelled) {
        let what = format!("`{key}` is for texts that are continued, but `data.format` is \"{format}\"");
        raw.note_contradiction(&[key, "data.format"], what, None);
    }
    let sizes = SIZES.into_iter().find(|key| raw.is_given(key));
    if let Some(key) = sizes.filter(|_| is_labelled) {
        let what = format!("`{key}` describes a new Llama, but `data.format` is \"{format}\"");
        let hint = "a classifier of texts comes from model.path or model.config";
        raw.note_contradiction(&[key, "data.format"], what, Some(hint));
    }
    let mut names = data.labels.clone();
    names.sort_unstable();
    names.dedup();
    if data.labels.len() == 1 || names.len() < data.labels.len() {
        let what = "`data.labels` needs two names or more, all different".to_owned();
        raw.note_contradiction(&["data.labels"], what, None);
    }
}

pub fn of_images(settings: &Settings) -> bool {
    matches!(settings.data.source, DataSource::Images | DataSource::Cifar10)
}

pub fn check_images(raw: &mut RawConfig, settings: &Settings) {
    if !of_images(settings) {
        return;
    }
    let data = &settings.data;
    let sizes = SIZES.into_iter().find(|key| raw.is_given(key));
    let useless = [
        ("data.packing", raw.is_given("data.packing") && data.packing),
        ("data.packing_strategy", data.packing_strategy.is_some() && data.packing),
        ("data.label_beyond_cut", data.label_beyond_cut),
        ("data.tokenizer", data.tokenizer.is_some()),
        ("sample.prompts", !settings.sample.prompts.is_empty()),
    ];
    let keys = useless.into_iter().filter_map(|(key, set)| set.then_some(key)).chain(sizes);
    for key in keys.collect::<Vec<_>>() {
        let what = format!("`{key}` is for text, but `data.source` is \"{}\"", data.source.name());
        let hint = sizes.filter(|&sizes| sizes == key);
        let hint = hint.map(|_| "a model of images comes from model.path or model.config");
        raw.note_contradiction(&[key, "data.source"], what, hint);
    }
}
