//! Logs that a person turns on: `EVENKEEL_LOG=debug evenkeel …` writes them to standard error.

use std::env;
use std::io::stderr;

use tracing_subscriber::EnvFilter;

use crate::{Failure, Mistake};

/// A level, or filters such as `evenkeel_train=debug`.
const FILTER: &str = "EVENKEEL_LOG";

/// Writes no logs unless the variable is set.
pub fn start() -> Result<(), Failure> {
    let Ok(filter) = env::var(FILTER) else { return Ok(()) };
    let filter = EnvFilter::try_new(&filter).map_err(|error| Mistake {
        what: format!("{FILTER} is `{}`: {error}", filter.escape_debug()),
        hint: Some("use error, warn, info, debug or trace, or filters such as evenkeel_train=debug".to_owned()),
    })?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr).with_ansi(false).init();
    Ok(())
}
