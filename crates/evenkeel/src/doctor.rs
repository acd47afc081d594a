//! `evenkeel doctor`

use crate::Mistake;

pub fn run() -> Result<(), Mistake> {
    println!("evenkeel {}", env!("CARGO_PKG_VERSION"));
    println!("{}", evenkeel_device::cpu_report());
    Ok(())
}
