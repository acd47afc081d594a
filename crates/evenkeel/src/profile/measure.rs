//! What ranks reach on this machine's devices while all of them are at work, as in a run.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use evenkeel_comm::{Communicator, ExchangeKind, Group, Options, run_ranks};
use evenkeel_device::{DType, Device, DeviceKind};
use evenkeel_plan::TimedExchange;
use evenkeel_step::simulate::median;
use evenkeel_train::{PEAK, Probe, ProductShape};

use crate::Failure;
use crate::launch::Launch;
use crate::memory::check_fit;

/// The rates of all ranks, and the exchanges between them.
pub struct HostRates {
    /// By rank.
    pub ranks: Vec<RankRates>,
    pub exchanges: Vec<TimedExchange>,
}

/// What a rank reaches while the others do the same.
pub struct RankRates {
    pub products: Vec<TimedProduct>,
    /// Of a copy, read and written.
    pub bytes_per_s: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedProduct {
    pub dtype: DType,
    /// Rows, columns, depth.
    pub dims: [usize; 3],
    pub flops: f64,
    pub seconds: f64,
}

pub const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Shapes of products, small ones first. The last ones are large, and decide the rate.
const SHAPES_ON_CORES: [[usize; 3]; 5] =
    [[256, 256, 256], [512, 512, 512], [1024, 512, 512], [1024, 1024, 1024], [2048, 1024, 1024]];
const SHAPES_ON_GPUS: [[usize; 3]; 5] =
    [[1024, 1024, 1024], [2048, 2048, 2048], [4096, 4096, 4096], [8192, 4096, 4096], [8192, 8192, 8192]];
pub const DECISIVE_SHAPES: usize = 2;

/// How often ranks begin a measurement together; a probe runs several times each time.
const ROUNDS: usize = 7;

pub const EXCHANGES: [ExchangeKind; 3] =
    [ExchangeKind::AllReduce, ExchangeKind::ReduceScatter, ExchangeKind::AllGather];
/// Of the whole tensor.
pub const EXCHANGED_BYTES: [usize; 5] = [1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25];
/// The columns of exchanged tensors, and the bytes of their rows.
const COLUMNS: usize = 256;
const ROW_BYTES: usize = COLUMNS * size_of::<f32>();
/// Exchanges that are timed as one: in a run, too, the host issues them ahead.
const IN_A_ROW: u32 = 4;

/// Bytes that a rank copies: more than its caches hold.
const COPIED_BYTES: u64 = 256 << 20;
const COPIED_BYTES_ON_GPUS: u64 = 2 << 30;

pub fn measure(launch: &Launch) -> Result<HostRates, Failure> {
    let ranks = launch.strategy.ranks();
    if launch.strategy.devices.kind() == DeviceKind::Cpu {
        let needed_bytes = ranks as u64 * (COPIED_BYTES + 2 * EXCHANGED_BYTES[EXCHANGED_BYTES.len() - 1] as u64);
        check_fit("measuring all ranks", needed_bytes, "use more --cores-per-rank")?;
    }
    let (shared, failed) = (launch.shared_gpu()?, Mutex::new(None));
    let options = Options { deadline: Duration::from_secs(60), ..Options::default() };
    let measured = run_ranks(ranks, &options, |communicator| match launch.device(communicator.rank(), &shared) {
        Ok(device) => Some(of_rank(&device, &communicator)),
        Err(failure) => {
            communicator.abort("its device cannot be started");
            failed.lock().expect("no panic under this lock").get_or_insert(failure);
            None
        }
    });
    if let Some(failure) = failed.into_inner().expect("no panic under this lock") {
        return Err(failure);
    }
    let (ranks, exchanges): (Vec<RankRates>, Vec<Vec<Option<TimedExchange>>>) =
        measured?.into_iter().map(|found| found.expect("no device has failed")).unzip();
    Ok(HostRates { ranks, exchanges: of_all_ranks(&exchanges) })
}

/// Ranks that took part in an exchange agree on its time but for noise.
fn of_all_ranks(by_rank: &[Vec<Option<TimedExchange>>]) -> Vec<TimedExchange> {
    let of_index = |index: usize| {
        let timed: Vec<TimedExchange> = by_rank.iter().filter_map(|exchanges| exchanges[index]).collect();
        TimedExchange { seconds: median(timed.iter().map(|it| it.seconds)), ..timed[0] }
    };
    (0..by_rank[0].len()).map(of_index).collect()
}

fn of_rank(device: &Device, communicator: &Communicator) -> (RankRates, Vec<Option<TimedExchange>>) {
    let world = communicator.group("all", &(0..communicator.size()).collect::<Vec<_>>());
    let is_gpu = device.kind() == DeviceKind::Cuda;
    let shapes = if is_gpu { SHAPES_ON_GPUS } else { SHAPES_ON_CORES };
    let products = products(device, &world, &shapes);
    let copied_bytes = if is_gpu { COPIED_BYTES_ON_GPUS } else { COPIED_BYTES }.min(room_bytes(device) / 2);
    let copy = Probe::of_copy(device, copied_bytes);
    let bytes_per_s = copy.work as f64 / median(rounds(device, &world, &[Some(&copy)]).remove(0));
    drop(copy);
    (RankRates { products, bytes_per_s }, exchanges(device, communicator, &world))
}

/// Shapes that a device has no room for are left out.
fn products(device: &Device, world: &Group, shapes: &[[usize; 3]]) -> Vec<TimedProduct> {
    let of_dtype = |dtype: DType| shapes.iter().map(move |&dims| (dtype, dims));
    let wanted: Vec<(DType, [usize; 3])> = DTYPES.into_iter().flat_map(of_dtype).collect();
    let probe = |&(dtype, dims): &(DType, [usize; 3])| {
        let [m, n, k] = dims;
        let bytes = ((m * k + k * n + m * n) * dtype.size_bytes()) as u64;
        let shape = ProductShape { dims, wide_out: dtype == DType::F32, ..PEAK };
        (bytes <= room_bytes(device) / 2).then(|| Probe::of_product(device, shape, dtype))
    };
    let probes: Vec<Option<Probe>> = wanted.iter().map(probe).collect();
    let seconds = rounds(device, world, &probes.iter().map(Option::as_ref).collect::<Vec<_>>());
    let timed = |(((dtype, dims), probe), seconds): ((_, Option<Probe>), Vec<f64>)| {
        Some(TimedProduct { dtype, dims, flops: probe?.work as f64, seconds: median(seconds) })
    };
    wanted.into_iter().zip(probes).zip(seconds).filter_map(timed).collect()
}

/// By probe: its seconds. All ranks begin together, those without a probe, too. Probes take turns, since machines change their
/// speed from second to second.
fn rounds(device: &Device, world: &Group, probes: &[Option<&Probe>]) -> Vec<Vec<f64>> {
    // Operands are filled before anything is measured.
    device.compute().finish();
    let mut seconds = vec![Vec::new(); probes.len()];
    for _ in 0..ROUNDS {
        for (probe, seconds) in probes.iter().zip(&mut seconds) {
            world.exchange(0);
            let times = probe.map(|probe| probe.measure(device)).unwrap_or_default();
            seconds.extend(times.iter().map(Duration::as_secs_f64));
        }
    }
    seconds
}

fn room_bytes(device: &Device) -> u64 {
    let usage = device.usage();
    usage.capacity_bytes.saturating_sub(usage.live_bytes)
}

/// Groups of 2, 4, 8, … and of all ranks.
pub fn group_sizes(ranks: usize) -> Vec<usize> {
    let powers = (1..).map(|power| 1usize << power).take_while(|size| *size < ranks);
    powers.chain((ranks > 1).then_some(ranks)).collect()
}

/// Times every kind of exchange in groups of neighbours, all groups of a size at once. None where this rank is left over.
fn exchanges(device: &Device, communicator: &Communicator, world: &Group) -> Vec<Option<TimedExchange>> {
    let (rank, ranks) = (communicator.rank(), communicator.size());
    let mut timed = Vec::new();
    for members in group_sizes(ranks) {
        let first = rank / members * members;
        let own: Vec<usize> = (first..first + members).collect();
        let group = (first + members <= ranks).then(|| communicator.group(&format!("{members} from {first}"), &own));
        for bytes in EXCHANGED_BYTES {
            for kind in EXCHANGES {
                world.exchange(0);
                timed.push(group.as_ref().map(|group| exchange(device, group, kind, bytes)));
            }
        }
    }
    timed
}

fn exchange(device: &Device, group: &Group, kind: ExchangeKind, bytes: usize) -> TimedExchange {
    /// Small exchanges take turns as often as noise needs.
    const BYTES_OF_ALL_TURNS: usize = 128 << 20;
    let turns = (BYTES_OF_ALL_TURNS / bytes).clamp(5, 50);
    let (queue, members) = (device.comm(), group.size());
    let rows_each = (bytes / ROW_BYTES).div_ceil(members);
    let bounds: Vec<usize> = (0..=members).map(|member| member * rows_each).collect();
    let whole = queue.zeros(members * rows_each, COLUMNS, DType::F32);
    let part = queue.zeros(rows_each, COLUMNS, DType::F32);
    let mut seconds = Vec::new();
    for turn in 0..=turns {
        queue.finish();
        group.exchange(0);
        let start = Instant::now();
        for _ in 0..IN_A_ROW {
            match kind {
                ExchangeKind::ReduceScatter => group.reduce_scatter(queue, &whole, &part, &bounds),
                ExchangeKind::AllGather => group.all_gather(queue, &part, &whole, &bounds),
                _ => group.all_reduce(queue, &whole),
            };
        }
        queue.finish();
        // The first finds the caches full of other things.
        if turn > 0 {
            seconds.push((start.elapsed() / IN_A_ROW).as_secs_f64());
        }
    }
    TimedExchange { kind, members, bytes: whole.bytes(), seconds: median(seconds) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_double_up_to_all_ranks() {
        let cases: [(usize, &[usize]); 6] =
            [(1, &[]), (2, &[2]), (3, &[2, 3]), (4, &[2, 4]), (6, &[2, 4, 6]), (8, &[2, 4, 8])];
        for (ranks, expected) in cases {
            assert_eq!(group_sizes(ranks), expected, "{ranks}");
        }
    }

    #[test]
    fn an_exchange_takes_the_median_of_the_ranks_that_took_part() {
        let of = |seconds| Some(TimedExchange { kind: ExchangeKind::AllReduce, members: 2, bytes: 1, seconds });
        let by_rank = [vec![of(1.0), of(4.0)], vec![of(3.0), of(4.0)], vec![of(2.0), None]];
        let seconds: Vec<f64> = of_all_ranks(&by_rank).iter().map(|it| it.seconds).collect();
        assert_eq!(seconds, [2.0, 4.0]);
    }
}
