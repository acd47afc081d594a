//! Chooses how to run a model on given devices, before anything runs.
//!
//! ```text
//! cluster  devices, hosts and the links between them, measured or written by hand
//! ```
//!
//! Pure: the same input gives the same plan. Nothing here runs a kernel or opens a file.

mod cluster;

pub use cluster::{Cluster, ClusterError, DeviceRates, Host, LinkRates, Place};
