//! The profile of this machine in the user's cache folder.

use std::path::PathBuf;

use evenkeel_device::{DeviceKind, cpu_report, cuda_report};
use evenkeel_plan::Profile;
use evenkeel_store::{read_json, write_file_atomically};
use serde::{Deserialize, Serialize};

use crate::kernel_cache::user_cache;

/// Measurements, and what they were made with: those of anything else say nothing.
#[derive(Serialize, Deserialize)]
pub struct ProfileFile {
    version: String,
    devices: Vec<String>,
    pub profile: Profile,
}

const MOST_BYTES: u64 = 64 << 20;

impl ProfileFile {
    /// The one in the cache, if it was measured by this version on these devices; else an empty one.
    pub fn open(kind: DeviceKind) -> ProfileFile {
        let fresh = ProfileFile::fresh(kind);
        let found = path(kind).and_then(|path| read_json(path, MOST_BYTES).ok());
        let found = found.and_then(|json| serde_json::from_value::<ProfileFile>(json).ok());
        let is_ours = |found: &ProfileFile| (&found.version, &found.devices) == (&fresh.version, &fresh.devices);
        found.filter(|found| is_ours(found) && found.profile.is_sound()).unwrap_or(fresh)
    }

    pub fn fresh(kind: DeviceKind) -> ProfileFile {
        let devices = match kind {
            DeviceKind::Cpu => {
                let report = cpu_report();
                vec![format!("{} cores, {}, {}", report.cores, report.f32_products, report.bf16_products)]
            }
            _ => cuda_report().gpus.into_iter().map(|gpu| gpu.name).collect(),
        };
        ProfileFile { version: env!("CARGO_PKG_VERSION").to_owned(), devices, profile: Profile::default() }
    }

    /// Keeps it for the next time. A cache that cannot be written costs the next plan its measurements.
    pub fn keep(&self, kind: DeviceKind) {
        let Some(path) = path(kind) else { return };
        let json = serde_json::to_string(self).expect("numbers and names");
        let written = write_file_atomically(path, |file| file.put(json.as_bytes()));
        let _: Result<(), evenkeel_store::Error> = written;
    }
}

fn path(kind: DeviceKind) -> Option<PathBuf> {
    let name = if kind == DeviceKind::Cpu { "profile-cpu.json" } else { "profile-cuda.json" };
    Some(user_cache()?.join(name))
}
