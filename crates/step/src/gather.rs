//! Values of a bucket from the replicas that each keep or have updated a part of them.

use evenkeel_comm::Group;
use evenkeel_device::{Queue, Stamp};
use evenkeel_model::{GRAIN, Parameters, in_grains};

/// Gathers a bucket's values: where all replicas compute with the whole, in its place, and if values are split, in a new tensor that
/// is theirs until it is removed. Returns the stamp of the moment when the last member has come.
pub fn gather_values(parameters: &Parameters, bucket: usize, group: &Group, comm: &Queue) -> Stamp {
    let lies = &parameters.buckets[bucket];
    let bounds = lies.grain_bounds(group.size());
    if let Some(own) = parameters.own_values(bucket) {
        let own = in_grains(own);
        let whole = comm.tensor(lies.len / GRAIN, GRAIN, own.dtype);
        let stamp = group.all_gather(comm, &own, &whole, &bounds);
        parameters.set_values(bucket, Some(whole.reshaped(1, lies.len)));
        return stamp;
    }
    let values = in_grains(&parameters.values(bucket).expect("values that are not split are here"));
    let own = values.row_range(bounds[group.rank()]..bounds[group.rank() + 1]);
    group.all_gather(comm, &own, &values, &bounds)
}
