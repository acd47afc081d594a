//! NCCL: what moves bytes between cards.
//!
//! ```text
//! library       libnccl.so.2, loaded at run time: a table of its functions
//! communicator  one card's end of a way between several; transfers on a stream
//! ```
//!
//! Communicators do not block: what NCCL needs time for, above all connecting, it does on a thread of its own, and whoever
//! waits for it asks from time to time and can give up. NCCL only moves bytes here. It adds nothing: its sums round at every
//! hop, in an order that depends on the machine.

mod communicator;
mod library;

pub use communicator::{NcclCommunicator, NcclId, NcclTransfer};
pub use library::NcclLibrary;
