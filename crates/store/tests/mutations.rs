//! Thousands of damaged files: opening one never panics, never allocates beyond reason, and never accepts what the
//! reference implementation would read otherwise. One test alone, because it watches the process's whole memory.

mod forge;

use evenkeel_store::SafeTensorsFile;
use fastrand::Rng;
use forge::{entry, file, header};
use peak_alloc::PeakAlloc;
use safetensors::SafeTensors;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const ROUNDS: usize = 30_000;
const PEAK_BYTES: usize = 64 << 10;
const LENGTHS: [u64; 8] = [0, 1, 7, 8, 100_000_000, 100_000_001, 1 << 63, u64::MAX];
const NUMBERS: [&str; 6] = ["0", "1", "4294967296", "18446744073709551615", "-1", "1e400"];

#[test]
fn damaged_files_are_refused_or_read_like_the_reference_does() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("damaged.safetensors");
    let original = valid_file();
    let mut rng = Rng::with_seed(2);
    let mut accepted = 0;
    for round in 0..ROUNDS {
        let bytes = if round < original.len() { original[..round].to_vec() } else { damage(&original, &mut rng) };
        std::fs::write(&path, &bytes).unwrap();
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        let opened = SafeTensorsFile::open(&path);
        let peak_bytes = ALLOCATOR.peak_usage() - before;
        assert!(peak_bytes < PEAK_BYTES, "{peak_bytes} bytes allocated for a file of {}", bytes.len());
        if let Ok(opened) = opened {
            accepted += 1;
            agrees_with_the_reference(&opened, &bytes);
        }
        // Unlinked, because writing into a file that is still mapped would change it under the map.
        std::fs::remove_file(&path).unwrap();
    }
    // Damage to the data alone goes unseen, and must: both sides of every check have been visited.
    assert!((ROUNDS / 100..ROUNDS / 2).contains(&accepted), "{accepted} accepted");
}

fn valid_file() -> Vec<u8> {
    let entries = [
        r#""__metadata__":{"format":"pt"}"#.to_owned(),
        entry("embed.weight", "F32", &[3, 5], 0, 60),
        entry("norm.weight", "BF16", &[5], 60, 70),
        entry("empty", "I64", &[2, 0], 70, 70),
        entry("scale", "F64", &[], 70, 78),
        entry("mask", "BOOL", &[2, 1, 3], 78, 84),
    ];
    file(&header(&entries), &(0..84).collect::<Vec<u8>>())
}

fn damage(original: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for _ in 0..rng.usize(1..=3) {
        match rng.u8(..7) {
            0 => flip(&mut bytes, rng),
            1 => bytes.truncate(rng.usize(..=bytes.len())),
            2 => bytes.extend((0..rng.usize(1..20)).map(|_| 0)),
            3 if bytes.len() >= 8 => bytes[..8].copy_from_slice(&rng.choice(LENGTHS).unwrap().to_le_bytes()),
            4 => change_digit(&mut bytes, rng),
            5 => replace_number(&mut bytes, rng),
            _ => repeat_piece(&mut bytes, rng),
        }
    }
    bytes
}

fn flip(bytes: &mut [u8], rng: &mut Rng) {
    if let Some(byte) = rng.choice(bytes) {
        *byte ^= 1 << rng.u8(..8);
    }
}

fn change_digit(bytes: &mut [u8], rng: &mut Rng) {
    let digits: Vec<&mut u8> = bytes.iter_mut().filter(|byte| byte.is_ascii_digit()).collect();
    if let Some(digit) = rng.choice(digits) {
        *digit = rng.u8(b'0'..=b'9');
    }
}

/// Puts another number in a number's place and corrects the announced length, so that the damage gets past it.
fn replace_number(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let begins: Vec<usize> = (9..bytes.len()).filter(|&i| matches!(bytes[i - 1], b'[' | b',')).collect();
    let Some(begin) = rng.choice(begins) else { return };
    let digits = bytes[begin..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = rng.choice(NUMBERS).unwrap();
    splice(bytes, begin..begin + digits, number.as_bytes());
}

fn repeat_piece(bytes: &mut Vec<u8>, rng: &mut Rng) {
    if bytes.len() <= 8 {
        return;
    }
    let (begin, length) = (rng.usize(8..bytes.len()), rng.usize(..80));
    let piece = bytes[begin..bytes.len().min(begin + length)].to_vec();
    let at = rng.usize(8..bytes.len());
    splice(bytes, at..at, &piece);
}

fn splice(bytes: &mut Vec<u8>, range: std::ops::Range<usize>, with: &[u8]) {
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let header_bytes = header_bytes.wrapping_add(with.len() as u64).wrapping_sub(range.len() as u64);
    bytes.splice(range, with.iter().copied());
    bytes[..8].copy_from_slice(&header_bytes.to_le_bytes());
}

fn agrees_with_the_reference(opened: &SafeTensorsFile, bytes: &[u8]) {
    let reference = SafeTensors::deserialize(bytes).unwrap();
    let mut names = reference.names();
    names.sort_unstable();
    assert_eq!(opened.names().collect::<Vec<_>>(), names);
    for name in names {
        let (ours, theirs) = (opened.tensor(name).unwrap(), reference.tensor(name).unwrap());
        assert_eq!(ours.dtype().name(), theirs.dtype().to_string());
        assert_eq!(ours.shape(), theirs.shape());
        assert_eq!(ours.bytes(), theirs.data());
    }
}
