use std::collections::BTreeMap;

use crate::call::ExchangeKind;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub calls: u64,
    /// Bytes of the tensors. How many bytes travel depends on the group.
    pub bytes: u128,
}

/// A rank's issued collectives by kind. Groups of one member issue none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(pub BTreeMap<ExchangeKind, Count>);

impl Counts {
    pub fn of(&self, kind: ExchangeKind) -> Count {
        self.0.get(&kind).copied().unwrap_or_default()
    }

    pub fn bytes(&self) -> u128 {
        self.0.values().map(|count| count.bytes).sum()
    }

    pub(crate) fn add(&mut self, kind: ExchangeKind, bytes: u64) {
        let count = self.0.entry(kind).or_default();
        count.calls += 1;
        count.bytes += bytes as u128;
    }
}
