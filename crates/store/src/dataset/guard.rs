//! Decoders of other people's files, kept from ending the run.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a decoder that we did not write. A file that makes it panic is a bad file; the panic's message still goes to
/// the error output, where it helps to report the bug.
pub(super) fn guarded<T>(decode: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // What the decoder left half done is dropped with it: it borrows only from its input.
    catch_unwind(AssertUnwindSafe(decode)).unwrap_or_else(|_| Err("its decoder gave up".to_owned()))
}
