//! `evenkeel doctor`

use crate::Mistake;

pub fn run() -> Result<String, Mistake> {
    Ok(format!("evenkeel {}\n{}", env!("CARGO_PKG_VERSION"), evenkeel_device::cpu_report()))
}
