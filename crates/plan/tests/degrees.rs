//! The search for degrees against all assignments, and against results that Oases states.

use evenkeel_plan::{DegreeCost, DegreeError, DegreeInput, DegreePlan, HalfLayerCost, plan_degrees};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    /// Eighths of a second: their sums have no rounding, so equal times are equal in any order of adding.
    fn seconds(&mut self) -> f64 {
        self.below(80) as f64 / 8.0
    }

    fn half_layer(&mut self, degree: usize) -> HalfLayerCost {
        let reduction_seconds = self.seconds();
        HalfLayerCost {
            forward_seconds: self.seconds(),
            backward_seconds: self.seconds(),
            reduction_seconds: if degree == 1 { 0.0 } else { reduction_seconds },
            bytes: self.below(1000),
        }
    }

    fn row(&mut self, degree: usize) -> DegreeCost {
        DegreeCost {
            degree,
            attention: self.half_layer(degree),
            mlp: self.half_layer(degree),
            workspace_bytes: self.below(500),
        }
    }

    fn input(&mut self) -> DegreeInput {
        let degrees: &[usize] = [&[1, 2][..], &[2, 4], &[1, 4], &[1, 2, 4], &[2, 4, 8]][self.below(5) as usize];
        let half_layers = 2 + self.below(6) as usize;
        let table = degrees.iter().rev().map(|degree| self.row(*degree)).collect();
        DegreeInput { table, half_layers, device_bytes: self.below(900 * half_layers as u64) }
    }
}

fn row_of(input: &DegreeInput, degree: usize) -> &DegreeCost {
    input.table.iter().find(|row| row.degree == degree).unwrap()
}

/// The costs that an assignment gives to half-layers.
fn costs(input: &DegreeInput, degrees: &[usize]) -> Vec<HalfLayerCost> {
    let cost = |(at, degree): (usize, &usize)| {
        let row = row_of(input, *degree);
        if at % 2 == 0 { row.attention } else { row.mlp }
    };
    degrees.iter().enumerate().map(cost).collect()
}

fn bytes(input: &DegreeInput, degrees: &[usize]) -> u64 {
    let workspace_bytes = row_of(input, degrees[degrees.len() - 1]).workspace_bytes;
    costs(input, degrees).iter().map(|cost| cost.bytes).sum::<u64>() + workspace_bytes
}

/// The objective as it is written, one pass at a time: `compute` and `reduction` are c and m.
fn pass_seconds(compute: &[f64], reduction: &[f64]) -> f64 {
    let count = compute.len();
    let stage = |i: usize| compute[i].max(reduction[i]) + compute[i + 1].max(reduction[i]);
    let stages: f64 = (1..count - 1).map(stage).sum();
    compute[0] + stages + compute[count - 2].max(reduction[count - 2]) + reduction[count - 1]
}

fn seconds(input: &DegreeInput, degrees: &[usize]) -> f64 {
    let costs = costs(input, degrees);
    let forward: Vec<f64> = costs.iter().map(|cost| cost.forward_seconds).collect();
    let backward: Vec<f64> = costs.iter().map(|cost| cost.backward_seconds + cost.forward_seconds).collect();
    let reduction: Vec<f64> = costs.iter().map(|cost| cost.reduction_seconds).collect();
    let change = |i: usize| {
        let [j, k] = [degrees[i] as f64, degrees[i + 1] as f64];
        let [m_j, m_k] = [reduction[i], reduction[i + 1]];
        if j == k {
            0.0
        } else if j < k {
            let gather = if j == 1.0 { m_k } else { k / j * m_j };
            gather + m_j.min(costs[i + 1].forward_seconds)
        } else {
            let gather = if k == 1.0 { m_j } else { j / k * m_k };
            gather + m_j.min(costs[i + 1].backward_seconds)
        }
    };
    let changes: f64 = (0..degrees.len() - 1).map(change).sum();
    pass_seconds(&forward, &reduction) + pass_seconds(&backward, &reduction) + changes
}

fn all_assignments(input: &DegreeInput) -> Vec<Vec<usize>> {
    let mut assignments = vec![Vec::new()];
    for _ in 0..input.half_layers {
        let lengthened = |degrees: &Vec<usize>| {
            let degrees = degrees.clone();
            input.table.iter().map(move |row| [degrees.clone(), vec![row.degree]].concat())
        };
        assignments = assignments.iter().flat_map(lengthened).collect();
    }
    assignments
}

/// The least seconds, and the least bytes among those, of all assignments that fit.
fn least_of_all(input: &DegreeInput) -> Option<(f64, u64)> {
    let fits = |degrees: &Vec<usize>| 100 * bytes(input, degrees) <= 95 * input.device_bytes;
    let fitting = all_assignments(input).into_iter().filter(fits);
    let pairs = fitting.map(|degrees| (seconds(input, &degrees), bytes(input, &degrees)));
    pairs.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
}

fn unlimited(input: &DegreeInput) -> DegreeInput {
    DegreeInput { device_bytes: u64::MAX, ..input.clone() }
}

#[test]
fn the_search_finds_what_trying_all_assignments_finds() {
    let mut random = Random(24);
    let [mut free, mut bound, mut nowhere] = [0; 3];
    for case in 0..1000 {
        let input = random.input();
        match (plan_degrees(&input), least_of_all(&input)) {
            (Ok(plan), Some(least)) => {
                assert_eq!((plan.seconds, plan.bytes), least, "case {case}: {input:?}");
                let told = (seconds(&input, &plan.degrees), bytes(&input, &plan.degrees));
                assert_eq!(told, least, "case {case}: {plan:?}");
                let is_free = plan.seconds == plan_degrees(&unlimited(&input)).unwrap().seconds;
                *(if is_free { &mut free } else { &mut bound }) += 1;
            }
            (Err(DegreeError::DoesNotFit { bytes_needed, bytes_allowed }), None) => {
                let leanest = all_assignments(&input).iter().map(|degrees| bytes(&input, degrees)).min();
                assert_eq!(Some(bytes_needed), leanest, "case {case}");
                assert_eq!(bytes_allowed, input.device_bytes * 95 / 100, "case {case}");
                nowhere += 1;
            }
            (found, expected) => panic!("case {case}: {found:?}, but of all assignments {expected:?}"),
        }
    }
    assert!(free > 200 && bound > 200 && nowhere > 100, "{free} free, {bound} bound, {nowhere} fit nowhere");
}

#[test]
fn the_order_of_rows_does_not_matter() {
    let mut random = Random(7);
    for _ in 0..100 {
        let input = unlimited(&random.input());
        let mut reversed = input.clone();
        reversed.table.reverse();
        assert_eq!(plan_degrees(&input), plan_degrees(&reversed));
    }
}

#[test]
fn a_plan_fits_to_the_byte_in_95_percent() {
    let table = vec![modelled_row(2048, 2)];
    let needed = plan_degrees(&DegreeInput { table: table.clone(), half_layers: 4, device_bytes: u64::MAX }).unwrap();
    let just_enough = (needed.bytes * 100).div_ceil(95);
    let with = |device_bytes| plan_degrees(&DegreeInput { table: table.clone(), half_layers: 4, device_bytes });
    assert_eq!(with(just_enough), Ok(needed.clone()));
    let short = DegreeError::DoesNotFit { bytes_needed: needed.bytes, bytes_allowed: (just_enough - 1) * 95 / 100 };
    assert_eq!(with(just_enough - 1), Err(short));
}

/// One row of a modelled table. The measured table of Oases is not here: none of these numbers is from it. The model:
/// 8 devices share 8 sequences of 1024 tokens, so a group of degree k has k sequences, and half of them at a time.
/// Products run at 20 TFLOP/s, backward takes twice the forward, and a ring of links with 7 GB/s reduces f32.
/// A device keeps 20 bytes for each of its parameters and three f32 tensors of the stream for each half-layer.
/// Degree 1 has a single sequence, which cannot be halved.
///
/// The speed of the links was chosen to bring the saving of the mixture near that of Oases. So the tests show the form of the
/// plans and when it changes, and say nothing about the measurements of Oases.
fn modelled_row(hidden: u64, degree: u64) -> DegreeCost {
    let tokens = 1024;
    let half_batch_tokens = degree * tokens / 2;
    let half_layer = |parameters: u64, scores: u64| {
        let operations = 2 * half_batch_tokens * (parameters + scores) / degree;
        let forward_seconds = operations as f64 / 20e12;
        let ring_bytes = 2 * (degree - 1) * half_batch_tokens * hidden * 4 / degree;
        HalfLayerCost {
            forward_seconds,
            backward_seconds: 2.0 * forward_seconds,
            reduction_seconds: ring_bytes as f64 / 7e9,
            bytes: 20 * parameters / degree + 3 * 4 * degree * tokens * hidden,
        }
    };
    DegreeCost {
        degree: degree as usize,
        attention: half_layer(4 * hidden * hidden, 2 * tokens * hidden),
        mlp: half_layer(8 * hidden * hidden, 0),
        workspace_bytes: 0,
    }
}

fn modelled_input(hidden: u64, device_bytes: u64) -> DegreeInput {
    let table = [2, 4, 8].map(|degree| modelled_row(hidden, degree)).to_vec();
    DegreeInput { table, half_layers: 48, device_bytes }
}

/// Memory of a device that holds 24 layers of 3072 if four of them have degree 2 and 20 have degree 4, and no more.
fn room_for_four_layers_at_2() -> u64 {
    let input = modelled_input(3072, u64::MAX);
    let degrees = [vec![2; 8], vec![4; 40]].concat();
    (bytes(&input, &degrees) * 100).div_ceil(95)
}

fn count(plan: &DegreePlan, degree: usize) -> usize {
    plan.degrees.iter().filter(|found| **found == degree).count()
}

/// Oases states degree 2 for all 24 layers of 2048.
#[test]
fn layers_of_2048_are_uniform_at_degree_2() {
    let plan = plan_degrees(&modelled_input(2048, room_for_four_layers_at_2())).unwrap();
    assert_eq!(plan.degrees, [2; 48]);
}

/// Oases states 4 layers at degree 2 and 20 at 4, about 2 % faster than all at 4. The memory is set to have room for so many.
#[test]
fn layers_of_3072_are_a_mixture_because_memory_binds() {
    let input = modelled_input(3072, room_for_four_layers_at_2());
    let plan = plan_degrees(&input).unwrap();
    assert_eq!((count(&plan, 2), count(&plan, 4)), (8, 40), "{plan:?}");
    let changes = plan.degrees.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert_eq!(changes, 1, "{plan:?}");
    let saved = 1.0 - plan.seconds / seconds(&input, &[4; 48]);
    assert!((0.01..0.03).contains(&saved), "{saved}");
    assert_eq!(plan_degrees(&unlimited(&input)).unwrap().degrees, [2; 48]);
}

/// From memory for degree 4 everywhere to memory for degree 2 everywhere, in twentieths.
#[test]
fn a_mixture_pays_only_where_memory_binds() {
    let device_bytes = |degree| (bytes(&modelled_input(3072, 0), &[degree; 48]) * 100).div_ceil(95);
    let least = device_bytes(4);
    let most = device_bytes(2);
    let with = |share| plan_degrees(&modelled_input(3072, least + (most - least) * share / 20)).unwrap();
    let plans: Vec<DegreePlan> = (0..=20).map(with).collect();
    let is_uniform = |share: &usize| count(&plans[*share], plans[*share].degrees[0]) == 48;
    let uniform: Vec<usize> = (0..=20).filter(is_uniform).collect();
    assert_eq!(uniform, [0, 20]);
    assert!(plans.windows(2).all(|pair| pair[1].seconds <= pair[0].seconds), "more memory makes no plan slower");
}

#[test]
fn a_reduction_of_degree_1_is_refused() {
    let mut alone = Random(1).row(1);
    alone.mlp.reduction_seconds = 0.001;
    let input = DegreeInput { table: vec![alone], half_layers: 2, device_bytes: u64::MAX };
    let error = plan_degrees(&input).unwrap_err().to_string();
    assert_eq!(error, "degree 1: mlp.reduction_seconds is 0.001, and must be 0: one device has nothing to reduce");
}

/// If the gathering were free, degrees 1, 2, 2 would be half a second faster than degree 1 alone.
#[test]
fn a_change_from_degree_1_is_not_free() {
    let half_layer = |forward_seconds, reduction_seconds| HalfLayerCost {
        forward_seconds,
        backward_seconds: forward_seconds,
        reduction_seconds,
        bytes: 1,
    };
    let row = |degree, attention, mlp| DegreeCost { degree, attention, mlp, workspace_bytes: 0 };
    let table =
        vec![row(1, half_layer(4.0, 0.0), half_layer(4.5, 0.0)), row(2, half_layer(4.5, 0.5), half_layer(4.0, 3.0))];
    let plan = plan_degrees(&DegreeInput { table, half_layers: 3, device_bytes: 100 }).unwrap();
    assert_eq!(plan.degrees, [1; 3]);
}

#[test]
fn absurd_tables_are_refused_with_what_is_wrong() {
    type Spoil = fn(&mut DegreeInput);
    let cases: [(Spoil, &str); 7] = [
        (|input| input.half_layers = 1, "the number of half-layers is 1, and must be at least 2"),
        (|input| input.table.clear(), "the number of rows in the table is 0"),
        (|input| input.table[0].degree = 0, "a degree is 0, and must be at least 1"),
        (|input| input.table[0].degree = 4, "degree 4 has two rows"),
        (|input| input.table[1].attention.forward_seconds = f64::NAN, "degree 4: attention.forward_seconds is NaN"),
        (|input| input.table[1].mlp.backward_seconds = -1.0, "degree 4: mlp.backward_seconds is -1"),
        (
            |input| {
                input.table.truncate(1);
                input.table[0].mlp.bytes = u64::MAX;
            },
            "no degrees fit: the leanest need 18446744073709551615 bytes",
        ),
    ];
    for (spoil, expected) in cases {
        let mut input = modelled_input(2048, 1 << 34);
        spoil(&mut input);
        let error = plan_degrees(&input).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
