//! Quantisation against bitsandbytes: every byte of `golden/nf4.safetensors`.

use std::convert::Infallible;
use std::ops::Range;
use std::path::{Path, PathBuf};

use evenkeel_device::kernel::{ExpandNf4, NF4_BLOCK, NF4_CODES};
use evenkeel_device::{CpuOptions, DType, Device};
use evenkeel_store::{RawTensor, SafeTensorsFile};
use serde_json::Value;

use super::dynamic_map::DYNAMIC_MAP;
use super::quantize::{Nested, absmax, codes, expand_nested};
use super::sum::mean;

const MATRICES: [&str; 4] = ["plain", "edges", "ragged", "long"];

fn golden() -> SafeTensorsFile {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo or a bundle's script runs the tests");
    let path: PathBuf = Path::new(&package).join("../../golden/nf4.safetensors");
    SafeTensorsFile::open(path).expect("golden files are sound")
}

fn floats(tensor: &RawTensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.element_count()];
    tensor.read(0..values.len(), &mut values).expect("numbers");
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn read(values: &[f32]) -> impl Fn(Range<usize>, &mut [f32]) -> Result<(), Infallible> + Sync {
    move |elements, out| {
        out.copy_from_slice(&values[elements]);
        Ok(())
    }
}

#[test]
fn codes_and_factors_are_bitsandbytes_bytes() {
    let file = golden();
    let tensor = |name: String| file.tensor(&name).unwrap_or_else(|| panic!("the golden file has {name}"));
    for name in MATRICES {
        let original = floats(&tensor(format!("{name}.original")));
        let factors = absmax(original.len(), read(&original)).unwrap();
        let mut bytes = vec![0; original.len().div_ceil(2)];
        codes(0..original.len(), original.len(), &factors, read(&original), &mut bytes).unwrap();
        for state in ["single", "double"] {
            assert_eq!(bytes, tensor(format!("{name}.{state}.weight")).bytes(), "{name} {state}");
        }
        assert_eq!(bits(&factors), bits(&floats(&tensor(format!("{name}.single.weight.absmax")))), "{name}");
        let nested = Nested::of(&factors);
        let double = |ending: &str| tensor(format!("{name}.double.weight.{ending}"));
        assert_eq!(nested.codes, double("absmax").bytes(), "{name}");
        assert_eq!(bits(&nested.absmax), bits(&floats(&double("nested_absmax"))), "{name}");
        assert_eq!(bits(&*DYNAMIC_MAP), bits(&floats(&double("nested_quant_map"))), "{name}");
        assert_eq!(bits(&NF4_CODES), bits(&floats(&double("quant_map"))), "{name}");
        let state: Value = serde_json::from_slice(double("quant_state.bitsandbytes__nf4").bytes()).unwrap();
        assert_eq!(f64::from(nested.offset), state["nested_offset"].as_f64().unwrap(), "{name}");
    }
}

#[test]
fn expanded_numbers_are_bitsandbytes_bits() {
    let file = golden();
    let device = Device::cpu(&CpuOptions { memory_bytes: 1 << 24, ..CpuOptions::with_threads(2) }).unwrap();
    let queue = device.compute();
    let mut compared = 0;
    for (name, state) in MATRICES.into_iter().flat_map(|name| [(name, "single"), (name, "double")]) {
        let tensor = |ending: &str| file.tensor(&format!("{name}.{state}.{ending}"));
        let weight = tensor("weight").unwrap();
        let factors = match state {
            "single" => floats(&tensor("weight.absmax").unwrap()),
            _ => {
                let json: Value =
                    serde_json::from_slice(tensor("weight.quant_state.bitsandbytes__nf4").unwrap().bytes()).unwrap();
                let offset = json["nested_offset"].as_f64().unwrap() as f32;
                let nested = floats(&tensor("weight.nested_absmax").unwrap());
                expand_nested(tensor("weight.absmax").unwrap().bytes(), &DYNAMIC_MAP, &nested, offset)
            }
        };
        for (ending, dtype) in [("f32", DType::F32), ("bf16", DType::Bf16)] {
            let Some(expected) = tensor(ending) else { continue };
            let len = expected.element_count();
            let mut bytes = weight.bytes().to_vec();
            bytes.resize(len.div_ceil(8) * 4, 0);
            let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            let (codes, out) = (queue.indices(&words), queue.tensor(1, len, dtype));
            let absmax = queue.floats(1, len.div_ceil(NF4_BLOCK), DType::F32, &factors);
            queue.launch(ExpandNf4 { codes: codes.view(), absmax: absmax.view(), out: out.view() });
            assert_eq!(bits(&queue.read(&out)), bits(&floats(&expected)), "{name}.{state} {ending}");
            compared += 1;
        }
    }
    assert_eq!(compared, 13);
}

/// Parts of a matrix, as shards have them, and many threads.
#[test]
fn a_part_has_the_codes_of_the_whole() {
    let values: Vec<f32> = (0..1 << 16).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e7 - 0.8).collect();
    let factors = absmax(values.len(), read(&values)).unwrap();
    let mut whole = vec![0; values.len() / 2];
    codes(0..values.len(), values.len(), &factors, read(&values), &mut whole).unwrap();
    for part in [0..64, 64..640, 32_768..65_536, 65_472..65_536] {
        let mut bytes = vec![0; part.len() / 2];
        codes(part.clone(), values.len(), &factors, read(&values), &mut bytes).unwrap();
        assert_eq!(bytes, whole[part.start / 2..part.end / 2], "{part:?}");
    }
}

#[test]
fn what_is_not_finite_makes_its_blocks_factor_so() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0; 200];
        values[70] = bad;
        let factors = absmax(values.len(), read(&values)).unwrap();
        assert_eq!(factors.iter().map(|factor| factor.is_finite()).collect::<Vec<_>>(), [true, false, true, true]);
    }
}

#[test]
fn equal_factors_and_no_numbers_at_all_are_quantised() {
    let nested = Nested::of(&[0.5; 300]);
    assert_eq!(nested.expanded(), vec![0.5; 300]);
    assert_eq!(mean(&[1.0, 2.0, 3.0]), 2.0);
    assert_eq!(absmax(0, read(&[])).unwrap(), Vec::<f32>::new());
}
