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

use super::{EvalMetrics, StepMetrics};

/// Writes one event file. TensorBoard finds it by its name, see [`event_file_name`].
pub struct EventWriter<W: Write> {
    out: W,
}

impl<W: Write> EventWriter<W> {
    /// Writes the event that every file begins with. `wall_time_s` is since 1970.
    pub fn new(out: W, wall_time_s: f64) -> io::Result<EventWriter<W>> {
        let mut writer = EventWriter { out };
        let mut event = event(wall_time_s, 0);
        event.bytes(3, b"brain.Event:2");
        writer.record(&event.0)?;
        Ok(writer)
    }

    pub fn step(&mut self, wall_time_s: f64, metrics: &StepMetrics) -> io::Result<()> {
        let peak_share = metrics.peak_share.map(|share| ("speed/peak_share", share));
        let values = [
            ("train/loss", metrics.loss),
            ("train/lr", metrics.lr),
            ("train/grad_norm", metrics.grad_norm),
            ("train/epoch", metrics.epoch as f64),
            ("train/skipped", f64::from(u8::from(metrics.skipped))),
            ("speed/tokens_per_s", metrics.tokens_per_s),
            ("memory/gib", metrics.memory_bytes as f64 / (1u64 << 30) as f64),
        ];
        self.scalars(wall_time_s, metrics.step, values.into_iter().chain(peak_share))
    }

    pub fn eval(&mut self, wall_time_s: f64, step: u64, metrics: &EvalMetrics) -> io::Result<()> {
        let values = [
            ("eval/loss", metrics.loss),
            ("eval/perplexity", metrics.perplexity()),
            ("eval/accuracy", metrics.accuracy),
        ];
        self.scalars(wall_time_s, step, values)
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

    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// In one call, so that a reader finds whole records only.
    fn record(&mut self, message: &[u8]) -> io::Result<()> {
        let length = (message.len() as u64).to_le_bytes();
        let (of_length, of_message) = (masked_crc(&length).to_le_bytes(), masked_crc(message).to_le_bytes());
        self.out.write_all(&[&length[..], &of_length, message, &of_message].concat())
    }
}

/// A name that sorts by time. TensorBoard reads files whose name contains `tfevents`.
pub fn event_file_name(wall_time_s: u64, process: u32) -> String {
    format!("events.out.tfevents.{wall_time_s:010}.{process}.evenkeel")
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
        events.flush().expect("memory can be written");
        let hex: String = out.iter().map(|byte| format!("{byte:02x}")).collect();
        let version = "1a00000000000000129bd82d09000000c00b5ad64110001a0d627261696e2e4576656e743a327e57b311";
        let scalars = "2600000000000000734fe30009000020c00b5ad64110ac022a180a0b0a046c6f737315000020400a090a026c72150000c07f7704f734";
        assert_eq!(hex, format!("{version}{scalars}"));
    }

    #[test]
    fn steps_and_evaluations_are_points_of_named_curves() {
        let mut out = Vec::new();
        let mut events = EventWriter::new(&mut out, 0.0).expect("memory can be written");
        events.step(1.0, &super::super::example()).expect("memory can be written");
        events.eval(2.0, 120, &EvalMetrics { loss: 1.0, accuracy: 0.5 }).expect("memory can be written");
        let text = String::from_utf8_lossy(&out);
        for tag in ["train/loss", "train/lr", "train/grad_norm", "speed/peak_share", "eval/perplexity", "eval/accuracy"]
        {
            assert!(text.contains(tag), "{tag}");
        }
    }
}
