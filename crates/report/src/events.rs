//! Events of a run, as data; sinks take them.

use std::io;

use serde::{Deserialize, Serialize};

use crate::number;
use crate::{EvalMetrics, RankMetrics, StepMetrics};

/// An event of a run. Times are seconds since 1970.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RunEvent {
    /// A run begins, or continues from a checkpoint.
    Begun(Begun),
    /// A step was made.
    Step {
        #[serde(with = "number")]
        time_s: f64,
        metrics: StepMetrics,
        /// By shard, if ranks are observed.
        ranks: Vec<RankMetrics>,
    },
    /// The model was evaluated after a step.
    Evaluation {
        #[serde(with = "number")]
        time_s: f64,
        step: u64,
        metrics: EvalMetrics,
    },
    /// Slow ranks led to a change, whose effect is known.
    Balance(BalanceReport),
    /// A checkpoint was taken after a step. It may still be on its way to the disk.
    Checkpoint { step: u64, path: String },
    /// A line for the reader.
    Note { line: String },
    /// The run has failed; nothing follows.
    Fault { what: String, hint: Option<String> },
    /// No step follows. The model may still have to be saved.
    Ended { step: u64, why: String },
}

/// How a run begins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Begun {
    /// The model, in a few words.
    pub title: String,
    /// The ranks and how they share the work, in a few words; empty for one rank on cores.
    pub ranks: String,
    /// The predicted peak.
    pub memory_bytes: u64,
    /// True for memory of GPUs, false for the machine's.
    pub is_gpu_memory: bool,
    /// Steps done, and the checkpoint that the run continues from.
    pub step: u64,
    pub resumed_from: Option<String>,
    /// The best evaluation so far.
    pub best: Option<BestEvaluation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BestEvaluation {
    pub step: u64,
    #[serde(with = "number")]
    pub loss: f64,
}

/// A change to the division of work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BalanceReport {
    /// The last step before it.
    pub step: u64,
    /// By shard: how many times as long as the fastest it computes.
    #[serde(with = "number::list")]
    pub slowness: Vec<f64>,
    /// A step before and after it, and the best possible by any division.
    #[serde(with = "number")]
    pub before_s: f64,
    #[serde(with = "number")]
    pub after_s: f64,
    #[serde(with = "number")]
    pub optimum_s: f64,
    /// Steps measured after it; without any, `after_s` is a forecast.
    pub steps_after: u64,
    /// The whole report in words.
    pub line: String,
}

/// Takes the events of a run, one after another.
pub trait Sink {
    /// Shows, writes or keeps what it needs of an event. An error ends the run.
    fn take(&mut self, event: &RunEvent) -> io::Result<()>;
}

impl<S: Sink + ?Sized> Sink for &mut S {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        (**self).take(event)
    }
}

/// A list of sinks is a sink, too. They take an event in order; after a failure, the rest do not get it.
impl Sink for Vec<Box<dyn Sink + '_>> {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        self.iter_mut().try_for_each(|sink| sink.take(event))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::{Reads, example};

    fn ranks(seconds: f64) -> Vec<RankMetrics> {
        let by_class_s = vec![("attention".into(), seconds), ("mlp".into(), 0.5)];
        vec![RankMetrics { compute_s: seconds, by_class_s, columns: 7, ..RankMetrics::default() }; 2]
    }

    /// One event of each kind, with this value for the numbers that may be anything.
    fn events(value: f64) -> Vec<RunEvent> {
        let metrics = StepMetrics {
            loss: value,
            grad_norm: value,
            peak_share: Some(value),
            step_duration: std::time::Duration::from_nanos(1_234_567_891),
            ..example()
        };
        let of_images = EvalMetrics { reads: Reads::Images, loss: value, accuracy: value };
        let best = Some(BestEvaluation { step: 3, loss: value });
        vec![
            RunEvent::Begun(Begun {
                title: "Llama, 1 M parameters".to_owned(),
                ranks: "tp 2".to_owned(),
                memory_bytes: 3 << 30,
                is_gpu_memory: true,
                step: 5,
                resumed_from: Some("run/checkpoints/step-00000005".to_owned()),
                best,
            }),
            RunEvent::Step { time_s: 1.75e9 + 0.1, metrics, ranks: ranks(value) },
            RunEvent::Step { time_s: 0.0, metrics: StepMetrics { peak_share: None, ..metrics }, ranks: Vec::new() },
            RunEvent::Evaluation { time_s: 1.75e9, step: 6, metrics: of_images },
            RunEvent::Balance(BalanceReport {
                step: 9,
                slowness: vec![1.0, value],
                before_s: 0.4,
                after_s: value,
                optimum_s: 0.3,
                steps_after: 5,
                line: "rank 1 computes 2.1× slower".to_owned(),
            }),
            RunEvent::Checkpoint { step: 10, path: "run/checkpoints/step-00000010".to_owned() },
            RunEvent::Note { line: "a \"note\"\nof two lines".to_owned() },
            RunEvent::Fault { what: "rank 1 failed".to_owned(), hint: None },
            RunEvent::Ended { step: 12, why: "as planned".to_owned() },
        ]
    }

    #[test]
    fn every_event_is_the_same_after_it_was_json() {
        for value in [0.1 + 0.2, -0.0, f64::MAX, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for event in events(value) {
                let sent = serde_json::to_string(&event).unwrap();
                let received: RunEvent = serde_json::from_str(&sent).unwrap_or_else(|error| panic!("{error}: {sent}"));
                // NaN equals nothing.
                assert_eq!(format!("{received:?}"), format!("{event:?}"), "{sent}");
                assert_eq!(serde_json::to_string(&received).unwrap(), sent);
            }
        }
    }

    #[test]
    fn an_event_says_what_it_is_and_numbers_that_are_not_finite_are_texts() {
        let loss = |value: f64| {
            let event = RunEvent::Evaluation {
                time_s: 2.5,
                step: 6,
                metrics: EvalMetrics { reads: Reads::Tokens, loss: value, accuracy: 0.5 },
            };
            serde_json::to_value(event).unwrap()
        };
        let expected = serde_json::json!({
            "event": "evaluation", "time_s": 2.5, "step": 6,
            "metrics": { "reads": "tokens", "loss": 1.5, "accuracy": 0.5 },
        });
        assert_eq!(loss(1.5), expected);
        for (value, text) in [(f64::NAN, "NaN"), (f64::INFINITY, "Infinity"), (f64::NEG_INFINITY, "-Infinity")] {
            assert_eq!(loss(value)["metrics"]["loss"], text);
        }
        for wrong in ["\"nan\"", "\"\"", "null", "[]", "\"1.5\""] {
            let event = format!("{{\"event\":\"evaluation\",\"time_s\":{wrong},\"step\":6}}");
            assert!(serde_json::from_str::<RunEvent>(&event).is_err(), "{event}");
        }
    }

    /// Writes down who took what, and fails at the end of a run if `fails` is set.
    struct Scribe<'a> {
        name: &'static str,
        fails: bool,
        taken: &'a RefCell<Vec<String>>,
    }

    impl Sink for Scribe<'_> {
        fn take(&mut self, event: &RunEvent) -> io::Result<()> {
            match event {
                RunEvent::Ended { .. } if self.fails => return Err(io::Error::other("the disk is full")),
                RunEvent::Note { line } => self.taken.borrow_mut().push(format!("{} {line}", self.name)),
                _ => self.taken.borrow_mut().push(format!("{} the end", self.name)),
            }
            Ok(())
        }
    }

    #[test]
    fn sinks_take_events_in_their_order_and_a_failure_keeps_them_from_those_behind() {
        let taken = RefCell::new(Vec::new());
        let mut kept = Scribe { name: "kept", fails: false, taken: &taken };
        let failing = Scribe { name: "failing", fails: true, taken: &taken };
        let last = Scribe { name: "last", fails: false, taken: &taken };
        let mut sinks: Vec<Box<dyn Sink + '_>> = vec![Box::new(&mut kept), Box::new(failing), Box::new(last)];
        for line in ["one", "two"] {
            sinks.take(&RunEvent::Note { line: line.to_owned() }).unwrap();
        }
        let error = sinks.take(&RunEvent::Ended { step: 2, why: String::new() }).unwrap_err();
        assert_eq!(error.to_string(), "the disk is full");
        drop(sinks);
        let expected = ["kept one", "failing one", "last one", "kept two", "failing two", "last two", "kept the end"];
        assert_eq!(*taken.borrow(), expected);
    }
}
