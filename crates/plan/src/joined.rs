//! Several clusters as one, such as measured hosts and the network between them.

use std::collections::BTreeMap;

use crate::cluster::{Cluster, ClusterError, Host, LinkRates};

/// Entries by name.
type Named<T> = BTreeMap<String, T>;

impl Cluster {
    /// The hosts of all clusters, in their order. A name that means different things in several of them gets the name of its
    /// cluster as a suffix. Hosts without a network are joined by the given one.
    pub fn joined(clusters: &[(String, Cluster)], network: Option<(&str, LinkRates)>) -> Result<Cluster, ClusterError> {
        let of_each = |cluster: &(String, Cluster)| (cluster.0.clone(), cluster.1.devices.clone());
        let (devices, device_names) = unambiguous(&clusters.iter().map(of_each).collect::<Vec<_>>());
        let of_each = |cluster: &(String, Cluster)| (cluster.0.clone(), cluster.1.links.clone());
        let (mut links, link_names) = unambiguous(&clusters.iter().map(of_each).collect::<Vec<_>>());
        let mut hosts = Vec::new();
        for (index, (_, cluster)) in clusters.iter().enumerate() {
            let renamed = |name: &String| link_names[index][name].clone();
            for host in &cluster.hosts {
                let named = |(name, count): (&String, &usize)| (device_names[index][name].clone(), *count);
                hosts.push(Host {
                    count: host.count,
                    devices: host.devices.iter().map(named).collect(),
                    link: host.link.as_ref().map(renamed),
                    network: host.network.as_ref().map(renamed),
                });
            }
        }
        if let Some((name, rates)) = network {
            if links.get(name).is_some_and(|known| *known != rates) {
                let what = "the name of the network".to_owned();
                return Err(ClusterError::Absurd { what, found: name.to_owned(), expected: "no link's".to_owned() });
            }
            links.insert(name.to_owned(), rates);
            hosts.iter_mut().for_each(|host| host.network = host.network.take().or(Some(name.to_owned())));
        }
        let cluster = Cluster { devices, links, hosts };
        cluster.check()?;
        Ok(cluster)
    }
}

/// All entries under names of their own, and by cluster: the new name of each.
fn unambiguous<T: Clone + PartialEq>(clusters: &[(String, Named<T>)]) -> (Named<T>, Vec<Named<String>>) {
    let differs = |name: &str, entry: &T| {
        let mut others = clusters.iter().filter_map(|(_, own)| own.get(name));
        others.any(|other| other != entry)
    };
    let (mut all, mut names) = (Named::new(), Vec::new());
    for (cluster, own) in clusters {
        let mut new_names = Named::new();
        for (name, entry) in own {
            let suffixed = format!("{name}-{cluster}");
            let numbered = (2..).map(|number| format!("{suffixed}-{number}"));
            let mut candidates = [name.clone(), suffixed.clone()].into_iter().chain(numbered);
            let is_taken = |new: &String| differs(new, entry) || all.get(new).is_some_and(|known| known != entry);
            let new = candidates.find(|new| !is_taken(new)).expect("some number is free");
            all.insert(new.clone(), entry.clone());
            new_names.insert(name.clone(), new);
        }
        names.push(new_names);
    }
    (all, names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(tflops: f64, gb_per_s: f64) -> Cluster {
        Cluster::parse(&format!(
            "[device.core]\nkind = \"cpu\"\nsource = \"here\"\nbf16_tflops = {tflops:?}\nf32_tflops = 0.1\nmemory_gb = 4.0\n\
             memory_gb_per_s = 10.0\n[link.memory]\nsource = \"here\"\ngb_per_s = {gb_per_s:?}\nlatency_us = 10.0\n\
             [[host]]\ndevices = {{ core = 2 }}\nlink = \"memory\"\n"
        ))
        .unwrap()
    }

    fn network() -> LinkRates {
        LinkRates { source: "a guess".to_owned(), gb_per_s: 1.25, latency_us: 30.0 }
    }

    #[test]
    fn names_that_mean_different_things_get_a_suffix_and_others_are_shared() {
        let names = |clusters: &[(&str, Cluster)]| {
            let clusters: Vec<_> =
                clusters.iter().map(|(name, cluster)| ((*name).to_owned(), cluster.clone())).collect();
            let joined = Cluster::joined(&clusters, Some(("ethernet", network()))).unwrap();
            assert_eq!(joined.host_count(), clusters.len());
            let places: Vec<String> = joined.places().iter().map(|place| place.device.to_owned()).collect();
            (places, joined.links.into_keys().collect::<Vec<_>>())
        };
        let (devices, links) = names(&[("a", host(1.0, 5.0)), ("b", host(2.0, 5.0))]);
        assert_eq!(devices, ["core-a", "core-a", "core-b", "core-b"]);
        assert_eq!(links, ["ethernet", "memory"]);
        let (devices, links) = names(&[("a", host(1.0, 5.0)), ("a", host(1.0, 6.0)), ("a", host(1.0, 7.0))]);
        assert_eq!(devices, ["core"; 6]);
        assert_eq!(links, ["ethernet", "memory-a", "memory-a-2", "memory-a-3"]);
        let mut taken = host(3.0, 5.0);
        taken.devices.insert("core-a".to_owned(), taken.devices["core"].clone());
        let (devices, _) = names(&[("a", host(1.0, 5.0)), ("b", taken)]);
        assert_eq!(devices, ["core-a-2", "core-a-2", "core-b", "core-b"]);
    }

    #[test]
    fn hosts_keep_the_networks_they_have_and_need_one() {
        let one = |gb_per_s: f64| ("a".to_owned(), host(1.0, gb_per_s));
        let missing = Cluster::joined(&[one(5.0), one(5.0)], None).unwrap_err().to_string();
        assert!(missing.contains("host 1 is one of 2: say which network joins them"), "{missing}");
        let taken = Cluster::joined(&[one(5.0), one(5.0)], Some(("memory", network()))).unwrap_err().to_string();
        assert!(taken.contains("the name of the network is memory, and must be no link's"), "{taken}");
        let pair = Cluster::joined(&[one(5.0), one(5.0)], Some(("ethernet", network()))).unwrap();
        let faster = LinkRates { gb_per_s: 10.0, ..network() };
        let all = Cluster::joined(&[("pair".to_owned(), pair), one(5.0)], Some(("fibre", faster))).unwrap();
        let networks: Vec<&str> = all.hosts.iter().filter_map(|host| host.network.as_deref()).collect();
        assert_eq!(networks, ["ethernet", "ethernet", "fibre"]);
        let absurd = LinkRates { gb_per_s: -1.0, ..network() };
        let error = Cluster::joined(&[one(5.0)], Some(("ethernet", absurd))).unwrap_err().to_string();
        assert!(error.contains("link.ethernet.gb_per_s is -1"), "{error}");
    }
}
