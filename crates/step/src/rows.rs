//! The norms of adapted weights' rows outside of a program, for parameters that were just loaded or moved.

use evenkeel_comm::Group;
use evenkeel_device::Device;
use evenkeel_model::{Model, Parameters};

use crate::schedule::Chain;

/// Measures the norms of rows that layers divide by, and sums those of which each shard has a summand. All ranks do so together.
pub fn measure_rows(model: &Model, chain: &Chain, groups: &[Group], device: &Device, parameters: &Parameters) {
    if !chain.measures_rows {
        return;
    }
    let (compute, comm) = (device.compute(), device.comm());
    model.measure_rows(parameters, compute);
    comm.wait(&compute.record());
    for (bucket, group) in chain.summed_rows() {
        let values = parameters.values(bucket).expect("vectors are never split");
        groups[group.0].all_reduce(comm, &values);
    }
    compute.wait(&comm.record());
}
