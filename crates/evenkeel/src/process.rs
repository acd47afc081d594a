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
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
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
