//! A member's request to its group, as plain data that members compare and messages show.

use std::fmt;
use std::sync::Arc;

use evenkeel_device::DType;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExchangeKind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Reduce,
    Broadcast,
    Redistribute,
    Send,
    Receive,
    Barrier,
    Exchange,
}

impl fmt::Display for ExchangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExchangeKind::AllReduce => "all-reduce",
            ExchangeKind::ReduceScatter => "reduce-scatter",
            ExchangeKind::AllGather => "all-gather",
            ExchangeKind::Reduce => "reduce",
            ExchangeKind::Broadcast => "broadcast",
            ExchangeKind::Redistribute => "redistribution",
            ExchangeKind::Send => "send",
            ExchangeKind::Receive => "receive",
            ExchangeKind::Barrier => "barrier",
            ExchangeKind::Exchange => "exchange",
        })
    }
}

/// The description of a collective, on which all members must agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub kind: ExchangeKind,
    pub dtype: DType,
    /// Size of the whole tensor, not of a part.
    pub bytes: u64,
    /// The world rank that alone sends or receives.
    pub root: Option<usize>,
    /// Member i has rows `bounds[i]..bounds[i + 1]`.
    pub bounds: Option<Arc<[usize]>>,
    /// The GPU that holds the tensors; `None` for host memory.
    pub gpu: Option<usize>,
}

impl Call {
    pub fn of(kind: ExchangeKind) -> Call {
        Call { kind, dtype: DType::F32, bytes: 0, root: None, bounds: None, gpu: None }
    }

    pub fn agrees_with(&self, other: &Call) -> bool {
        // A send and its receive name each other as the root.
        let is_same = match (self.kind, other.kind) {
            (ExchangeKind::Send, ExchangeKind::Receive) | (ExchangeKind::Receive, ExchangeKind::Send) => true,
            (one, another) => one == another && self.root == other.root,
        };
        // Members cannot mix host memory and GPU memory.
        let is_same = is_same && self.gpu.is_some() == other.gpu.is_some();
        // Only the sender and the receiver of a parcel compare it.
        if is_same && self.kind == ExchangeKind::Redistribute {
            return true;
        }
        is_same && self.dtype == other.dtype && self.bytes == other.bytes && self.bounds == other.bounds
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if !matches!(self.kind, ExchangeKind::Barrier | ExchangeKind::Exchange) {
            self.fmt_operand(f)?;
        }
        self.gpu.map_or(Ok(()), |gpu| write!(f, " on GPU {gpu}"))
    }
}

impl Call {
    fn fmt_operand(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = match self.dtype {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::U32 => "u32",
        };
        write!(f, " of {} bytes of {dtype}", self.bytes)?;
        match (self.kind, self.root) {
            (ExchangeKind::Reduce | ExchangeKind::Send, Some(root)) => write!(f, " to rank {root}")?,
            (ExchangeKind::Broadcast | ExchangeKind::Receive, Some(root)) => write!(f, " from rank {root}")?,
            _ => (),
        }
        match &self.bounds {
            Some(bounds) => write!(f, " with rows cut at {bounds:?}"),
            None => Ok(()),
        }
    }
}

/// 1st, 2nd, 3rd, …
pub(crate) fn ordinal(number: u64) -> String {
    let ending = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinals_end_as_they_are_spoken() {
        for (number, expected) in
            [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (112, "112th"), (121, "121st")]
        {
            assert_eq!(ordinal(number), expected);
        }
    }
}
