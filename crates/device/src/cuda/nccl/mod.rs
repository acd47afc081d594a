//! NCCL moves bytes between GPUs.
//!
//! ```text
//! library       libnccl.so.2, loaded at run time: a table of its functions
//! communicator  one GPU's end of a communicator; transfers on a stream
//! ```
//!
//! Communicators do not block: NCCL does slow work, above all connecting, on its own thread, and a waiting host polls it and
//! can give up. NCCL only moves bytes here and never sums: its sums round at every hop, in an order that depends on the
//! machine.

mod communicator;
mod library;

pub use communicator::{NcclCommunicator, NcclId, NcclTransfer};
pub use library::NcclLibrary;
