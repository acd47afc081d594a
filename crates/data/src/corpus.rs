//! A corpus that needs no file: small stories and sums, written by a seeded generator.
//!
//! Its sentences agree with each other: things are where they were put, belong to their new owners, and sums are right. A model
//! can therefore learn something from it, and a test can check that it did.

use std::fmt::Write;

use evenkeel_random::Random;

use crate::source::{Record, Source};

const CHUNK_RECORDS: usize = 1024;
/// Chunks of an endless corpus, about 10¹⁵ records.
const ENDLESS_CHUNKS: usize = 1 << 40;
/// The purpose of the key, so that no other use shares its random numbers.
const CORPUS: u64 = 0x636f_7270_7573;

const NAMES: [&str; 24] = [
    "Mara", "Tomas", "Ines", "Jonas", "Lena", "Piet", "Nora", "Emil", "Ada", "Oskar", "Greta", "Hugo", "Selma",
    "Anton", "Klara", "Felix", "Runa", "Mikko", "Vera", "Levi", "Tilda", "Bruno", "Edda", "Kaspar",
];
const PLACES: [&str; 20] = [
    "kitchen",
    "garden",
    "harbour",
    "library",
    "attic",
    "market",
    "barn",
    "school",
    "workshop",
    "cellar",
    "station",
    "bakery",
    "lighthouse",
    "orchard",
    "tower",
    "office",
    "mill",
    "boathouse",
    "museum",
    "stable",
];
const THINGS: [&str; 24] = [
    "lamp", "rope", "map", "kettle", "drum", "basket", "compass", "letter", "blanket", "hammer", "violin", "mirror",
    "ladder", "coin", "book", "key", "bottle", "kite", "clock", "scarf", "bell", "shovel", "box", "boat",
];
const COLOURS: [&str; 10] = ["red", "blue", "green", "yellow", "white", "black", "brown", "grey", "old", "small"];
const MOODS: [&str; 8] =
    ["early", "quietly", "after lunch", "in the rain", "at noon", "with a smile", "slowly", "again"];

/// Stories and sums without end, or a given number of them.
#[derive(Clone, Copy, Debug)]
pub struct Corpus {
    seed: u64,
    records: Option<u64>,
}

impl Corpus {
    /// With no number of records, the corpus does not end.
    pub fn new(seed: u64, records: Option<u64>) -> Corpus {
        Corpus { seed, records }
    }

    /// The text of one record.
    pub fn text(&self, index: u64) -> String {
        let mut random = Random::new(&[CORPUS, self.seed, index]);
        let mut text = String::with_capacity(320);
        match random.below(4) {
            0 => write_sums(&mut random, &mut text),
            1 => write_counting(&mut random, &mut text),
            2 => write_gift(&mut random, &mut text),
            _ => write_journey(&mut random, &mut text),
        }
        text
    }

    fn chunk_count(&self) -> usize {
        let Some(records) = self.records else { return ENDLESS_CHUNKS };
        records.div_ceil(CHUNK_RECORDS as u64).min(ENDLESS_CHUNKS as u64) as usize
    }
}

impl Source for Corpus {
    fn chunks(&self) -> usize {
        self.chunk_count()
    }

    fn read(&self, chunk: usize) -> Result<Vec<Record>, evenkeel_store::Error> {
        let first = chunk as u64 * CHUNK_RECORDS as u64;
        let end = (first + CHUNK_RECORDS as u64).min(self.records.unwrap_or(u64::MAX));
        Ok((first..end).map(|index| Record::Text(self.text(index))).collect())
    }
}

/// Lines such as `12 + 7 = 19.`
fn write_sums(random: &mut Random, out: &mut String) {
    for _ in 0..4 + random.below(8) {
        let (a, b) = (random.below(100), random.below(100));
        let (more, less) = (a.max(b), a.min(b));
        match random.below(3) {
            0 | 1 => put(out, &[Word::Number(a), " + ".into(), b.into(), " = ".into(), (a + b).into(), ".\n".into()]),
            _ => put(out, &[more.into(), " - ".into(), less.into(), " = ".into(), (more - less).into(), ".\n".into()]),
        }
    }
}

/// Someone has some things and gets or gives away others.
fn write_counting(random: &mut Random, out: &mut String) {
    let [name, other] = two(random, &NAMES);
    let (thing, had, change) = (random.pick(&THINGS), 2 + random.below(18), 1 + random.below(9));
    let plural = plural(thing);
    put(out, &[name.into(), " has ".into(), had.into(), " ".into(), thing.into(), plural.into(), ". ".into()]);
    let change = change.min(had - 1);
    let (verb, link, left) = if random.below(2) == 0 {
        (" gets ", " more from ", had + change)
    } else {
        (" gives ", " of them to ", had - change)
    };
    put(out, &[name.into(), verb.into(), change.into(), link.into(), other.into(), ". ".into()]);
    put(out, &["How many ".into(), thing.into(), plural.into(), " does ".into(), name.into(), " have now? ".into()]);
    let ending = if left == 1 { "" } else { plural };
    put(out, &[name.into(), " has ".into(), left.into(), " ".into(), thing.into(), ending.into(), ".\n".into()]);
}

/// A thing changes hands; who has it, and from whom?
fn write_gift(random: &mut Random, out: &mut String) {
    let [giver, taker] = two(random, &NAMES);
    let (colour, thing, place) = (random.pick(&COLOURS), random.pick(&THINGS), random.pick(&PLACES));
    let found = random.pick(&["found", "bought", "picked up", "repaired"]);
    put(out, &[giver.into(), " ".into(), found.into(), " a ".into(), colour.into(), " ".into(), thing.into()]);
    put(out, &[" in the ".into(), place.into(), ". ".into(), taker.into(), " came by ".into()]);
    put(
        out,
        &[random.pick(&MOODS).into(), ", and ".into(), giver.into(), " gave the ".into(), thing.into(), " to ".into()],
    );
    put(out, &[taker.into(), ". ".into()]);
    let mut owner = taker;
    if random.below(2) == 0 {
        let [next, spare] = two(random, &NAMES);
        let next = if next == taker { spare } else { next };
        put(out, &["Later ".into(), taker.into(), " handed it on to ".into(), next.into(), ". ".into()]);
        owner = next;
    }
    match random.below(3) {
        0 => put(out, &["Who has the ".into(), thing.into(), " now? ".into(), owner.into(), " has the ".into()]),
        1 => {
            put(out, &["What did ".into(), giver.into(), " give to ".into(), taker.into(), "? ".into(), giver.into()]);
            put(out, &[" gave ".into(), taker.into(), " the ".into(), colour.into(), " ".into()]);
        }
        _ => {
            put(
                out,
                &["Where was the ".into(), thing.into(), " at first? The ".into(), place.into(), " had the ".into()],
            );
        }
    }
    put(out, &[thing.into(), ".\n".into()]);
}

/// Someone carries a thing from place to place and leaves it somewhere; where are both?
fn write_journey(random: &mut Random, out: &mut String) {
    let [name, other] = two(random, &NAMES);
    let [start, middle] = two(random, &PLACES);
    let (colour, thing) = (random.pick(&COLOURS), random.pick(&THINGS));
    put(out, &[name.into(), " took the ".into(), colour.into(), " ".into(), thing.into(), " from the ".into()]);
    put(
        out,
        &[
            start.into(),
            " and walked to the ".into(),
            middle.into(),
            " ".into(),
            random.pick(&MOODS).into(),
            ". ".into(),
        ],
    );
    let [end, spare] = two(random, &PLACES);
    let end = if end == middle { spare } else { end };
    let left = random.below(2) == 0;
    if left {
        put(out, &["There ".into(), name.into(), " left the ".into(), thing.into(), ", met ".into(), other.into()]);
        put(out, &[" and went on to the ".into(), end.into(), ". ".into()]);
    } else {
        put(out, &["There ".into(), name.into(), " met ".into(), other.into(), ", and ".into(), name.into()]);
        put(out, &[" carried the ".into(), thing.into(), " on to the ".into(), end.into(), ". ".into()]);
    }
    let place = if left { middle } else { end };
    match random.below(2) {
        0 => {
            put(out, &["Where is the ".into(), thing.into(), "? The ".into(), thing.into(), " is in the ".into()]);
            put(out, &[place.into(), ".\n".into()]);
        }
        _ => {
            put(out, &["Where is ".into(), name.into(), "? ".into(), name.into(), " is in the ".into()]);
            put(out, &[end.into(), ".\n".into()]);
        }
    }
}

/// A text or a number: formatting through `write!` was the generator's main cost.
#[derive(Clone, Copy)]
enum Word {
    Text(&'static str),
    Number(u64),
}

impl From<&'static str> for Word {
    fn from(text: &'static str) -> Word {
        Word::Text(text)
    }
}

impl From<u64> for Word {
    fn from(number: u64) -> Word {
        Word::Number(number)
    }
}

fn put(out: &mut String, words: &[Word]) {
    for word in words {
        match word {
            Word::Text(text) => out.push_str(text),
            Word::Number(number) => write!(out, "{number}").expect("a String takes everything"),
        }
    }
}

fn plural(thing: &str) -> &'static str {
    if thing.ends_with('x') || thing.ends_with("ss") { "es" } else { "s" }
}

/// Two different choices.
fn two(random: &mut Random, choices: &[&'static str]) -> [&'static str; 2] {
    let count = choices.len() as u64;
    let first = random.below(count);
    let second = (first + 1 + random.below(count - 1)) % count;
    [choices[first as usize], choices[second as usize]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_corpus_of_so_many_records_has_so_many() {
        for (records, chunks) in [(0, 0), (1, 1), (1024, 1), (1025, 2), (5000, 5)] {
            let corpus = Corpus::new(1, Some(records));
            assert_eq!(corpus.chunks(), chunks);
            let read: usize = (0..chunks).map(|chunk| corpus.read(chunk).unwrap().len()).sum();
            assert_eq!(read as u64, records);
        }
        assert_eq!(Corpus::new(1, None).read((1 << 40) - 1).unwrap().len(), CHUNK_RECORDS);
    }

    #[test]
    fn the_same_seed_writes_the_same_text_and_another_does_not() {
        let read = |seed| Corpus::new(seed, None).read(3).unwrap();
        assert_eq!(read(1), read(1));
        assert_ne!(read(1), read(2));
    }

    #[test]
    fn every_sum_is_right() {
        let corpus = Corpus::new(5, None);
        let mut sums = 0;
        for line in (0..2000).flat_map(|index| corpus.text(index).lines().map(str::to_owned).collect::<Vec<_>>()) {
            let words: Vec<&str> = line.trim_end_matches('.').split(' ').collect();
            let [a, sign, b, "=", result] = words[..] else { continue };
            let [a, b, result] = [a, b, result].map(|number| number.parse::<i64>().unwrap());
            assert_eq!(result, if sign == "+" { a + b } else { a - b }, "{line}");
            sums += 1;
        }
        assert!(sums > 1000, "{sums}");
    }

    /// Reads a story again, sentence by sentence, and answers its question without the generator.
    #[test]
    fn every_question_about_an_owner_or_a_place_is_answered_right() {
        let corpus = Corpus::new(6, None);
        let mut answered = 0;
        for text in (0..4000).map(|index| corpus.text(index)) {
            let between = |before: &str, after: &str| -> Option<String> {
                let start = text.rfind(before)? + before.len();
                Some(text[start..start + text[start..].find(after)?].to_owned())
            };
            let expected = if text.contains("Who has the ") {
                between("handed it on to ", ".")
                    .or_else(|| between(" to ", ". "))
                    .map(|owner| format!("{owner} has the "))
            } else if text.contains("Where is the ") {
                let left = text.contains(" left the ");
                let place = if left { between("walked to the ", " ") } else { between(" on to the ", ".") };
                place.map(|place| format!(" is in the {place}.\n"))
            } else {
                continue;
            };
            let expected = expected.unwrap_or_else(|| panic!("an answer in {text}"));
            let answer = &text[text.find('?').unwrap()..];
            assert!(answer.contains(&expected), "{text} should say {expected}");
            answered += 1;
        }
        assert!(answered > 500, "{answered}");
    }
}
