//! Finds every occurrence of a separator in a stream of bytes, overlapping ones too (Knuth, Morris and Pratt).

#[derive(Debug)]
pub(super) struct Separator {
    bytes: Vec<u8>,
    /// For each length of a match so far, the longest shorter one that it ends with.
    shorter: Vec<usize>,
}

impl Separator {
    /// # Panics
    /// If it is empty.
    pub fn new(text: &str) -> Separator {
        let bytes = text.replace("\r\n", "\n").into_bytes();
        assert!(!bytes.is_empty(), "an empty separator");
        let mut separator = Separator { shorter: vec![0; bytes.len() + 1], bytes };
        let mut matched = 0;
        for length in 1..separator.bytes.len() {
            matched = separator.step(matched, separator.bytes[length]);
            separator.shorter[length + 1] = matched;
        }
        separator
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// How many of the separator's bytes the stream ends with after this byte; all of them mean an occurrence.
    pub fn step(&self, mut matched: usize, byte: u8) -> usize {
        loop {
            if self.bytes.get(matched) == Some(&byte) {
                return matched + 1;
            }
            if matched == 0 {
                return 0;
            }
            matched = self.shorter[matched];
        }
    }
}
