//! Copies of golden folders with changes, for tests of what is refused.

use std::collections::BTreeMap;
use std::path::Path;

use evenkeel_device::{DType, Device};
use evenkeel_model::{Error, Model, ZeroSharding};
use evenkeel_store::Folder;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::golden;

pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The tensors of a golden folder with one file.
pub fn read_tensors(case: &str) -> Tensors {
    let bytes = std::fs::read(golden().join(case).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let of = |(name, view): (String, TensorView)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    file.tensors().into_iter().map(of).collect()
}

pub fn write_tensors(folder: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Loads a copy of a golden folder after a change. An error that does not say `late` must come before memory is used.
pub fn load_changed(case: &str, late: &str, change: impl Fn(&mut Value, &mut Tensors)) -> Result<(), Error> {
    let mut tensors = read_tensors(case);
    let mut config = Folder::open(golden().join(case)).expect("golden folders are sound").config().clone();
    change(&mut config, &mut tensors);
    let copy = tempfile::tempdir().unwrap();
    std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    write_tensors(copy.path(), &tensors);
    let folder = Folder::open(copy.path())?;
    let model = Model::open(&folder)?;
    let device = Device::dry();
    let loaded = model.load(&folder, DType::Bf16, ZeroSharding::NONE, device.compute()).map(drop);
    if matches!(&loaded, Err(error) if !error.to_string().contains(late)) {
        assert_eq!(device.usage().peak_bytes, 0, "sizes are compared before memory is used");
    }
    loaded
}
