//! Stanford Alpaca's prompt, as its authors published it.

use crate::error::Error;
use crate::tokenizer::{Tokenizer, TokenizerConfig};

const WITHOUT_INPUT: &str = "Below is an instruction that describes a task. \
     Write a response that appropriately completes the request.\n\n";
const WITH_INPUT: &str = "Below is an instruction that describes a task, paired with an input that provides further context. \
     Write a response that appropriately completes the request.\n\n";

/// Separates an instruction from its input.
const INPUT: &str = "\n\n### Input:\n";

/// The text that the answer follows at once.
pub(crate) fn alpaca_prompt(instruction: &str, input: Option<&str>) -> String {
    match input {
        None => format!("{WITHOUT_INPUT}### Instruction:\n{instruction}\n\n### Response:"),
        Some(input) => {
            format!("{WITH_INPUT}### Instruction:\n{instruction}{INPUT}{input}\n\n### Response:")
        }
    }
}

/// The same as a chat template, for a model that was taught it and has none of its own. The user's message is the instruction. An
/// input follows it behind `### Input:`, as in the prompt itself, or is the message's `input` beside its `content`.
pub fn alpaca_template(tokenizer: &Tokenizer, config: &TokenizerConfig) -> Result<String, Error> {
    // A template has to write what a tokenizer puts before a text by itself.
    let added = tokenizer.encode("", true)?;
    let begin = match &config.begin_token {
        Some(token) if !added.is_empty() && added.starts_with(&tokenizer.encode(token, false)?) => "{{- bos_token }}",
        _ => "",
    };
    let [without_input, with_input, before_input] =
        [WITHOUT_INPUT, WITH_INPUT, INPUT].map(|text| text.replace('\n', "\\n"));
    Ok(format!(
        "{begin}
{{%- for message in messages %}}
    {{%- if message.role == 'system' %}}
        {{{{- message.content + '\\n\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{{{- message.content + eos_token }}}}
    {{%- elif message.role == 'user' %}}
        {{%- if not loop.first and loop.previtem.role == 'assistant' %}}
            {{{{- '\\n\\n' }}}}
        {{%- elif message.input or '{before_input}' in message.content %}}
            {{{{- '{with_input}' }}}}
        {{%- else %}}
            {{{{- '{without_input}' }}}}
        {{%- endif %}}
        {{{{- '### Instruction:\\n' + message.content }}}}
        {{%- if message.input %}}
            {{{{- '{before_input}' + message.input }}}}
        {{%- endif %}}
        {{{{- '\\n\\n### Response:' }}}}
    {{%- else %}}
        {{{{- raise_exception('there is no role ' + message.role + ' in the prompt of Alpaca') }}}}
    {{%- endif %}}
{{%- endfor %}}
"
    ))
}
