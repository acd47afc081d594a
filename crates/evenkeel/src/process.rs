//! The system's information on this process and its machine.

/// The memory this process has resident; 0 if the system does not say.
pub fn resident_bytes() -> u64 {
    status("VmRSS:")
}

/// The most memory this process ever had resident; 0 if the system does not say.
pub fn peak_bytes() -> u64 {
    status("VmHWM:")
}

fn status(key: &str) -> u64 {
    bytes("/proc/self/status", key).unwrap_or(0)
}

/// The memory that processes can still take without swapping.
pub fn available_bytes() -> Option<u64> {
    bytes("/proc/meminfo", "MemAvailable:")
}

/// The CPU's name, as its maker gives it.
pub fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).trim().to_owned()).filter(|name| !name.is_empty())
}

/// A line of the system's information that counts KiB.
fn bytes(file: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// The names of this machine's NVIDIA GPUs, as their driver lists them.
pub fn gpus() -> Vec<String> {
    let folders = std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let name = |folder: std::fs::DirEntry| {
        let text = std::fs::read_to_string(folder.path().join("information")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(line.trim().to_owned())
    };
    folders.filter_map(name).collect()
}
