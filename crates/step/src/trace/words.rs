//! What listings and drawings call spans.

use std::borrow::Cow;

use super::{Span, Timeline};
use crate::program::{UnitIdx, Work};

/// The words for the spans of one timeline. They tell parts and micro-batches apart only where there are several.
pub struct Words<'a> {
    units: &'a [String],
    tells_micro: bool,
    tells_part: bool,
}

impl<'a> Words<'a> {
    /// `units` are the names of the chain's units.
    pub fn of(timeline: &Timeline, units: &'a [String]) -> Words<'a> {
        let any = |is_told: fn(&Span) -> bool| timeline.ranks.iter().flatten().any(is_told);
        Words { units, tells_micro: any(|span| span.micro.index > 0), tells_part: any(|span| span.micro.part > 0) }
    }

    pub fn unit(&self, unit: UnitIdx) -> Cow<'a, str> {
        match self.units.get(unit.0) {
            Some(name) => Cow::Borrowed(name),
            None => Cow::Owned(format!("unit {}", unit.0)),
        }
    }

    /// As in "forward attention 3, part 1".
    pub fn name(&self, span: &Span) -> String {
        if let Work::SumGradients(bucket) | Work::ReduceGradients(bucket) | Work::GatherParameters(bucket) = span.work {
            return format!("{}, bucket {}", verb(span.work), bucket.0);
        }
        let mut name = format!("{} {}", verb(span.work), self.unit(span.unit));
        if is_of_whole_step(span.work) {
            return name;
        }
        if let Work::Logits(chunk) | Work::Loss(chunk) | Work::Evaluate(chunk) = span.work {
            name += &format!(", chunk {}", chunk.0);
        }
        if self.tells_micro {
            name += &format!(", micro-batch {}", span.micro.index);
        }
        if self.tells_part {
            name += &format!(", part {}", span.micro.part);
        }
        name
    }

    /// What a box may say of its span, the longest first.
    pub fn labels(&self, span: &Span) -> Vec<String> {
        if let Work::SumGradients(bucket) | Work::ReduceGradients(bucket) | Work::GatherParameters(bucket) = span.work {
            return vec![self.name(span), verb(span.work).to_owned(), bucket.0.to_string()];
        }
        let unit = self.unit(span.unit);
        let short = abbreviated(&unit);
        let place = match (self.tells_micro, self.tells_part) {
            _ if is_of_whole_step(span.work) => return vec![self.name(span), unit.into_owned(), short],
            (true, true) => span.micro.to_string(),
            (true, false) => span.micro.index.to_string(),
            (false, true) => span.micro.part.to_string(),
            (false, false) => return vec![self.name(span), unit.into_owned(), short],
        };
        vec![self.name(span), format!("{unit} · {place}"), format!("{short}·{place}"), short]
    }
}

/// Whether it is done once for all micro-batches.
fn is_of_whole_step(work: Work) -> bool {
    matches!(work, Work::Borrow | Work::Return)
}

fn verb(work: Work) -> &'static str {
    match work {
        Work::Enter => "enter",
        Work::Forward => "forward",
        Work::Normalise => "normalise again",
        Work::Recompute => "recompute",
        Work::Logits(_) => "logits",
        Work::Loss(_) => "loss",
        Work::Evaluate(_) => "evaluate",
        Work::BackwardInput => "backward input",
        Work::BackwardWeight => "backward weight",
        Work::BackwardEnter => "backward enter",
        Work::AllReduce => "all-reduce",
        Work::ReduceScatter => "reduce-scatter",
        Work::AllGather => "all-gather",
        Work::SumGradients(_) => "sum gradients",
        Work::ReduceGradients(_) => "reduce gradients",
        Work::GatherParameters(_) => "gather parameters",
        Work::Borrow => "borrow",
        Work::Return => "return",
    }
}

/// "A3" for "attention 3".
fn abbreviated(unit: &str) -> String {
    let initial = unit.chars().next().into_iter().flat_map(char::to_uppercase);
    let number = unit.rsplit_once(' ').map_or("", |(_, last)| last);
    initial.chain(number.chars().take_while(char::is_ascii_digit)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_abbreviated() {
        let cases = [("attention 3", "A3"), ("mlp 12", "M12"), ("head", "H"), ("", ""), ("é x9", "É"), ("7", "7")];
        for (unit, expected) in cases {
            assert_eq!(abbreviated(unit), expected, "{unit}");
        }
    }
}
