//! Programs on one rank against the plain pass, bit for bit.

mod support;

use evenkeel_comm::Communicator;
use evenkeel_device::{DType, Device};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{Batch, Context, Gradients, LossOptions, Model, Parameters, RotaryTables, ZeroSharding};
use evenkeel_step::schedule::{
    Arrangement, CROSS_PASS, Chain, DEFAULT_REFERENCE, NONE, OASES, PartSize, SAVED_COMM, Schedule,
};
use evenkeel_step::{Executor, Program, Strategy, join, verify};
use support::{device_of, golden, parts, sizes};

const CASES: [&str; 7] = ["bert", "gemma3", "gemma4_shared", "gpt2", "gpt_neox", "llama3", "vit"];
const OPTIONS: LossOptions = LossOptions { smoothing: 0.1, scale: 0.01 };

/// The data that passes work on.
struct Setting {
    model: Model,
    device: Device,
    parameters: Parameters,
    tables: RotaryTables,
    gradients: Gradients,
    micros: Vec<Vec<Batch>>,
}

impl Setting {
    fn new(case: &str, device: Device, micros: usize) -> Setting {
        let (queue, folder) = (device.compute(), golden(case));
        let model = Model::open(&folder).expect("a known architecture");
        let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).expect("golden weights fit");
        Setting {
            tables: RotaryTables::new(&model.config, queue, 64),
            gradients: Gradients::new(&parameters, queue),
            micros: (0..micros).map(|micro| parts(&model, micro, 1, DType::F32, queue)).collect(),
            parameters,
            model,
            device,
        }
    }

    fn pass(&self, keep: Keep) -> Vec<evenkeel_device::Tensor> {
        let Setting { model, device, parameters, tables, gradients, .. } = self;
        let pass = |batch| {
            let context = Context { queue: device.compute(), parameters, tables, batch, pruning: None };
            pass::losses_and_gradients(model, &context, gradients, OPTIONS, keep)
        };
        self.micros.iter().flatten().map(pass).collect()
    }

    fn program(&self, arrangement: Arrangement) -> Vec<evenkeel_device::Tensor> {
        self.program_of(arrangement, sizes(&self.model, &self.micros))
    }

    fn program_of(&self, arrangement: Arrangement, sizes: Vec<Vec<PartSize>>) -> Vec<evenkeel_device::Tensor> {
        let Setting { model, device, parameters, tables, gradients, micros } = self;
        let chain = Chain::of(model, &Strategy::alone(DType::F32), 0);
        let program: Program = arrangement.write(&chain, &sizes);
        verify(std::slice::from_ref(&program)).expect("a schedule of ours is sound");
        let groups = join(&Communicator::dry(0, 1), &chain.groups);
        let groups = &groups;
        let executor =
            Executor { model, device, parameters, tables, gradients, groups, migration: None, pruning: None };
        executor.run(&program, micros, OPTIONS, None).into_iter().map(|found| found.losses).collect()
    }

    /// Losses by micro-batch and gradients by parameter.
    fn read(&self, losses: &[evenkeel_device::Tensor]) -> [Vec<Vec<f32>>; 2] {
        let queue = self.device.compute();
        let trained = self.parameters.ids().filter(|id| self.model.specs[id.0].is_trained);
        let gradients = trained.map(|id| queue.read(&self.gradients.sum(queue, id)));
        [losses.iter().map(|losses| queue.read(losses)).collect(), gradients.collect()]
    }
}

#[test]
fn whole_micro_batches_in_turn_equal_the_plain_pass_bit_for_bit() {
    for case in CASES {
        for (micros, schedule, keep) in [
            (1, NONE, Keep::Everything),
            (1, OASES, Keep::Stream),
            (3, NONE, Keep::Everything),
            (3, OASES, Keep::Stream),
            (3, SAVED_COMM, Keep::Stream),
        ] {
            let settings = [(); 2].map(|()| Setting::new(case, device_of(2), micros));
            let plain = settings[0].read(&settings[0].pass(keep));
            let program = settings[1].read(&settings[1].program(Arrangement::of(schedule)));
            assert_eq!(plain, program, "{case}, {micros} micro-batches, {}", schedule.name);
        }
    }
}

#[test]
fn recomputation_changes_no_bit() {
    for case in CASES {
        let [kept, again, layers] = [NONE, OASES, CROSS_PASS].map(|schedule| {
            let setting = Setting::new(case, device_of(2), 2);
            setting.read(&setting.program(Arrangement::of(schedule)))
        });
        assert_eq!(kept, again, "{case}, by units");
        assert_eq!(kept, layers, "{case}, by layers");
    }
}

#[test]
fn recomputation_leaves_out_the_products_that_only_the_output_needs() {
    let products = |schedule: Schedule| {
        let setting = Setting::new("llama3", Device::dry(), 1);
        drop(setting.program(Arrangement::of(schedule)));
        setting.device.take_counts().0["Product"].flops
    };
    let model = Model::open(&golden("llama3")).expect("a known architecture");
    let (hidden, ffn, layers) = (model.config.hidden, model.config.ffn, model.config.layers.len());
    let tokens = Setting::new("llama3", Device::dry(), 1).micros[0][0].token_count();
    let of_layers = |per_token: usize| (2 * tokens * layers * per_token) as u128;
    let [everything, by_layers, by_units] = [DEFAULT_REFERENCE, CROSS_PASS, OASES].map(products);
    assert_eq!(everything - by_layers, of_layers(ffn * hidden), "the MLP's last");
    assert_eq!(by_layers - by_units, of_layers(hidden * hidden), "attention's last");
}

#[test]
fn chunks_without_rows_are_skipped_and_change_no_bit_and_no_memory() {
    for case in CASES {
        let settings = [(); 2].map(|()| Setting::new(case, device_of(2), 2));
        let exact = settings[0].read(&settings[0].program(Arrangement::of(OASES)));
        let sizes = sizes(&settings[1].model, &settings[1].micros).into_iter();
        let padded = |size: PartSize| {
            let chunks = size.chunk_rows.len();
            size.in_chunks(chunks + 3)
        };
        let sizes = sizes.map(|parts| parts.into_iter().map(padded).collect()).collect();
        let with_more = settings[1].read(&settings[1].program_of(Arrangement::of(OASES), sizes));
        assert_eq!(exact, with_more, "{case}");
        let [exact, with_more] = settings.map(|setting| setting.device.usage().peak_bytes);
        assert_eq!(exact, with_more, "{case}");
    }
}

#[test]
fn a_program_holds_no_more_memory_than_the_plain_pass() {
    for (schedule, keep) in [(NONE, Keep::Everything), (OASES, Keep::Stream)] {
        let settings = [(); 2].map(|()| Setting::new("llama3", Device::dry(), 1));
        drop((settings[0].pass(keep), settings[1].program(Arrangement::of(schedule))));
        let [plain, program] = settings.map(|setting| setting.device.usage().peak_bytes);
        // Statistics are returned with the losses, 16 bytes a token.
        let handed_out = 16 * 32;
        assert!(program <= plain + handed_out, "{}: {program} bytes, the pass {plain}", schedule.name);
    }
}
