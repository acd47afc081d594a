//! Experts' weights in MXFP4, as their publishers save them: 32 numbers of 4 bits share a scale, a power of two. Nothing in such
//! tensors is trusted: every size follows from config.json. bf16 holds every number exactly.
//!
//! A file has each expert's matrix transposed, with the numbers that share a scale in a row: codes [E, columns, rows / 32, 16],
//! two in a byte, the lower half first, and scales [E, columns, rows / 32].

use std::cell::RefCell;
use std::ops::Range;

use evenkeel_store::{FileDtype, Folder, RawTensor};

use crate::error::Error;
use crate::parameters::ParamSpec;
use crate::parameters::load::read_behind;

const CODES: &str = "_blocks";
const SCALES: &str = "_scales";

/// Numbers that share a scale.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = BLOCK / 2;
const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// The scale that stands for 1.
const BIAS: i32 = 127;
/// With greater ones, numbers are not finite.
const LARGEST_SCALE: u8 = 252;

/// The name of the codes of a weight that is saved so.
pub(crate) fn name_of_codes(name: &str) -> String {
    format!("{name}{CODES}")
}

/// The name of the scales that belong to codes.
fn name_of_scales(codes: &str) -> Option<String> {
    Some(format!("{}{SCALES}", codes.strip_suffix(CODES)?))
}

/// The scales of these tensors that a folder has, among them those of codes that lack some.
pub(crate) fn companions<'a>(codes: impl IntoIterator<Item = &'a String>) -> Vec<String> {
    codes.into_iter().filter_map(|name| name_of_scales(name)).collect()
}

/// The numbers of a parameter in a folder.
pub(crate) enum SavedNumbers<'f> {
    /// One behind the other.
    Tensors(Vec<RawTensor<'f>>),
    Mxfp4(Mxfp4<'f>),
}

impl<'f> SavedNumbers<'f> {
    /// Those in tensors of these names, which the folder has.
    pub fn open(folder: &'f Folder, spec: &ParamSpec, names: &[String], has_mxfp4: bool) -> Result<Self, Error> {
        match names {
            [codes] if has_mxfp4 && name_of_scales(codes).is_some() => {
                let (tensor, _) = spec.in_files().next().expect("a parameter of one tensor");
                Ok(SavedNumbers::Mxfp4(Mxfp4::open(folder, codes, &tensor.shape)?))
            }
            names => {
                let tensor = |name: &String| folder.tensor(name).expect("names were compared");
                Ok(SavedNumbers::Tensors(names.iter().map(tensor).collect()))
            }
        }
    }

    /// Reads elements of the whole parameter, row-major.
    pub fn read(&self, spec: &ParamSpec, elements: Range<usize>, out: &mut [f32]) -> Result<(), Error> {
        match self {
            SavedNumbers::Tensors(tensors) => read_behind(tensors, spec, elements, out),
            SavedNumbers::Mxfp4(weight) => weight.read(elements, out),
        }
    }
}

/// A weight in MXFP4 whose sizes have been checked.
pub(crate) struct Mxfp4<'f> {
    codes: RawTensor<'f>,
    scales: RawTensor<'f>,
    /// Rows of one expert, in blocks.
    blocks: usize,
    /// Columns of the weight, which are the file's rows.
    cols: usize,
    /// The numbers that were expanded last: neighbouring rows are asked for one after the other.
    last: RefCell<Expanded>,
}

/// Some columns of a block of rows. [32, columns]
#[derive(Default)]
struct Expanded {
    block: usize,
    cols: Range<usize>,
    numbers: Vec<f32>,
}

impl<'f> Mxfp4<'f> {
    /// The weight of this shape, [E, rows, columns], whose codes have this name.
    pub fn open(folder: &'f Folder, codes: &str, shape: &[usize]) -> Result<Mxfp4<'f>, Error> {
        let tensor = folder.tensor(codes).expect("names were compared");
        let scales = name_of_scales(codes).expect("a name of codes");
        let scales = folder.tensor(&scales).ok_or_else(|| bad(&tensor, format!("`{scales}` is missing")))?;
        let &[experts, rows, cols] = shape else {
            return Err(bad(&tensor, "config.json needs no weight of experts there".to_owned()));
        };
        if !rows.is_multiple_of(BLOCK) {
            return Err(bad(&tensor, format!("config.json needs {rows} rows, no multiple of {BLOCK}")));
        }
        let blocks = rows / BLOCK;
        for (tensor, expected) in
            [(&tensor, &[experts, cols, blocks, BLOCK_BYTES][..]), (&scales, &[experts, cols, blocks])]
        {
            if (tensor.dtype(), tensor.shape()) != (FileDtype::U8, expected) {
                let (dtype, shape) = (tensor.dtype(), tensor.shape());
                return Err(bad(tensor, format!("it is {dtype} {shape:?}, expected {} {expected:?}", FileDtype::U8)));
            }
        }
        Ok(Mxfp4 { codes: tensor, scales, blocks, cols, last: RefCell::default() })
    }

    /// Reads elements of the weight, row-major.
    fn read(&self, elements: Range<usize>, out: &mut [f32]) -> Result<(), Error> {
        let mut rest = out;
        let mut at = elements.start;
        while !rest.is_empty() {
            let (row, col) = (at / self.cols, at % self.cols);
            let (now, later) = rest.split_at_mut(rest.len().min(self.cols - col));
            self.read_row(row, col..col + now.len(), now)?;
            at += now.len();
            rest = later;
        }
        Ok(())
    }

    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [f32]) -> Result<(), Error> {
        let mut last = self.last.borrow_mut();
        if (last.block, &last.cols) != (row / BLOCK, &cols) {
            self.expand(row / BLOCK, cols.clone(), &mut last)?;
        }
        out.copy_from_slice(&last.numbers[row % BLOCK * cols.len()..][..cols.len()]);
        Ok(())
    }

    /// Expands columns of a block, which is counted over all experts.
    fn expand(&self, block: usize, cols: Range<usize>, into: &mut Expanded) -> Result<(), Error> {
        let (codes, scales, width) = (self.codes.bytes(), self.scales.bytes(), cols.len());
        let (expert, of_expert) = (block / self.blocks, block % self.blocks);
        into.numbers.resize(BLOCK * width, 0.0);
        for (place, col) in cols.clone().enumerate() {
            let index = (expert * self.cols + col) * self.blocks + of_expert;
            if scales[index] > LARGEST_SCALE {
                let what = format!("it has the scale {}, expected {LARGEST_SCALE} at most", scales[index]);
                return Err(bad(&self.scales, what));
            }
            let scale = 2f32.powi(i32::from(scales[index]) - BIAS);
            for (pair, byte) in codes[index * BLOCK_BYTES..][..BLOCK_BYTES].iter().enumerate() {
                let [low, high] = [byte & 15, byte >> 4].map(|code| VALUES[usize::from(code)] * scale);
                into.numbers[2 * pair * width + place] = low;
                into.numbers[(2 * pair + 1) * width + place] = high;
            }
        }
        (into.block, into.cols) = (block, cols);
        Ok(())
    }
}

fn bad(tensor: &RawTensor, what: String) -> Error {
    Error::BadMxfp4 { name: tensor.name().to_owned(), file: tensor.file().to_owned(), what }
}
