//! Parameters from a Hugging Face folder. Names and shapes are compared with the config before memory is used.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use evenkeel_device::{DType, Queue, Tensor};
use evenkeel_store::{Folder, RawTensor};
use serde_json::Value;

use crate::adapter::AdapterValues;
use crate::chain::adapted::AdaptedWeight;
use crate::chain::model::Model;
use crate::config::check_description;
use crate::config::family::{Family, Names};
use crate::config::{Config, Input, Quantization};
use crate::error::Error;
use crate::nf4::PackedLayers;
use crate::nf4::bitsandbytes::{self, Quantized};
use crate::nf4::packed::{HostWeight, QuantizedOnLoading, read_expanded};
use crate::parameters::mxfp4::{self, SavedNumbers};
use crate::parameters::{FileTensor, ParamId, ParamSpec, Parameters, ZeroSharding, draw};
use crate::sharding::layout::Piece;

/// Fills a shard's part of a parameter. `read(range, out)` reads elements of the whole parameter, row-major; only the shard's
/// part is read.
pub fn fill_slice<E>(
    queue: &Queue,
    tensor: &Tensor,
    spec: &ParamSpec,
    read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    let width = spec.whole[1];
    let is_there = |piece: &Piece| !piece.rows.is_empty() && !piece.cols.is_empty();
    for piece in spec.slice.pieces().filter(is_there) {
        let held = tensor.view().row_range(piece.held_rows).col_range(piece.held_cols);
        let (first_row, cols) = (piece.rows.start, piece.cols);
        queue.write_rows(held, |first, rows| {
            let start = (first_row + first) * width;
            if cols.len() == width {
                return read(start..start + rows.len(), rows);
            }
            let starts = (start + cols.start..).step_by(width);
            starts.zip(rows.chunks_exact_mut(cols.len())).try_for_each(|(at, row)| read(at..at + row.len(), row))
        })?;
    }
    Ok(())
}

/// Reads elements of a parameter from the tensors that make it up, one behind the other.
pub(crate) fn read_behind(
    tensors: &[RawTensor],
    spec: &ParamSpec,
    elements: Range<usize>,
    out: &mut [f32],
) -> Result<(), Error> {
    let each = spec.whole.iter().product::<usize>() / tensors.len();
    let (mut at, mut rest) = (elements.start, out);
    while !rest.is_empty() {
        let (tensor, first) = (at / each, at % each);
        let (now, later) = rest.split_at_mut(rest.len().min(each - first));
        tensors[tensor].read(first..first + now.len(), now)?;
        at += now.len();
        rest = later;
    }
    Ok(())
}

/// Calls `work` with a folder's weight in 4 bits: as it was saved, or quantised while it is read.
pub(crate) fn with_packed<T>(
    folder: &Folder,
    name: &str,
    spec: &ParamSpec,
    work: impl FnOnce(&dyn HostWeight) -> Result<T, Error>,
) -> Result<T, Error> {
    if bitsandbytes::is_quantized(folder, name) {
        return work(&Quantized::open(folder, name, &spec.shape)?.read()?);
    }
    let tensor = folder.tensor(name).expect("names were compared");
    let read = |elements: Range<usize>, out: &mut [f32]| tensor.read(elements, out).map_err(Error::from);
    work(&QuantizedOnLoading::new(spec, read)?)
}

/// Calls `work` with a function that reads elements of a folder's weight: the numbers that layers compute with, but for their dtype.
fn with_numbers<T>(
    folder: &Folder,
    name: &str,
    spec: &ParamSpec,
    work: impl FnOnce(&dyn Fn(Range<usize>, &mut [f32]) -> Result<(), Error>) -> Result<T, Error>,
) -> Result<T, Error> {
    if spec.is_packed {
        return with_packed(folder, name, spec, |weight| work(&|elements, out| read_expanded(weight, elements, out)));
    }
    let tensor = folder.tensor(name).expect("names were compared");
    work(&|elements, out| tensor.read(elements, out).map_err(Error::from))
}

impl Model {
    /// The model that a folder's config.json describes.
    pub fn open(folder: &Folder) -> Result<Model, Error> {
        Model::of_folder(folder.config(), folder)
    }

    /// The model of a folder with this config.json. The folder's tensors tell which layers are in 4 bits, if config.json says that
    /// some are.
    pub fn of_folder(json: &Value, folder: &Folder) -> Result<Model, Error> {
        check_description(folder.config(), folder.path())?;
        let mut config = Config::from_json(json).map_err(|error| error.with_line(folder.path()))?;
        if let (Some(experts), Some(options)) = (&mut config.experts, &config.family.experts) {
            experts.are_stacked |= folder.names().any(|name| name.ends_with(options.stacked[0]));
        }
        if let Some(multimodal) = &config.family.multimodal {
            let has_older = |name: &str| multimodal.older.iter().any(|(_, older)| name.starts_with(older));
            config.has_older_names = folder.names().any(has_older);
        }
        let model = Model::new(config);
        if model.config.packing.is_none() {
            return Ok(model);
        }
        if model.config.family.is_transposed {
            let what =
                format!("a `{}` in 4 bits, whose matrices bitsandbytes transposes,", model.config.family.model_type);
            return Err(Error::Unsupported { what });
        }
        let present: BTreeSet<&str> = folder.names().collect();
        let is_quantized = |spec: &&ParamSpec| {
            let name = spec.in_files().next().and_then(|(tensor, _)| model.find(&present, &tensor.name));
            name.is_none_or(|name| bitsandbytes::is_quantized(folder, name))
        };
        let packed = || model.specs.iter().filter(|spec| spec.is_packed);
        let (quantized, skipped): (Vec<&ParamSpec>, Vec<&ParamSpec>) = packed().partition(is_quantized);
        if quantized.is_empty() {
            return Err(Error::NothingQuantized { folder: folder.path().to_owned() });
        }
        let skipped = skipped.into_iter().map(|spec| spec.name.clone()).collect();
        Ok(model.packed_as(PackedLayers::skipping(skipped)))
    }

    /// A folder's name for a tensor. Checkpoints of the bare network leave out the prefix; the first of BERT have other names for
    /// the parameters of norms.
    fn find<'n>(&self, present: &BTreeSet<&'n str>, name: &str) -> Option<&'n str> {
        const OLDER: [(&str, &str); 2] =
            [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];
        let has_older = |(new, _): &&(&str, &str)| self.config.family.classifier.is_some() && name.ends_with(new);
        let older = OLDER.iter().find(has_older).map(|(new, older)| name.replace(new, older));
        let names = [Some(name), older.as_deref()].into_iter().flatten();
        let mut names = names.flat_map(|name| [Some(name), name.strip_prefix(self.config.family.names.base)]).flatten();
        names.find_map(|name| present.get(name).copied())
    }

    /// The modules that begin with random numbers: a head that is to begin anew, and what the folder has nothing of, the head of texts
    /// and the layer before it, where it has a network that knows no labels.
    pub fn new_modules(&self, folder: &Folder) -> Vec<&'static str> {
        let Family { names, classifier, .. } = self.config.family;
        let present: BTreeSet<&str> = folder.names().collect();
        let pooler = classifier.as_ref().map(|classifier| classifier.pooler);
        let is_anew = |module: &&str| self.config.has_new_head && *module == names.head;
        let head = Some(names.head).filter(|head| pooler.is_some() || is_anew(head));
        let parameters = ["weight", "bias"];
        let is_new = |module: &&str| {
            parameters.iter().all(|parameter| self.find(&present, &format!("{module}.{parameter}")).is_none())
        };
        pooler.into_iter().chain(head).filter(|module| is_anew(module) || is_new(module)).collect()
    }

    pub(crate) fn wrong_shape(&self, name: String, file: &Path, found: &[usize], expected: Vec<usize>) -> Error {
        let file = file.to_owned();
        let is_head = name.contains(self.config.family.names.head);
        match (self.config.input, found.first(), expected.first()) {
            (Input::Texts { .. }, Some(&found), Some(&expected)) if is_head => {
                Error::OtherLabels { file, found, expected }
            }
            _ => Error::WrongShape { name, file, found: found.to_vec(), expected },
        }
    }

    /// Compares the names and shapes of the folder's tensors with the config, and reads no values.
    pub fn check(&self, folder: &Folder) -> Result<(), Error> {
        self.names_in(folder).map(drop)
    }

    /// Loads this shard's part of the folder's weights, converting them to f32 masters and copies in `dtype` as they are read.
    pub fn load(&self, folder: &Folder, dtype: DType, split: ZeroSharding, queue: &Queue) -> Result<Parameters, Error> {
        self.load_adapted(folder, &AdapterValues::New { seed: 0 }, dtype, split, queue)
    }

    /// The same for a model with adapters. A saved adapter also has the modules that were trained whole.
    pub fn load_adapted(
        &self,
        folder: &Folder,
        adapter: &AdapterValues,
        dtype: DType,
        split: ZeroSharding,
        queue: &Queue,
    ) -> Result<Parameters, Error> {
        let names = self.names_in(folder)?;
        if let AdapterValues::Saved(saved) = adapter {
            self.check_adapter(saved)?;
        }
        let adapted = self.adapted_weights();
        let adapted_by = |magnitudes: ParamId| {
            let has = |adapted: &&AdaptedWeight| {
                adapted.magnitude.is_some_and(|magnitude| magnitude.magnitudes == magnitudes)
            };
            adapted.iter().find(has)
        };
        let parameters = Parameters::allocate(self, dtype, split, queue);
        parameters.fill(queue, |id, spec, whole| {
            if spec.is_derived {
                return Ok(());
            }
            match (adapter, &names[id.0][..], adapted_by(id)) {
                (AdapterValues::Saved(saved), ..) if spec.is_trained => {
                    fill_slice(queue, whole, spec, self.saved_values(saved, spec)?)?;
                }
                (AdapterValues::New { .. }, [], Some(adapted)) => {
                    let name = names[adapted.weight.0].first().expect("an adapted weight is the base's");
                    let weight = &self.specs[adapted.weight.0];
                    with_numbers(folder, name, weight, |read| {
                        fill_slice(queue, whole, spec, |outputs, norms| {
                            adapted.read_norms(read, weight.whole, dtype, outputs, norms)
                        })
                    })?;
                    folder.release(name);
                }
                (AdapterValues::New { seed }, [], None) => draw(queue, spec, whole, *seed),
                (_, names, _) => {
                    assert!(!names.is_empty(), "an adapter is trained");
                    let saved = SavedNumbers::open(folder, spec, names, self.has_mxfp4())?;
                    fill_slice(queue, whole, spec, |elements, out| saved.read(spec, elements, out))?;
                    names.iter().for_each(|name| folder.release(name));
                }
            }
            Ok::<_, Error>(())
        })?;
        parameters.fill_packed(|id, spec, weight| {
            let name = names[id.0].first().expect("a weight of the base");
            with_packed(folder, name, spec, |whole| weight.fill(spec, whole, queue))?;
            folder.release(name);
            Ok(())
        })?;
        self.measure_filled_rows(&parameters, queue);
        Ok(parameters)
    }

    /// Whether the folder may have experts in MXFP4.
    pub(crate) fn has_mxfp4(&self) -> bool {
        self.config.quantization == Some(Quantization::Mxfp4)
    }

    /// The folder's names for each parameter that is not an adapter's, once every name and shape is known to fit.
    pub(crate) fn names_in(&self, folder: &Folder) -> Result<Vec<Vec<String>>, Error> {
        let present: BTreeSet<&str> = folder.names().collect();
        let Names { embed, head, .. } = self.config.family.names;
        let find = |name: &str| self.find(&present, name).map(str::to_owned);
        let in_folder = |name: &str| {
            let is_copy = self.config.head_begins_as_embedding && name.strip_suffix(".weight") == Some(head);
            let codes = || self.has_mxfp4().then(|| find(&mxfp4::name_of_codes(name))).flatten();
            find(name).or_else(|| find(embed).filter(|_| is_copy)).or_else(codes)
        };
        let new = self.new_modules(folder);
        let is_new = |spec: &ParamSpec| {
            let inside = |module: &str| spec.name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
            new.iter().any(|module| inside(module))
        };
        if let Some(spec) = self.specs.iter().find(|spec| is_new(spec) && !spec.is_trained && !spec.is_empty()) {
            return Err(Error::NewButFrozen { name: spec.name.clone(), folder: folder.path().to_owned() });
        }
        let of_base = || self.specs.iter().filter(|spec| !spec.is_adapter && !is_new(spec));
        let wanted = || of_base().flat_map(ParamSpec::in_files).map(|(tensor, _)| tensor);
        let missing: Vec<String> =
            wanted().map(|tensor| tensor.name).filter(|name| in_folder(name).is_none()).collect();
        if let Some(first) = missing.first() {
            let (name, missing, expected) = (first.clone(), missing.len(), wanted().count());
            return Err(Error::MissingTensor { name, folder: folder.path().to_owned(), missing, expected });
        }
        let found = |tensor: FileTensor| in_folder(&tensor.name).expect("none is missing");
        let names_of = |spec: &ParamSpec| spec.in_files().map(|(tensor, _)| found(tensor)).collect();
        let of_spec = |spec: &ParamSpec| if spec.is_adapter || is_new(spec) { Vec::new() } else { names_of(spec) };
        let names: Vec<Vec<String>> = self.specs.iter().map(of_spec).collect();
        let mut companions = Vec::new();
        for (spec, name) in self.specs.iter().zip(&names).filter(|(spec, _)| spec.is_packed) {
            let name = name.first().expect("a weight of the base");
            if bitsandbytes::is_quantized(folder, name) {
                Quantized::open(folder, name, &spec.shape)?;
                companions.extend(bitsandbytes::companions(folder, name));
            }
        }
        if self.has_mxfp4() {
            for (spec, names) in self.specs.iter().zip(&names).filter(|(spec, _)| !spec.is_adapter) {
                SavedNumbers::open(folder, spec, names, true)?;
            }
            companions.extend(mxfp4::companions(names.iter().flatten()));
        }
        self.refuse_unexpected(&present, names.iter().flatten().chain(&companions), folder)?;
        let tensors = of_base().flat_map(|spec| spec.in_files().map(move |(tensor, _)| (spec, tensor)));
        for ((spec, expected), name) in tensors.zip(names.iter().flatten()) {
            let tensor = folder.tensor(name).expect("present");
            let is_packed = spec.is_packed && bitsandbytes::is_quantized(folder, name);
            let is_quantized = is_packed || (self.has_mxfp4() && name.ends_with(&mxfp4::name_of_codes("")));
            if is_quantized {
                continue;
            }
            if tensor.shape() != expected.shape {
                return Err(self.wrong_shape(name.clone(), tensor.file(), tensor.shape(), expected.shape));
            }
            tensor.check_conversion::<f32>()?;
        }
        self.refuse_other_head(&present, folder)?;
        Ok(names)
    }

    /// Refuses a head that is tied to the embedding if the folder has another one. Versions of transformers take different ones.
    fn refuse_other_head(&self, present: &BTreeSet<&str>, folder: &Folder) -> Result<(), Error> {
        if !self.config.tied && !self.config.head_begins_as_embedding {
            return Ok(());
        }
        let tensor = |name: &str| self.find(present, name).and_then(|name| folder.tensor(name));
        let head = present.iter().find(|name| self.is_head(name)).and_then(|name| folder.tensor(name));
        let (Some(head), Some(embedding)) = (head, tensor(self.config.family.names.embed)) else { return Ok(()) };
        let is_copy = has_same_numbers(&head, &embedding)?;
        folder.release(head.name());
        folder.release(embedding.name());
        if is_copy {
            return Ok(());
        }
        let [head, embedding] = [head, embedding].map(|tensor| tensor.name().to_owned());
        Err(Error::OtherHead { head, embedding, folder: folder.path().to_owned() })
    }

    fn refuse_unexpected<'n>(
        &self,
        present: &BTreeSet<&str>,
        known: impl IntoIterator<Item = &'n String>,
        folder: &Folder,
    ) -> Result<(), Error> {
        let known: BTreeSet<&str> = known.into_iter().map(String::as_str).collect();
        // A mask is a square, a bias a vector.
        let is_bias =
            |name: &str| name.ends_with(".bias") && folder.tensor(name).is_some_and(|tensor| tensor.shape().len() == 1);
        let is_unexpected = |name: &&str| match is_buffer(name) && is_bias(name) {
            true => !self.carries(name),
            false => !self.may_be_ignored(name),
        };
        let unexpected: Vec<&str> = present.difference(&known).copied().filter(is_unexpected).collect();
        match unexpected.first() {
            None => Ok(()),
            Some(name) => Err(Error::UnexpectedTensor {
                name: name.to_string(),
                folder: folder.path().to_owned(),
                unexpected: unexpected.len(),
            }),
        }
    }

    /// Buffers, and a tied head saved a second time.
    fn may_be_ignored(&self, name: &str) -> bool {
        let is_other_head = |other: &&str| name.starts_with(other);
        is_buffer(name)
            || self.config.family.classifier.as_ref().is_some_and(|it| it.others.iter().any(is_other_head))
            || (self.config.tied && self.is_head(name))
            || (self.config.has_new_head
                && name.rsplit_once('.').is_some_and(|(module, _)| module == self.config.family.names.head))
            || self.carries(name)
    }

    fn is_head(&self, name: &str) -> bool {
        let Family { names, multimodal, .. } = self.config.family;
        let is = |head: &str| name.strip_suffix(".weight") == Some(head);
        is(names.head) || multimodal.as_ref().is_some_and(|multimodal| is(&multimodal.older_name(names.head)))
    }

    /// The tensors of a folder that belong to no part of the model that is trained: a saved model has them, too.
    pub fn carried<'f>(&self, folder: &'f Folder) -> Vec<RawTensor<'f>> {
        folder.names().filter(|name| self.carries(name)).filter_map(|name| folder.tensor(name)).collect()
    }

    fn carries(&self, name: &str) -> bool {
        let family = self.config.family;
        let is_idle = |layer: usize| {
            let own = name.strip_prefix(&family.names.layer.replace("{}", &layer.to_string()));
            let idle = family.key_sharers.as_ref().map_or(&[][..], |sharers| sharers.idle);
            own.is_some_and(|own| idle.iter().any(|idle| own.starts_with(idle)))
        };
        let sharers = (0..self.config.layers.len()).filter(|&layer| self.config.layers[layer].keys_of.is_some());
        family.carried.iter().any(|prefix| name.starts_with(prefix)) || sharers.into_iter().any(is_idle)
    }
}

fn has_same_numbers(one: &RawTensor, other: &RawTensor) -> Result<bool, Error> {
    /// Numbers that are compared at once.
    const PART: usize = 1 << 16;
    if one.shape() != other.shape() {
        return Ok(false);
    }
    // Of one dtype, most are copies.
    if one.dtype() == other.dtype() && one.bytes() == other.bytes() {
        return Ok(true);
    }
    let count = one.element_count();
    let [mut here, mut there] = [vec![0.0f32; PART], vec![0.0; PART]];
    for first in (0..count).step_by(PART) {
        let part = first..count.min(first + PART);
        let [here, there] = [&mut here[..part.len()], &mut there[..part.len()]];
        one.read(part.clone(), here)?;
        other.read(part, there)?;
        if here != there {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether older versions of transformers saved a buffer of such a name.
fn is_buffer(name: &str) -> bool {
    const BUFFERS: [&str; 7] = [
        ".rotary_emb.inv_freq",
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
        ".embeddings.position_ids",
        ".embeddings.token_type_ids",
    ];
    BUFFERS.iter().any(|buffer| name.ends_with(buffer) || name == &buffer[1..])
}
