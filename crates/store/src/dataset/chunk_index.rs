//! Numbers the chunks of several files or row groups consecutively.

/// Cumulative numbers of chunks.
#[derive(Debug, Default)]
pub(super) struct ChunkIndex {
    /// The number after the last chunk of each part.
    ends: Vec<usize>,
}

impl ChunkIndex {
    pub fn new(counts: impl IntoIterator<Item = u64>) -> ChunkIndex {
        let mut end = 0usize;
        let ends = counts
            .into_iter()
            .map(|count| {
                // Sizes claimed by a damaged file can be absurd; reading such a chunk is then an error.
                end = end.saturating_add(usize::try_from(count).unwrap_or(usize::MAX));
                end
            })
            .collect();
        ChunkIndex { ends }
    }

    pub fn count(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The part that holds a chunk, and the chunk's number there.
    pub fn locate(&self, chunk: usize) -> (usize, usize) {
        assert!(chunk < self.count(), "chunk {chunk} of {}", self.count());
        let part = self.ends.partition_point(|&end| end <= chunk);
        let begin = if part == 0 { 0 } else { self.ends[part - 1] };
        (part, chunk - begin)
    }
}
