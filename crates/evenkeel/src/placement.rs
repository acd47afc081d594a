//! The GPU of each rank: all ranks share one, or each has its own.

use std::collections::BTreeSet;

/// By rank, the number of its GPU: as wanted, one for each rank or one for all; else one for each rank if there are as many and
/// no parts of one are asked for.
pub fn gpus(ranks: usize, wanted: &[u32], has_parts: bool, found: usize) -> Vec<usize> {
    match wanted {
        [] if ranks > 1 && ranks <= found && !has_parts => (0..ranks).collect(),
        [] => vec![0; ranks],
        [gpu] => vec![*gpu as usize; ranks],
        gpus => gpus.iter().take(ranks).map(|&gpu| gpu as usize).collect(),
    }
}

/// The distinct GPUs, in order.
pub fn different(gpus: &[usize]) -> Vec<usize> {
    gpus.iter().copied().collect::<BTreeSet<usize>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_gpus_that_are_named_or_their_own_where_there_are_enough() {
        type Case<'a> = (usize, &'a [u32], bool, usize, &'a [usize]);
        let cases: [Case; 11] = [
            (1, &[], false, 4, &[0]),
            (1, &[2], false, 4, &[2]),
            (2, &[], false, 1, &[0, 0]),
            (2, &[], false, 2, &[0, 1]),
            (2, &[], true, 2, &[0, 0]),
            (3, &[], false, 2, &[0, 0, 0]),
            (2, &[], false, 0, &[0, 0]),
            (2, &[1], false, 4, &[1, 1]),
            (2, &[3, 1], false, 4, &[3, 1]),
            (2, &[1, 1], true, 4, &[1, 1]),
            // An evaluation has fewer ranks than training.
            (1, &[3, 1], false, 4, &[3]),
        ];
        for (ranks, wanted, has_parts, found, expected) in cases {
            assert_eq!(gpus(ranks, wanted, has_parts, found), expected, "{ranks} ranks on {wanted:?} of {found}");
        }
        assert_eq!(different(&[3, 1, 3]), [1, 3]);
    }
}
