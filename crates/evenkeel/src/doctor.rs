//! `evenkeel doctor`

use evenkeel_device::{CpuOptions, Device, cpu_report, libraries_found};

use crate::{Mistake, process};

pub fn run() -> Result<String, Mistake> {
    // What a run would stumble over shows here.
    let options = CpuOptions { memory_bytes: 1 << 20, ..CpuOptions::with_threads(1) };
    Device::cpu(&options)
        .map_err(|error| Mistake { what: format!("a device cannot be started: {error}"), hint: None })?;
    let lines = [
        format!("evenkeel {}", env!("CARGO_PKG_VERSION")),
        cpu_report().to_string(),
        format!("GPUs           {}", list(&process::gpus())),
        format!("libraries      {}", list(&libraries_found())),
    ];
    Ok(lines.join("\n"))
}

fn list(names: &[impl AsRef<str>]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    if names.is_empty() { "none found".to_owned() } else { names.join(", ") }
}
