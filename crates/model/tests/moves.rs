//! `moves` against a plain twin that looks at every element, on random layouts.

use std::ops::Range;

use evenkeel_model::{Held, Move, Ranges, Slice, even_bounds, moves};
use fastrand::Rng;

/// The elements of a holder in the order in which it holds them, each as (row, column).
fn elements(held: &Held) -> Vec<(usize, usize)> {
    let [rows, cols] = [dim(&held.slice.rows), dim(&held.slice.cols)];
    let all = rows.iter().flat_map(|&row| cols.iter().map(move |&col| (row, col)));
    all.skip(held.range.start).take(held.range.len()).collect()
}

fn dim(ranges: &Ranges) -> Vec<usize> {
    let ranges: Vec<Range<usize>> = serde_json::from_value(serde_json::to_value(ranges).unwrap()).unwrap();
    ranges.into_iter().flatten().collect()
}

/// The first source that has each element, with its place there, or the first element that no source has.
fn plain(from: &[Held], to: &Held) -> Result<Vec<(usize, usize)>, (usize, usize)> {
    let sources: Vec<Vec<(usize, usize)>> = from.iter().map(elements).collect();
    let find = |element: (usize, usize)| {
        let places = sources.iter().map(|source| source.iter().position(|&held| held == element));
        places.enumerate().find_map(|(source, place)| Some((source, place?))).ok_or(element)
    };
    elements(to).into_iter().map(find).collect()
}

/// The source and place of each element of the target. Moves must fill it from the first element to the last, each once, and no
/// two could be joined.
fn unfolded(moves: &[Move]) -> Vec<(usize, usize)> {
    let mut places = Vec::new();
    for Move { from, from_start, to_start, len } in moves {
        assert_eq!(*to_start, places.len(), "{moves:?}");
        assert!(*len > 0, "{moves:?}");
        if let Some(&(last, place)) = places.last() {
            assert!((last, place + 1) != (*from, *from_start), "two moves could be one: {moves:?}");
        }
        places.extend((0..*len).map(|at| (*from, from_start + at)));
    }
    places
}

/// Bounds of `parts` parts, some of them empty.
fn bounds(random: &mut Rng, total: usize, parts: usize) -> Vec<usize> {
    let mut bounds: Vec<usize> = (1..parts).map(|_| random.usize(0..=total)).collect();
    bounds.extend([0, total]);
    bounds.sort_unstable();
    bounds
}

/// A dim of several equal blocks, as in fused projections. Every shard has the same part of each block.
fn fused(random: &mut Rng, total: usize, parts: usize) -> Vec<Ranges> {
    let blocks = random.usize(1..=3.min(total));
    let starts = even_bounds(total, blocks);
    let cuts = bounds(random, total / blocks, parts);
    let last = parts - 1;
    let of = |part: usize| {
        let range = |block: usize| {
            let end = if part == last { starts[block + 1] } else { starts[block] + cuts[part + 1] };
            starts[block] + cuts[part]..end
        };
        Ranges::new((0..blocks).map(range).collect())
    };
    (0..parts).map(of).collect()
}

/// The parts of a matrix that the ranks of a random mesh hold, in random order.
fn layout(random: &mut Rng, [rows, cols]: [usize; 2]) -> Vec<Held> {
    let parts = random.usize(1..=4);
    let slices: Vec<Slice> = match random.u8(0..3) {
        0 => fused(random, rows, parts).into_iter().map(|rows| Slice::of_rows(rows, cols)).collect(),
        1 => fused(random, cols, parts).into_iter().map(|cols| Slice::of_cols(rows, cols)).collect(),
        _ => vec![Slice::whole([rows, cols]); parts],
    };
    let mut held: Vec<Held> = Vec::new();
    for slice in slices {
        let splits = random.usize(1..=5);
        let bounds = bounds(random, slice.dims().iter().product(), splits);
        held.extend(bounds.windows(2).map(|pair| Held { slice: slice.clone(), range: pair[0]..pair[1] }));
    }
    random.shuffle(&mut held);
    held
}

fn sizes(random: &mut Rng) -> [usize; 2] {
    match random.u8(0..6) {
        0 => [1, random.usize(1..40)],
        1 => [random.usize(1..40), 1],
        _ => [random.usize(1..12), random.usize(1..12)],
    }
}

/// Contents after the moves of every target have been applied.
fn apply(from: &[Held], contents: &[Vec<usize>], to: &[Held], cols: usize) -> Vec<Vec<usize>> {
    let fill = |held: &Held| {
        let mut filled = vec![usize::MAX; held.len()];
        for Move { from, from_start, to_start, len } in moves(from, held, cols).expect("nothing is missing") {
            filled[to_start..][..len].copy_from_slice(&contents[from][from_start..][..len]);
        }
        filled
    };
    to.iter().map(fill).collect()
}

#[test]
fn every_element_comes_once_and_from_the_first_that_has_it() {
    for seed in 0..3000 {
        let random = &mut Rng::with_seed(seed);
        let whole = sizes(random);
        let (from, to) = (layout(random, whole), layout(random, whole));
        for target in &to {
            assert_eq!(target.check(whole), Ok(()));
            let found = moves(&from, target, whole[1]).map(|moves| unfolded(&moves));
            assert_eq!(found, plain(&from, target), "seed {seed}: {from:?} to {target:?}");
        }
    }
}

#[test]
fn there_and_back_changes_nothing() {
    for seed in 0..1000 {
        let random = &mut Rng::with_seed(seed);
        let whole @ [_, cols] = sizes(random);
        let (from, to) = (layout(random, whole), layout(random, whole));
        let values = |held: &Held| elements(held).into_iter().map(|(row, col)| row * cols + col).collect();
        let before: Vec<Vec<usize>> = from.iter().map(values).collect();
        let there = apply(&from, &before, &to, cols);
        assert_eq!(there, to.iter().map(values).collect::<Vec<_>>(), "seed {seed}");
        assert_eq!(apply(&to, &there, &from, cols), before, "seed {seed}");
    }
}

#[test]
fn the_first_element_that_nobody_has_is_named() {
    let mut named = 0;
    for seed in 0..1000 {
        let random = &mut Rng::with_seed(seed);
        let whole = sizes(random);
        let (mut from, to) = (layout(random, whole), layout(random, whole));
        from.pop();
        for target in &to {
            let (found, expected) = (moves(&from, target, whole[1]), plain(&from, target));
            named += usize::from(found.is_err());
            assert_eq!(found.map(|moves| unfolded(&moves)), expected, "seed {seed}: {from:?} to {target:?}");
        }
    }
    assert!(named > 500, "{named}");
}

#[test]
fn what_lies_together_moves_together() {
    let whole = [128_256, 8192];
    let all = Held::all(Slice::whole(whole));
    let ranks = |slice: &dyn Fn(Range<usize>) -> Slice, total: usize| -> Vec<Held> {
        even_bounds(total, 8).windows(2).map(|pair| Held::all(slice(pair[0]..pair[1]))).collect()
    };
    let by_rows = ranks(&|rows| Slice::of_rows(rows, whole[1]), whole[0]);
    let by_cols = ranks(&|cols| Slice::of_cols(whole[0], cols), whole[1]);
    let flat: Vec<Held> = even_bounds(whole[0] * whole[1], 7)
        .windows(2)
        .map(|pair| Held { slice: Slice::whole(whole), range: pair[0]..pair[1] })
        .collect();
    let in_two =
        Held::all(Slice { rows: Ranges::new(vec![0..9, 9..whole[0]]), cols: Ranges::new(vec![0..9, 9..8192]) });
    let cases: [(&str, &[Held], &Held, usize); 8] = [
        ("whole to a row cut", std::slice::from_ref(&all), &by_rows[3], 1),
        ("row cuts to whole", &by_rows, &all, 8),
        ("ranges that touch", std::slice::from_ref(&in_two), &all, 1),
        ("a column cut to itself", &by_cols, &by_cols[5], 1),
        ("whole to a column cut", std::slice::from_ref(&all), &by_cols[5], whole[0]),
        ("column cuts to whole", &by_cols, &all, 8 * whole[0]),
        ("flat parts to whole", &flat, &all, 7),
        // The six cuts are at 2, 4, 6, 1, 3 and 5 sevenths of a row; one of them is between five and six eighths.
        ("flat parts to a column cut", &flat, &by_cols[5], whole[0] + 1),
    ];
    for (name, from, to, expected) in cases {
        let moves = moves(from, to, whole[1]).expect(name);
        assert_eq!(moves.iter().map(|one| one.len).sum::<usize>(), to.len(), "{name}");
        assert_eq!(moves.len(), expected, "{name}");
    }
}

#[test]
fn layouts_are_written_and_read_again() {
    let slice = Slice { rows: Ranges::new(vec![0..2, 4..6]), cols: Ranges::new(vec![3..3, 5..8]) };
    let held = Held { slice, range: 1..7 };
    let text = serde_json::to_string(&held).unwrap();
    assert_eq!(serde_json::from_str::<Held>(&text).unwrap(), held, "{text}");
}

#[test]
fn what_a_file_says_is_not_believed() {
    let read = |rows: &str, cols: &str, range: [usize; 2]| {
        let range = format!(r#"{{"start":{},"end":{}}}"#, range[0], range[1]);
        let text = format!(r#"{{"slice":{{"rows":{rows},"cols":{cols}}},"range":{range}}}"#);
        let held: Held = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        held.check([4, 6]).map_err(str::to_owned)
    };
    let most = usize::MAX;
    let all = r#"[{"start":0,"end":4}]"#;
    let huge = format!(r#"[{{"start":0,"end":{most}}}]"#);
    let cases = [
        (all, all, [0, 16], ""),
        ("[]", "[]", [0, 0], ""),
        (r#"[{"start":3,"end":1}]"#, all, [0, 0], "the range 3..1 ends before it starts"),
        (r#"[{"start":0,"end":2},{"start":1,"end":3}]"#, all, [0, 0], "overlap or are out of order"),
        (all, r#"[{"start":4,"end":6},{"start":0,"end":2}]"#, [0, 0], "overlap or are out of order"),
        (r#"[{"start":0,"end":-1}]"#, all, [0, 0], "invalid value: integer `-1`"),
        (r#"[{"start":0,"end":5}]"#, all, [0, 1], "rows behind the parameter's last"),
        (all, r#"[{"start":5,"end":7}]"#, [0, 1], "columns behind the parameter's last"),
        (&huge, &huge, [0, 1], "rows behind the parameter's last"),
        (all, all, [0, 17], "elements behind its slice's last"),
        (all, "[]", [0, 1], "elements behind its slice's last"),
        (all, all, [most, most], "elements behind its slice's last"),
        (all, all, [2, 1], "its elements end before they start"),
    ];
    for (rows, cols, range, expected) in cases {
        let found = read(rows, cols, range).err().unwrap_or_default();
        assert!(
            found.contains(expected) && found.is_empty() == expected.is_empty(),
            "{rows} {cols} {range:?}: {found}"
        );
    }
    let held = Held::all(Slice::whole([1, 1]));
    assert_eq!(held.check([most, 2]), Err("the parameter has more elements than can be counted"));
}
