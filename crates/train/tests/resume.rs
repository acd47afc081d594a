//! Runs that were cut short and continued, against runs that were not.

mod support;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use evenkeel_device::DType;
use evenkeel_model::{Cut, Model};
use evenkeel_step::schedule::Arrangement;
use evenkeel_store::checkpoint::{Checkpoint, CheckpointWriter};
use evenkeel_train::{
    AdamWOptions, Attendant, Balanced, Decay, Error, Evaluation, Feed, Limits, Plan, Progress, Ranks, Rate, Samples,
    StepReport, Stop, Trainer, TrainerOptions, checkpoint, run,
};

const SEQUENCE: usize = 12;

fn model() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 50, "tie_word_embeddings": false,
        "attention_dropout": 0.1,
    });
    Model::from_json(&config).unwrap()
}

fn options() -> TrainerOptions {
    TrainerOptions {
        optimizer: Some(AdamWOptions::default()),
        label_smoothing: 0.1,
        arrangement: Arrangement::default(),
        longest: SEQUENCE,
        dropout_seed: 5,
    }
}

fn alone(dtype: DType) -> Ranks {
    support::random(&model(), &Cut::even(1), options(), dtype)
}

/// Samples that depend on their number alone.
struct Numbers {
    next: u64,
    end: u64,
}

impl Feed for Numbers {
    fn next(&mut self) -> Result<Option<Samples>, Error> {
        if self.next == self.end {
            return Ok(None);
        }
        self.next += 1;
        let ids: Vec<u32> = (0..2 * SEQUENCE as u64).map(|i| ((i * i + self.next * 13) % 50) as u32).collect();
        let labels = ids.iter().map(|id| (id + 1) % 50).collect();
        Ok(Some(Samples::Tokens { ids, labels, segment_lengths: vec![SEQUENCE; 2] }))
    }

    fn progress(&self) -> Option<f64> {
        None
    }

    fn epoch(&self) -> f64 {
        0.0
    }

    fn state(&self) -> serde_json::Value {
        self.next.into()
    }
}

/// Checkpoints to a folder and keeps what it hears.
struct Watch<'a> {
    folder: PathBuf,
    reports: Vec<StepReport>,
    evaluations: Vec<u64>,
    stop_at: u64,
    interrupted: &'a AtomicBool,
    checkpoints: Cell<usize>,
}

impl Watch<'_> {
    fn new(folder: PathBuf, stop_at: u64, interrupted: &AtomicBool) -> Watch<'_> {
        let (reports, evaluations, checkpoints) = (Vec::new(), Vec::new(), Cell::new(0));
        Watch { folder, reports, evaluations, stop_at, interrupted, checkpoints }
    }
}

impl Attendant for Watch<'_> {
    fn stepping(&mut self, _: &Ranks, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn stepped(&mut self, report: &StepReport) -> Result<(), Error> {
        self.reports.push(report.clone());
        self.interrupted.store(report.step == self.stop_at, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }

    fn balanced(&mut self, _: &Balanced) -> Result<(), Error> {
        unreachable!("nobody balances")
    }

    fn evaluate(&mut self, ranks: &Ranks) -> Result<Option<Evaluation>, Error> {
        if self.interrupted.load(std::sync::atomic::Ordering::Relaxed) {
            return Ok(None);
        }
        ranks.evaluate(Numbers { next: 900, end: 901 }.next()?.unwrap()).map(Some)
    }

    fn is_evaluated(&self, step: u64) -> bool {
        self.evaluations.contains(&step)
    }

    fn evaluated(&mut self, step: u64, evaluation: &Evaluation) -> Result<(), Error> {
        assert_eq!(evaluation.labels, 2 * SEQUENCE);
        assert!(evaluation.loss() > 0.0 && (0.0..=1.0).contains(&evaluation.accuracy()));
        self.evaluations.push(step);
        Ok(())
    }

    fn checkpoint(&mut self, ranks: &Ranks, feed: &dyn Feed, progress: &Progress) -> Result<(), Error> {
        self.checkpoints.set(self.checkpoints.get() + 1);
        checkpoint::save(&self.folder, ranks, progress, feed.state())
    }

    fn settle(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

fn plan(steps: u64) -> Plan {
    Plan {
        rate: Rate { peak: 1e-2, floor: 1e-3, warmup_steps: 3, decay: Decay::Cosine },
        limits: Limits { steps: Some(steps), ..Limits::default() },
        micros_per_step: 2,
        evaluate_every: Some(5),
        checkpoint_every: None,
        nonfinite_limit: 3,
    }
}

type Trained = (Stop, Vec<Vec<f32>>, Vec<StepReport>);

/// Trains to `steps`, from the folder's checkpoint if it has one; interrupted after step `stop_at`.
fn train(folder: &Path, cut: &Cut, dtype: DType, steps: u64, stop_at: u64) -> Trained {
    let ranks = support::random(&model(), cut, options(), dtype);
    let (mut feed, mut progress) = (Numbers { next: 0, end: 1000 }, Progress::default());
    if folder.exists() {
        let state = checkpoint::load(folder, &ranks).unwrap();
        feed.next = state.feed.as_u64().unwrap();
        progress = state.progress;
    }
    let (begun, interrupted) = (progress.step, AtomicBool::new(false));
    let mut watch = Watch::new(folder.to_owned(), stop_at, &interrupted);
    let stop = run(&ranks, &mut feed, &plan(steps), None, &mut progress, &interrupted, &mut watch).unwrap();
    assert_eq!(watch.checkpoints.get(), 1, "the end is checkpointed");
    let is_due = |step: &u64| *step > 0 && *step != stop_at && (step.is_multiple_of(5) || *step == steps);
    let due: Vec<u64> = (begun..=progress.step).filter(is_due).collect();
    assert_eq!(watch.evaluations, due, "one that was interrupted is made when the run goes on");
    (stop, support::state(&ranks), watch.reports)
}

#[test]
fn ten_steps_and_ten_resumed_ones_equal_twenty_straight_bit_for_bit() {
    let split = Cut { split_sequence: true, ..Cut::even(2) };
    // Shares such as 3/21 have no short decimal form: they must come back from the checkpoint as they were.
    for (cut, dtype, steps) in [
        (Cut::even(1), DType::F32, 20),
        (Cut::even(1), DType::F32, 21),
        (Cut::even(1), DType::Bf16, 20),
        (Cut::weighted(vec![1.0, 2.0, 1.0]), DType::F32, 20),
        (split, DType::Bf16, 20),
    ] {
        let temporary = tempfile::tempdir().unwrap();
        let (stop, straight, all) = train(&temporary.path().join("straight"), &cut, dtype, steps, 0);
        assert_eq!(stop, Stop::Done);
        let folder = temporary.path().join("resumed");
        let (stop, _, first) = train(&folder, &cut, dtype, steps, 10);
        assert_eq!((stop, first.len()), (Stop::Interrupted, 10));
        let (stop, resumed, second) = train(&folder, &cut, dtype, steps, 0);
        assert_eq!((stop, second.len()), (Stop::Done, steps as usize - 10));
        assert_eq!(straight, resumed, "{dtype:?}, {cut:?}");
        let lines = |reports: &[StepReport]| -> Vec<_> {
            reports.iter().map(|report| (report.step, report.lr, report.outcome, report.tokens)).collect()
        };
        assert_eq!(lines(&all), lines(&[first, second].concat()), "{dtype:?}, {cut:?}");
        assert!(all[19].outcome.loss < all[0].outcome.loss, "it learns");
    }
}

#[test]
fn a_run_resumes_on_another_number_of_ranks() {
    let cuts = [Cut::even(1), Cut::even(2), Cut::weighted(vec![1.0, 1.0, 0.5]), Cut::even(4)];
    for (from, to) in cuts.iter().zip(cuts.iter().cycle().skip(1)) {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("run");
        let (_, before, _) = train(&folder, from, DType::F32, 20, 10);
        let loaded = support::random(&model(), to, options(), DType::F32);
        checkpoint::load(&folder, &loaded).unwrap();
        assert_eq!(support::state(&loaded), before, "{from:?} to {to:?}: weights and moments come over bit for bit");
        let (_, _, resumed) = train(&folder, to, DType::F32, 20, 0);
        let (_, _, straight) = train(&temporary.path().join("straight"), &Cut::even(1), DType::F32, 20, 0);
        for (resumed, straight) in resumed.iter().zip(&straight[10..]) {
            let (ours, theirs) = (resumed.outcome.loss, straight.outcome.loss);
            assert!((ours - theirs).abs() < 1e-4, "{from:?} to {to:?}, step {}: {ours}, {theirs}", straight.step);
        }
    }
}

#[test]
fn a_run_ends_with_its_data() {
    let ranks = alone(DType::F32);
    let temporary = tempfile::tempdir().unwrap();
    let interrupted = AtomicBool::new(false);
    let folder = temporary.path().join("run");
    let mut watch = Watch::new(folder, 0, &interrupted);
    let mut feed = Numbers { next: 0, end: 7 };
    let stop = run(&ranks, &mut feed, &plan(100), None, &mut Progress::default(), &interrupted, &mut watch).unwrap();
    assert_eq!((stop, watch.reports.len()), (Stop::DataEnded, 4), "three steps of two micro-batches and one of one");
}

#[test]
fn steps_that_are_not_finite_change_nothing_and_end_the_run_at_the_limit() {
    let ranks = alone(DType::F32);
    let poison = |trainer: &mut Trainer| {
        let out = trainer.parameters.master(evenkeel_model::ParamId(0)).view();
        trainer.device.compute().launch(evenkeel_device::kernel::Fill { out, value: f32::NAN });
    };
    ranks.each(poison).unwrap();
    let before = support::state(&ranks);
    let temporary = tempfile::tempdir().unwrap();
    let interrupted = AtomicBool::new(false);
    let folder = temporary.path().join("run");
    let mut watch = Watch::new(folder, 0, &interrupted);
    let mut feed = Numbers { next: 0, end: 1000 };
    let error =
        run(&ranks, &mut feed, &plan(100), None, &mut Progress::default(), &interrupted, &mut watch).unwrap_err();
    assert!(matches!(error, Error::NotFinite { steps: 3, step: 3, .. }), "{error}");
    assert!(watch.reports.iter().all(|report| !report.outcome.updated));
    assert_eq!(watch.checkpoints.get(), 0, "a broken state is not kept");
    let same = before
        .iter()
        .zip(support::state(&ranks))
        .all(|(a, b)| a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()));
    assert!(same, "no weight and no moment moved");
}

/// The same checkpoint, but for what `change` does to its state.
fn rewrite(from: &Path, to: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let checkpoint = Checkpoint::open(from).unwrap();
    let mut body = checkpoint.body().clone();
    change(&mut body);
    let writer = CheckpointWriter::create(to).unwrap();
    for name in checkpoint.names() {
        let bytes = std::fs::read(from.join(name)).unwrap();
        writer.file(name, |file| file.put(&bytes)).unwrap();
    }
    writer.commit(&body).unwrap();
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("checkpoint");
    let ranks = alone(DType::F32);
    checkpoint::save(&folder, &ranks, &Progress::default(), serde_json::Value::Null).unwrap();
    let changed = temporary.path().join("changed");
    rewrite(&folder, &changed, |state| state["version"] = 99.into());
    let error = checkpoint::load(&changed, &ranks).unwrap_err();
    assert!(matches!(error, Error::CheckpointVersion { found: 99, .. }), "{error}");
    for (key, absurd) in [("seconds", -1.0), ("seconds", 1e30), ("warmup_share", 7.0), ("step", 1e15)] {
        rewrite(&folder, &changed, |state| {
            state["progress"][key] = if key == "step" { (absurd as u64).into() } else { absurd.into() };
        });
        let error = checkpoint::load(&changed, &ranks).unwrap_err();
        assert!(matches!(error, Error::BadState { .. }), "{key} {absurd}: {error}");
    }
    // Elements beyond the parameter's, or fewer than the file has.
    for range in [[0, 1u64 << 40], [0, 3], [5, 4]] {
        rewrite(&folder, &changed, |state| {
            let file = state["layout"].as_object_mut().unwrap().values_mut().next().unwrap();
            let held = file.as_object_mut().unwrap().values_mut().next().unwrap();
            held["range"] = serde_json::json!({ "start": range[0], "end": range[1] });
        });
        let error = checkpoint::load(&changed, &ranks).unwrap_err();
        assert!(matches!(error, Error::BadManifest { .. }), "{range:?}: {error}");
    }

    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 50, "tie_word_embeddings": false,
    });
    let larger = Model::from_json(&config).unwrap();
    let error = checkpoint::load(&folder, &support::random(&larger, &Cut::even(2), options(), DType::F32)).unwrap_err();
    assert!(matches!(error, Error::OtherModel { .. }), "{error}");
}
