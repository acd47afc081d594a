//! Keeps decoders of untrusted files from ending the run.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a third-party decoder. A file that makes it panic is a bad file; the panic's message still goes to the error output,
/// where it helps to report the bug.
pub(super) fn guarded<T>(decode: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // The decoder borrows only its input, so its half-done state is dropped with it.
    catch_unwind(AssertUnwindSafe(decode)).unwrap_or_else(|_| Err("its decoder gave up".to_owned()))
}
