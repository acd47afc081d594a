//! Text from a model: [`generate`] runs the chain on new tokens, [`cache`] keeps the keys and values that they attend to,
//! [`sampling`] chooses the next.

pub(crate) mod cache;
pub(crate) mod generate;
pub(crate) mod sampling;
