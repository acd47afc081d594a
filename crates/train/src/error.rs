//! What can go wrong in a run.

use std::path::PathBuf;

/// A run's end before its time.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] evenkeel_store::Error),
    #[error("`{}` was written in version {found} of the format, this program knows {known}", path.display())]
    CheckpointVersion { path: PathBuf, found: u32, known: u32 },
    #[error("`{}` has no tensor `{tensor}` of the shape this model needs", path.display())]
    OtherModel { path: PathBuf, tensor: String },
    #[error(
        "loss or gradients were not finite in {steps} steps in a row, up to step {step} (loss {loss}, gradient norm \
         {grad_norm})"
    )]
    NotFinite { steps: u32, step: u64, loss: f64, grad_norm: f64 },
}

impl Error {
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Store(error) => error.hint().map(str::to_owned),
            Error::CheckpointVersion { .. } => Some("use the program that wrote it".to_owned()),
            Error::OtherModel { .. } => {
                Some("the checkpoint is of another model; resume with its own config".to_owned())
            }
            Error::NotFinite { .. } => Some(
                "resume from the last checkpoint with a smaller train.lr, a longer warm-up, or train.dtype = \"f32\""
                    .to_owned(),
            ),
        }
    }
}
