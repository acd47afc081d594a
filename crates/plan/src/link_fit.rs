//! A link's latency and bandwidth, from exchanges over it that were timed.

use evenkeel_comm::ExchangeKind;

use crate::cluster::LinkRates;

/// An exchange among so many ranks, and what it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedExchange {
    pub kind: ExchangeKind,
    pub members: usize,
    pub bytes: u64,
    pub seconds: f64,
}

impl LinkRates {
    /// What an exchange takes over it: a ring's bytes, and messages of latency as in a tree.
    pub fn exchange_s(&self, kind: ExchangeKind, members: usize, bytes: u64) -> f64 {
        let [messages, sent_bytes] = traffic(kind, members, bytes);
        messages * 1e-6 * self.latency_us + sent_bytes / (1e9 * self.gb_per_s)
    }

    /// The link that foretells these exchanges best, by least squares. None if nothing was exchanged.
    ///
    /// Errors are relative. Absolute ones would leave the decision to the largest exchanges, which take several times as long
    /// while others use the machine's memory.
    pub fn fitted(source: String, exchanges: &[TimedExchange]) -> Option<LinkRates> {
        let (mut squares, mut products) = ([[0.0; 2]; 2], [0.0; 2]);
        for &TimedExchange { kind, members, bytes, seconds } in exchanges.iter().filter(|it| it.seconds > 0.0) {
            let relative = traffic(kind, members, bytes).map(|amount| amount / seconds);
            for row in 0..2 {
                products[row] += relative[row];
                (0..2).for_each(|column| squares[row][column] += relative[row] * relative[column]);
            }
        }
        let [[of_messages, mixed], [_, of_bytes]] = squares;
        let determinant = of_messages * of_bytes - mixed * mixed;
        let latency_s = (products[0] * of_bytes - products[1] * mixed) / determinant;
        let s_per_byte = (products[1] * of_messages - products[0] * mixed) / determinant;
        // Noise may make messages seem to take less than nothing, and equal sizes do not tell them from bytes.
        let is_sound = latency_s >= 0.0 && s_per_byte > 0.0 && s_per_byte.is_finite();
        let (latency_s, s_per_byte) = if is_sound { (latency_s, s_per_byte) } else { (0.0, products[1] / of_bytes) };
        let gb_per_s = 1e-9 / s_per_byte;
        (gb_per_s > 0.0 && gb_per_s.is_finite()).then_some(LinkRates { source, gb_per_s, latency_us: 1e6 * latency_s })
    }
}

/// The messages that follow one another, and the bytes that each member sends.
fn traffic(kind: ExchangeKind, members: usize, bytes: u64) -> [f64; 2] {
    let (steps, share) = kind.on_a_ring(members);
    let rounds = f64::from(members.next_power_of_two().trailing_zeros());
    [f64::from(steps).min(2.0 * rounds), share * bytes as f64]
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [ExchangeKind; 3] = [ExchangeKind::AllReduce, ExchangeKind::ReduceScatter, ExchangeKind::AllGather];

    fn exchanges(link: &LinkRates, noise: impl Fn(usize) -> f64) -> Vec<TimedExchange> {
        let mut exchanges = Vec::new();
        for kind in KINDS {
            for members in [2, 4, 8] {
                for bytes in [1 << 16, 1 << 19, 1 << 22, 1 << 25] {
                    let seconds = link.exchange_s(kind, members, bytes) * noise(exchanges.len());
                    exchanges.push(TimedExchange { kind, members, bytes, seconds });
                }
            }
        }
        exchanges
    }

    #[test]
    fn a_link_is_found_from_what_it_takes_and_noise_moves_it_little() {
        let link = LinkRates { source: String::new(), gb_per_s: 12.5, latency_us: 20.0 };
        let found = LinkRates::fitted(String::new(), &exchanges(&link, |_| 1.0)).unwrap();
        assert!((found.gb_per_s - 12.5).abs() < 1e-6 && (found.latency_us - 20.0).abs() < 1e-6, "{found:?}");
        let noisy = |index: usize| if index.is_multiple_of(2) { 1.1 } else { 0.9 };
        let found = LinkRates::fitted(String::new(), &exchanges(&link, noisy)).unwrap();
        assert!(
            (found.gb_per_s / 12.5 - 1.0).abs() < 0.15 && (found.latency_us / 20.0 - 1.0).abs() < 0.15,
            "{found:?}"
        );
    }

    #[test]
    fn no_exchanges_give_no_link_and_strange_ones_no_strange_link() {
        assert_eq!(LinkRates::fitted(String::new(), &[]), None);
        let of = |bytes: u64, seconds: f64| TimedExchange { kind: ExchangeKind::AllReduce, members: 2, bytes, seconds };
        let cases: [&[TimedExchange]; 4] = [
            &[of(1 << 20, 1e-3)],
            &[of(1 << 20, 1e-3), of(1 << 20, 2e-3)],
            // Smaller ones that take longer; larger ones that take more than in proportion.
            &[of(1 << 16, 2e-3), of(1 << 20, 1e-3)],
            &[of(1 << 16, 1e-6), of(1 << 20, 1e-3)],
        ];
        for case in cases {
            let found = LinkRates::fitted(String::new(), case).unwrap();
            assert!(
                found.gb_per_s > 0.0 && found.gb_per_s.is_finite() && found.latency_us >= 0.0,
                "{case:?}: {found:?}"
            );
        }
    }
}
