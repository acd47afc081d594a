//! A model disk: the states it may show after a loss of power.
//!
//! A file's bytes last once it was synced; before that they may be absent, present or torn. A name in a folder lasts
//! once the folder was synced; before that each change of names may be lost or kept, and those that are kept may have
//! been made in any order. One change is made whole or not at all.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path};

use fastrand::Rng;

use super::recording::Recorded;

const BLOCK_BYTES: usize = 512;

#[derive(Clone)]
pub struct Disk {
    /// The first is the folder that was looked at.
    nodes: Vec<Node>,
}

#[derive(Clone)]
enum Node {
    File { lasting: Vec<u8>, now: Vec<u8> },
    Folder { lasting: Names, now: Names, changes: Vec<Change> },
}

type Names = BTreeMap<String, usize>;

#[derive(Clone)]
enum Change {
    Add { name: String, node: usize },
    Remove { name: String, node: usize },
    Rename { from: String, to: String, node: usize },
}

/// The fate of unsynced changes.
pub enum Loss<'rng> {
    AllLost,
    AllKept,
    /// Names are kept and bytes are not.
    EmptyFiles,
    /// Names are kept, and files have their length but not all of their bytes.
    Holes,
    Random(&'rng mut Rng),
}

impl Disk {
    /// A folder as it is, all of it synced.
    pub fn of(folder: &Path) -> Disk {
        let mut disk = Disk { nodes: Vec::new() };
        disk.take_in(folder);
        disk
    }

    fn take_in(&mut self, path: &Path) -> usize {
        let place = self.nodes.len();
        if !path.is_dir() {
            let bytes = fs::read(path).unwrap();
            self.nodes.push(Node::File { lasting: bytes.clone(), now: bytes });
            return place;
        }
        self.nodes.push(Node::new_folder());
        let mut found = Names::new();
        for entry in fs::read_dir(path).unwrap() {
            let entry = entry.unwrap();
            found.insert(entry.file_name().into_string().unwrap(), self.take_in(&entry.path()));
        }
        self.nodes[place] = Node::Folder { lasting: found.clone(), now: found, changes: Vec::new() };
        place
    }

    pub fn apply(&mut self, operation: &Recorded) {
        match operation {
            Recorded::CreateFile(path) => self.add(path, Node::File { lasting: Vec::new(), now: Vec::new() }),
            Recorded::CreateFolder(path) => self.add(path, Node::new_folder()),
            Recorded::Write { file, bytes } => {
                let node = self.find(file);
                let Node::File { now, .. } = &mut self.nodes[node] else { panic!("{file:?} is no file") };
                now.extend(bytes);
            }
            Recorded::SyncFile(path) | Recorded::SyncFolder(path) => {
                let node = self.find(path);
                match &mut self.nodes[node] {
                    Node::File { lasting, now } => lasting.clone_from(now),
                    Node::Folder { lasting, now, changes } => {
                        lasting.clone_from(now);
                        changes.clear();
                    }
                }
            }
            Recorded::Rename { from, to } => {
                assert_eq!(from.parent(), to.parent(), "a rename from folder to folder is not in the model");
                let node = self.find(from);
                let from = last(from);
                let to = last(to);
                self.change(operation.path().parent().unwrap(), Change::Rename { from, to, node });
            }
            Recorded::RemoveFile(path) => self.remove(path),
            Recorded::RemoveTree(path) => {
                let node = self.find(path);
                let Node::Folder { now, .. } = &self.nodes[node] else { panic!("{path:?} is no folder") };
                for name in now.keys().cloned().collect::<Vec<_>>() {
                    self.remove(&path.join(name));
                }
                self.remove(path);
            }
        }
    }

    /// Writes the state that processes see before the loss of power into an empty folder.
    pub fn show(&self, into: &Path) {
        self.show_node(0, into, &mut Loss::AllKept);
    }

    /// Writes the state after the loss of power into an empty folder.
    pub fn show_after(&self, mut loss: Loss, into: &Path) {
        self.show_node(0, into, &mut loss);
    }

    fn show_node(&self, node: usize, path: &Path, loss: &mut Loss) {
        match &self.nodes[node] {
            Node::File { lasting, now } => fs::write(path, loss.of_bytes(lasting, now)).unwrap(),
            Node::Folder { lasting, now, changes } => {
                if !path.is_dir() {
                    fs::create_dir(path).unwrap();
                }
                for (name, node) in loss.of_names(lasting, now, changes) {
                    self.show_node(node, &path.join(name), loss);
                }
            }
        }
    }

    fn find(&self, path: &Path) -> usize {
        let mut place = 0;
        for part in path.components() {
            let Component::Normal(name) = part else { panic!("{path:?} is no plain path") };
            let Node::Folder { now, .. } = &self.nodes[place] else { panic!("{path:?} leads through a file") };
            place = *now.get(name.to_str().unwrap()).unwrap_or_else(|| panic!("{path:?} is not there"));
        }
        place
    }

    fn add(&mut self, path: &Path, node: Node) {
        self.nodes.push(node);
        let node = self.nodes.len() - 1;
        self.change(path.parent().unwrap(), Change::Add { name: last(path), node });
    }

    fn remove(&mut self, path: &Path) {
        let node = self.find(path);
        self.change(path.parent().unwrap(), Change::Remove { name: last(path), node });
    }

    fn change(&mut self, folder: &Path, change: Change) {
        let place = self.find(folder);
        let Node::Folder { now, changes, .. } = &mut self.nodes[place] else { panic!("{folder:?} is no folder") };
        change.make(now);
        changes.push(change);
    }
}

impl Recorded {
    fn path(&self) -> &Path {
        match self {
            Recorded::CreateFile(path)
            | Recorded::Write { file: path, .. }
            | Recorded::SyncFile(path)
            | Recorded::CreateFolder(path)
            | Recorded::SyncFolder(path)
            | Recorded::Rename { from: path, .. }
            | Recorded::RemoveFile(path)
            | Recorded::RemoveTree(path) => path,
        }
    }
}

impl Node {
    fn new_folder() -> Node {
        Node::Folder { lasting: Names::new(), now: Names::new(), changes: Vec::new() }
    }
}

impl Change {
    /// A name is taken from a node only, not from whatever has the name when changes come in another order.
    fn make(&self, names: &mut Names) {
        let take = |names: &mut Names, name: &String, node: &usize| {
            if names.get(name) == Some(node) {
                names.remove(name);
            }
        };
        match self {
            Change::Add { name, node } => drop(names.insert(name.clone(), *node)),
            Change::Remove { name, node } => take(names, name, node),
            Change::Rename { from, to, node } => {
                take(names, from, node);
                names.insert(to.clone(), *node);
            }
        }
    }
}

impl Loss<'_> {
    fn of_names(&mut self, lasting: &Names, now: &Names, changes: &[Change]) -> Names {
        match self {
            Loss::AllLost => lasting.clone(),
            Loss::AllKept | Loss::EmptyFiles | Loss::Holes => now.clone(),
            Loss::Random(rng) => {
                let kept_share = rng.f32();
                let mut kept: Vec<&Change> = changes.iter().filter(|_| rng.f32() < kept_share).collect();
                if rng.bool() {
                    rng.shuffle(&mut kept);
                }
                let mut names = lasting.clone();
                kept.into_iter().for_each(|change| change.make(&mut names));
                names
            }
        }
    }

    /// Bytes are only ever added, so `now` begins with what lasts.
    fn of_bytes(&mut self, lasting: &[u8], now: &[u8]) -> Vec<u8> {
        let mut shown = now.to_vec();
        if lasting.len() == now.len() {
            return shown;
        }
        match self {
            Loss::AllKept => {}
            Loss::AllLost | Loss::EmptyFiles => shown.truncate(lasting.len()),
            Loss::Holes => shown[lasting.len()..].fill(0),
            Loss::Random(rng) => match rng.u8(..5) {
                0 => {}
                1 => shown.truncate(lasting.len()),
                2 | 3 => shown.truncate(rng.usize(lasting.len()..now.len())),
                _ => {
                    let begin = rng.usize(lasting.len()..now.len()) / BLOCK_BYTES * BLOCK_BYTES;
                    let end = now.len().min(begin + BLOCK_BYTES);
                    shown[begin.max(lasting.len())..end].fill(0);
                }
            },
        }
        shown
    }
}

fn last(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}
