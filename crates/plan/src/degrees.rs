//! The tensor-parallel degree of every half-layer, by the objective of Oases (arXiv 2305.16121). A batch has two halves, and
//! one half's reduction runs under the other's computation. c, b and m are the forward, backward and reduction of half a
//! batch. There are N half-layers, attention and MLP in turn:
//!
//! ```text
//! forward   c_0 + Σ_{i=1}^{N−2} [max(c_i, m_i) + max(c_{i+1}, m_i)] + max(c_{N−2}, m_{N−2}) + m_{N−1}
//! backward  the same with b_i + c_i for c_i
//! change of degree j → k between i and i+1
//!           j < k: (k/j)·m_i[j] + min(m_i[j], c_{i+1}[k])
//!           j > k: (j/k)·m_{i+1}[k] + min(m_i[j], b_{i+1}[k])
//! ```
//!
//! The optimum is exact: a dynamic programme over half-layers and degrees keeps every pair of bytes and seconds that no other
//! pair beats in both.

use std::cmp::Ordering;

/// Time and memory of one half-layer at one degree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HalfLayerCost {
    /// Times are of half a batch.
    pub forward_seconds: f64,
    /// Without the recomputation before it.
    pub backward_seconds: f64,
    /// Over the group of this degree. Zero for degree 1.
    pub reduction_seconds: f64,
    /// Memory that one device keeps for this half-layer and the whole batch.
    pub bytes: u64,
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DegreeCost {
    pub degree: usize,
    pub attention: HalfLayerCost,
    pub mlp: HalfLayerCost,
    /// Memory for running a half-layer. It counts once, at the degree of the last half-layer.
    pub workspace_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DegreeInput {
    /// Rows in any order.
    pub table: Vec<DegreeCost>,
    pub half_layers: usize,
    /// Memory of a device. The plan takes at most 0.95 of it.
    pub device_bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DegreePlan {
    /// By half-layer.
    pub degrees: Vec<usize>,
    pub seconds: f64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DegreeError {
    #[error("{what} is {found}, and must be {expected}")]
    Absurd { what: String, found: String, expected: &'static str },
    #[error("degree {degree} has two rows in the table")]
    Repeated { degree: usize },
    #[error(
        "no degrees fit: the leanest need {bytes_needed} bytes of a device, and 0.95 of its memory is {bytes_allowed}"
    )]
    DoesNotFit { bytes_needed: u64, bytes_allowed: u64 },
}

/// Finds the degrees that take the fewest seconds within the memory. Among equally fast ones it takes those with the fewest
/// bytes.
pub fn plan_degrees(input: &DegreeInput) -> Result<DegreePlan, DegreeError> {
    let table = checked_table(input)?;
    let chain = Chain::new(&table, input);
    let bytes_needed = chain.least_bytes_from[0];
    let bytes_allowed = chain.bytes_allowed;
    if bytes_needed > bytes_allowed {
        return Err(DegreeError::DoesNotFit { bytes_needed, bytes_allowed });
    }
    let mut fronts = vec![chain.first_fronts()];
    for at in 1..chain.half_layers {
        let next = (0..table.len()).map(|row| chain.next_front(at, row, &fronts[at - 1])).collect();
        fronts.push(next);
    }
    Ok(chain.fastest(&fronts))
}

/// Ways to run the half-layers up to one of them, which has a given degree: more bytes, fewer seconds.
type Front = Vec<Way>;

#[derive(Clone, Copy)]
struct Way {
    bytes: u64,
    seconds: f64,
    /// The row of the half-layer before, and the place in its front.
    before: (usize, usize),
}

impl Way {
    fn compare(&self, other: &Way) -> Ordering {
        let bytes = self.bytes.cmp(&other.bytes);
        bytes.then(self.seconds.total_cmp(&other.seconds)).then(self.before.cmp(&other.before))
    }
}

struct Chain<'a> {
    /// By rising degree.
    table: &'a [DegreeCost],
    half_layers: usize,
    bytes_allowed: u64,
    /// By half-layer: the fewest bytes of it and all after it. A last entry, zero, stands for the end.
    least_bytes_from: Vec<u64>,
    /// The most bytes, likewise.
    most_bytes_from: Vec<u64>,
}

impl Chain<'_> {
    fn new<'a>(table: &'a [DegreeCost], input: &DegreeInput) -> Chain<'a> {
        let bytes_allowed = (u128::from(input.device_bytes) * 95 / 100) as u64;
        let half_layers = input.half_layers;
        let mut chain =
            Chain { table, half_layers, bytes_allowed, least_bytes_from: Vec::new(), most_bytes_from: Vec::new() };
        chain.least_bytes_from = chain.bytes_from(u64::min);
        chain.most_bytes_from = chain.bytes_from(u64::max);
        chain
    }

    fn bytes_from(&self, pick: fn(u64, u64) -> u64) -> Vec<u64> {
        let mut bytes_from = vec![0u64; self.half_layers + 1];
        for at in (0..self.half_layers).rev() {
            let picked = (0..self.table.len()).map(|row| self.bytes(at, row)).reduce(pick).expect("a table has rows");
            bytes_from[at] = bytes_from[at + 1].saturating_add(picked);
        }
        bytes_from
    }

    fn cost(&self, at: usize, row: usize) -> &HalfLayerCost {
        let costs = &self.table[row];
        if at.is_multiple_of(2) { &costs.attention } else { &costs.mlp }
    }

    fn bytes(&self, at: usize, row: usize) -> u64 {
        let workspace_bytes = if at + 1 == self.half_layers { self.table[row].workspace_bytes } else { 0 };
        self.cost(at, row).bytes.saturating_add(workspace_bytes)
    }

    /// Whether the leanest rest fits after a way that ends with half-layer `at`.
    fn can_fit(&self, at: usize, way: &Way) -> bool {
        way.bytes.saturating_add(self.least_bytes_from[at + 1]) <= self.bytes_allowed
    }

    /// Whether any rest fits.
    fn always_fits(&self, at: usize, way: &Way) -> bool {
        way.bytes.saturating_add(self.most_bytes_from[at + 1]) <= self.bytes_allowed
    }

    /// Terms of the objective that one half-layer decides.
    fn own_seconds(&self, at: usize, row: usize) -> f64 {
        let cost = self.cost(at, row);
        let forward = cost.forward_seconds;
        let backward = recomputed_backward_seconds(cost);
        let reduction = cost.reduction_seconds;
        let overlapped = forward.max(reduction) + backward.max(reduction);
        let last = self.half_layers - 1;
        let mut seconds = 0.0;
        if at == 0 {
            seconds += forward + backward;
        }
        if at > 0 && at < last {
            seconds += overlapped;
        }
        if at + 1 == last {
            seconds += overlapped;
        }
        if at == last {
            seconds += 2.0 * reduction;
        }
        seconds
    }

    /// Terms of the objective that a half-layer and the one before it decide together.
    fn joint_seconds(&self, at: usize, row_before: usize, row: usize) -> f64 {
        let before = self.cost(at - 1, row_before);
        let cost = self.cost(at, row);
        let change = change_seconds(
            Choice { degree: self.table[row_before].degree, cost: before },
            Choice { degree: self.table[row].degree, cost },
        );
        if at == 1 {
            return change;
        }
        let reduction = before.reduction_seconds;
        change + cost.forward_seconds.max(reduction) + recomputed_backward_seconds(cost).max(reduction)
    }

    fn first_fronts(&self) -> Vec<Front> {
        let front = |row| {
            let way = Way { bytes: self.bytes(0, row), seconds: self.own_seconds(0, row), before: (0, 0) };
            Some(way).filter(|way| self.can_fit(0, way)).into_iter().collect()
        };
        (0..self.table.len()).map(front).collect()
    }

    /// Lengthens all ways by one half-layer with the degree of `row`.
    fn next_front(&self, at: usize, row: usize, fronts: &[Front]) -> Front {
        let own_seconds = self.own_seconds(at, row);
        let own_bytes = self.bytes(at, row);
        let mut ways = Vec::new();
        for (row_before, front) in fronts.iter().enumerate() {
            let added_seconds = own_seconds + self.joint_seconds(at, row_before, row);
            let lengthened = front.iter().enumerate().map(|(place, way)| Way {
                bytes: way.bytes.saturating_add(own_bytes),
                seconds: way.seconds + added_seconds,
                before: (row_before, place),
            });
            ways.extend(lengthened.filter(|way| self.can_fit(at, way)));
        }
        ways.sort_unstable_by(Way::compare);
        let mut least_seconds = f64::INFINITY;
        ways.retain(|way| {
            let better = way.seconds < least_seconds;
            least_seconds = least_seconds.min(way.seconds);
            better
        });
        // Memory no longer matters to ways that any rest fits, so only the fastest of them can win.
        let always_fitting = ways.partition_point(|way| self.always_fits(at, way));
        ways.drain(..always_fitting.saturating_sub(1));
        ways
    }

    fn fastest(&self, fronts: &[Vec<Front>]) -> DegreePlan {
        let ends = fronts[self.half_layers - 1].iter().enumerate();
        // A front ends with its fastest way.
        let ends = ends.filter_map(|(row, front)| front.last().map(|way| (row, way)));
        let faster = |a: &Way, b: &Way| a.seconds.total_cmp(&b.seconds).then(a.bytes.cmp(&b.bytes));
        let (mut row, end) = ends.min_by(|(_, a), (_, b)| faster(a, b)).expect("the leanest degrees fit");
        let mut way = end;
        let mut degrees = vec![self.table[row].degree];
        for at in (1..self.half_layers).rev() {
            let (row_before, place) = way.before;
            way = &fronts[at - 1][row_before][place];
            row = row_before;
            degrees.push(self.table[row].degree);
        }
        degrees.reverse();
        DegreePlan { degrees, seconds: end.seconds, bytes: end.bytes }
    }
}

/// Recomputation and backward of a half-layer are one stage.
fn recomputed_backward_seconds(cost: &HalfLayerCost) -> f64 {
    cost.backward_seconds + cost.forward_seconds
}

#[derive(Clone, Copy)]
struct Choice<'a> {
    degree: usize,
    cost: &'a HalfLayerCost,
}

/// Seconds that a change of degree adds between neighbours.
fn change_seconds(before: Choice, after: Choice) -> f64 {
    let reduction = before.cost.reduction_seconds;
    match before.degree.cmp(&after.degree) {
        Ordering::Equal => 0.0,
        Ordering::Less => gather_seconds(before, after) + reduction.min(after.cost.forward_seconds),
        Ordering::Greater => gather_seconds(after, before) + reduction.min(after.cost.backward_seconds),
    }
}

/// Seconds to gather the larger degree's batch. Oases estimates them from the reduction of the smaller degree. Degree 1 has no
/// reduction, and the estimate would make changes free. The larger degree's reduction stands in: in a ring it takes twice as
/// long as the gathering, and so does the estimate of Oases from degree 2 to 4.
fn gather_seconds(smaller: Choice, larger: Choice) -> f64 {
    if smaller.degree == 1 {
        return larger.cost.reduction_seconds;
    }
    larger.degree as f64 / smaller.degree as f64 * smaller.cost.reduction_seconds
}

/// The table by rising degree.
fn checked_table(input: &DegreeInput) -> Result<Vec<DegreeCost>, DegreeError> {
    within("the number of half-layers", input.half_layers, input.half_layers >= 2, "at least 2")?;
    within("the number of rows in the table", input.table.len(), !input.table.is_empty(), "at least 1")?;
    let mut table = input.table.clone();
    table.sort_by_key(|row| row.degree);
    if let Some(pair) = table.windows(2).find(|pair| pair[0].degree == pair[1].degree) {
        return Err(DegreeError::Repeated { degree: pair[0].degree });
    }
    for row in &table {
        within("a degree", row.degree, row.degree > 0, "at least 1")?;
        check_half_layer(row.degree, "attention", &row.attention)?;
        check_half_layer(row.degree, "mlp", &row.mlp)?;
    }
    Ok(table)
}

fn check_half_layer(degree: usize, name: &str, cost: &HalfLayerCost) -> Result<(), DegreeError> {
    let times = [
        ("forward_seconds", cost.forward_seconds),
        ("backward_seconds", cost.backward_seconds),
        ("reduction_seconds", cost.reduction_seconds),
    ];
    for (key, seconds) in times {
        let what = format!("degree {degree}: {name}.{key}");
        within(&what, seconds, seconds.is_finite() && seconds >= 0.0, "finite and not below 0")?;
    }
    // A time here was measured over another group than that of the degree, and so perhaps were the other rows.
    let what = format!("degree {degree}: {name}.reduction_seconds");
    let alone_without_reduction = degree > 1 || cost.reduction_seconds == 0.0;
    within(&what, cost.reduction_seconds, alone_without_reduction, "0: one device has nothing to reduce")
}

fn within(what: &str, found: impl ToString, holds: bool, expected: &'static str) -> Result<(), DegreeError> {
    let absurd = || DegreeError::Absurd { what: what.to_owned(), found: found.to_string(), expected };
    if holds { Ok(()) } else { Err(absurd()) }
}
