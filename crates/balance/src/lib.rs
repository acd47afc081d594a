//! Who is slow, and what to do about it: pure functions from measurements, costs and layouts to actions.
//!
//! Every rank is given the same numbers and decides the same. Nothing here knows devices, programs or files.
