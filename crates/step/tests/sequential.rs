//! The sequential schedule against the plain pass, bit for bit, and what `verify` refuses.

use std::path::{Path, PathBuf};

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{CpuOptions, DType, Device, Queue};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{Batch, Context, Gradients, Images, Input, LossOptions, Model, Parameters, RotaryTables};
use evenkeel_step::schedule::{Chain, sequential};
use evenkeel_step::{Executor, Program, Unsound, verify};
use evenkeel_store::Folder;

const CASES: [&str; 5] = ["gemma3", "gpt2", "gpt_neox", "llama3", "vit"];
const OPTIONS: LossOptions = LossOptions { smoothing: 0.1, scale: 0.01 };

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(case)
}

/// A batch that differs from micro-batch to micro-batch.
fn batch(model: &Model, micro: usize, queue: &Queue) -> Batch {
    match model.config.input {
        Input::Tokens { .. } => {
            let ids: Vec<u32> = (0..24).map(|i| ((i * 7 + micro * 31) % model.config.classes) as u32).collect();
            let labels: Vec<u32> = (0..24).map(|i| if i % 12 == 11 { IGNORE } else { ids[i + 1] }).collect();
            Batch::tokens(queue, &ids, &labels, Segments::uniform(2, 12))
        }
        Input::Images { size, channels, .. } => {
            let pixels: Vec<f32> = (0..2 * channels * size * size).map(|i| ((i + micro) % 17) as f32 / 17.0).collect();
            let images = Images { pixels: &pixels, count: 2 };
            Batch::images(queue, images, &[1, 0], model.config.input, DType::F32)
        }
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
    let folder = Folder::open(golden(case)).expect("golden folders are sound");
    let model = Model::open(&folder).expect("a known architecture");
    let parameters = model.load(&folder, DType::F32, queue).expect("golden weights fit");
    let tables = RotaryTables::new(&model.config, queue, 64);
    let gradients = Gradients::new(&model.specs, queue);
    let batches: Vec<Batch> = (0..micros).map(|micro| batch(&model, micro, queue)).collect();
    let losses = run(&model, &parameters, &tables, &gradients, &batches);
    let losses = losses.iter().map(|losses| queue.read(losses)).collect();
    (losses, parameters.ids().map(|id| queue.read(gradients.sum(queue, id))).collect())
}

#[test]
fn the_sequential_schedule_equals_the_plain_pass_bit_for_bit() {
    let device = Device::cpu(&CpuOptions { memory_bytes: 1 << 30, ..CpuOptions::with_threads(2) }).unwrap();
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
                let program = sequential(Chain::of(model), batches.len(), recompute);
                verify(&program).expect("a schedule of ours is sound");
                let executor = Executor { model, device: &device, parameters, tables, gradients };
                executor.run(&program, batches, OPTIONS)
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
            let model = Model::open(&Folder::open(golden("llama3")).unwrap()).unwrap();
            let parameters = Parameters::random(&model.specs, DType::F32, 0, queue);
            let tables = RotaryTables::new(&model.config, queue, 64);
            let gradients = Gradients::new(&model.specs, queue);
            let batches = [batch(&model, 0, queue)];
            if planned {
                let executor = Executor {
                    model: &model,
                    device: &device,
                    parameters: &parameters,
                    tables: &tables,
                    gradients: &gradients,
                };
                executor.run(&sequential(Chain::of(&model), 1, recompute), &batches, OPTIONS);
            } else {
                let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batches[0] };
                let keep = if recompute { Keep::Stream } else { Keep::Everything };
                pass::losses_and_gradients(&model, &context, &gradients, OPTIONS, keep);
            }
            device.usage().peak_bytes
        });
        assert!(
            peaks[1] <= peaks[0],
            "recompute {recompute}: the program needs {} bytes, the pass {}",
            peaks[1],
            peaks[0]
        );
    }
}

#[test]
fn verify_refuses_programs_that_lost_or_repeat_a_part() {
    for recompute in [false, true] {
        let chain = Chain { units: 4, starts_stream: true };
        let sound = sequential(chain, 2, recompute);
        assert_eq!(verify(&sound), Ok(()));
        for index in 0..sound.tasks.len() {
            let mut without = sound.clone();
            let removed = without.tasks.remove(index);
            // A weight half without a trace elsewhere still leaves its inputs unfreed.
            assert!(verify(&without).is_err(), "without `{removed}`");
            let mut twice = sound.clone();
            twice.tasks.insert(index, sound.tasks[index].clone());
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
    let mut program: Program = sequential(Chain { units: 2, starts_stream: false }, 1, false);
    program.tasks.remove(0);
    let refusal = verify(&program).unwrap_err();
    assert!(matches!(refusal, Unsound::ReadsNothing { index: 0, .. }));
    assert_eq!(
        refusal.to_string(),
        "task 0, `Enter(1, 0)  reads Output(0, 0)  writes Stream(1, 0) Normalised(1, 0)  frees Output(0, 0)`, reads \
         Output(0, 0), which nothing has written or which is freed"
    );
}
