//! Chooses the pieces that share a row, so that few tokens of it are left over.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Best fit, the longest first: each piece goes to the row in which it leaves the least room. Rows hold up to `room`, and so does
/// each piece. A row has its pieces in their order, and rows come in the order of their first pieces.
pub(crate) fn best_fit(lengths: &[usize], room: usize) -> Vec<Vec<usize>> {
    let mut longest_first: Vec<usize> = (0..lengths.len()).collect();
    longest_first.sort_by_key(|&piece| (Reverse(lengths[piece]), piece));
    let mut rows: Vec<Vec<usize>> = Vec::new();
    // By the room they have left; of equal ones the last that was put there.
    let mut rows_with: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for piece in longest_first {
        let length = lengths[piece];
        let tightest = rows_with.range(length..).next().map(|(&free, _)| free);
        let (row, free) = match tightest {
            Some(free) => (take_last(&mut rows_with, free), free),
            None => {
                rows.push(Vec::new());
                (rows.len() - 1, room)
            }
        };
        rows[row].push(piece);
        rows_with.entry(free - length).or_default().push(row);
    }
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows.sort_unstable_by_key(|row| row[0]);
    rows
}

fn take_last(rows_with: &mut BTreeMap<usize, Vec<usize>>, free: usize) -> usize {
    let rows = rows_with.get_mut(&free).expect("it was just found");
    let row = rows.pop().expect("empty ones are removed");
    if rows.is_empty() {
        rows_with.remove(&free);
    }
    row
}

#[cfg(test)]
mod tests {
    use evenkeel_random::Random;

    use super::*;

    #[test]
    fn every_piece_is_in_one_row_that_holds_it() {
        let mut random = Random::new(&[7]);
        for room in [1, 5, 64, 1000] {
            let lengths: Vec<usize> = (0..700).map(|_| 1 + random.below(room) as usize).collect();
            let rows = best_fit(&lengths, room as usize);
            let mut pieces: Vec<usize> = rows.concat();
            pieces.sort_unstable();
            assert_eq!(pieces, (0..lengths.len()).collect::<Vec<_>>());
            let filled = |row: &Vec<usize>| row.iter().map(|&piece| lengths[piece]).sum::<usize>();
            assert!(rows.iter().all(|row| filled(row) <= room as usize && row.is_sorted()));
            assert!(rows.is_sorted_by_key(|row| row[0]));
            let needed = lengths.iter().sum::<usize>().div_ceil(room as usize);
            // Best fit, the longest first, takes at most 11/9 of the fewest possible rows, and one more.
            assert!(9 * (rows.len() - 1) <= 11 * needed, "{} rows, {needed} needed", rows.len());
        }
    }

    #[test]
    fn pieces_go_where_they_leave_least() {
        // 7 and 3, 6 and 4 fill rows of 10; the 2 goes to neither.
        assert_eq!(best_fit(&[6, 3, 7, 2, 4], 10), [vec![0, 4], vec![1, 2], vec![3]]);
        assert_eq!(best_fit(&[], 10), Vec::<Vec<usize>>::new());
        assert_eq!(best_fit(&[10, 10], 10), [vec![0], vec![1]]);
        assert_eq!(best_fit(&[0, 10], 10), [vec![0, 1]]);
    }

    #[test]
    fn short_pieces_fill_rows_almost_wholly() {
        let mut random = Random::new(&[8]);
        let lengths: Vec<usize> = (0..2000).map(|_| 20 + random.below(300) as usize).collect();
        let tokens: usize = lengths.iter().sum();
        let rows = best_fit(&lengths, 1024).len();
        assert!(rows == tokens.div_ceil(1024), "{rows} rows for {tokens} tokens");
    }
}
