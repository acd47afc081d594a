//! `evenkeel data CONFIG`: the first samples of a run as the model gets them.

use evenkeel_data::{IGNORE, Row, Tokenizer};

use crate::config::Overrides;
use crate::inputs::feed::{Data, Text};
use crate::inputs::model::ModelInput;
use crate::{Failure, Mistake};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    overrides: Overrides,
    /// Samples to show.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    samples: u32,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let mut config = arguments.overrides.read()?;
    let text = Text::open(&config)?;
    let input = ModelInput::read(&mut config, text.as_ref().map(|text| &text.tokenizer))?;
    let data = Data::open(&config, &input.model, text)?;
    let Some(tokenizer) = data.tokenizer() else {
        return Err(Mistake { what: "the data are images, which have no tokens".to_owned(), hint: None }.into());
    };
    let rows = data.first_samples(arguments.samples as usize)?;
    let prompt = data.describe_prompt().map(|prompt| format!("instructions use {prompt}\n\n"));
    let show = |(number, row): (usize, &Row)| match row.types.is_empty() {
        true => show(number, row, tokenizer),
        false => show_labelled(number, row, tokenizer, &input.model.config.label_names),
    };
    let shown: Vec<String> = rows.iter().enumerate().map(show).collect();
    Ok(format!("{}{}", prompt.unwrap_or_default(), shown.join("\n\n")))
}

/// A line for each token of a labelled text.
fn show_labelled(number: usize, row: &Row, tokenizer: &Tokenizer, names: &[String]) -> String {
    let label = row.labels.first().map_or(IGNORE, |&label| label);
    let name = names.get(label as usize).map_or_else(String::new, |name| format!(" ({name})"));
    let mut lines = vec![
        format!("sample {}: {} tokens, label {label}{name}", number + 1, row.ids.len()),
        format!("{:>8}  {:<6}  text", "token", "type"),
    ];
    for (place, (&id, of_type)) in row.ids.iter().zip(&row.types).enumerate() {
        let before = place.checked_sub(1).map(|before| row.ids[before]);
        let text = tokenizer.token(before, id).unwrap_or_default();
        lines.push(format!("{id:>8}  {of_type:<6}  {text:?}"));
    }
    lines.join("\n")
}

/// A line for each token.
fn show(number: usize, row: &Row, tokenizer: &Tokenizer) -> String {
    let counts = |place: usize| place > 0 && row.labels[place - 1] != IGNORE;
    let mut lines = vec![
        format!("sample {}: {} tokens, {} of which the loss counts", number + 1, row.ids.len(), row.targets()),
        format!("{:>8}  {:<6}  text", "token", "counts"),
    ];
    for (place, &id) in row.ids.iter().enumerate() {
        let before = place.checked_sub(1).map(|before| row.ids[before]);
        let text = tokenizer.token(before, id).unwrap_or_default();
        let mark = if counts(place) { "yes" } else { "" };
        lines.push(format!("{id:>8}  {mark:<6}  {text:?}"));
    }
    lines.join("\n")
}
