//! PEFT's folder: adapter_config.json and adapter_model.safetensors. Names and shapes are compared with the model before memory is
//! used; missing and surplus tensors are errors.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use evenkeel_store::{SafeTensorsFile, read_json};
use serde_json::Value;

use super::experts::ExpertFile;
use super::{AdapterConfig, PEFT_PREFIX, names, targets};
use crate::chain::model::Model;
use crate::error::Error;
use crate::parameters::{ParamId, ParamSpec};

pub const ADAPTER_CONFIG: &str = "adapter_config.json";
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// The key of that file's metadata that has the names of labels, as config.json has them. PEFT's configuration has no place for them.
pub const LABEL_NAMES: &str = "id2label";
const CONFIG_BYTES: u64 = 16 << 20;

/// An adapter that was saved.
pub struct AdapterFolder {
    pub path: PathBuf,
    /// The model that it belongs to: a folder or a hub's name.
    pub base: Option<String>,
    pub config: AdapterConfig,
    /// The version of PEFT that saved it, if it says so.
    pub(super) peft_version: Option<String>,
    pub(crate) weights: SafeTensorsFile,
}

/// The values that adapters begin with.
pub enum AdapterValues<'a> {
    /// Drawn at random, B zero.
    New {
        seed: u64,
    },
    Saved(&'a AdapterFolder),
}

/// Reads elements of a parameter, row-major.
pub(crate) type ReadElements<'f> = Box<dyn Fn(Range<usize>, &mut [f32]) -> Result<(), Error> + 'f>;

impl AdapterFolder {
    pub fn open(path: &Path) -> Result<AdapterFolder, Error> {
        let json: Value = read_json(path.join(ADAPTER_CONFIG), CONFIG_BYTES)?;
        let mut config = AdapterConfig::from_peft(&json)?;
        let base = json["base_model_name_or_path"].as_str().map(str::to_owned);
        let peft_version = json["peft_version"].as_str().map(str::to_owned);
        let weights = SafeTensorsFile::open(path.join(ADAPTER_WEIGHTS))?;
        let is_new = |name: &str| name.strip_prefix(PEFT_PREFIX).is_some_and(names::is_new);
        config.has_new_names = weights.names().any(is_new);
        Ok(AdapterFolder { path: path.to_owned(), base, config, peft_version, weights })
    }

    /// The rows of this module, if it was trained whole.
    pub fn rows_of(&self, module: &str) -> Option<usize> {
        self.weights.tensor(&format!("{PEFT_PREFIX}{module}.weight"))?.shape().first().copied()
    }

    /// The names of the labels of a classifier's adapter, if it was saved with some.
    pub fn label_names(&self) -> Vec<String> {
        let names = || {
            let table: Value = serde_json::from_str(self.weights.metadata().get(LABEL_NAMES)?).ok()?;
            let name = |label: usize| Some(table.get(label.to_string())?.as_str()?.to_owned());
            (0..table.as_object()?.len()).map(name).collect::<Option<Vec<String>>>()
        };
        names().unwrap_or_default()
    }

    /// The number of the last layer that has an adapter.
    fn deepest_layer(&self) -> Option<usize> {
        let adapters = self.weights.names().filter(|name| name.contains(".lora_"));
        adapters.filter_map(|name| targets::layer_of(name.strip_prefix(PEFT_PREFIX)?)).max()
    }
}

impl Model {
    /// Some rows of a parameter that a saved adapter has, once the adapter is known to fit.
    pub fn read_saved_rows(&self, folder: &AdapterFolder, id: ParamId, rows: Range<usize>) -> Result<Vec<f32>, Error> {
        let spec = &self.specs[id.0];
        let cols = spec.whole[1];
        let mut values = vec![0.0; rows.len() * cols];
        self.saved_values(folder, spec)?(rows.start * cols..rows.end * cols, &mut values)?;
        Ok(values)
    }

    /// Reads elements of a whole parameter that a saved adapter has, once the adapter is known to fit.
    pub(crate) fn saved_values<'f>(
        &self,
        folder: &'f AdapterFolder,
        spec: &ParamSpec,
    ) -> Result<ReadElements<'f>, Error> {
        if let Some(factor) = spec.expert_factor {
            let whole = self.read_expert_factor(folder, spec, factor)?;
            return Ok(Box::new(move |elements, out| {
                out.copy_from_slice(&whole[elements]);
                Ok(())
            }));
        }
        let tensor = folder.weights.tensor(&self.peft_name(spec)).expect("names were compared");
        Ok(Box::new(move |elements, out| Ok(tensor.read(elements, out)?)))
    }

    /// The name of a parameter in an adapter's file.
    pub fn peft_name(&self, spec: &ParamSpec) -> String {
        let adapters = self.config.adapters.as_ref();
        let name = adapters.map_or_else(|| spec.name.clone(), |adapters| adapters.name_of(&spec.name));
        format!("{PEFT_PREFIX}{name}")
    }

    /// The same model with a saved adapter, once the adapter's tensors are known to fit.
    pub fn with_adapter(&self, folder: &AdapterFolder) -> Result<Model, Error> {
        let last = self.config.layers.len().saturating_sub(1);
        let other_depth = |found: usize| {
            let (folder, base) = (folder.path.clone(), folder.base.clone().filter(|base| !base.is_empty()));
            Error::OtherDepth { folder, base, found, expected: last }
        };
        let deepest = folder.deepest_layer();
        if let Some(found) = deepest.filter(|&found| found > last) {
            return Err(other_depth(found));
        }
        let model = self.adapted(folder.config.clone())?;
        model.check_adapter(folder).map_err(|error| match (error, deepest) {
            (Error::MissingTensor { .. }, Some(found)) if found < last => other_depth(found),
            (error, _) => error,
        })?;
        Ok(model)
    }

    /// Compares the names and shapes of a saved adapter's tensors with those that this model trains.
    pub fn check_adapter(&self, folder: &AdapterFolder) -> Result<(), Error> {
        let file = &folder.weights;
        let trained = || self.specs.iter().filter(|spec| spec.is_trained);
        let missing: Vec<String> =
            trained().map(|spec| self.peft_name(spec)).filter(|name| file.tensor(name).is_none()).collect();
        if let Some(name) = missing.first() {
            let (name, folder, missing) = (name.clone(), folder.path.clone(), missing.len());
            return Err(Error::MissingTensor { name, folder, missing, expected: trained().count() });
        }
        let known: BTreeSet<String> = trained().map(|spec| self.peft_name(spec)).chain(self.tied_name()).collect();
        let unexpected: Vec<&str> = file.names().filter(|name| !known.contains(*name)).collect();
        if let Some(name) = unexpected.first() {
            if let Some(pooler) = self.pooler().filter(|pooler| name.contains(&format!(".{pooler}.lora_"))) {
                return Err(Error::PoolerAdapter { pooler });
            }
            let (name, folder, unexpected) = (name.to_string(), folder.path.clone(), unexpected.len());
            return Err(Error::UnexpectedTensor { name, folder, unexpected });
        }
        // Swapped, all factors of experts have the shapes of that.
        let swapped = self.expert_file(folder)? == ExpertFile::Swapped;
        for spec in trained().filter(|spec| !swapped || spec.expert_factor.is_none()) {
            let name = self.peft_name(spec);
            let tensor = file.tensor(&name).expect("it is not missing");
            if !spec.fits_adapter_file(tensor.shape()) {
                let expected = spec.shape_in_adapter_file();
                return Err(self.wrong_shape(name, file.path(), tensor.shape(), expected));
            }
        }
        Ok(())
    }

    /// PEFT writes a trained embedding a second time, as the head that is tied to it.
    fn tied_name(&self) -> Option<String> {
        self.config.tied.then(|| format!("{PEFT_PREFIX}{}.weight", self.config.family.names.head))
    }
}
