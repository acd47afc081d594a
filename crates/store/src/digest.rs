//! Digests of bytes, taken while they are written, that tell a damaged file from a whole one.
//!
//! XXH3 with 128 bits runs at the speed of memory, and a fault of a disk, a cable or a copy that leaves the digest unchanged is
//! less likely than any other fault. It does not prevent forgeries.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, Serializer};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Each block of a file has its own digest. A terabyte has a million of them.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;

const HEX_CHARS: usize = 32;

/// Bytes of numbers that are digested at a time.
const NUMBER_BYTES: usize = 4096;

/// A digest of bytes: the same on every machine and in every version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(u128);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(xxh3_128(bytes))
    }

    /// The digest of numbers in little-endian order.
    pub fn of_numbers(numbers: impl IntoIterator<Item = u32>) -> Digest {
        let mut all = Xxh3::new();
        let mut piece = Vec::with_capacity(NUMBER_BYTES);
        for number in numbers {
            piece.extend_from_slice(&number.to_le_bytes());
            if piece.len() == NUMBER_BYTES {
                all.update(&piece);
                piece.clear();
            }
        }
        all.update(&piece);
        Digest(all.digest128())
    }

    /// Half of it, for exchanges of a single number.
    pub fn short(self) -> u64 {
        self.0 as u64
    }

    /// The digest of a file: that of its blocks' digests in big-endian order.
    pub(crate) fn of_blocks(blocks: &[Digest]) -> Digest {
        let mut all = Xxh3::new();
        blocks.iter().for_each(|block| all.update(&block.0.to_be_bytes()));
        Digest(all.digest128())
    }

    /// Accepts exactly what `Display` writes: 32 lower-case digits.
    pub(crate) fn from_hex(text: &[u8]) -> Option<Digest> {
        let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let text =
            str::from_utf8(text).ok().filter(|text| text.len() == HEX_CHARS && text.bytes().all(|b| is_digit(&b)))?;
        u128::from_str_radix(text, 16).ok().map(Digest)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:0width$x}", self.0, width = HEX_CHARS)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = <std::borrow::Cow<str>>::deserialize(deserializer)?;
        Digest::from_hex(text.as_bytes()).ok_or_else(|| D::Error::custom("expected a digest of 32 hexadecimal digits"))
    }
}

/// Digests a file's bytes block by block as they are written.
pub(crate) struct BlockDigester {
    /// The state of the block that is not yet full, and its bytes so far.
    current: Box<Xxh3>,
    current_bytes: usize,
    full: Vec<Digest>,
}

/// The size and digests of a complete file.
#[derive(Debug)]
pub(crate) struct FileDigests {
    pub bytes: u64,
    pub blocks: Vec<Digest>,
}

impl BlockDigester {
    pub fn new() -> BlockDigester {
        BlockDigester { current: Box::new(Xxh3::new()), current_bytes: 0, full: Vec::new() }
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (fits, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.current_bytes));
            self.current.update(fits);
            self.current_bytes += fits.len();
            if self.current_bytes == BLOCK_BYTES {
                self.end_block();
            }
            bytes = rest;
        }
    }

    pub fn finish(mut self) -> FileDigests {
        let bytes = (self.full.len() * BLOCK_BYTES + self.current_bytes) as u64;
        if self.current_bytes > 0 {
            self.end_block();
        }
        FileDigests { bytes, blocks: self.full }
    }

    fn end_block(&mut self) {
        self.full.push(Digest(self.current.digest128()));
        self.current.reset();
        self.current_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_do_not_depend_on_the_pieces_in_which_bytes_come() {
        let bytes: Vec<u8> = (0..2 * BLOCK_BYTES + 12_345).map(|i| (i * i % 251) as u8).collect();
        for length in [0, 1, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, bytes.len()] {
            let expected: Vec<Digest> = bytes[..length].chunks(BLOCK_BYTES).map(Digest::of).collect();
            for piece in [4093, BLOCK_BYTES, 3 * BLOCK_BYTES] {
                let mut digester = BlockDigester::new();
                bytes[..length].chunks(piece).for_each(|piece| digester.update(piece));
                let found = digester.finish();
                assert_eq!((found.bytes, &found.blocks), (length as u64, &expected), "{length} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn a_digest_of_numbers_is_that_of_their_bytes() {
        for count in [0, 1, 1023, 1024, 1025, 5000u32] {
            let numbers = || (0..count).map(|n| n.wrapping_mul(2_654_435_761));
            let bytes: Vec<u8> = numbers().flat_map(u32::to_le_bytes).collect();
            assert_eq!(Digest::of_numbers(numbers()), Digest::of(&bytes), "{count}");
        }
    }

    #[test]
    fn a_digest_is_the_published_one_and_reads_back_only_as_it_is_written() {
        // The reference implementation's digest of no bytes.
        assert_eq!(Digest::of(b"").to_string(), "99aa06d3014798d86001c324468d497f");
        let digest = Digest(0xab);
        let text = digest.to_string();
        assert_eq!(Digest::from_hex(text.as_bytes()), Some(digest));
        for other in [&text[1..], &text.to_uppercase(), &format!("+{}", &text[1..]), &format!("{text}0"), ""] {
            assert_eq!(Digest::from_hex(other.as_bytes()), None, "{other}");
        }
    }
}
