//! The sequential schedule against the plain pass, bit for bit, and what `verify` refuses.

mod support;

use evenkeel_comm::Communicator;
use evenkeel_device::{DType, Device};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{Batch, Context, Gradients, LossOptions, Model, Parameters, RotaryTables};
use evenkeel_step::schedule::{Chain, sequential};
use evenkeel_step::{Executor, Program, TensorGroups, Unsound, Work, verify};
use support::{batch, cpu, golden};

const CASES: [&str; 5] = ["gemma3", "gpt2", "gpt_neox", "llama3", "vit"];
const OPTIONS: LossOptions = LossOptions { smoothing: 0.1, scale: 0.01 };

fn alone(model: &Model) -> TensorGroups {
    TensorGroups::new(&Communicator::dry(0, 1), &[0], &model.shard)
}

/// In how many chunks a batch's head is treated.
fn chunks(model: &Model, batches: &[Batch]) -> Vec<usize> {
    batches.iter().map(|batch| model.head.chunks(model.head.rows(batch)).count()).collect()
}

fn chain(units: usize, starts_stream: bool, ranks: usize, splits_sequence: bool) -> Chain {
    let is_partial = ranks > 1;
    Chain {
        partial: vec![is_partial; units],
        head_is_partial: is_partial,
        starts_stream,
        splits_sequence,
        sums_gradients: is_partial,
    }
}

type Outcome = (Vec<Vec<f32>>, Vec<Vec<f32>>);

/// Losses by micro-batch and gradients by parameter, with `run` doing the passes.
fn outcome(
    case: &str,
    device: &Device,
    micros: usize,
    run: impl Fn(&Model, &Parameters, &RotaryTables, &Gradients, &[Batch]) -> Vec<evenkeel_device::Tensor>,
) -> Outcome {
    let queue = device.compute();
    let folder = golden(case);
    let model = Model::open(&folder).expect("a known architecture");
    let parameters = model.load(&folder, DType::F32, queue).expect("golden weights fit");
    let tables = RotaryTables::new(&model.config, queue, 64);
    let gradients = Gradients::new(&model.specs, queue);
    let batches: Vec<Batch> = (0..micros).map(|micro| batch(&model, micro, DType::F32, queue)).collect();
    let losses = run(&model, &parameters, &tables, &gradients, &batches);
    let losses = losses.iter().map(|losses| queue.read(losses)).collect();
    (losses, parameters.ids().map(|id| queue.read(gradients.sum(queue, id))).collect())
}

#[test]
fn the_sequential_schedule_equals_the_plain_pass_bit_for_bit() {
    let device = cpu(2);
    for case in CASES {
        for (micros, recompute) in [(1, false), (1, true), (3, false), (3, true)] {
            let keep = if recompute { Keep::Stream } else { Keep::Everything };
            let plain = outcome(case, &device, micros, |model, parameters, tables, gradients, batches| {
                let pass = |batch| {
                    let context = Context { queue: device.compute(), parameters, tables, batch };
                    pass::losses_and_gradients(model, &context, gradients, OPTIONS, keep)
                };
                batches.iter().map(pass).collect()
            });
            let program = outcome(case, &device, micros, |model, parameters, tables, gradients, batches| {
                let program = sequential(&Chain::of(model), &chunks(model, batches), recompute);
                verify(&program).expect("a schedule of ours is sound");
                let groups = alone(model);
                let executor = Executor { model, device: &device, parameters, tables, gradients, groups: &groups };
                executor.run(&program, batches, OPTIONS).into_iter().map(|found| found.losses).collect()
            });
            assert_eq!(plain, program, "{case}, {micros} micro-batches, recompute {recompute}");
        }
    }
}

#[test]
fn a_program_holds_no_more_memory_than_the_plain_pass() {
    for recompute in [false, true] {
        let peaks = [false, true].map(|planned| {
            let device = Device::dry();
            let queue = device.compute();
            let model = Model::open(&golden("llama3")).unwrap();
            let parameters = Parameters::random(&model.specs, DType::F32, 0, queue);
            let tables = RotaryTables::new(&model.config, queue, 64);
            let gradients = Gradients::new(&model.specs, queue);
            let batches = [batch(&model, 0, DType::F32, queue)];
            if planned {
                let executor = Executor {
                    model: &model,
                    device: &device,
                    parameters: &parameters,
                    tables: &tables,
                    gradients: &gradients,
                    groups: &alone(&model),
                };
                executor.run(&sequential(&Chain::of(&model), &[1], recompute), &batches, OPTIONS);
            } else {
                let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batches[0] };
                let keep = if recompute { Keep::Stream } else { Keep::Everything };
                pass::losses_and_gradients(&model, &context, &gradients, OPTIONS, keep);
            }
            device.usage().peak_bytes
        });
        // Statistics are handed out with the losses, 16 bytes a token.
        let handed_out = 16 * 32;
        assert!(
            peaks[1] <= peaks[0] + handed_out,
            "recompute {recompute}: the program needs {} bytes, the pass {}",
            peaks[1],
            peaks[0]
        );
    }
}

#[test]
fn verify_refuses_programs_that_lost_or_repeat_a_part() {
    let chains =
        [chain(4, true, 1, false), chain(4, true, 2, false), chain(4, true, 2, true), chain(3, false, 2, true)];
    for (chain, recompute) in chains.iter().flat_map(|chain| [(chain, false), (chain, true)]) {
        let sound = sequential(chain, &[1, 3], recompute);
        assert_eq!(verify(&sound), Ok(()));
        for index in 0..sound.tasks.len() {
            let mut without = sound.clone();
            let removed = without.tasks.remove(index);
            if removed.work == Work::SumGradients {
                continue;
            }
            // A weight half without a trace elsewhere still leaves its inputs unfreed.
            assert!(verify(&without).is_err(), "without `{removed}`");
            let mut twice = sound.clone();
            twice.tasks.insert(index, removed);
            assert!(verify(&twice).is_err(), "with `{}` twice", sound.tasks[index]);
            let mut unfreed = sound.clone();
            if unfreed.tasks[index].frees.pop().is_some() {
                assert!(verify(&unfreed).is_err(), "`{}` frees less", sound.tasks[index]);
            }
        }
    }
}

#[test]
fn a_refusal_names_the_task_and_the_value() {
    let mut program: Program = sequential(&chain(2, false, 1, false), &[1], false);
    program.tasks.remove(0);
    let refusal = verify(&program).unwrap_err();
    assert!(matches!(refusal, Unsound::ReadsNothing { index: 0, .. }));
    assert_eq!(
        refusal.to_string(),
        "task 0, `Enter(1, 0)  reads Output(0, 0)  writes Stream(1, 0) Normalised(1, 0)  frees Output(0, 0)`, reads \
         Output(0, 0), which nothing has written or which is freed"
    );
}
