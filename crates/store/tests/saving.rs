//! Safetensors files and model folders as written here, read back by this crate and by the `safetensors` crate.

mod forge;

use std::collections::{BTreeMap, HashMap};
use std::fs;

use evenkeel_store::{
    Defect, Error, FileDtype, Folder, NewFolder, SHARD_BYTES, SafeTensorsFile, SafeTensorsWriter, TensorEntry,
    cut_in_shards, save_model, write_file_atomically,
};
use fastrand::Rng;
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

fn entry(name: &str, dtype: FileDtype, shape: &[usize]) -> TensorEntry {
    TensorEntry { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

/// The bytes of a file with these tensors, or why it is refused.
fn write(
    entries: &[TensorEntry],
    metadata: &BTreeMap<String, String>,
    fill: impl FnOnce(&mut SafeTensorsWriter) -> Result<(), Error>,
) -> Result<Vec<u8>, Defect> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.safetensors");
    let written = write_file_atomically(&path, |file| {
        let mut writer = SafeTensorsWriter::new(file, entries, metadata)?;
        fill(&mut writer)?;
        writer.finish()
    });
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), usize::from(written.is_ok()));
    written.map(|()| fs::read(path).unwrap()).map_err(|error| error.defect)
}

#[test]
fn a_file_is_the_same_to_the_byte_as_the_reference_writes_it() {
    let reference_dtype = |dtype: FileDtype| -> Dtype {
        serde_json::from_value(serde_json::Value::String(dtype.name().to_owned())).unwrap()
    };
    let mut rng = Rng::with_seed(4);
    for round in 0..100 {
        let entries: Vec<TensorEntry> = (0..rng.usize(..20))
            .map(|i| {
                let shape: Vec<usize> = (0..rng.usize(..4)).map(|_| rng.usize(..5)).collect();
                let name = format!("{}\"ü.{i}", rng.alphabetic());
                entry(&name, rng.choice(FileDtype::ALL).unwrap(), &shape)
            })
            .collect();
        let contents: HashMap<&str, Vec<u8>> = entries
            .iter()
            .map(|entry| (entry.name.as_str(), (0..entry.size_bytes().unwrap()).map(|_| rng.u8(..)).collect()))
            .collect();
        let metadata = if round % 2 == 0 { metadata() } else { BTreeMap::new() };
        let ours = write(&entries, &metadata, |writer| {
            let in_order: Vec<String> = writer.entries().iter().map(|entry| entry.name.clone()).collect();
            in_order.iter().try_for_each(|name| writer.write_bytes(&contents[name.as_str()]))
        });
        let views: Vec<(&str, TensorView)> = entries
            .iter()
            .map(|entry| {
                let view = TensorView::new(reference_dtype(entry.dtype), entry.shape.clone(), &contents[&*entry.name]);
                (entry.name.as_str(), view.unwrap())
            })
            .collect();
        let metadata = (!metadata.is_empty()).then(|| metadata.into_iter().collect());
        let theirs = safetensors::serialize(views, metadata).unwrap();
        assert_eq!(ours.unwrap(), theirs);
    }
}

#[test]
fn values_are_rounded_to_the_dtype_of_their_tensor() {
    let mut rng = Rng::with_seed(5);
    let mut values: Vec<f32> = (0..5000).map(|_| (rng.f32() - 0.5) * 10f32.powi(rng.i32(-9..5))).collect();
    values.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, 1e-30, 65504.0, -65504.0]);
    type Twin = (FileDtype, fn(f32) -> f32);
    let twins: [Twin; 3] = [
        (FileDtype::F32, |value| value),
        (FileDtype::BF16, |value| bf16::from_f32(value).to_f32()),
        (FileDtype::F16, |value| f16::from_f32(value).to_f32()),
    ];
    for (dtype, twin) in twins {
        for piece in [1, 7, 1024, 1500, values.len()] {
            let entries = [entry("t", dtype, &[values.len()])];
            let bytes =
                write(&entries, &metadata(), |writer| values.chunks(piece).try_for_each(|part| writer.write_f32(part)));
            let file = forge::open(bytes.unwrap()).unwrap();
            let mut read = vec![0f32; values.len()];
            file.tensor("t").unwrap().read(0..values.len(), &mut read).unwrap();
            for (found, value) in read.iter().zip(&values) {
                assert_eq!(found.to_bits(), twin(*value).to_bits(), "{value} as {dtype}");
            }
        }
    }
}

#[test]
fn nan_stays_nan_and_a_finite_value_never_becomes_infinite() {
    let one = |dtype, value: f32| write(&[entry("t", dtype, &[1])], &metadata(), |writer| writer.write_f32(&[value]));
    for dtype in [FileDtype::F32, FileDtype::BF16, FileDtype::F16] {
        let file = forge::open(one(dtype, f32::NAN).unwrap()).unwrap();
        let mut read = [0f32];
        file.tensor("t").unwrap().read(0..1, &mut read).unwrap();
        assert!(read[0].is_nan());
    }
    let beyond = |dtype, value| matches!(one(dtype, value), Err(Defect::BeyondDtype { value: v, .. }) if v == value);
    assert!(beyond(FileDtype::F16, 65520.0) && beyond(FileDtype::F16, -1e9) && beyond(FileDtype::BF16, f32::MAX));
    assert!(!beyond(FileDtype::F16, 65519.0) && !beyond(FileDtype::BF16, 3.38e38));
}

#[test]
fn a_file_with_too_few_or_too_many_elements_is_never_finished() {
    let entries =
        [entry("a", FileDtype::F32, &[2, 3]), entry("b", FileDtype::F32, &[0]), entry("c", FileDtype::BF16, &[2])];
    let write = |fill: &dyn Fn(&mut SafeTensorsWriter) -> Result<(), Error>| write(&entries, &metadata(), fill);
    let all = |writer: &mut SafeTensorsWriter| {
        writer.write_f32(&[0.0; 6])?;
        writer.write_f32(&[])?;
        writer.write_f32(&[0.0; 2])
    };
    write(&all).unwrap();
    let incomplete = |found: Result<Vec<u8>, Defect>, name: &str, needed: usize, given: usize| {
        let Err(Defect::TensorIncomplete { tensor, expected_bytes, found_bytes }) = found else { panic!("{found:?}") };
        assert_eq!((tensor.as_str(), expected_bytes, found_bytes), (name, needed, given));
    };
    incomplete(write(&|_| Ok(())), "a", 24, 0);
    incomplete(write(&|writer| writer.write_f32(&[0.0; 5])), "a", 24, 20);
    incomplete(write(&|writer| Err(writer.write_f32(&[0.0; 7]).unwrap_err())), "a", 24, 28);
    incomplete(write(&|writer| writer.write_f32(&[0.0; 6])), "c", 4, 0);
    incomplete(write(&|writer| writer.write_f32(&[0.0; 6]).and_then(|()| writer.write_bytes(&[0; 5]))), "c", 4, 5);
    let beyond = write(&|writer| all(writer).and_then(|()| writer.write_f32(&[0.0])));
    assert!(matches!(beyond, Err(Defect::BeyondLastTensor { found_bytes: 4 })), "{beyond:?}");
}

#[test]
fn entries_that_no_reader_would_accept_are_refused() {
    let refused = |entries: &[TensorEntry], expected: fn(&Defect) -> bool| {
        let defect = write(entries, &metadata(), |_| Ok(())).unwrap_err();
        assert!(expected(&defect), "{defect:?}");
    };
    let f32 = |name: &str, shape: &[usize]| entry(name, FileDtype::F32, shape);
    refused(&[f32("", &[])], |defect| matches!(defect, Defect::TensorName { .. }));
    refused(&[f32("a\nb", &[])], |defect| matches!(defect, Defect::TensorName { .. }));
    refused(&[f32("__metadata__", &[])], |defect| matches!(defect, Defect::TensorName { .. }));
    refused(&[f32("a", &[]), f32("a", &[1])], |defect| matches!(defect, Defect::DuplicateKey { .. }));
    refused(&[f32("a", &[1; 9])], |defect| matches!(defect, Defect::TooManyDims { .. }));
    refused(&[f32("a", &[1 << 62])], |defect| matches!(defect, Defect::SizeOverflow { .. }));
    refused(&[f32("a", &[1 << 61]), f32("b", &[1 << 61])], |defect| matches!(defect, Defect::SizeOverflow { .. }));
    let integers = write(&[entry("a", FileDtype::I64, &[1])], &metadata(), |writer| writer.write_f32(&[1.0]));
    assert!(matches!(integers, Err(Defect::CannotWriteAs { .. })), "{integers:?}");
}

/// A model whose every element is known by its place, saved in a new folder with a config.
fn save(entries: &[TensorEntry], shard_bytes: u64) -> (TempDir, std::path::PathBuf) {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("model");
    let folder = NewFolder::create(&path).unwrap();
    folder.write("config.json", b"{}").unwrap();
    save_model(&folder, entries, &[], &metadata(), shard_bytes, |name, emit| {
        let entry = entries.iter().find(|entry| entry.name == name).unwrap();
        values(entry).chunks(5).try_for_each(emit)
    })
    .unwrap();
    folder.commit(false).unwrap();
    (parent, path)
}

fn values(entry: &TensorEntry) -> Vec<f32> {
    let seed = entry.name.len() as f32 + f32::from(*entry.name.as_bytes().last().unwrap());
    (0..entry.shape.iter().product()).map(|i| seed + i as f32).collect()
}

#[test]
fn a_model_comes_back_from_any_number_of_shards() {
    let entries = [
        entry("model.embed.weight", FileDtype::BF16, &[10, 4]),
        entry("model.norm.weight", FileDtype::F32, &[4]),
        entry("model.layers.1.up", FileDtype::F16, &[4, 8]),
        entry("model.layers.0.up", FileDtype::F32, &[4, 8]),
        entry("model.empty", FileDtype::F32, &[0, 8]),
        entry("lm_head.weight", FileDtype::F32, &[]),
    ];
    for (shard_bytes, files) in [(0, 6), (4, 5), (64, 5), (100, 3), (160, 2), (292, 1), (SHARD_BYTES, 1)] {
        let (_parent, path) = save(&entries, shard_bytes);
        let shards = cut_in_shards(&entries, shard_bytes);
        assert_eq!(shards.len(), files, "{shard_bytes}");
        let opened = Folder::open(&path).unwrap();
        let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        names.sort();
        assert_eq!(opened.names().collect::<Vec<_>>(), names);
        for entry in &entries {
            let tensor = opened.tensor(&entry.name).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (entry.dtype, &entry.shape[..]));
            let mut read = vec![0f32; tensor.element_count()];
            tensor.read(0..read.len(), &mut read).unwrap();
            assert_eq!(read, values(entry), "{}", entry.name);
        }
        for shard in shards {
            let bytes = fs::read(path.join(&shard.file_name)).unwrap();
            let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
            assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
            let reference = SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(reference.len(), shard.entries.len());
            assert!(shard.entries.iter().all(|entry| reference.tensor(&entry.name).is_ok()));
        }
    }
}

#[test]
fn shards_and_their_index_are_named_as_transformers_names_them() {
    let entries = ["b", "a", "huge", "c"].map(|name| {
        let rows = if name == "huge" { 9 } else { 2 };
        entry(name, FileDtype::F32, &[rows])
    });
    let (_parent, path) = save(&entries, 16);
    let mut names: Vec<_> =
        fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let shard = |i| format!("model-0000{i}-of-00003.safetensors");
    assert_eq!(
        names,
        ["config.json".to_owned(), shard(1), shard(2), shard(3), "model.safetensors.index.json".to_owned()]
    );
    // The huge tensor overtakes the shard that was being filled, as it does in transformers.
    let expected = "{\n  \"metadata\": {\n    \"total_size\": 60\n  },\n  \"weight_map\": {\n    \
         \"a\": \"model-00002-of-00003.safetensors\",\n    \"b\": \"model-00002-of-00003.safetensors\",\n    \
         \"c\": \"model-00003-of-00003.safetensors\",\n    \"huge\": \"model-00001-of-00003.safetensors\"\n  }\n}\n";
    assert_eq!(fs::read_to_string(path.join("model.safetensors.index.json")).unwrap(), expected);
    let (_parent, path) = save(&entries, 100);
    assert_eq!(SafeTensorsFile::open(path.join("model.safetensors")).unwrap().names().count(), 4);
    assert!(!path.join("model.safetensors.index.json").exists());
}

#[test]
fn a_save_that_fails_leaves_nothing_under_the_name() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("model");
    let entries = ["a", "b", "c"].map(|name| entry(name, FileDtype::F32, &[4]));
    let save = |entries: &[TensorEntry], shard_bytes, fail_at: &str| {
        let folder = NewFolder::create(&path).unwrap();
        save_model(&folder, entries, &[], &metadata(), shard_bytes, |name, emit| {
            emit(&[1.0; 2])?;
            if name != fail_at { emit(&[1.0; 2]) } else { Ok::<(), Error>(()) }
        })
        .and_then(|()| folder.commit(false))
    };
    for (shard_bytes, file) in [(16, "model-00002-of-00003.safetensors"), (SHARD_BYTES, "model.safetensors")] {
        let error = save(&entries, shard_bytes, "b").unwrap_err();
        assert!(matches!(&error.defect, Defect::TensorIncomplete { tensor, .. } if tensor == "b"), "{error:?}");
        assert_eq!(error.file, path.join(file));
    }
    let twice = [entries[0].clone(), entries[1].clone(), entries[0].clone()];
    assert!(matches!(save(&twice, 16, "").unwrap_err().defect, Defect::DuplicateKey { .. }));
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    save(&entries, 16, "").unwrap();
    assert!(path.exists());
}
