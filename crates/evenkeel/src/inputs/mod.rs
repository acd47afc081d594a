//! Inputs of commands: the model and the data that a configuration names, and the folder of an earlier run. train, eval, export,
//! generate, inspect, data and program share them.

pub mod feed;
pub mod model;
pub mod model_folder;
pub mod run_folder;
