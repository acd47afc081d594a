//! Programs without contention, whose times one pass finds, against the moment-to-moment simulation of programs with it.

mod support;

use evenkeel_device::DType;
use evenkeel_model::{Cut, Model, ZeroStage};
use evenkeel_random::Random;
use evenkeel_step::schedule::{Arrangement, Chain, PartSize, REFERENCES, SCHEDULES};
use evenkeel_step::simulate::{Contention, Costs, simulate, simulate_sound};
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Pipeline, PipelineOrder, Program, Strategy};
use support::golden;

const LAYERS: usize = 5;
const MICROS: usize = 5;
/// So little that it changes no time.
const NEXT_TO_NONE: Contention = Contention { compute: f64::MIN_POSITIVE, exchange: 0.0 };

fn model() -> Model {
    let mut json = golden("llama3").config().clone();
    json["num_hidden_layers"] = LAYERS.into();
    Model::from_json(&json).expect("a known architecture")
}

/// The programs of all ranks.
fn programs(model: &Model, strategy: &Strategy) -> Vec<Program> {
    let shards = model.cut(&strategy.cut).expect("as many heads as shards");
    let size = PartSize { tokens: 8, chunk_rows: vec![4, 4] };
    let sizes = vec![vec![size; strategy.arrangement.parts]; MICROS];
    Chain::all(&shards, strategy).iter().map(|chain| strategy.arrangement.step(chain, &sizes)).collect()
}

/// Every task of every rank takes a time of its own, or none.
fn random_costs(programs: &[Program], random: &mut Random) -> Costs {
    // A fifth take no time.
    let mut seconds = || random.below(1000).saturating_sub(200) as f64 * 1e-3;
    let mut of_rank = |program: &Program| program.tasks.iter().map(|_| seconds()).collect();
    Costs::one_by_one(programs.iter().map(&mut of_rank).collect())
}

fn check(what: &str, programs: &[Program], mut costs: Costs) {
    let one = simulate(programs, &costs).unwrap();
    costs.contention = NEXT_TO_NONE;
    let other = simulate_sound(&programs.iter().map(Program::view).collect::<Vec<_>>(), &costs).unwrap();
    assert!(one.duration_s() > 0.0, "{what}");
    for (rank, (spans, expected)) in one.ranks.iter().zip(&other.ranks).enumerate() {
        assert_eq!(spans.len(), expected.len(), "{what}, rank {rank}");
        for (index, (span, expected)) in spans.iter().zip(expected).enumerate() {
            let [found, wanted] = [span, expected].map(|it| [it.start_s, it.came_s, it.end_s]);
            let is_near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-9 * b.abs().max(1.0);
            let are_near = found.into_iter().zip(wanted).all(is_near);
            assert!(are_near, "{what}, rank {rank}, task {index}: {span:?}, expected {expected:?}");
        }
    }
    same_shares(what, &one, &other);
}

fn same_shares(what: &str, one: &Timeline, other: &Timeline) {
    let shares = |timeline: &Timeline| [timeline.exposed_share(), timeline.idle_share()];
    for (found, expected) in shares(one).into_iter().zip(shares(other)) {
        assert!((found - expected).abs() < 1e-9, "{what}: a share of {found}, expected {expected}");
    }
}

#[test]
fn one_pass_finds_the_times_that_moments_give() {
    let (model, mut random) = (model(), Random::new(&[7]));
    let stages = PipelineOrder::ALL.into_iter().flat_map(|order| [2, 3].map(|pp| Some((order, pp))));
    let stages: Vec<_> = stages.chain([None]).collect();
    for (index, schedule) in SCHEDULES.into_iter().chain(REFERENCES).enumerate() {
        for parts in 1..=3 {
            let arrangement = Arrangement::of(schedule).in_parts(parts);
            let arrangements = [arrangement, arrangement.ahead(), arrangement.blocking()];
            for (number, (tp, dp)) in [(1, 1), (2, 1), (1, 2), (2, 2)].into_iter().enumerate() {
                for (turn, &stages) in stages.iter().enumerate() {
                    let cut = Cut { split_sequence: tp > 1 && turn % 2 == 0, ..Cut::even(tp) };
                    let zero = ZeroStage::ALL[(index + number + turn) % if stages.is_some() { 2 } else { 4 }];
                    let strategy = Strategy::of(cut).with_replicas(dp, zero);
                    let strategy = strategy.arranged(arrangements[(index + parts + turn) % 3]);
                    let strategy = in_stages(Strategy { dtype: DType::F32, ..strategy }, stages, model.units.len());
                    let what = format!("{schedule:?} in {parts}, tp {tp}, dp {dp}, {zero:?}, {stages:?}");
                    let programs = programs(&model, &strategy);
                    check(&what, &programs, random_costs(&programs, &mut random));
                }
            }
        }
    }
}

fn in_stages(strategy: Strategy, stages: Option<(PipelineOrder, usize)>, units: usize) -> Strategy {
    let Some((order, pp)) = stages else { return strategy };
    let stages = pp * order.usual_chunks();
    strategy.in_stages(pp, Pipeline { cuts: (1..stages).map(|stage| stage * units / stages).collect(), order })
}
