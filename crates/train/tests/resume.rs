//! Runs that were cut short and continued, against runs that were not.

mod support;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use evenkeel_device::DType;
use evenkeel_model::{Cut, Model};
use evenkeel_store::checkpoint::{Checkpoint, CheckpointWriter};
use evenkeel_train::{
    Balancing, Best, Decay, EarlyStop, Error, Evaluation, Feed, Form, Limits, OptimizerOptions, Progress, Ranks, Rate,
    Report, RunGoals, RunObserver, Samples, StepReport, Stop, Trainer, TrainerOptions, checkpoint, run,
};
use support::compare_curves;

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
        optimizer: Some(OptimizerOptions::default()),
        label_smoothing: 0.1,
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

impl RunObserver for Watch<'_> {
    fn stepping(&mut self, _: &Ranks, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn tell(&mut self, report: Report) -> Result<(), Error> {
        match report {
            Report::Step(report) => {
                self.reports.push(report.clone());
                self.interrupted.store(report.step == self.stop_at, std::sync::atomic::Ordering::Relaxed);
            }
            Report::Evaluation { step, evaluation } => {
                assert_eq!(evaluation.labels, 2 * SEQUENCE);
                assert!(evaluation.loss() > 0.0 && (0.0..=1.0).contains(&evaluation.accuracy()));
                self.evaluations.push(step);
            }
            Report::Balanced(_) | Report::Restaged(_) => unreachable!("nobody balances"),
            Report::Note(_) => (),
        }
        Ok(())
    }

    fn evaluate(&mut self, ranks: &Ranks) -> Result<Option<Evaluation>, Error> {
        if self.interrupted.load(std::sync::atomic::Ordering::Relaxed) {
            return Ok(None);
        }
        ranks.evaluate(Numbers { next: 900, end: 901 }.next()?.unwrap()).map(Some)
    }

    fn checkpoint(&mut self, ranks: &Ranks, feed: &serde_json::Value, progress: &Progress) -> Result<(), Error> {
        self.checkpoints.set(self.checkpoints.get() + 1);
        checkpoint::save(&self.folder, ranks, progress, feed.clone())
    }

    fn settle(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

fn plan(steps: u64) -> RunGoals {
    RunGoals {
        rate: Rate { peak: 1e-2, floor: 1e-3, warmup_steps: 3, decay: Decay::Cosine },
        limits: Limits { steps: Some(steps), ..Limits::default() },
        micros_per_step: 2,
        evaluate_every: Some(5),
        checkpoint_every: None,
        nonfinite_limit: 3,
        keep_best: false,
        early_stop: None,
    }
}

type Trained = (Stop, Vec<Vec<f32>>, Vec<StepReport>);

/// Trains to `steps`, from the folder's checkpoint if it has one; interrupted after step `stop_at`.
fn train(folder: &Path, cut: &Cut, dtype: DType, steps: u64, stop_at: u64) -> Trained {
    train_by(&plan(steps), folder, cut, dtype, stop_at)
}

fn train_by(plan: &RunGoals, folder: &Path, cut: &Cut, dtype: DType, stop_at: u64) -> Trained {
    let ranks = support::random(&model(), cut, options(), dtype);
    let (mut feed, mut progress) = (Numbers { next: 0, end: 1000 }, Progress::default());
    if folder.exists() {
        let state = checkpoint::load(folder, &ranks).unwrap();
        feed.next = state.feed.as_u64().unwrap();
        progress = state.progress;
    }
    let (begun, interrupted) = (progress.step, AtomicBool::new(false));
    let mut watch = Watch::new(folder.to_owned(), stop_at, &interrupted);
    let stop = run(&ranks, &mut feed, plan, Balancing::default(), &mut progress, &interrupted, &mut watch).unwrap();
    assert_eq!(watch.checkpoints.get(), 1, "the end is checkpointed");
    let is_due = |step: &u64| {
        let in_turn = plan.evaluate_every.is_some_and(|every| step.is_multiple_of(every));
        *step > 0 && *step != stop_at && (in_turn || plan.limits.steps == Some(*step))
    };
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
fn every_schedule_of_the_rate_goes_on_where_it_was() {
    let (wsd, form) = (0.3, Form::Sqrt);
    let decays =
        [Decay::Restarts { cycles: 3 }, Decay::Polynomial { power: 2.0 }, Decay::Stable { decay_share: wsd, form }];
    for decay in decays {
        let usual = plan(21);
        let plan = RunGoals { rate: Rate { decay, ..usual.rate }, ..usual };
        let temporary = tempfile::tempdir().unwrap();
        let train =
            |folder: &str, stop_at| train_by(&plan, &temporary.path().join(folder), &Cut::even(1), DType::F32, stop_at);
        let (_, straight, all) = train("straight", 0);
        let (first, (_, resumed, second)) = (train("resumed", 9).2, train("resumed", 0));
        let rates = |reports: &[StepReport]| reports.iter().map(|report| report.lr).collect::<Vec<f64>>();
        assert_eq!(rates(&all), rates(&[first, second].concat()), "{decay:?}");
        assert_eq!(straight, resumed, "{decay:?}");
        assert!(rates(&all).windows(2).any(|pair| pair[1] < pair[0]), "{decay:?} falls");
    }
}

/// Evaluates to losses that depend on the step alone, and notes which steps are checkpointed.
struct Scripted<'a> {
    watch: Watch<'a>,
    saved: Vec<u64>,
}

/// After steps 2, 4, …: the best counts as a gain only where it is so by more than 0.1.
const LOSSES: [f64; 10] = [3.0, 2.0, 2.5, 1.95, f64::NAN, 1.9, 1.8, 1.7, 1.6, 1.5];

impl RunObserver for Scripted<'_> {
    fn stepping(&mut self, _: &Ranks, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn tell(&mut self, report: Report) -> Result<(), Error> {
        match report {
            Report::Evaluation { .. } => Ok(()),
            report => self.watch.tell(report),
        }
    }

    fn evaluate(&mut self, _: &Ranks) -> Result<Option<Evaluation>, Error> {
        let step = self.watch.reports.last().map_or(0, |report| report.step);
        let loss_sum = LOSSES[(step / 2) as usize - 1];
        Ok(Some(Evaluation { labels: 1, loss_sum, correct: 0 }))
    }

    fn checkpoint(&mut self, ranks: &Ranks, feed: &serde_json::Value, progress: &Progress) -> Result<(), Error> {
        self.saved.push(progress.step);
        self.watch.checkpoint(ranks, feed, progress)
    }

    fn settle(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// What a run came to: why it ended, its progress, and the steps that it checkpointed.
fn judged(folder: &Path, plan: &RunGoals, stop_at: u64) -> (Stop, Progress, Vec<u64>) {
    let ranks = alone(DType::F32);
    let (mut feed, mut progress) = (Numbers { next: 0, end: 1000 }, Progress::default());
    if folder.exists() {
        let state = checkpoint::load(folder, &ranks).unwrap();
        (feed.next, progress) = (state.feed.as_u64().unwrap(), state.progress);
    }
    let interrupted = AtomicBool::new(false);
    let watch = Watch::new(folder.to_owned(), stop_at, &interrupted);
    let mut scripted = Scripted { watch, saved: vec![] };
    let stop = run(&ranks, &mut feed, plan, Balancing::default(), &mut progress, &interrupted, &mut scripted).unwrap();
    (stop, Progress { seconds: 0.0, ..progress }, scripted.saved)
}

#[test]
fn a_run_that_no_longer_gains_ends_at_the_same_step_however_often_it_was_resumed() {
    let early_stop = Some(EarlyStop { patience: 3, min_delta: 0.1 });
    let plan = RunGoals { evaluate_every: Some(2), keep_best: true, early_stop, ..plan(20) };
    let temporary = tempfile::tempdir().unwrap();
    let folder = |name: &str| temporary.path().join(name);
    let (stop, straight, saved) = judged(&folder("straight"), &plan, 0);
    // No gain after steps 6, 8 (too small a one) and 10 (not a number).
    assert_eq!((stop, straight.step, straight.evaluations_without_gain), (Stop::NoGain, 10, 3));
    assert_eq!(straight.best, Some(Best { step: 8, loss: 1.95 }), "the best is the lowest, however small its gain");
    assert_eq!(saved, [2, 4, 8, 10], "every best, and the end");
    for stops in [&[5][..], &[6], &[8], &[3, 7, 9]] {
        let resumed = folder(&format!("{stops:?}"));
        for &stop_at in stops {
            assert_eq!(judged(&resumed, &plan, stop_at).0, Stop::Interrupted);
        }
        let (stop, progress, _) = judged(&resumed, &plan, 0);
        assert_eq!((stop, progress), (Stop::NoGain, straight), "{stops:?}");
        let (stop, progress, saved) = judged(&resumed, &plan, 0);
        assert_eq!((stop, progress, saved), (Stop::NoGain, straight, vec![]), "it has ended");
    }
    // With more patience it goes on, and its last step is its best.
    let more = RunGoals { early_stop: Some(EarlyStop { patience: 4, min_delta: 0.1 }), ..plan };
    let (stop, progress, _) = judged(&folder("straight"), &more, 0);
    assert_eq!((stop, progress.best), (Stop::NoGain, Some(Best { step: 12, loss: 1.9 })));
    let any = RunGoals { early_stop: Some(EarlyStop { patience: 3, min_delta: 0.0 }), ..plan };
    let (stop, progress, _) = judged(&folder("any"), &any, 0);
    assert_eq!((stop, progress.step, progress.best), (Stop::Done, 20, Some(Best { step: 20, loss: 1.5 })));
}

#[test]
fn the_evaluation_at_the_end_is_in_the_last_checkpoint() {
    // Step 4 is the last, and evaluated before it is checkpointed, for 4 is no multiple of 3.
    let usual = plan(4);
    let plan = RunGoals { evaluate_every: Some(3), checkpoint_every: Some(4), keep_best: true, ..usual };
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("run");
    let (_, progress, saved) = judged(&folder, &plan, 0);
    assert_eq!((progress.best, saved), (Some(Best { step: 4, loss: 2.0 }), vec![3, 4]));
    let state = checkpoint::CheckpointState::of(&Checkpoint::open(&folder).unwrap()).unwrap();
    assert_eq!(state.progress.best, progress.best);
    let plain = RunGoals { keep_best: false, ..plan };
    assert_eq!(judged(&temporary.path().join("plain"), &plain, 0).2, [4], "no state depends on it");
}

#[test]
fn a_run_resumes_on_another_number_of_ranks() {
    let cuts = [Cut::even(1), Cut::even(2), Cut::weighted(vec![1.0, 1.0, 0.5]), Cut::even(4)];
    let temporary = tempfile::tempdir().unwrap();
    let (_, _, straight) = train(&temporary.path().join("straight"), &Cut::even(1), DType::F32, 20, 0);
    for (from, to) in cuts.iter().zip(cuts.iter().cycle().skip(1)) {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("run");
        let (_, before, _) = train(&folder, from, DType::F32, 20, 10);
        let loaded = support::random(&model(), to, options(), DType::F32);
        checkpoint::load(&folder, &loaded).unwrap();
        assert_eq!(support::state(&loaded), before, "{from:?} to {to:?}: weights and moments come over bit for bit");
        let (_, _, resumed) = train(&folder, to, DType::F32, 20, 0);
        let losses = |reports: &[StepReport]| -> Vec<f64> { reports.iter().map(|step| step.outcome.loss).collect() };
        compare_curves(&format!("{from:?} to {to:?}"), &losses(&resumed), &losses(&straight[10..]), [1e-4, 0.0]);
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
    let stop =
        run(&ranks, &mut feed, &plan(100), Balancing::default(), &mut Progress::default(), &interrupted, &mut watch)
            .unwrap();
    assert_eq!((stop, watch.reports.len()), (Stop::DataEnded, 4), "three steps of two micro-batches and one of one");
}

#[test]
fn steps_that_are_not_finite_change_nothing_and_end_the_run_at_the_limit() {
    let ranks = alone(DType::F32);
    let poison = |trainer: &mut Trainer| {
        let out = trainer.parameters.master(evenkeel_model::ParamId(0)).view();
        trainer.device.compute().launch(evenkeel_device::kernel::Fill { out, value: f32::NAN });
    };
    ranks.with_trainers(poison).unwrap();
    let before = support::state(&ranks);
    let temporary = tempfile::tempdir().unwrap();
    let interrupted = AtomicBool::new(false);
    let folder = temporary.path().join("run");
    let mut watch = Watch::new(folder, 0, &interrupted);
    let mut feed = Numbers { next: 0, end: 1000 };
    let error =
        run(&ranks, &mut feed, &plan(100), Balancing::default(), &mut Progress::default(), &interrupted, &mut watch)
            .unwrap_err();
    assert!(matches!(error, Error::NotFinite { steps: 3, step: 3, .. }), "{error}");
    assert_eq!(watch.reports.len(), 3);
    assert!(watch.reports.iter().all(|report| !report.outcome.updated));
    assert_eq!(watch.checkpoints.get(), 0, "a broken state is not kept");
    let bits = |state: Vec<Vec<f32>>| -> Vec<u32> { state.concat().into_iter().map(f32::to_bits).collect() };
    assert!(bits(before) == bits(support::state(&ranks)), "no weight and no moment moved");
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
    for absurd in [serde_json::json!({"step": 9, "loss": 1.0}), serde_json::json!({"step": 0, "loss": null})] {
        rewrite(&folder, &changed, |state| state["progress"]["best"] = absurd.clone());
        assert!(checkpoint::load(&changed, &ranks).is_err(), "{absurd}");
    }
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
    assert!(error.to_string().contains("of the shape this model needs"), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("another model")) && !error.is_fault(), "{error}");
}
