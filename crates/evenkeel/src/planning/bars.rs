//! The memory of a planned step as bars, one for devices that are alike.

use evenkeel_plan::Cluster;
use evenkeel_step::{Devices, Strategy};
use evenkeel_train::Cost;

use super::choice::JudgedStep;
use super::job::Job;
use crate::drawing::MemoryBar;
use crate::memory::Room;

/// What a rank needs, has and computes on.
#[derive(PartialEq, Eq)]
struct Need {
    used_bytes: u64,
    limit_bytes: u64,
    device: String,
}

pub fn memory_bars(job: &Job, judged: &JudgedStep, cluster: Option<&Cluster>) -> Vec<MemoryBar> {
    let (strategy, costs) = (&judged.timed.strategy, &judged.memory);
    match (cluster, &strategy.devices) {
        (Some(cluster), Devices::Cuda { gpus, .. }) => {
            let places = cluster.places();
            let need = |(cost, &number): (&Cost, &usize)| {
                let device = places[number].device;
                let limit_bytes = cluster.devices[device].arena_bytes();
                Need { used_bytes: cost.arena_bytes, limit_bytes, device: device.to_owned() }
            };
            alike(costs.iter().zip(gpus).map(need))
        }
        _ => match Room::of(strategy, (job.beside)(strategy)) {
            Room::Machine(others) => {
                // All ranks share the memory, and so does everything else in the process.
                let used_bytes = others.with(costs, strategy.devices.cores_per_rank()).bytes();
                let limit_bytes = evenkeel_device::cpu_report().memory_bytes;
                let devices = "the whole process on this machine".to_owned();
                vec![MemoryBar {
                    ranks: ranks(&(0..strategy.ranks()).collect::<Vec<_>>()),
                    devices,
                    used_bytes,
                    limit_bytes,
                }]
            }
            Room::Gpus(bytes) => {
                let device = part_of_gpu(strategy);
                let need = |(cost, &limit_bytes): (&Cost, &u64)| Need {
                    used_bytes: cost.arena_bytes,
                    limit_bytes,
                    device: device.to_owned(),
                };
                alike(costs.iter().zip(&bytes).map(need))
            }
        },
    }
}

fn part_of_gpu(strategy: &Strategy) -> &'static str {
    if strategy.ranks() == 1 || strategy.devices.are_separate_gpus() { "GPU" } else { "share of a GPU" }
}

/// Ranks with the same need as one bar.
fn alike(needs: impl Iterator<Item = Need>) -> Vec<MemoryBar> {
    let mut groups: Vec<(Need, Vec<usize>)> = Vec::new();
    for (rank, need) in needs.enumerate() {
        match groups.iter_mut().find(|(known, _)| *known == need) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((need, vec![rank])),
        }
    }
    let bar = |(need, members): (Need, Vec<usize>)| MemoryBar {
        ranks: ranks(&members),
        devices: if members.len() == 1 { need.device } else { format!("{} × {}", members.len(), need.device) },
        used_bytes: need.used_bytes,
        limit_bytes: need.limit_bytes,
    };
    groups.into_iter().map(bar).collect()
}

/// `rank 0`, `ranks 0–3, 8`
fn ranks(members: &[usize]) -> String {
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for &rank in members {
        match runs.last_mut().filter(|run| run[1] + 1 == rank) {
            Some(run) => run[1] = rank,
            None => runs.push([rank, rank]),
        }
    }
    let run = |[first, last]: &[usize; 2]| if first == last { first.to_string() } else { format!("{first}–{last}") };
    let runs: Vec<String> = runs.iter().map(run).collect();
    format!("{} {}", if members.len() == 1 { "rank" } else { "ranks" }, runs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_need_and_have_the_same_are_one_bar() {
        let need = |used_bytes: u64, device: &str| Need { used_bytes, limit_bytes: 10, device: device.to_owned() };
        let needs = [need(1, "a"), need(1, "a"), need(2, "a"), need(1, "b"), need(1, "a")];
        let bars: Vec<String> = alike(needs.into_iter())
            .iter()
            .map(|bar| format!("{}: {} of {} on {}", bar.ranks, bar.used_bytes, bar.limit_bytes, bar.devices))
            .collect();
        assert_eq!(bars, ["ranks 0–1, 4: 1 of 10 on 3 × a", "rank 2: 2 of 10 on a", "rank 3: 1 of 10 on b"]);
    }
}
