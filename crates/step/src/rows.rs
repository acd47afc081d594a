//! The norms of adapted weights' rows outside of a program, for parameters that were just loaded or moved.

use evenkeel_comm::Group;
use evenkeel_device::Device;
use evenkeel_model::{Model, Parameters};

use crate::gather::gather_values;
use crate::schedule::Chain;

/// Measures the norms of rows that layers divide by, and sums those of which ranks have summands. All ranks do so together.
pub fn measure_rows(model: &Model, chain: &Chain, groups: &[Group], device: &Device, parameters: &Parameters) {
    if !chain.measures_rows {
        return;
    }
    let (compute, comm) = (device.compute(), device.comm());
    comm.wait(&compute.record());
    for (bucket, group) in chain.gathered_for_rows() {
        gather_values(parameters, bucket, &groups[group.0], comm);
    }
    compute.wait(&comm.record());
    model.measure_rows(parameters, compute);
    chain.gathered_for_rows().for_each(|(bucket, _)| parameters.set_values(bucket, None));
    comm.wait(&compute.record());
    for (bucket, group) in chain.summed_rows() {
        let values = parameters.values(bucket).expect("vectors are never split");
        groups[group.0].all_reduce(comm, &values);
    }
    compute.wait(&comm.record());
}
