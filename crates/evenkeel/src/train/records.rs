//! The files that a run's events are written to: metrics, the loss curve, and TensorBoard's.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use evenkeel_report::{Curve, EventWriter, MetricsLog, RunEvent, Sink, event_file_name, events_until};
use evenkeel_store::{LogFile, exists, read_bytes, read_text, write_file_atomically};
use evenkeel_train::{Error, Progress};
use serde_json::Value;

use crate::inputs::run_folder::RunFolder;

/// The largest file of records that is read, enough for millions of steps.
const MOST_BYTES: u64 = 1 << 30;

/// Continues the records of a run from this progress; later records are dropped.
pub fn open(
    folder: &RunFolder,
    title: &str,
    progress: &Progress,
    tensorboard: bool,
) -> Result<Vec<Box<dyn Sink>>, Error> {
    let mut curve = Curve::new(title);
    let kept = before(&folder.metrics(), progress, &mut curve)?;
    write_file_atomically(folder.metrics(), |file| file.put(kept.as_bytes()))?;
    let metrics = MetricsFile(MetricsLog::new(LogFile::append(folder.metrics())?));
    for path in folder.event_files()? {
        cut_events(&path, progress.step)?;
    }
    let mut sinks: Vec<Box<dyn Sink>> = vec![Box::new(metrics)];
    if tensorboard {
        sinks.push(Box::new(open_events(folder)?));
    }
    sinks.push(Box::new(CurveFile { curve, path: folder.curve(), pace: Pace::default() }));
    Ok(sinks)
}

/// A sink's failure: of a file, which the error names, or of the progress display.
pub fn failure(error: io::Error) -> Error {
    match error.downcast::<evenkeel_store::Error>() {
        Ok(error) => Error::Store(error),
        Err(error) => Error::Report(error),
    }
}

pub fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// The metrics so far of a continued run, which are also put in its curve.
fn before(path: &Path, progress: &Progress, curve: &mut Curve) -> Result<String, Error> {
    let step = progress.step;
    let before = if step > 0 && exists(path) { read_text(path, MOST_BYTES)? } else { String::new() };
    let mut kept = String::new();
    for line in before.lines() {
        let Ok(value) = serde_json::from_str::<Value>(line) else { continue };
        let Some(at) = value["step"].as_u64().filter(|&at| at <= step) else { continue };
        // The evaluation after this step is repeated, unless the checkpoint knows it.
        if value.get("eval_loss").is_some() && at == step && progress.evaluated != Some(at) {
            continue;
        }
        if let Some(loss) = value["loss"].as_f64() {
            curve.add(at, loss);
        }
        if let Some(loss) = value["eval_loss"].as_f64() {
            curve.add_eval(at, loss);
        }
        kept.extend([line, "\n"]);
    }
    Ok(kept)
}

/// Drops the events that an earlier part of the run wrote after a step.
fn cut_events(path: &Path, step: u64) -> Result<(), Error> {
    let written = read_bytes(path, MOST_BYTES)?;
    let kept = events_until(&written, step);
    if kept.len() < written.len() {
        write_file_atomically(path, |file| file.put(kept))?;
    }
    Ok(())
}

fn open_events(folder: &RunFolder) -> Result<EventWriter<LogFile>, Error> {
    let name = event_file_name(now_s() as u64, std::process::id());
    EventWriter::new(LogFile::create(folder.file(&name))?, now_s()).map_err(Error::Report)
}

/// Metrics in a file, whose failures name it.
struct MetricsFile(MetricsLog<LogFile>);

impl Sink for MetricsFile {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        self.0.take(event).map_err(|error| io::Error::other(self.0.out().failure(error)))
    }
}

/// The curve in a file, drawn anew from time to time and at every evaluation and checkpoint.
struct CurveFile {
    curve: Curve,
    path: PathBuf,
    pace: Pace,
}

impl Sink for CurveFile {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        self.curve.take(event)?;
        match event {
            RunEvent::Step { .. } if self.pace.is_due(Instant::now()) => self.draw(),
            RunEvent::Evaluation { .. } | RunEvent::Checkpoint { .. } => self.draw(),
            _ => Ok(()),
        }
    }
}

impl CurveFile {
    fn draw(&mut self) -> io::Result<()> {
        let began = Instant::now();
        let mut svg = Vec::new();
        self.curve.write_svg(&mut svg)?;
        write_file_atomically(&self.path, |file| file.put(&svg)).map_err(io::Error::other)?;
        self.pace.done(began, Instant::now());
        Ok(())
    }
}

/// When a run's curve is redrawn: not all the time, and the less often the longer it takes.
#[derive(Default)]
struct Pace {
    due: Option<Instant>,
}

impl Pace {
    const LEAST: Duration = Duration::from_secs(5);
    /// A slow disk costs a run 2 % of its time at most.
    const REST: u32 = 50;

    fn is_due(&self, now: Instant) -> bool {
        self.due.is_none_or(|due| now >= due)
    }

    fn done(&mut self, began: Instant, ended: Instant) {
        self.due = Some(ended + Pace::LEAST.max(Pace::REST * ended.saturating_duration_since(began)));
    }
}

#[cfg(test)]
mod tests {
    use evenkeel_report::{EvalMetrics, Reads};

    use super::*;

    #[test]
    fn a_curve_is_drawn_at_first_then_now_and_then_and_seldom_on_a_slow_disk() {
        let start = Instant::now();
        let drawn = |took: Duration| {
            let mut pace = Pace::default();
            assert!(pace.is_due(start));
            pace.done(start, start + took);
            pace
        };
        let millisecond = Duration::from_millis(1);
        for (took, rest) in [(millisecond, Pace::LEAST), (Duration::from_secs(1), Duration::from_secs(50))] {
            let pace = drawn(took);
            assert!(!pace.is_due(start + took + rest - millisecond), "{took:?}");
            assert!(pace.is_due(start + took + rest), "{took:?}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named_and_any_other_failure_is_of_the_progress() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.svg");
        std::fs::create_dir_all(path.join("folder")).unwrap();
        let mut curve = CurveFile { curve: Curve::new("a run"), path: path.clone(), pace: Pace::default() };
        let mut metrics = MetricsFile(MetricsLog::new(LogFile::append("/dev/full").unwrap()));
        let evaluated = EvalMetrics { reads: Reads::Tokens, loss: 1.0, accuracy: 0.5 };
        let event = RunEvent::Evaluation { time_s: 0.0, step: 1, metrics: evaluated };
        let cases: [(&mut dyn Sink, &Path); 2] = [(&mut curve, &path), (&mut metrics, Path::new("/dev/full"))];
        for (sink, path) in cases {
            match failure(sink.take(&event).unwrap_err()) {
                Error::Store(error) => assert_eq!(error.file, path, "{error}"),
                other => panic!("{other}"),
            }
        }
        let error = failure(io::Error::other("the terminal is gone"));
        assert_eq!(error.to_string(), "the run's progress cannot be written: the terminal is gone");
        assert!(error.is_fault());
    }
}
