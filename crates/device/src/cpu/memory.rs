//! The memory behind a CPU arena: one anonymous map, whose pages the kernel supplies as they are first touched.

use memmap2::{Advice, MmapMut, MmapOptions};

pub(crate) struct Memory {
    map: MmapMut,
}

impl Memory {
    pub fn reserve(bytes: u64) -> std::io::Result<Memory> {
        let bytes = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let map = MmapOptions::new().len(bytes).no_reserve_swap().map_anon()?;
        // Huge pages save most of the page faults and TLB misses of a large arena; a kernel without them is no error.
        let _ = map.advise(Advice::HugePage);
        Ok(Memory { map })
    }

    pub fn address(&self) -> u64 {
        self.map.as_ptr() as u64
    }
}
