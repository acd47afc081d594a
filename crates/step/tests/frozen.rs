//! Models with some frozen parameters: the others' gradients are those of the whole model, and no work is done for frozen ones.

mod support;

use evenkeel_comm::Options;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{Batch, Cut, Dim, Model, ParamSpec, Parameters, SHARES, Shard, ZeroSharding, widths_of};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, NONE, OASES, SCHEDULES, Units};
use evenkeel_step::{PipelineOrder, Program, Work};
use support::ranks::{
    Origin, Outcome, Stages, TOLERANCE, Way, compare_gradients, dry_peak_bytes, on_one_rank, on_ranks, on_working_ranks,
};

/// A golden model that trains these parameters.
#[derive(Clone, Copy)]
struct Partly {
    case: &'static str,
    what: &'static str,
    is_trained: fn(&str) -> bool,
    /// The lowest unit with some of them.
    lowest: usize,
}

impl Origin for Partly {
    fn model(&self) -> Model {
        self.case.model().training(|_, spec: &ParamSpec| (self.is_trained)(&spec.name))
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        self.case.parameters(shard, dtype, split, queue)
    }

    fn micros(&self, model: &Model, parts: usize, dtype: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        self.case.micros(model, parts, dtype, queue)
    }
}

/// Each has at least two layers.
const ORIGINS: [Partly; 7] = [
    Partly { case: "llama3", what: "all but the embedding", is_trained: |name| !name.contains("embed"), lowest: 1 },
    Partly {
        case: "llama3",
        what: "the second layer's MLP",
        is_trained: |name| name.contains("layers.1.mlp"),
        lowest: 4,
    },
    Partly { case: "llama3", what: "an entry's norm", is_trained: |name| name.contains("1.post_attention"), lowest: 4 },
    Partly { case: "qwen3", what: "the head", is_trained: |name| name == "lm_head.weight", lowest: 5 },
    Partly { case: "gemma3", what: "queries", is_trained: |name| name.contains("q_proj"), lowest: 1 },
    Partly { case: "gpt2", what: "biases", is_trained: |name| name.ends_with("bias"), lowest: 1 },
    Partly { case: "gpt2", what: "positions", is_trained: |name| name.contains("wpe"), lowest: 0 },
];

fn gradients_of_trained(outcome: &Outcome) -> usize {
    outcome.gradient_bits().iter().filter(|bits| !bits.is_empty()).count()
}

fn check_program(what: &str, program: &Program, lowest: usize) {
    let is_backward = |work| matches!(work, Work::BackwardInput | Work::BackwardWeight | Work::BackwardEnter);
    let is_again = |work| matches!(work, Work::Recompute | Work::Normalise);
    for task in &program.tasks {
        let is_below = task.unit.0 < lowest;
        assert!(!is_below || !(is_backward(task.work) || is_again(task.work)), "{what}: `{task}`");
    }
}

#[test]
fn the_gradients_of_what_is_trained_are_those_of_the_whole_model() {
    for origin in ORIGINS {
        let whole = on_one_rank(origin.case, DType::F32);
        let alone = on_one_rank(&origin, DType::F32);
        let trained = origin.model().specs.iter().filter(|spec| spec.is_trained).count();
        let what = format!("{}: {}", origin.case, origin.what);
        assert!(trained > 0 && gradients_of_trained(&alone) == trained, "{what}");
        check_program(&what, &alone.program, origin.lowest);
        for (ours, expected) in alone.gradient_bits().iter().zip(whole.gradient_bits()) {
            assert!(ours.is_empty() || *ours == expected, "{what}: other bits");
        }
        assert_eq!(alone.losses, whole.losses, "{what}");
        let units = [Units::All, Units::Mlp].map(|units| Arrangement::of(OASES).in_parts(2).recomputing(units));
        let arrangements = SCHEDULES.map(|schedule| Arrangement::of(schedule).in_parts(2)).into_iter().chain(units);
        for (index, arrangement) in arrangements.enumerate() {
            let cut = Cut { split_sequence: index % 2 == 0, ..Cut::weighted(vec![1.0, 1.7]) };
            let ranks = on_ranks(&origin, &cut, DType::F32, arrangement, &Options::default());
            let what = format!("{what}, tp 2, {arrangement:?}");
            ranks.iter().for_each(|rank| check_program(&what, &rank.program, origin.lowest));
            compare_gradients(&what, &whole, &ranks, TOLERANCE);
        }
        for (zero, schedule) in [(0, NONE), (1, OASES), (2, NONE), (3, OASES), (3, CROSS_PASS)] {
            let way = Way { dp: 2, zero, ..Arrangement::of(schedule).into() };
            let ranks = on_ranks(&origin, &Cut::even(2), DType::F32, way, &Options::default());
            compare_gradients(&format!("{what}, {way:?}"), &whole, &ranks, TOLERANCE);
        }
    }
}

#[test]
fn stages_below_what_is_trained_have_no_backward_and_get_no_gradients() {
    for origin in ORIGINS {
        let whole = on_one_rank(origin.case, DType::F32);
        for (index, order) in PipelineOrder::ALL.into_iter().enumerate() {
            let arrangement = Arrangement::of([NONE, OASES, CROSS_PASS][index % 3]);
            let way = Way { stages: Some(Stages { pp: 2 + index % 2, order, shift: index % 2 }), ..arrangement.into() };
            let what = format!("{}: {}, {way:?}", origin.case, origin.what);
            let ranks = on_ranks(&origin, &Cut::even(1), DType::F32, way, &Options::default());
            for rank in &ranks {
                check_program(&what, &rank.program, origin.lowest);
                let gradients = rank.program.tasks.iter().filter(|task| task.work == Work::PassGradient);
                let mut below = gradients.filter(|task| task.unit.0 < origin.lowest);
                assert!(below.next().is_none(), "{what}");
            }
            compare_gradients(&what, &whole, &ranks, TOLERANCE);
        }
    }
}

#[test]
fn frozen_parameters_take_no_gradients_and_nobody_reduces_any() {
    let origin = ORIGINS[1];
    let way = |zero| Way { dp: 2, zero, ..Arrangement::of(NONE).into() };
    let reductions = |outcome: &Outcome| {
        let tasks = outcome.program.tasks.iter();
        tasks.filter(|task| matches!(task.work, Work::ReduceGradients(_) | Work::SumGradients(_))).count()
    };
    let [whole, partly] = [
        on_ranks(origin.case, &Cut::even(1), DType::F32, way(0), &Options::default()),
        on_ranks(&origin, &Cut::even(1), DType::F32, way(0), &Options::default()),
    ];
    assert!(reductions(&whole[0]) > 1);
    assert_eq!(reductions(&partly[0]), 1, "of the MLP's matrices");
    // Frozen parameters keep only their values, and ZeRO 3 splits those too.
    let peak_bytes = |origin: &Partly, zero| dry_peak_bytes(origin, &Cut::even(1), 0, way(zero));
    let all = Partly { is_trained: |_| true, ..origin };
    assert!(peak_bytes(&origin, 0) < peak_bytes(&all, 0));
    assert!(peak_bytes(&origin, 3) < peak_bytes(&origin, 0));
}

#[test]
fn ranks_compute_frozen_units_for_one_another() {
    for origin in [ORIGINS[0], ORIGINS[1], ORIGINS[5]] {
        let (whole, model) = (on_one_rank(origin.case, DType::F32), origin.model());
        let cut = Cut::even(2);
        let home = widths_of(&Shard::cut(&model.config, &cut).unwrap());
        let ffn = model.config.ffn;
        let groups = model.config.kv_heads;
        let head_shares = vec![SHARES * (groups - 1), SHARES];
        let work = home.with(Dim::Columns, vec![ffn - ffn / 4, ffn / 4]).with(Dim::Heads, head_shares);
        for schedule in [NONE, OASES] {
            let arrangement = Arrangement::of(schedule).in_parts(2);
            let options = Options::default();
            let ranks = on_working_ranks(&origin, &cut, Some(&work), DType::F32, arrangement, &options);
            let what = format!("{}: {}, {arrangement:?}", origin.case, origin.what);
            assert!(ranks.iter().any(|rank| rank.migrated.calls > 0), "{what}: nothing migrates");
            compare_gradients(&what, &whole, &ranks, TOLERANCE);
        }
    }
}
