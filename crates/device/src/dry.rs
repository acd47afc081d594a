//! The device that computes nothing: it counts launches, operations and bytes per kernel. Values read from it are zeros.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::kernel::Kernel;
use crate::queue::{Backend, Event, Health, HostData, Lane, Point, Stamp};
use crate::{DType, View, WorkingMemory};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Count {
    pub launches: u64,
    pub flops: u128,
    pub bytes: u128,
}

/// The work issued to a dry device, by kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Counts(pub BTreeMap<&'static str, Count>);

impl Counts {
    pub fn flops(&self) -> u128 {
        self.0.values().map(|count| count.flops).sum()
    }

    pub fn bytes(&self) -> u128 {
        self.0.values().map(|count| count.bytes).sum()
    }
}

#[derive(Default)]
pub(crate) struct DryBackend {
    counts: Mutex<Counts>,
    working: Mutex<WorkingMemory>,
}

impl DryBackend {
    pub(crate) fn take_counts(&self) -> Counts {
        std::mem::take(&mut *self.counts.lock().expect("counting never panics"))
    }

    pub(crate) fn working_memory(&self) -> WorkingMemory {
        *self.working.lock().expect("counting never panics")
    }
}

impl Backend for DryBackend {
    fn keeps_values(&self) -> bool {
        false
    }

    fn launch(&self, lane: Lane, kernel: Kernel) {
        if lane == Lane::Compute {
            let mut working = self.working.lock().expect("counting never panics");
            *working = working.max(kernel.working_memory_on_cpu());
        }
        let mut counts = self.counts.lock().expect("counting never panics");
        let count = counts.0.entry(kernel.name()).or_default();
        count.launches += 1;
        count.flops += kernel.operation().flops() as u128;
        count.bytes += kernel.operation().bytes() as u128;
    }

    fn record(&self, _lane: Lane) -> Event {
        Event(Point::Cpu(crate::cpu::Flag::raised()))
    }

    fn wait(&self, _lane: Lane, _event: &Event) {}

    fn upload(&self, _lane: Lane, _view: View, _data: HostData) {}

    fn download(&self, _lane: Lane, view: View) -> HostData {
        match view.dtype {
            DType::U32 => HostData::Indices(vec![0; view.len()]),
            DType::F32 | DType::Bf16 => HostData::Floats(vec![0.0; view.len()]),
        }
    }

    fn stamp(&self, _lane: Lane, _stamp: Stamp) {}

    fn call(&self, _lane: Lane, _work: Box<dyn FnOnce() + Send>) {}

    fn finish(&self, _lane: Lane) {}

    fn health(&self) -> Health {
        Health::default()
    }
}
