//! Emulates a link slower than memory: collectives take as long as over a ring of such links.

use std::time::Duration;

use crate::call::{Call, ExchangeKind};

/// The link from a rank to the next one of a ring.
///
/// A collective of n members and B bytes takes `steps × latency + traffic / bytes_per_s` from the moment the last member
/// arrived:
///
/// | collective | steps | traffic |
/// | --- | --- | --- |
/// | all-reduce | 2 (n − 1) | 2 (n − 1) / n · B |
/// | reduce-scatter, all-gather | n − 1 | (n − 1) / n · B, where B is the whole tensor |
/// | reduce, broadcast | n − 1 | B, as the pieces follow one another around the ring |
/// | redistribution | 1 | the most that one member sends to or receives from the others |
/// | send | 1 | B |
/// | barrier | 2 (n − 1) | 0 |
///
/// Members sleep meanwhile and use no core. A collective never takes less than moving its bytes in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub latency: Duration,
    pub bytes_per_s: f64,
}

impl Link {
    pub(crate) fn duration(&self, call: &Call, members: usize) -> Duration {
        self.duration_of(call.kind, call.bytes, members)
    }

    /// Duration of a collective of `bytes` among `members` ranks.
    pub fn duration_of(&self, kind: ExchangeKind, bytes: u64, members: usize) -> Duration {
        let (steps, share) = kind.on_a_ring(members);
        let transfer = Duration::try_from_secs_f64(share * bytes as f64 / self.bytes_per_s);
        // Zero bandwidth takes for ever.
        self.latency.saturating_mul(steps).saturating_add(transfer.unwrap_or(Duration::MAX))
    }
}

impl ExchangeKind {
    /// The number of consecutive messages in a ring of `members`, and the share of the bytes that each member sends.
    pub fn on_a_ring(self, members: usize) -> (u32, f64) {
        let others = members as u32 - 1;
        let n = members as f64;
        match self {
            ExchangeKind::AllReduce => (2 * others, 2.0 * (n - 1.0) / n),
            ExchangeKind::ReduceScatter | ExchangeKind::AllGather => (others, (n - 1.0) / n),
            ExchangeKind::Reduce | ExchangeKind::Broadcast => (others, 1.0),
            ExchangeKind::Redistribute | ExchangeKind::Send | ExchangeKind::Receive => (1, 1.0),
            ExchangeKind::Barrier | ExchangeKind::Exchange => (2 * others, 0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_takes_the_steps_and_the_traffic_of_a_ring() {
        let link = Link { latency: Duration::from_millis(1), bytes_per_s: 1e6 };
        let cases = [
            (ExchangeKind::AllReduce, 4, 6 + 1500),
            (ExchangeKind::AllReduce, 2, 2 + 1000),
            (ExchangeKind::ReduceScatter, 4, 3 + 750),
            (ExchangeKind::AllGather, 2, 1 + 500),
            (ExchangeKind::Reduce, 4, 3 + 1000),
            (ExchangeKind::Broadcast, 3, 2 + 1000),
            (ExchangeKind::Redistribute, 4, 1 + 1000),
            (ExchangeKind::Send, 2, 1 + 1000),
            (ExchangeKind::Barrier, 4, 6),
        ];
        for (kind, members, expected_ms) in cases {
            let duration = link.duration(&Call { bytes: 1_000_000, ..Call::of(kind) }, members);
            assert_eq!(duration.as_millis(), expected_ms, "{kind} of {members}");
        }
    }
}
