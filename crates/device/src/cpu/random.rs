//! Counter-based random numbers, as a function of seed and place.
//!
//! **The generator.** `mix` is a bijection of 64-bit numbers (two rounds of multiply and shift). A row of the whole
//! matrix has the key `mix(mix(seed + G·(draw + 1)) + G·(row + 1))`, G = 2⁶⁴/φ, where `draw` tells apart the words
//! that one element needs. The word at column c is a bijection of 32-bit numbers applied to c: the key's lower half is
//! added, then three rounds of shift and multiply, the key's upper half being added after the first. So numbers of a
//! row never repeat a word, and rows, draws and seeds differ in 64 bits of key.
//! The weights of attention have keys alike, a head in the place of the draw and a query in that of the row, and words of
//! their own: see `attention/dropout.rs`.
//!
//! A uniform number is the upper 24 bits of a word, over 2²⁴. A normal one is √(-2 ln u)·cos(2πv) of two words, made of
//! additions, products, a quotient and a root in f32 only, which are the same on every CPU.

use std::array::from_fn;

use super::matrix::indices;
use super::rows::{Map, map};
use super::simd::{LANES, Simd};
use super::{Run, Team};
use crate::kernel::{Dropout, Placement, RandomNormal, seed_of};

/// One draw for every element of a view.
#[derive(Clone, Copy)]
struct Words {
    seed: u64,
    placement: Placement,
}

impl Words {
    fn new(seed: u64, draw: u64, placement: Placement, cols: usize) -> Words {
        let end = placement.first_col + cols as u64;
        assert!(end <= placement.cols, "columns up to {end} of a matrix of {}", placement.cols);
        assert!(placement.cols <= 1 << 32, "random matrices have at most 2^32 columns, not {}", placement.cols);
        Words { seed: seed_of(seed, draw), placement }
    }

    /// The words of the elements from (row, col) on, counted from the placement's first.
    #[inline(always)]
    fn at(self, row: u64, col: usize) -> [u32; LANES] {
        let row = self.placement.first_row + row;
        let key = seed_of(self.seed, row);
        let first = (self.placement.first_col + col as u64) as u32;
        let halves = [key as u32, (key >> 32) as u32];
        from_fn(|lane| word(halves, first.wrapping_add(lane as u32)))
    }
}

/// The key in its lower and its upper half.
#[inline(always)]
fn word([lower, upper]: [u32; 2], col: u32) -> u32 {
    let x = col.wrapping_add(lower);
    let x = (x ^ (x >> 17)).wrapping_mul(0xed5a_d4bb).wrapping_add(upper);
    let x = (x ^ (x >> 11)).wrapping_mul(0xac4c_1b51);
    let x = (x ^ (x >> 15)).wrapping_mul(0x3184_8bab);
    x ^ (x >> 14)
}

/// In 0..1.
#[inline(always)]
fn uniform(word: u32) -> f32 {
    (word >> 8) as i32 as f32 * (1.0 / (1 << 24) as f32)
}

/// Box and Muller's cosine. `radius` gives a number in (0, 1] with all the bits an f32 can hold, so that the tails reach
/// √(2 ln 2³²) = 6.6.
#[inline(always)]
fn normal(radius: u32, angle: u32) -> f32 {
    let u = (radius | 1) as f32 * (1.0 / (1u64 << 32) as f32);
    (-2.0 * ln(u)).sqrt() * cos_of_turns(angle)
}

/// The natural logarithm of a normal number, not above 1.
#[inline(always)]
fn ln(u: f32) -> f32 {
    // u = m · 2^e with m between √½ and √2; ln m = 2 artanh z, z = (m - 1) / (m + 1), whose series is cut at z⁹.
    const SQRT_HALF: i32 = 0x3f35_04f3;
    let bits = u.to_bits() as i32;
    let e = (bits - SQRT_HALF) >> 23;
    let m = f32::from_bits((bits - (e << 23)) as u32);
    let z = (m - 1.0) / (m + 1.0);
    let zz = z * z;
    let series = 2.0 + zz * (2.0 / 3.0 + zz * (2.0 / 5.0 + zz * (2.0 / 7.0 + zz * (2.0 / 9.0))));
    (e as f32 * std::f32::consts::LN_2 + z * series).min(0.0)
}

/// The cosine of `angle` · 2⁻³² turns.
#[inline(always)]
fn cos_of_turns(angle: u32) -> f32 {
    // As the sine of what is missing to a quarter turn: |y| <= π/2, and Taylor's series up to y¹¹ errs by 6e-8.
    let turns = (angle as i32 as f32 * (1.0 / (1u64 << 32) as f32)).abs();
    let y = (0.25 - turns) * std::f32::consts::TAU;
    let yy = y * y;
    let series = 1.0 / 120.0 + yy * (-1.0 / 5040.0 + yy * (1.0 / 362_880.0 + yy * (-1.0 / 39_916_800.0)));
    y * (1.0 + yy * (-1.0 / 6.0 + yy * series))
}

#[inline(always)]
fn vector<S: Simd>(s: S, lanes: [f32; LANES]) -> S::Vector {
    // SAFETY: the array has LANES elements.
    unsafe { s.load(lanes.as_ptr()) }
}

#[derive(Clone, Copy)]
struct Normal {
    radius: Words,
    angle: Words,
    mean: f32,
    deviation: f32,
}

impl Map<0, 1> for Normal {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, row: usize, col: usize, []: [S::Vector; 0]) -> [S::Vector; 1] {
        let (radius, angle) = (self.radius.at(row as u64, col), self.angle.at(row as u64, col));
        let normal = vector(s, from_fn(|lane| normal(radius[lane], angle[lane])));
        [s.mul_add(normal, s.splat(self.deviation), s.splat(self.mean))]
    }
}

impl Run for RandomNormal {
    fn run(&self, team: &mut Team) {
        let [radius, angle] = [0, 1].map(|draw| Words::new(self.seed, draw, self.placement, self.out.cols));
        map(team, Normal { radius, angle, mean: self.mean, deviation: self.deviation }, [], [self.out]);
    }
}

#[derive(Clone, Copy)]
struct Drop<'a> {
    words: Words,
    probability: f32,
    rows: Option<&'a [u32]>,
}

impl Map<1, 1> for Drop<'_> {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, row: usize, col: usize, [x]: [S::Vector; 1]) -> [S::Vector; 1] {
        let row = self.rows.map_or(row as u64, |rows| rows[row].into());
        let uniform = vector(s, self.words.at(row, col).map(uniform));
        let kept = s.mul(x, s.splat(1.0 / (1.0 - self.probability)));
        [s.select_less(uniform, s.splat(self.probability), s.splat(0.0), kept)]
    }
}

impl Run for Dropout {
    fn run(&self, team: &mut Team) {
        let words = Words::new(self.seed, 0, self.placement, self.x.cols);
        // SAFETY: the kernel's operands live and keep their values until the kernel has run.
        let rows = self.rows.as_ref().map(|rows| unsafe { indices(rows).as_slice() });
        map(team, Drop { words, probability: self.probability, rows }, [self.x], [self.out]);
    }
}
