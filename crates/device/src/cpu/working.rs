//! The memory that kernels work with beside the arena, known from their shapes.

/// The page size of working memory, independent of the system's.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The memory that a device's team keeps for its kernels. It grows to the largest request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkingMemory {
    /// Per thread.
    pub thread_bytes: u64,
    /// Shared by all tasks of a kernel, such as partial sums.
    pub common_bytes: u64,
    /// The packed left and right operand of a product.
    pub operand_bytes: [u64; 2],
}

impl WorkingMemory {
    pub(crate) fn of_thread(floats: usize) -> WorkingMemory {
        WorkingMemory { thread_bytes: in_pages(floats), ..WorkingMemory::default() }
    }

    pub(crate) fn of_team(floats: usize) -> WorkingMemory {
        WorkingMemory { common_bytes: in_pages(floats), ..WorkingMemory::default() }
    }

    pub(crate) fn with_operands(self, floats: [usize; 2]) -> WorkingMemory {
        WorkingMemory { operand_bytes: floats.map(in_pages), ..self }
    }

    /// The larger of each part.
    pub fn max(self, other: WorkingMemory) -> WorkingMemory {
        let [left, right] = [0, 1].map(|side: usize| self.operand_bytes[side].max(other.operand_bytes[side]));
        WorkingMemory {
            thread_bytes: self.thread_bytes.max(other.thread_bytes),
            common_bytes: self.common_bytes.max(other.common_bytes),
            operand_bytes: [left, right],
        }
    }

    /// The total for a team of `threads`.
    pub fn bytes(&self, threads: usize) -> u64 {
        self.thread_bytes * threads as u64 + self.common_bytes + self.operand_bytes.iter().sum::<u64>()
    }
}

/// No request is for less than a page.
fn in_pages(floats: usize) -> u64 {
    (floats * size_of::<f32>()).next_multiple_of(PAGE_BYTES).max(PAGE_BYTES) as u64
}
