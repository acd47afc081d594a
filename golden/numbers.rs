//! Numbers of golden files and their distances, for the tests of every crate.

#![allow(dead_code, reason = "every test file uses its own part")]

use evenkeel_device::kernel::IGNORE;
use evenkeel_store::SafeTensorsFile;

pub fn floats(file: &SafeTensorsFile, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap_or_else(|| panic!("golden file has {name}"));
    let mut values = vec![0.0; tensor.element_count()];
    tensor.read(0..values.len(), &mut values).expect("numbers");
    values
}

/// Negative ones stand for nothing.
pub fn indices(file: &SafeTensorsFile, name: &str) -> Vec<u32> {
    let tensor = file.tensor(name).unwrap_or_else(|| panic!("golden file has {name}"));
    let mut values = vec![0i32; tensor.element_count()];
    tensor.read(0..values.len(), &mut values).expect("integers");
    values.iter().map(|&value| if value < 0 { IGNORE } else { value as u32 }).collect()
}

pub fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| (value as f64).powi(2)).sum::<f64>().sqrt()
}

pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&a, &b)| (a as f64 - b as f64).powi(2)).sum::<f64>().sqrt()
}
