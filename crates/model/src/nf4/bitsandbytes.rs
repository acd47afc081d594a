//! 4-bit weights as bitsandbytes saves them: beside a weight's codes lie tensors of the same name and an ending. Nothing in them is
//! trusted: every size follows from config.json, and every number is checked before it is used.

use std::ops::Range;

use evenkeel_device::kernel::{NF4_BLOCK, NF4_CODES};
use evenkeel_store::{FileDtype, Folder, RawTensor, shortened};
use serde::Deserialize;

use super::dynamic_map::MAP_LEN;
use super::packed::HostWeight;
use super::quantize::{NESTED_BLOCK, expand_nested};
use crate::error::Error;

const STATE: &str = ".quant_state.bitsandbytes__nf4";
const OTHER_STATE: &str = ".quant_state.bitsandbytes__";
const ABSMAX: &str = ".absmax";
const MAP: &str = ".quant_map";
const NESTED_ABSMAX: &str = ".nested_absmax";
const NESTED_MAP: &str = ".nested_quant_map";

/// Every ending that a weight's companions can have.
const ENDINGS: [&str; 5] = [STATE, ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP];

/// A state is some 170 bytes.
const STATE_BYTES: usize = 4096;

/// Whether a folder has this weight in 4 bits, of whatever kind.
pub(crate) fn is_quantized(folder: &Folder, name: &str) -> bool {
    let prefix = format!("{name}{OTHER_STATE}");
    folder.names().any(|name| name.starts_with(&prefix))
}

/// The names of a weight's companions that a folder has.
pub(crate) fn companions(folder: &Folder, name: &str) -> Vec<String> {
    let names = ENDINGS.map(|ending| format!("{name}{ending}"));
    names.into_iter().filter(|name| folder.tensor(name).is_some()).collect()
}

/// A weight in 4 bits, whose sizes have been checked.
pub(crate) struct Quantized<'a> {
    codes: RawTensor<'a>,
    absmax: RawTensor<'a>,
    nested: Option<NestedState<'a>>,
}

struct NestedState<'a> {
    absmax: RawTensor<'a>,
    map: RawTensor<'a>,
    offset: f32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    quant_type: String,
    blocksize: u64,
    /// The dtype of the numbers before they were quantised: it changes none of them.
    #[serde(rename = "dtype")]
    _dtype: String,
    shape: Vec<u64>,
    nested_blocksize: Option<u64>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

impl<'a> Quantized<'a> {
    /// The weight of this name and shape.
    pub fn open(folder: &'a Folder, name: &str, shape: &[usize]) -> Result<Quantized<'a>, Error> {
        let codes = folder.tensor(name).expect("names were compared");
        let bad = |what: String| bad(&codes, what);
        let part = |ending: &str| folder.tensor(&format!("{name}{ending}"));
        let needed = |ending: &str| part(ending).ok_or_else(|| bad(format!("`{name}{ending}` is missing")));
        let state = match part(STATE) {
            Some(state) => read_state(&state)?,
            None => {
                let kind = folder.names().find_map(|other| other.strip_prefix(name)?.strip_prefix(OTHER_STATE));
                return Err(bad(format!(
                    "its codes are {}, expected nf4",
                    shorten(kind.unwrap_or("of no known kind"))
                )));
            }
        };
        let len: usize = shape.iter().product();
        let blocks = len.div_ceil(NF4_BLOCK);
        if state.quant_type != "nf4" {
            return Err(bad(format!("its codes are {}, expected nf4", shorten(&state.quant_type))));
        }
        if state.blocksize != NF4_BLOCK as u64 {
            return Err(bad(format!("its blocks have {} numbers, expected {NF4_BLOCK}", state.blocksize)));
        }
        if !state.shape.iter().copied().eq(shape.iter().map(|&size| size as u64)) {
            return Err(bad(format!(
                "its shape is {}, config.json needs {shape:?}",
                shorten(&format!("{:?}", state.shape))
            )));
        }
        check_tensor(&codes, FileDtype::U8, &[len.div_ceil(2), 1])?;
        let map = needed(MAP)?;
        check_tensor(&map, FileDtype::F32, &[NF4_CODES.len()])?;
        if floats(&map)?.iter().map(|number| number.to_bits()).ne(NF4_CODES.map(f32::to_bits)) {
            return Err(bad("its `quant_map` has other numbers than nf4's codes".to_owned()));
        }
        let absmax = needed(ABSMAX)?;
        let State { nested_blocksize, nested_dtype, nested_offset, .. } = state;
        let nested = match (nested_blocksize, nested_dtype, nested_offset) {
            (None, None, None) => {
                check_tensor(&absmax, FileDtype::F32, &[blocks])?;
                if let Some(surplus) = [NESTED_ABSMAX, NESTED_MAP].into_iter().find(|ending| part(ending).is_some()) {
                    return Err(bad(format!("`{name}{surplus}` is there, but the weight is quantised once")));
                }
                None
            }
            (Some(size), Some(dtype), Some(offset)) => {
                let offset = offset as f32;
                if size != NESTED_BLOCK as u64 || dtype != "float32" || !offset.is_finite() {
                    let what = format!("blocks of {size} factors of {}, less {offset}", shorten(&dtype));
                    return Err(bad(format!("it has {what}, expected blocks of {NESTED_BLOCK} of float32")));
                }
                check_tensor(&absmax, FileDtype::U8, &[blocks])?;
                let (absmax, map) = (needed(NESTED_ABSMAX)?, needed(NESTED_MAP)?);
                check_tensor(&absmax, FileDtype::F32, &[blocks.div_ceil(NESTED_BLOCK)])?;
                check_tensor(&map, FileDtype::F32, &[MAP_LEN])?;
                Some(NestedState { absmax, map, offset })
            }
            _ => return Err(bad("its state has a part of the keys of a second quantisation".to_owned())),
        };
        Ok(Quantized { codes, absmax, nested })
    }

    /// The weight, its factors read.
    pub fn read(&self) -> Result<FileWeight<'a>, Error> {
        Ok(FileWeight { codes: self.codes.bytes(), factors: self.factors()? })
    }

    fn factors(&self) -> Result<Vec<f32>, Error> {
        let factors = match &self.nested {
            None => floats(&self.absmax)?,
            Some(NestedState { absmax, map, offset }) => {
                let map: [f32; MAP_LEN] = floats(map)?.try_into().expect("its size was checked");
                expand_nested(self.absmax.bytes(), &map, &floats(absmax)?, *offset)
            }
        };
        match factors.iter().find(|factor| !factor.is_finite()) {
            None => Ok(factors),
            Some(factor) => Err(bad(&self.codes, format!("a block's factor is {factor}"))),
        }
    }
}

/// A whole weight as a file has it.
pub(crate) struct FileWeight<'a> {
    codes: &'a [u8],
    factors: Vec<f32>,
}

impl HostWeight for FileWeight<'_> {
    fn factors(&self) -> &[f32] {
        &self.factors
    }

    fn codes(&self, elements: Range<usize>, out: &mut [u8]) -> Result<(), Error> {
        out.copy_from_slice(&self.codes[elements.start / 2..elements.end.div_ceil(2)]);
        Ok(())
    }
}

fn read_state(tensor: &RawTensor) -> Result<State, Error> {
    if tensor.dtype() != FileDtype::U8 || tensor.shape().len() != 1 || tensor.element_count() > STATE_BYTES {
        let what = format!("it is {} {:?}, expected at most {STATE_BYTES} bytes", tensor.dtype(), tensor.shape());
        return Err(bad(tensor, what));
    }
    serde_json::from_slice(tensor.bytes())
        .map_err(|error| bad(tensor, format!("its JSON cannot be read: {}", shorten(&error.to_string()))))
}

fn check_tensor(tensor: &RawTensor, dtype: FileDtype, shape: &[usize]) -> Result<(), Error> {
    if (tensor.dtype(), tensor.shape()) == (dtype, shape) {
        return Ok(());
    }
    Err(bad(tensor, format!("it is {} {:?}, expected {dtype} {shape:?}", tensor.dtype(), tensor.shape())))
}

fn floats(tensor: &RawTensor) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; tensor.element_count()];
    tensor.read(0..values.len(), &mut values)?;
    Ok(values)
}

/// The beginning of a text from a file, for use in a message.
fn shorten(text: &str) -> String {
    shortened(text, 80)
}

fn bad(tensor: &RawTensor, what: String) -> Error {
    Error::BadQuantization { name: tensor.name().to_owned(), file: tensor.file().to_owned(), what }
}
