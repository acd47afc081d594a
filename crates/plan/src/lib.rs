//! Chooses how to run a model on given devices, before anything runs.
//!
//! ```text
//! cluster  devices, hosts and the links between them, measured or written by hand
//! profile  what tasks and exchanges take on a machine's devices, as measured
//! space    the strategies there are
//! search   the fastest of them, without a look at all
//! degrees  the tensor-parallel degree of every half-layer, by the objective of Oases
//! ```
//!
//! Pure: the same input gives the same plan. Nothing here runs a kernel or opens a file.

mod cluster;
mod degrees;
mod profile;
mod search;
mod space;

pub use cluster::{Cluster, ClusterDevice, ClusterError, DeviceRates, Host, LinkRates};
pub use degrees::{DegreeCost, DegreeError, DegreeInput, DegreePlan, HalfLayerCost, plan_degrees};
pub use profile::{Counted, ForetoldStep, NotKnown, NotMeasured, Profile};
pub use search::{Found, Judged, search};
pub use space::Space;
