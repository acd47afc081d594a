//! Linear attention by the gated delta rule, and what stands around it.
//!
//! The rule goes through a segment in chunks of [`DELTA_CHUNK`](crate::kernel::DELTA_CHUNK) tokens ([`chunk`]), whose sums are
//! products of small matrices ([`product`]); a few tokens go one by one ([`recurrence`]).

mod backward;
mod block;
mod chunk;
mod convolution;
mod dynamic;
mod fading;
mod forward;
mod gated_norm;
mod gradients;
mod product;
mod recurrence;
mod rows;
