//! The dims of a model that shards divide among them, and how much of each every shard has.
//!
//! The model cuts its parameters by these widths; the balancer decides on other ones.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A dim that shards divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dim {
    /// Groups of query heads with their key and value head, in parts of a group: [`SHARES`] of them are one group.
    Heads,
    /// Columns of the FFN.
    Columns,
    /// Classes of the head, and of the embedding if it has the same.
    Classes,
    /// What the embedding of a classifier divides: elements of an image's patches, or the vocabulary of texts. No balancer moves
    /// them.
    Inputs,
    /// Rows of the stream, where it is split by tokens, as shares of all there are.
    Tokens,
}

impl Dim {
    pub const ALL: [Dim; 5] = [Dim::Heads, Dim::Columns, Dim::Classes, Dim::Inputs, Dim::Tokens];
}

/// The parts that a group of heads counts as.
pub const SHARES: usize = 64;

/// The width of every dim on each shard. A shard may have none of a dim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Names", into = "Names")]
pub struct Widths {
    by_dim: [Vec<usize>; Dim::ALL.len()],
}

impl Widths {
    pub fn new(of: impl Fn(Dim) -> Vec<usize>) -> Widths {
        let widths = Widths { by_dim: Dim::ALL.map(of) };
        let shards = widths.shards();
        assert!(widths.by_dim.iter().all(|widths| widths.len() == shards), "{widths:?}");
        widths
    }

    /// The widths of a dim, by shard.
    pub fn of(&self, dim: Dim) -> &[usize] {
        &self.by_dim[dim as usize]
    }

    pub fn set(&mut self, dim: Dim, widths: Vec<usize>) {
        assert_eq!(widths.len(), self.shards(), "a width for each shard");
        self.by_dim[dim as usize] = widths;
    }

    /// The same with other widths of a dim.
    pub fn with(mut self, dim: Dim, widths: Vec<usize>) -> Widths {
        self.set(dim, widths);
        self
    }

    pub fn shards(&self) -> usize {
        self.by_dim[0].len()
    }

    pub fn total(&self, dim: Dim) -> usize {
        self.of(dim).iter().sum()
    }

    /// Whether they cut groups of heads by samples: good for computing, but not for keeping parameters.
    pub fn share_heads_by_samples(&self) -> bool {
        self.of(Dim::Heads).iter().any(|shares| !shares.is_multiple_of(SHARES))
    }

    /// The width that shards have and did not have before, summed over the shards. Their parts lie side by side, so a part moves if
    /// those before it change. A shard with some of a group of heads has all of its weights.
    pub fn gained(&self, before: &Widths, dim: Dim) -> usize {
        let grain = if dim == Dim::Heads { SHARES } else { 1 };
        let whole = |part: Range<usize>| match part.is_empty() {
            true => part,
            false => part.start / grain * grain..part.end.next_multiple_of(grain),
        };
        let parts = side_by_side(self.of(dim)).zip(side_by_side(before.of(dim)));
        let gained = |(now, before): (Range<usize>, Range<usize>)| {
            let (now, before) = (whole(now), whole(before));
            now.len() - now.end.min(before.end).saturating_sub(now.start.max(before.start))
        };
        parts.map(gained).sum()
    }
}

fn side_by_side(widths: &[usize]) -> impl Iterator<Item = Range<usize>> {
    widths.iter().scan(0, |end, width| {
        *end += width;
        Some(*end - width..*end)
    })
}

/// Widths as files have them. What comes from a file is as long as it says: [`Widths`] of different lengths fit no model.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Names {
    head_shares: Vec<usize>,
    ffn: Vec<usize>,
    classes: Vec<usize>,
    #[serde(alias = "patch_elements")]
    inputs: Vec<usize>,
    tokens: Vec<usize>,
}

impl From<Names> for Widths {
    fn from(names: Names) -> Widths {
        let Names { head_shares, ffn, classes, inputs, tokens } = names;
        Widths { by_dim: [head_shares, ffn, classes, inputs, tokens] }
    }
}

impl From<Widths> for Names {
    fn from(widths: Widths) -> Names {
        let [head_shares, ffn, classes, inputs, tokens] = widths.by_dim;
        Names { head_shares, ffn, classes, inputs, tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_go_through_json_by_the_names_that_files_have() {
        let widths = Widths::new(|dim| vec![dim as usize, 10]);
        let json = serde_json::to_string(&widths).unwrap();
        assert_eq!(json, r#"{"head_shares":[0,10],"ffn":[1,10],"classes":[2,10],"inputs":[3,10],"tokens":[4,10]}"#);
        assert_eq!(serde_json::from_str::<Widths>(&json).unwrap(), widths);
        assert!(serde_json::from_str::<Widths>(r#"{"ffn":[1]}"#).is_err());
    }

    #[test]
    fn a_dim_is_set_alone_and_what_shards_gain_is_counted() {
        let before = Widths::new(|_| vec![4, 4]);
        let now = before.clone().with(Dim::Columns, vec![6, 2]);
        assert_eq!((now.of(Dim::Columns), now.of(Dim::Heads), now.total(Dim::Columns)), (&[6, 2][..], &[4, 4][..], 8));
        assert_eq!(Dim::ALL.map(|dim| now.gained(&before, dim)), [0, 2, 0, 0, 0]);
    }

    #[test]
    fn what_shards_gain_are_places_and_whole_groups_of_heads() {
        let of = |dim: Dim, widths: [usize; 3]| Widths::new(|_| vec![4; 3]).with(dim, widths.to_vec());
        let gained = |dim: Dim, before: [usize; 3], now: [usize; 3]| of(dim, now).gained(&of(dim, before), dim);
        // The first gives up four: the others' parts move towards it, by four and by two.
        assert_eq!(gained(Dim::Columns, [10, 10, 10], [6, 12, 12]), 4 + 2);
        assert_eq!(gained(Dim::Columns, [10, 10, 10], [10, 10, 10]), 0);
        assert_eq!(gained(Dim::Columns, [10, 0, 10], [0, 10, 10]), 10);
        // Half a group is all of its weights.
        assert_eq!(gained(Dim::Heads, [SHARES, SHARES, 0], [SHARES, SHARES / 2, SHARES / 2]), SHARES);
    }
}
