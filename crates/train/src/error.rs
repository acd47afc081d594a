//! Errors of a run.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// An error of a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] evenkeel_store::Error),
    #[error(transparent)]
    Data(#[from] evenkeel_data::Error),
    #[error(transparent)]
    Model(#[from] evenkeel_model::Error),
    #[error(transparent)]
    Generate(#[from] evenkeel_model::GenerateError),
    #[error("the run's progress cannot be written: {0}")]
    Report(std::io::Error),
    #[error("`{}` was written in version {found} of the format, this program knows {known}", path.display())]
    CheckpointVersion { path: PathBuf, found: u32, known: u32 },
    #[error("`{}`: `{what}` is not a number that a run can have", path.display())]
    BadState { path: PathBuf, what: &'static str },
    #[error("`{}`: its {what} is not as this program writes it ({why})", path.display())]
    BadManifest { path: PathBuf, what: &'static str, why: String },
    #[error("`{}` has no tensor `{tensor}` of the shape this model needs", path.display())]
    OtherModel { path: PathBuf, tensor: String },
    #[error("`{}` has `{tensor}` as {found:?}, this run needs {wanted:?}", path.display())]
    OtherShape { path: PathBuf, tensor: String, found: Vec<usize>, wanted: Vec<usize> },
    #[error("`{}` has a trained `{tensor}`, which this run does not train", path.display())]
    TrainedBefore { path: PathBuf, tensor: String },
    #[error("`{}` holds the state of the optimizer \"{found}\", this run's is \"{wanted}\"", path.display())]
    OtherOptimizer { path: PathBuf, found: String, wanted: &'static str },
    #[error(
        "loss or gradients were not finite in {steps} steps in a row, up to step {step} (loss {loss}, gradient norm \
         {grad_norm})"
    )]
    NotFinite { steps: u32, step: u64, loss: f64, grad_norm: f64 },
    #[error("ranks {} and {} were given different samples", ranks[0], ranks[1])]
    DifferentSamples { ranks: [usize; 2] },
    #[error(transparent)]
    Rank(#[from] evenkeel_comm::RankFailure),
    /// A rank refused a request. It has not ended.
    #[error(transparent)]
    OnRank(#[from] ErrorText),
}

/// An error in a form that crosses hosts: its message, its hint and whose fault it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{what}")]
pub struct ErrorText {
    what: String,
    hint: Option<String>,
    is_fault: bool,
}

impl From<&Error> for ErrorText {
    fn from(error: &Error) -> ErrorText {
        ErrorText { what: error.to_string(), hint: error.hint(), is_fault: error.is_fault() }
    }
}

impl Error {
    /// Whether the machine or the run is at fault, rather than the user's input.
    pub fn is_fault(&self) -> bool {
        match self {
            Error::Store(error) => error.is_fault(),
            Error::Data(error) => error.is_fault(),
            Error::Model(error) => matches!(error, evenkeel_model::Error::Store(error) if error.is_fault()),
            Error::Report(_) | Error::NotFinite { .. } | Error::Generate(_) => true,
            Error::DifferentSamples { .. } | Error::Rank(_) => true,
            Error::CheckpointVersion { .. } | Error::BadState { .. } => false,
            Error::BadManifest { .. } | Error::OtherModel { .. } | Error::OtherOptimizer { .. } => false,
            Error::TrainedBefore { .. } | Error::OtherShape { .. } => false,
            Error::OnRank(error) => error.is_fault,
        }
    }

    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Store(error) => error.hint().map(str::to_owned),
            Error::Data(error) => error.hint(),
            Error::Model(error) => error.hint(),
            Error::Generate(error) => error.hint().map(str::to_owned),
            Error::OnRank(error) => error.hint.clone(),
            Error::Report(_) | Error::Rank(_) => None,
            Error::DifferentSamples { .. } => {
                Some("all ranks of a group must read the same data in the same order".to_owned())
            }
            Error::CheckpointVersion { .. } => Some("use the program that wrote it".to_owned()),
            Error::BadState { .. } | Error::BadManifest { .. } => {
                Some("the checkpoint was changed; resume from an earlier one".to_owned())
            }
            Error::OtherModel { .. } => {
                Some("the checkpoint is of another model; resume with its own config".to_owned())
            }
            Error::OtherShape { tensor, found, wanted, .. } => Some(how_to_resume(tensor, found, wanted)),
            Error::TrainedBefore { .. } => {
                Some("resume with the [adapter] or the frozen layers that it was written with".to_owned())
            }
            Error::OtherOptimizer { .. } => Some(
                "resume with the train.optimizer and train.momentum that it was written with, or begin a run from the \
                 weights that `evenkeel export` takes from it"
                    .to_owned(),
            ),
            Error::NotFinite { .. } => Some(
                "resume from the last checkpoint with a smaller train.lr, a longer warm-up, or train.dtype = \"f32\""
                    .to_owned(),
            ),
        }
    }
}

/// The hint for a checkpoint with a parameter of another shape. The rank of an adapter is the first dim of A and the last of B.
fn how_to_resume(tensor: &str, found: &[usize], wanted: &[usize]) -> String {
    let rank = |shape: &[usize]| match shape {
        [rank, _] if tensor.ends_with("lora_A.weight") => Some(*rank),
        [_, rank] if tensor.ends_with("lora_B.weight") => Some(*rank),
        _ => None,
    };
    match (rank(found), rank(wanted)) {
        (Some(found), Some(wanted)) if found != wanted => format!(
            "its adapter has rank {found} there and this run's has {wanted}: set adapter.rank, or the layer's \
             adapter.rank_pattern, to {found}, or begin a run in another output.folder"
        ),
        _ => "the checkpoint is of a model of another size; resume with its own config".to_owned(),
    }
}
