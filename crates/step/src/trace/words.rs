//! Names of spans in listings and drawings.

use std::borrow::Cow;

use super::{Span, Timeline};
use crate::program::UnitIdx;
use crate::work::{Scope, WorkRow};

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
        let WorkRow { name, scope, .. } = span.work.row();
        let of_unit = || format!("{name} {}", self.unit(span.unit));
        match scope {
            Scope::Step => name.to_owned(),
            Scope::Bucket(bucket) => format!("{name}, bucket {}", bucket.0),
            Scope::Unit => of_unit(),
            Scope::Part => of_unit() + &self.place(span),
            Scope::Chunk(chunk) => format!("{}, chunk {}{}", of_unit(), chunk.0, self.place(span)),
        }
    }

    /// The micro-batch and part of a span, if there are several.
    fn place(&self, span: &Span) -> String {
        let mut place = String::new();
        if self.tells_micro {
            place += &format!(", micro-batch {}", span.micro.index);
        }
        if self.tells_part {
            place += &format!(", part {}", span.micro.part);
        }
        place
    }

    /// Labels for a span's box, the longest first.
    pub fn labels(&self, span: &Span) -> Vec<String> {
        let WorkRow { name, scope, .. } = span.work.row();
        match scope {
            Scope::Step => return vec![name.to_owned()],
            Scope::Bucket(bucket) => return vec![self.name(span), name.to_owned(), bucket.0.to_string()],
            Scope::Unit | Scope::Part | Scope::Chunk(_) => (),
        }
        let unit = self.unit(span.unit);
        let short = abbreviated(&unit);
        let place = match (self.tells_micro, self.tells_part) {
            _ if scope == Scope::Unit => return vec![self.name(span), unit.into_owned(), short],
            (true, true) => span.micro.to_string(),
            (true, false) => span.micro.index.to_string(),
            (false, true) => span.micro.part.to_string(),
            (false, false) => return vec![self.name(span), unit.into_owned(), short],
        };
        vec![self.name(span), format!("{unit} · {place}"), format!("{short}·{place}"), short]
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
