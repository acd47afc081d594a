//! `evenkeel doctor`

use evenkeel_device::{cpu_report, cuda_report, libraries_found};

use crate::{Mistake, device, process};

pub fn run() -> Result<String, Mistake> {
    // Starting a device shows problems that a run would have.
    device::start(Some(1))?;
    let cuda = cuda_report();
    let lines = [
        format!("evenkeel {}", env!("CARGO_PKG_VERSION")),
        cpu_report().to_string(),
        format!("GPUs           {}", list(&process::gpus())),
        format!("libraries      {}", list(&libraries_found())),
        cuda.to_string(),
    ];
    // Problems are reported only on a machine with a GPU.
    let problems = if process::gpus().is_empty() { Vec::new() } else { cuda.problems };
    Ok(lines.into_iter().chain(problems).collect::<Vec<_>>().join("\n"))
}

fn list(names: &[impl AsRef<str>]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    if names.is_empty() { "none found".to_owned() } else { names.join(", ") }
}
