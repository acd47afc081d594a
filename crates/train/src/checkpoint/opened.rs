//! A checkpoint opened for reading.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use evenkeel_model::{Held, Move, ParamSpec, Slice, as_matrix, moves};
use evenkeel_store::SafeTensorsFile;
use evenkeel_store::checkpoint::Checkpoint;

use super::{CheckpointState, tensor_name};
use crate::Error;
use crate::state_kind::StateKind;

/// Values copied from file to device at a time.
const PIECE_ELEMENTS: usize = 1 << 20;

/// A checkpoint whose files have been compared with their digests.
pub struct Opened {
    pub state: CheckpointState,
    path: PathBuf,
    files: Vec<SafeTensorsFile>,
    /// By tensor: the files that have it, and which elements each has.
    places: BTreeMap<String, Vec<(usize, Held)>>,
}

impl Opened {
    pub fn new(checkpoint: &Checkpoint) -> Result<Opened, Error> {
        let path = checkpoint.path().to_owned();
        let state = CheckpointState::of(checkpoint)?;
        let damaged = |what: &'static str, why: String| Error::BadManifest { path: path.clone(), what, why };
        let (mut files, mut places) = (Vec::new(), BTreeMap::new());
        for (name, tensors) in &state.layout {
            let file = checkpoint.tensors(name)?;
            for (tensor, held) in tensors {
                let of_tensor = |why: &str| damaged("layout", format!("`{tensor}`: {why}"));
                let raw = file.tensor(tensor).ok_or_else(|| of_tensor("its file does not have it"))?;
                let parameter = tensor.split_once('.').map_or("", |(_, parameter)| parameter);
                let whole = state
                    .shapes
                    .get(parameter)
                    .and_then(|shape| as_matrix(shape))
                    .ok_or_else(|| of_tensor("its parameter has no shape"))?;
                held.check(whole).map_err(of_tensor)?;
                if raw.element_count() != held.len() {
                    return Err(of_tensor("its file has another number of elements"));
                }
                places.entry(tensor.clone()).or_insert_with(Vec::new).push((files.len(), held.clone()));
            }
            files.push(file);
        }
        Ok(Opened { state, path, files, places })
    }

    /// Refuses a parameter that the checkpoint does not have in this shape.
    pub fn check(&self, spec: &ParamSpec) -> Result<(), Error> {
        match self.state.shapes.get(&spec.name) {
            Some(shape) if *shape == spec.shape => Ok(()),
            Some(found) => Err(Error::OtherShape {
                path: self.path.clone(),
                tensor: spec.name.clone(),
                found: found.clone(),
                wanted: spec.shape.clone(),
            }),
            None => Err(self.other_model(&spec.name)),
        }
    }

    /// Refuses a checkpoint that does not have exactly what these train.
    pub fn check_trained(&self, specs: &[ParamSpec]) -> Result<(), Error> {
        let trained: Vec<&ParamSpec> = specs.iter().filter(|spec| spec.is_trained).collect();
        trained.iter().try_for_each(|spec| self.check(spec))?;
        match self.state.shapes.keys().find(|name| !trained.iter().any(|spec| spec.name == **name)) {
            None => Ok(()),
            Some(name) => Err(Error::TrainedBefore { path: self.path.clone(), tensor: name.clone() }),
        }
    }

    /// Refuses the state of another optimizer.
    pub fn check_rule(&self, wanted: &'static str) -> Result<(), Error> {
        match &self.state.optimizer {
            found if found == wanted => Ok(()),
            found => Err(Error::OtherOptimizer { path: self.path.clone(), found: found.clone(), wanted }),
        }
    }

    /// Whether the checkpoint has anything of this kind for a parameter.
    pub fn has(&self, kind: &str, parameter: &str) -> bool {
        self.places.contains_key(&tensor_name(kind, parameter))
    }

    /// Reads the elements that `held` names, some at a time: `put(which of them, fill)` gets a function that fills a slice with
    /// them.
    pub fn read(
        &self,
        kind: &str,
        spec: &ParamSpec,
        held: &Held,
        mut put: impl FnMut(Range<usize>, &dyn Fn(&mut [f32]) -> Result<(), Error>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let name = tensor_name(kind, &spec.name);
        let places = self.places.get(&name).map_or(&[][..], Vec::as_slice);
        let sources: Vec<Held> = places.iter().map(|(_, held)| held.clone()).collect();
        for start in (0..held.len()).step_by(PIECE_ELEMENTS) {
            let elements = start..held.len().min(start + PIECE_ELEMENTS);
            let range = held.range.start + elements.start..held.range.start + elements.end;
            let piece = Held { range, slice: held.slice.clone() };
            let moves = moves(&sources, &piece, spec.whole[1]).map_err(|_| self.other_model(&name))?;
            put(elements, &|values| {
                moves.iter().try_for_each(|&Move { from, from_start, to_start, len }| {
                    let raw = self.files[places[from].0].tensor(&name).expect("found when it was opened");
                    Ok(raw.read(from_start..from_start + len, &mut values[to_start..to_start + len])?)
                })
            })?;
        }
        places.iter().for_each(|&(file, _)| self.files[file].release(&name));
        Ok(())
    }

    /// Some rows of a whole weight.
    pub fn read_rows(&self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<f32>, Error> {
        let held = Held::all(Slice::of_rows(rows, spec.whole[1]));
        let mut values = vec![0.0; held.len()];
        self.read(StateKind::Weight.name(), spec, &held, |elements, fill| fill(&mut values[elements]))?;
        Ok(values)
    }

    fn other_model(&self, tensor: &str) -> Error {
        Error::OtherModel { path: self.path.clone(), tensor: tensor.to_owned() }
    }
}
