//! Chooses how to run a model on given devices, before anything runs.
//!
//! ```text
//! counted      the kernels of ranks' programs, and the ranks that stand for all others
//! short_chain  the tasks of a long chain from those of a short one
//! prices       the time of a step by what tasks and exchanges take
//! lateness     what steps take beyond their simulation
//! profile      what they take on a machine's devices, as measured
//! rates        what they take on the devices of a cluster, by its figures
//! cluster      devices, hosts and the links between them, as a file describes them
//! written      a cluster as such a file
//! joined       several clusters as one
//! link_fit     a link's latency and bandwidth from exchanges that were timed
//! space        the strategies there are
//! bound        a time that a strategy takes at least
//! search       the fastest of them, without a look at all
//! degrees      the tensor-parallel degree of every half-layer, by the objective of Oases
//! ```
//!
//! Pure: the same input gives the same plan. Nothing here runs a kernel or opens a file.

mod bound;
mod cluster;
mod counted;
mod degrees;
mod joined;
mod lateness;
mod link_fit;
mod prices;
mod profile;
mod rates;
mod search;
mod short_chain;
mod space;
mod written;

pub use bound::{PlaceTime, UnitTime, least_step_s, least_step_s_of_any_cut, unit_times};
pub use cluster::{Cluster, ClusterDevice, ClusterError, ClusterKind, DeviceRates, Host, LinkRates};
pub use counted::{Counted, Representatives};
pub use degrees::{DegreeCost, DegreeError, DegreeInput, DegreePlan, HalfLayerCost, plan_degrees};
pub use link_fit::TimedExchange;
pub use prices::{ForetoldStep, NotKnown, NotMeasured, Prices, foretell, simulated};
pub use profile::{Measured, Profile};
pub use rates::Published;
pub use search::{Bounded, Fit, Found, Judge, Judged, Least, Timed, search};
pub use short_chain::{EvenChain, ShortChain, TaskKernels};
pub use space::{RankDevices, Space, recomputing};
pub use written::Comments;
