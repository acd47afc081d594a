//! Chooses how to run a model on given devices, before anything runs.
//!
//! ```text
//! cluster  devices, hosts and the links between them, measured or written by hand
//! degrees  the tensor-parallel degree of every half-layer, by the objective of Oases
//! ```
//!
//! Pure: the same input gives the same plan. Nothing here runs a kernel or opens a file.

mod cluster;
mod degrees;

pub use cluster::{Cluster, ClusterError, DeviceRates, Host, LinkRates, Place};
pub use degrees::{DegreeCost, DegreeError, DegreeInput, DegreePlan, HalfLayerCost, plan_degrees};
