//! TensorBoard's event files: records of protocol buffer messages, each with checksums.
//!
//! A record is its length (u64), that length's checksum (u32), the message and the message's checksum (u32), little
//! endian. A checksum is a masked CRC-32C. Of the `Event` message only these fields are written:
//!
//! ```text
//! Event   1: wall_time (double)  2: step (int64)  3: file_version (string)  5: summary (Summary)
//! Summary 1: value (repeated Value)
//! Value   1: tag (string)  2: simple_value (float)
//! ```

use std::io::{self, Write};

use crate::{EvalMetrics, RunEvent, Sink, StepMetrics};

/// Steps are flushed to the system so often, and at every evaluation and checkpoint.
const FLUSH_INTERVAL_S: f64 = 5.0;

/// Writes one event file. TensorBoard finds it by its name, see [`event_file_name`].
pub struct EventWriter<W: Write> {
    out: W,
    /// When steps were last flushed to the system.
    flushed_s: Option<f64>,
}

impl<W: Write> EventWriter<W> {
    /// Writes the event that every file begins with. `wall_time_s` is since 1970.
    pub fn new(out: W, wall_time_s: f64) -> io::Result<EventWriter<W>> {
        let mut writer = EventWriter { out, flushed_s: None };
        let mut event = event(wall_time_s, 0);
        event.bytes(3, b"brain.Event:2");
        writer.record(&event.0)?;
        Ok(writer)
    }

    fn step(&mut self, wall_time_s: f64, metrics: &StepMetrics) -> io::Result<()> {
        let optional = [
            ("speed/peak_share", metrics.peak_share),
            ("train/balance_loss", metrics.balance_loss),
            ("train/expert_load", metrics.expert_load),
            ("train/idle_experts", metrics.idle_experts),
        ];
        let found = optional.into_iter().filter_map(|(tag, value)| Some((tag, value?)));
        let values = [
            ("train/loss", metrics.loss),
            ("train/lr", metrics.lr),
            ("train/grad_norm", metrics.grad_norm),
            ("train/epoch", metrics.epoch),
            ("train/skipped", f64::from(u8::from(metrics.skipped))),
            ("speed/tokens_per_s", metrics.tokens_per_s),
            ("memory/gib", metrics.memory_bytes as f64 / (1u64 << 30) as f64),
        ];
        self.scalars(wall_time_s, metrics.step, values.into_iter().chain(found))
    }

    fn eval(&mut self, wall_time_s: f64, step: u64, metrics: &EvalMetrics) -> io::Result<()> {
        let perplexity = metrics.perplexity().map(|perplexity| ("eval/perplexity", perplexity));
        let values = [("eval/loss", metrics.loss), ("eval/accuracy", metrics.accuracy)];
        self.scalars(wall_time_s, step, values.into_iter().chain(perplexity))
    }

    /// Values of one step, each a point of the curve that its tag names.
    pub fn scalars<'a>(
        &mut self,
        wall_time_s: f64,
        step: u64,
        values: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> io::Result<()> {
        let mut summary = Message::default();
        for (tag, simple_value) in values {
            let mut value = Message::default();
            value.bytes(1, tag.as_bytes());
            value.float(2, simple_value as f32);
            summary.bytes(1, &value.0);
        }
        let mut event = event(wall_time_s, step);
        event.bytes(5, &summary.0);
        self.record(&event.0)
    }

    /// In one call, so that a reader finds whole records only.
    fn record(&mut self, message: &[u8]) -> io::Result<()> {
        let length = (message.len() as u64).to_le_bytes();
        let (of_length, of_message) = (masked_crc(&length).to_le_bytes(), masked_crc(message).to_le_bytes());
        self.out.write_all(&[&length[..], &of_length, message, &of_message].concat())
    }
}

impl<W: Write> Sink for EventWriter<W> {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        match event {
            RunEvent::Step { time_s, metrics, .. } => {
                self.step(*time_s, metrics)?;
                if self.flushed_s.is_some_and(|flushed_s| (flushed_s..flushed_s + FLUSH_INTERVAL_S).contains(time_s)) {
                    return Ok(());
                }
                self.flushed_s = Some(*time_s);
            }
            RunEvent::Evaluation { time_s, step, metrics } => self.eval(*time_s, *step, metrics)?,
            RunEvent::Checkpoint { .. } => (),
            _ => return Ok(()),
        }
        self.out.flush()
    }
}

/// A name that sorts by time. TensorBoard reads files whose name contains `tfevents`.
pub fn event_file_name(wall_time_s: u64, process: u32) -> String {
    format!("events.out.tfevents.{wall_time_s:010}.{process}.evenkeel")
}

/// Whether a file has a name that [`event_file_name`] gives.
pub fn is_event_file_name(name: &str) -> bool {
    name.starts_with("events.out.tfevents.") && name.ends_with(".evenkeel")
}

/// The bytes of an event file up to the first event of a later step, or to what is not a whole record.
pub fn events_until(file: &[u8], step: u64) -> &[u8] {
    let mut end = 0;
    while let Some(message) = first_record(&file[end..])
        && step_of(message).is_some_and(|found| found <= step)
    {
        end += message.len() + RECORD_BYTES;
    }
    &file[..end]
}

/// Bytes of a record beside its message.
const RECORD_BYTES: usize = 16;

fn first_record(bytes: &[u8]) -> Option<&[u8]> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let message = rest.get(4..)?.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let checksum = rest.get(4 + message.len()..)?.first_chunk::<4>()?;
    (u32::from_le_bytes(*checksum) == masked_crc(message)).then_some(message)
}

/// An event begins with its time, a double, and its step, a varint, as [`event`] writes them.
fn step_of(message: &[u8]) -> Option<u64> {
    let varint = message.get(9..)?.strip_prefix(&[2 << 3])?;
    let length = varint.iter().position(|byte| byte & 0x80 == 0)?;
    let bytes = varint[..=length].iter().rev();
    (length < 9).then(|| bytes.fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f)))
}

fn event(wall_time_s: f64, step: u64) -> Message {
    let mut event = Message::default();
    event.double(1, wall_time_s);
    event.integer(2, step);
    event
}

/// A protocol buffer message: fields, each behind its number and its wire type.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn integer(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.varint(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
    }

    /// Seven bits a byte, the lowest first; all bytes but the last have the highest bit set.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// Masked, because the checksum of data that holds its own checksum says little.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(bytes: &[u8]) -> u32 {
    /// Castagnoli's polynomial, its bits reversed.
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reads;

    #[test]
    fn checksums_are_those_of_the_standard() {
        let ascending: Vec<u8> = (0..32).collect();
        let cases: [(&[u8], u32); 4] = [
            (b"", 0),
            (b"123456789", 0xe306_9283),
            // From the appendix of RFC 3720.
            (&[0; 32], 0x8a91_36aa),
            (&ascending, 0x46dd_794e),
        ];
        for (bytes, expected) in cases {
            assert_eq!(crc32c(bytes), expected, "{bytes:?}");
        }
    }

    /// Checked once against TensorBoard's own reader, which gave these steps, tags and values back.
    #[test]
    fn a_file_has_the_bytes_that_tensorboard_reads() {
        let mut out = Vec::new();
        let mut events = EventWriter::new(&mut out, 1.5e9).expect("memory can be written");
        events.scalars(1.5e9 + 0.5, 300, [("loss", 2.5), ("lr", f64::NAN)]).expect("memory can be written");
        let hex: String = out.iter().map(|byte| format!("{byte:02x}")).collect();
        let version = "1a00000000000000129bd82d09000000c00b5ad64110001a0d627261696e2e4576656e743a327e57b311";
        let scalars = "2600000000000000734fe30009000020c00b5ad64110ac022a180a0b0a046c6f737315000020400a090a026c72150000c07f7704f734";
        assert_eq!(hex, format!("{version}{scalars}"));
    }

    #[test]
    fn a_file_is_cut_behind_a_step_or_before_what_is_broken() {
        let mut out = Vec::new();
        let mut ends = Vec::new();
        let steps = [1, 127, 128, 300, 300, 1 << 40];
        for count in 0..=steps.len() {
            out.clear();
            let mut events = EventWriter::new(&mut out, 1.0).expect("memory can be written");
            for &step in &steps[..count] {
                events.scalars(2.0, step, [("loss", 2.5)]).expect("memory can be written");
            }
            ends.push(out.len());
        }
        let cases = [(0, 0), (1, 1), (126, 1), (127, 2), (299, 3), (300, 5), (u64::MAX, 6)];
        for (step, kept) in cases {
            assert_eq!(events_until(&out, step).len(), ends[kept], "{step}");
        }
        for (name, bytes) in [("cut", &out[..ends[3] - 1]), ("empty", &[][..])] {
            let kept = if name == "cut" { ends[2] } else { 0 };
            assert_eq!(events_until(bytes, u64::MAX).len(), kept, "{name}");
        }
        out[ends[1] + 20] ^= 1;
        assert_eq!(events_until(&out, u64::MAX).len(), ends[1], "a checksum does not hold");
        out[..8].fill(0xff);
        assert_eq!(events_until(&out, u64::MAX).len(), 0, "a length beyond the file");
    }

    #[test]
    fn steps_and_evaluations_are_points_of_named_curves() {
        let mut out = Vec::new();
        let mut events = EventWriter::new(&mut out, 0.0).expect("memory can be written");
        events.step(1.0, &crate::example()).expect("memory can be written");
        events
            .eval(2.0, 120, &EvalMetrics { reads: Reads::Tokens, loss: 1.0, accuracy: 0.5 })
            .expect("memory can be written");
        let text = String::from_utf8_lossy(&out);
        for tag in ["train/loss", "train/lr", "train/grad_norm", "speed/peak_share", "eval/perplexity", "eval/accuracy"]
        {
            assert!(text.contains(tag), "{tag}");
        }
    }

    #[test]
    fn steps_reach_the_system_now_and_then_evaluations_and_checkpoints_at_once() {
        let step = |time_s: f64| RunEvent::Step { time_s, metrics: crate::example(), ranks: Vec::new() };
        let metrics = EvalMetrics { reads: Reads::Tokens, loss: 1.0, accuracy: 0.5 };
        let mut events = EventWriter::new(Flushes(0), 0.0).expect("it takes all bytes");
        for (event, flushes) in [
            (step(100.0), 1),
            (step(104.0), 1),
            (RunEvent::Evaluation { time_s: 104.5, step: 1, metrics }, 2),
            (step(105.0), 3),
            (RunEvent::Note { line: String::new() }, 3),
            (RunEvent::Checkpoint { step: 1, path: String::new() }, 4),
            // The clock was set back.
            (step(90.0), 5),
        ] {
            events.take(&event).expect("it takes all bytes");
            assert_eq!(events.out.0, flushes, "{event:?}");
        }
    }

    /// Counts how often it is flushed.
    struct Flushes(usize);

    impl Write for Flushes {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0 += 1;
            Ok(())
        }
    }
}
