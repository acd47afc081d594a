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
    /// The three above of each thread's own team, where threads compute whole products alone.
    pub alone_bytes: [u64; 4],
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

    /// The same for each thread's own team.
    pub(crate) fn alone(self) -> WorkingMemory {
        WorkingMemory { alone_bytes: self.parts(), ..WorkingMemory::default() }
    }

    /// The bytes of a team of one thread, part by part.
    pub(crate) fn parts(&self) -> [u64; 4] {
        let [left, right] = self.operand_bytes;
        [self.thread_bytes, self.common_bytes, left, right]
    }

    /// The larger of each part.
    pub fn max(self, other: WorkingMemory) -> WorkingMemory {
        WorkingMemory {
            thread_bytes: self.thread_bytes.max(other.thread_bytes),
            common_bytes: self.common_bytes.max(other.common_bytes),
            operand_bytes: larger(self.operand_bytes, other.operand_bytes),
            alone_bytes: larger(self.alone_bytes, other.alone_bytes),
        }
    }

    /// The total for a team of `threads`.
    pub fn bytes(&self, threads: usize) -> u64 {
        let of_thread = self.thread_bytes + self.alone_bytes.iter().sum::<u64>();
        of_thread * threads as u64 + self.common_bytes + self.operand_bytes.iter().sum::<u64>()
    }
}

fn larger<const N: usize>(some: [u64; N], others: [u64; N]) -> [u64; N] {
    std::array::from_fn(|i| some[i].max(others[i]))
}

/// No request is for less than a page.
fn in_pages(floats: usize) -> u64 {
    (floats * size_of::<f32>()).next_multiple_of(PAGE_BYTES).max(PAGE_BYTES) as u64
}
