//! Which card each rank is on.

use std::collections::BTreeSet;

/// By rank, the number of its card. All ranks share one, or each has its own; none where they are on cores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement(Vec<usize>);

impl Placement {
    /// As is wanted, a card for each or one for all; else a card for each rank where the machine has as many and no parts of one are
    /// asked for.
    pub fn on_cards(ranks: usize, wanted: &[u32], has_parts: bool, cards: usize) -> Placement {
        Placement(match wanted {
            [] if ranks > 1 && ranks <= cards && !has_parts => (0..ranks).collect(),
            [] => vec![0; ranks],
            [card] => vec![*card as usize; ranks],
            cards => cards.iter().take(ranks).map(|&card| card as usize).collect(),
        })
    }

    pub fn card_of(&self, rank: usize) -> usize {
        self.0[rank]
    }

    /// The different cards, in order.
    pub fn cards(&self) -> Vec<usize> {
        self.0.iter().copied().collect::<BTreeSet<usize>>().into_iter().collect()
    }

    /// The ranks on each card.
    pub fn ranks_on_each(&self) -> usize {
        if self.is_each_on_its_own() { 1 } else { self.0.len() }
    }

    /// Several ranks, each on a card of its own.
    pub fn is_each_on_its_own(&self) -> bool {
        self.cards().len() > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_cards_that_are_named_or_their_own_where_there_are_enough() {
        type Case<'a> = (usize, &'a [u32], bool, usize, &'a [usize], bool);
        let cases: [Case; 11] = [
            (1, &[], false, 4, &[0], false),
            (1, &[2], false, 4, &[2], false),
            (2, &[], false, 1, &[0, 0], false),
            (2, &[], false, 2, &[0, 1], true),
            (2, &[], true, 2, &[0, 0], false),
            (3, &[], false, 2, &[0, 0, 0], false),
            (2, &[], false, 0, &[0, 0], false),
            (2, &[1], false, 4, &[1, 1], false),
            (2, &[3, 1], false, 4, &[3, 1], true),
            (2, &[1, 1], true, 4, &[1, 1], false),
            // An evaluation has fewer ranks than training.
            (1, &[3, 1], false, 4, &[3], false),
        ];
        for (ranks, wanted, has_parts, cards, expected, own) in cases {
            let found = Placement::on_cards(ranks, wanted, has_parts, cards);
            let what = format!("{ranks} ranks on {wanted:?} of {cards}");
            assert_eq!((found.0.as_slice(), found.is_each_on_its_own()), (expected, own), "{what}");
            assert_eq!(found.ranks_on_each(), if own { 1 } else { ranks }, "{what}");
        }
    }
}
