//! Hosts of several files as one cluster.

use std::path::{Path, PathBuf};

use evenkeel_plan::{Cluster, ClusterError, Comments, LinkRates};
use evenkeel_store::read_text;

use crate::{Failure, Mistake, text};

/// No description comes near this.
const MOST_BYTES: u64 = 1 << 20;

pub fn merged(files: &[PathBuf], network: Option<&str>) -> Result<String, Failure> {
    let clusters = files.iter().map(|path| Ok((name(path), read(path)?))).collect::<Result<Vec<_>, Failure>>()?;
    let network = network.map(parsed).transpose()?;
    if network.is_some() && clusters.iter().flat_map(|(_, cluster)| &cluster.hosts).all(|host| host.network.is_some()) {
        let what = "--network joins hosts that have none, but all of these have one".to_owned();
        return Err(Mistake { what, hint: Some("leave it out, or change `network` in the files".to_owned()) }.into());
    }
    let network = network.as_ref().map(|(name, rates)| (name.as_str(), rates.clone()));
    let joined = Cluster::joined(&clusters, network).map_err(|error| {
        let hint = matches!(error, ClusterError::Apart { .. })
            .then(|| "give it as --network NAME=GB_PER_S,LATENCY_US, such as --network ethernet=1.25,30".to_owned());
        Mistake { what: error.to_string(), hint }
    })?;
    let names: Vec<String> = files.iter().map(|path| format!("`{}`", path.display())).collect();
    let hosts = text::counted(joined.host_count(), "host", "hosts");
    let whole = vec![format!("{hosts}, joined by `evenkeel profile --merge` from {}.", names.join(", "))];
    Ok(joined.to_toml(&Comments { whole, ..Comments::default() }))
}

fn read(path: &Path) -> Result<Cluster, Failure> {
    let wrong = |error: ClusterError| Mistake { what: format!("`{}`: {error}", path.display()), hint: None };
    Ok(Cluster::parse(&read_text(path, MOST_BYTES)?).map_err(wrong)?)
}

/// What tells a file's names apart from those of others.
fn name(path: &Path) -> String {
    path.file_stem().map_or_else(|| "host".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

/// Reads `ethernet=1.25,30`.
fn parsed(network: &str) -> Result<(String, LinkRates), Mistake> {
    let parts = network.split_once('=').and_then(|(name, rates)| Some((name.trim(), rates.split_once(',')?)));
    let numbers = parts.and_then(|(name, (gb_per_s, latency_us))| {
        let number = |text: &str| text.trim().parse::<f64>().ok();
        Some((name, number(gb_per_s)?, number(latency_us)?))
    });
    let Some((name, gb_per_s, latency_us)) = numbers.filter(|(name, ..)| !name.is_empty()) else {
        let what = format!("--network is `{network}`, and must be NAME=GB_PER_S,LATENCY_US");
        return Err(Mistake { what, hint: Some("such as --network ethernet=1.25,30".to_owned()) });
    };
    let source = "given on the command line".to_owned();
    Ok((name.to_owned(), LinkRates { source, gb_per_s, latency_us }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_a_name_and_two_numbers() {
        let (name, rates) = parsed("ethernet = 1.25, 30").unwrap();
        assert_eq!((name.as_str(), rates.gb_per_s, rates.latency_us), ("ethernet", 1.25, 30.0));
        for wrong in ["", "ethernet", "ethernet=1", "=1,2", "ethernet=1,2,3", "ethernet=fast,2", "1,2"] {
            let mistake = parsed(wrong).unwrap_err();
            assert!(mistake.what.contains("must be NAME=GB_PER_S,LATENCY_US"), "{wrong}: {}", mistake.what);
        }
    }
}
