//! Sixteen f32 lanes, as AVX-512 has them, or as an array that the compiler vectorises for the CPU.
//!
//! A kernel's inner loop is a struct with a generic [`Vectorised::run`]; [`vectorise`] calls it compiled for this CPU.
//! Every operation rounds as IEEE 754 says, lane sums have one fixed order, so all levels give the same bits.

use half::bf16;

use super::features::{VectorLevel, vector_level};

pub(crate) const LANES: usize = 16;

/// The operations of one vector level. Pointers need no alignment.
pub(crate) trait Simd: Copy {
    type Vector: Copy;

    fn splat(self, value: f32) -> Self::Vector;
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a·b + c`, rounded once.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    fn sqrt(self, a: Self::Vector) -> Self::Vector;
    /// `b` where `a` is NaN.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn abs(self, a: Self::Vector) -> Self::Vector;
    /// The magnitude of `a` with the sign of `b`.
    fn copysign(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `yes` where `a < b`, else `no`.
    fn select_less(self, a: Self::Vector, b: Self::Vector, yes: Self::Vector, no: Self::Vector) -> Self::Vector;
    /// `yes` in the lanes whose bit is set, the lowest for the first, else `no`.
    fn select_bits(self, bits: u16, yes: Self::Vector, no: Self::Vector) -> Self::Vector;
    /// The lanes of `table` that sixteen nibbles name, two in each byte: the upper one comes first.
    fn choose(self, table: Self::Vector, nibbles: u64) -> Self::Vector;
    /// To the nearest integer, ties to even.
    fn round(self, a: Self::Vector) -> Self::Vector;
    /// `a · 2^n` for integers n in -126..=127.
    fn scale_by_power_of_two(self, a: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// `a - ⌊a⌋`; 0 for infinities.
    fn fraction(self, a: Self::Vector) -> Self::Vector;
    /// `a · 2^⌊n⌋` for any n; anything where the result is subnormal.
    fn scale_by_floor(self, a: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// The sum of the lanes, folded in halves.
    fn sum(self, a: Self::Vector) -> f32;
    fn max_lane(self, a: Self::Vector) -> f32;
    /// Sixteen rows as sixteen columns.
    fn transpose(self, rows: [Self::Vector; LANES]) -> [Self::Vector; LANES];
    /// In each lane, the upper half of `high` above that of `low`.
    fn pair_upper_halves(self, low: Self::Vector, high: Self::Vector) -> Self::Vector;
    /// In each lane, the nearest bf16 of `high` above that of `low`; NaN stays NaN.
    fn pair_nearest_bf16(self, low: Self::Vector, high: Self::Vector) -> Self::Vector;
    /// The bf16 in the lower half of each lane, widened.
    fn widen_lower_halves(self, a: Self::Vector) -> Self::Vector;
    /// The bf16 in the upper half of each lane, widened.
    fn widen_upper_halves(self, a: Self::Vector) -> Self::Vector;
    /// The upper halves of the lanes of `first`, then those of `second`.
    fn join_upper_halves(self, first: Self::Vector, second: Self::Vector) -> Self::Vector;
    /// The nearest bf16 of the lanes of `first`, then of those of `second`; NaN stays NaN, subnormal numbers may become 0.
    fn join_nearest_bf16(self, first: Self::Vector, second: Self::Vector) -> Self::Vector;
    /// 32 halves of each, in turns: in each lane, a half of `high` above that of `low`.
    fn interleave_halves(self, low: Self::Vector, high: Self::Vector) -> [Self::Vector; 2];

    /// # Safety
    /// `from` is readable for [`LANES`] elements.
    unsafe fn load(self, from: *const f32) -> Self::Vector;
    /// # Safety
    /// `from` is readable for `count <= LANES` elements.
    unsafe fn load_partial(self, from: *const f32, count: usize) -> Self::Vector;
    /// # Safety
    /// `to` is writable for [`LANES`] elements.
    unsafe fn store(self, to: *mut f32, a: Self::Vector);
    /// # Safety
    /// `to` is writable for `count <= LANES` elements.
    unsafe fn store_partial(self, to: *mut f32, a: Self::Vector, count: usize);
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_bf16(self, from: *const bf16) -> Self::Vector;
    /// # Safety
    /// As [`Simd::load_partial`].
    unsafe fn load_bf16_partial(self, from: *const bf16, count: usize) -> Self::Vector;
    /// # Safety
    /// As [`Simd::store`].
    unsafe fn store_bf16(self, to: *mut bf16, a: Self::Vector);
    /// # Safety
    /// As [`Simd::store_partial`].
    unsafe fn store_bf16_partial(self, to: *mut bf16, a: Self::Vector, count: usize);
}

/// A loop to be compiled for each vector level. `run` must be `#[inline(always)]`, and so must what it calls.
pub(crate) trait Vectorised {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a loop with the widest vectors this CPU has.
pub(crate) fn vectorise<W: Vectorised>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    match vector_level() {
        // SAFETY: the level was detected on this CPU.
        VectorLevel::Avx512 => return unsafe { run_avx512(work) },
        // SAFETY: as above.
        VectorLevel::Avx2 => return unsafe { run_avx2(work) },
        VectorLevel::Portable => (),
    }
    work.run(Portable)
}

/// Runs a loop on a CPU with AVX-512, compiled with and without the instructions that round to bf16.
#[cfg(target_arch = "x86_64")]
pub(crate) fn vectorise_avx512<W: Vectorised>(work: W) -> W::Output {
    assert_eq!(vector_level(), VectorLevel::Avx512, "this loop needs AVX-512");
    if is_x86_feature_detected!("avx512bf16") {
        // SAFETY: both were detected on this CPU.
        unsafe { run_avx512_bf16(work) }
    } else {
        // SAFETY: the level was detected on this CPU.
        unsafe { run_avx512(work) }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn run_avx512<W: Vectorised>(work: W) -> W::Output {
    work.run(avx512::Avx512::<false>)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
unsafe fn run_avx512_bf16<W: Vectorised>(work: W) -> W::Output {
    work.run(avx512::Avx512::<true>)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<W: Vectorised>(work: W) -> W::Output {
    work.run(Portable)
}

/// Lanes as an array.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Lanes([f32; LANES]);

impl Lanes {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Lanes {
        Lanes(std::array::from_fn(|i| f(self.0[i])))
    }

    #[inline(always)]
    fn zip(self, other: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
        Lanes(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }

    #[inline(always)]
    fn fold(self, f: impl Fn(f32, f32) -> f32) -> f32 {
        let mut lanes = self.0;
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] = f(lanes[i], lanes[i + width]);
            }
            width /= 2;
        }
        lanes[0]
    }
}

impl Simd for Portable {
    type Vector = Lanes;

    #[inline(always)]
    fn splat(self, value: f32) -> Lanes {
        Lanes([value; LANES])
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        a.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        a.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        a.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        a.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        Lanes(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn sqrt(self, a: Lanes) -> Lanes {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        a.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Lanes, b: Lanes) -> Lanes {
        a.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: Lanes) -> Lanes {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn copysign(self, a: Lanes, b: Lanes) -> Lanes {
        a.zip(b, f32::copysign)
    }
    #[inline(always)]
    fn select_less(self, a: Lanes, b: Lanes, yes: Lanes, no: Lanes) -> Lanes {
        Lanes(std::array::from_fn(|i| if a.0[i] < b.0[i] { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    fn select_bits(self, bits: u16, yes: Lanes, no: Lanes) -> Lanes {
        Lanes(std::array::from_fn(|i| if bits >> i & 1 == 1 { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    fn choose(self, table: Lanes, nibbles: u64) -> Lanes {
        Lanes(std::array::from_fn(|i| table.0[(nibbles >> (4 * (i ^ 1)) & 15) as usize]))
    }
    #[inline(always)]
    fn round(self, a: Lanes) -> Lanes {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn scale_by_power_of_two(self, a: Lanes, n: Lanes) -> Lanes {
        a.zip(n, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn fraction(self, a: Lanes) -> Lanes {
        a.map(|a| if a.is_infinite() { 0.0 } else { a - a.floor() })
    }
    #[inline(always)]
    fn scale_by_floor(self, a: Lanes, n: Lanes) -> Lanes {
        // Beyond these powers every normal number is 0 or infinite; in double precision none of them is either.
        let exponent = |n: f32| (n.floor().clamp(-300.0, 300.0) as i64 + 1023) as u64;
        a.zip(n, |a, n| (a as f64 * f64::from_bits(exponent(n) << 52)) as f32)
    }
    #[inline(always)]
    fn sum(self, a: Lanes) -> f32 {
        a.fold(|a, b| a + b)
    }
    #[inline(always)]
    fn max_lane(self, a: Lanes) -> f32 {
        a.fold(|a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn transpose(self, rows: [Lanes; LANES]) -> [Lanes; LANES] {
        std::array::from_fn(|col| Lanes(std::array::from_fn(|row| rows[row].0[col])))
    }
    #[inline(always)]
    fn pair_upper_halves(self, low: Lanes, high: Lanes) -> Lanes {
        low.zip(high, |low, high| f32::from_bits(low.to_bits() >> 16 | high.to_bits() & 0xffff_0000))
    }
    #[inline(always)]
    fn pair_nearest_bf16(self, low: Lanes, high: Lanes) -> Lanes {
        low.zip(high, |low, high| f32::from_bits(round_to_bf16(low) as u32 | (round_to_bf16(high) as u32) << 16))
    }
    #[inline(always)]
    fn widen_lower_halves(self, a: Lanes) -> Lanes {
        a.map(|a| f32::from_bits(a.to_bits() << 16))
    }
    #[inline(always)]
    fn widen_upper_halves(self, a: Lanes) -> Lanes {
        a.map(|a| f32::from_bits(a.to_bits() & 0xffff_0000))
    }
    #[inline(always)]
    fn join_upper_halves(self, first: Lanes, second: Lanes) -> Lanes {
        let halves = [first.0, second.0];
        let upper = |i: usize| halves[i / LANES][i % LANES].to_bits() >> 16;
        Lanes(std::array::from_fn(|i| f32::from_bits(upper(2 * i) | upper(2 * i + 1) << 16)))
    }
    #[inline(always)]
    fn join_nearest_bf16(self, first: Lanes, second: Lanes) -> Lanes {
        let nearest = |a: f32| f32::from_bits((round_to_bf16(a) as u32) << 16);
        self.join_upper_halves(first.map(nearest), second.map(nearest))
    }
    #[inline(always)]
    fn interleave_halves(self, low: Lanes, high: Lanes) -> [Lanes; 2] {
        let half = |of: Lanes, i: usize| of.0[i / 2].to_bits() >> (16 * (i % 2)) & 0xffff;
        let lane = |i: usize| f32::from_bits(half(low, i) | half(high, i) << 16);
        [0, LANES].map(|first| Lanes(std::array::from_fn(|i| lane(first + i))))
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Lanes {
        // SAFETY: the caller's promise.
        Lanes(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_partial(self, from: *const f32, count: usize) -> Lanes {
        let mut lanes = [0.0; LANES];
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count) };
        Lanes(lanes)
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(a.0) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, a: Lanes, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(a.0.as_ptr(), to, count) };
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> Lanes {
        // SAFETY: the caller's promise.
        let words = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Lanes(words.map(|word| f32::from_bits((word as u32) << 16)))
    }
    #[inline(always)]
    unsafe fn load_bf16_partial(self, from: *const bf16, count: usize) -> Lanes {
        let mut words = [bf16::ZERO; LANES];
        // SAFETY: the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(from, words.as_mut_ptr(), count);
            self.load_bf16(words.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, a: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(a.0.map(round_to_bf16)) }
    }
    #[inline(always)]
    unsafe fn store_bf16_partial(self, to: *mut bf16, a: Lanes, count: usize) {
        let words = a.0.map(round_to_bf16);
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), to.cast::<u16>(), count) };
    }
}

/// To nearest, ties to even; NaN stays NaN.
#[inline(always)]
fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if value.is_nan() { (bits >> 16) | 0x40 } else { rounded }) as u16
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{LANES, Simd, bf16};

    /// Only `run_avx512` and `run_avx512_bf16` make it, on CPUs that have the instructions, those for bf16 too if `BF16`;
    /// therefore the calls below are sound.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512<const BF16: bool>;

    #[inline(always)]
    fn mask(count: usize) -> __mmask16 {
        debug_assert!(count <= LANES);
        ((1u32 << count) - 1) as __mmask16
    }

    macro_rules! lanewise {
        ($($name:ident($($arg:ident),*) => $body:expr;)*) => {
            $(#[inline(always)]
            fn $name(self, $($arg: __m512),*) -> __m512 {
                // SAFETY: `Avx512` exists only where the CPU has these instructions.
                unsafe { $body }
            })*
        };
    }

    /// Numbers of the upper halves of 32 words' lanes.
    const UPPER_HALVES: [u16; 2 * LANES] = {
        let mut numbers = [0; 2 * LANES];
        let mut i = 0;
        while i < numbers.len() {
            numbers[i] = 2 * i as u16 + 1;
            i += 1;
        }
        numbers
    };

    /// Rounded to nearest even in the upper halves; NaN stays NaN.
    #[inline(always)]
    unsafe fn nearest(a: __m512) -> __m512i {
        // SAFETY: the caller is `Avx512`.
        unsafe {
            let bits = _mm512_castps_si512(a);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
            _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000))
        }
    }

    /// 32 upper halves in order.
    #[inline(always)]
    unsafe fn upper_halves(first: __m512i, second: __m512i) -> __m512i {
        // SAFETY: the caller is `Avx512`; the table is 64 bytes.
        unsafe {
            let numbers = _mm512_loadu_si512(UPPER_HALVES.as_ptr().cast());
            _mm512_permutex2var_epi16(first, numbers, second)
        }
    }

    /// 16 f32 rounded to nearest even as bf16; NaN stays NaN.
    #[inline(always)]
    unsafe fn round_to_bf16(a: __m512) -> __m256i {
        // SAFETY: the caller is `Avx512`.
        unsafe {
            let rounded = nearest(a);
            _mm512_castsi512_si256(upper_halves(rounded, rounded))
        }
    }

    impl<const BF16: bool> Simd for Avx512<BF16> {
        type Vector = __m512;

        #[inline(always)]
        fn splat(self, value: f32) -> __m512 {
            // SAFETY: `Avx512` exists only where the CPU has these instructions.
            unsafe { _mm512_set1_ps(value) }
        }

        lanewise! {
            add(a, b) => _mm512_add_ps(a, b);
            sub(a, b) => _mm512_sub_ps(a, b);
            mul(a, b) => _mm512_mul_ps(a, b);
            div(a, b) => _mm512_div_ps(a, b);
            mul_add(a, b, c) => _mm512_fmadd_ps(a, b, c);
            sqrt(a) => _mm512_sqrt_ps(a);
            max(a, b) => _mm512_max_ps(a, b);
            min(a, b) => _mm512_min_ps(a, b);
            abs(a) => _mm512_abs_ps(a);
            copysign(a, b) => {
                let sign = _mm512_castsi512_ps(_mm512_set1_epi32(i32::MIN));
                _mm512_or_ps(_mm512_andnot_ps(sign, a), _mm512_and_ps(sign, b))
            };
            select_less(a, b, yes, no) => _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes);
            round(a) => _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
            scale_by_power_of_two(a, n) => {
                let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
                _mm512_mul_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent)))
            };
            fraction(a) => _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a);
            scale_by_floor(a, n) => _mm512_scalef_ps(a, n);
            pair_upper_halves(low, high) => {
                let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
                _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_castps_si512(high)))
            };
            pair_nearest_bf16(low, high) => {
                let low = _mm512_srli_epi32::<16>(nearest(low));
                _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, low, nearest(high)))
            };
            widen_lower_halves(a) => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(a)));
            widen_upper_halves(a) => {
                let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), upper))
            };
            join_upper_halves(first, second) => {
                _mm512_castsi512_ps(upper_halves(_mm512_castps_si512(first), _mm512_castps_si512(second)))
            };
            join_nearest_bf16(first, second) => {
                if BF16 {
                    std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first))
                } else {
                    _mm512_castsi512_ps(upper_halves(nearest(first), nearest(second)))
                }
            };
        }

        #[inline(always)]
        fn choose(self, table: __m512, nibbles: u64) -> __m512 {
            // SAFETY: as above. The permutation looks at the lowest four bits of each lane only.
            unsafe {
                let words = _mm512_mask_blend_epi32(
                    0xff00,
                    _mm512_set1_epi32(nibbles as i32),
                    _mm512_set1_epi32((nibbles >> 32) as i32),
                );
                let shifts = _mm512_setr_epi32(4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24);
                _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), table)
            }
        }

        #[inline(always)]
        fn select_bits(self, bits: u16, yes: __m512, no: __m512) -> __m512 {
            // SAFETY: as above.
            unsafe { _mm512_mask_blend_ps(bits, no, yes) }
        }

        #[inline(always)]
        fn interleave_halves(self, low: __m512, high: __m512) -> [__m512; 2] {
            // SAFETY: as above. Quarters are interleaved in place, then put in order.
            unsafe {
                let (low, high) = (_mm512_castps_si512(low), _mm512_castps_si512(high));
                let (even, odd) = (_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high));
                let first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
                let second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
                let first = _mm512_permutex2var_epi64(even, first, odd);
                let second = _mm512_permutex2var_epi64(even, second, odd);
                [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)]
            }
        }

        #[inline(always)]
        fn sum(self, a: __m512) -> f32 {
            // SAFETY: as above. The halves are folded in the order of `Lanes::fold`.
            unsafe {
                let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
                let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
                _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
            }
        }

        #[inline(always)]
        fn max_lane(self, a: __m512) -> f32 {
            // SAFETY: as above.
            unsafe { _mm512_reduce_max_ps(a) }
        }

        #[inline(always)]
        fn transpose(self, rows: [__m512; LANES]) -> [__m512; LANES] {
            // SAFETY: as above. Squares of 4 × 4 inside the quarters of four rows, then squares of quarters.
            unsafe {
                let mut quarters = rows;
                for i in (0..LANES).step_by(4) {
                    let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
                    let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
                    quarters[i] = _mm512_shuffle_ps::<0x44>(ab, cd);
                    quarters[i + 1] = _mm512_shuffle_ps::<0xee>(ab, cd);
                    let (ab, cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
                    quarters[i + 2] = _mm512_shuffle_ps::<0x44>(ab, cd);
                    quarters[i + 3] = _mm512_shuffle_ps::<0xee>(ab, cd);
                }
                let mut columns = rows;
                for i in 0..4 {
                    let [a, b, c, d] = [quarters[i], quarters[4 + i], quarters[8 + i], quarters[12 + i]];
                    let (ab, cd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d));
                    columns[i] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                    columns[8 + i] = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
                    let (ab, cd) = (_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(c, d));
                    columns[4 + i] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                    columns[12 + i] = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
                }
                columns
            }
        }

        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> __m512 {
            // SAFETY: the caller's promise.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn load_partial(self, from: *const f32, count: usize) -> __m512 {
            // SAFETY: the caller's promise.
            unsafe { _mm512_maskz_loadu_ps(mask(count), from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, a: __m512) {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_ps(to, a) }
        }
        #[inline(always)]
        unsafe fn store_partial(self, to: *mut f32, a: __m512, count: usize) {
            // SAFETY: the caller's promise.
            unsafe { _mm512_mask_storeu_ps(to, mask(count), a) }
        }
        #[inline(always)]
        unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
            // SAFETY: the caller's promise.
            unsafe {
                let words = _mm256_loadu_si256(from.cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)))
            }
        }
        #[inline(always)]
        unsafe fn load_bf16_partial(self, from: *const bf16, count: usize) -> __m512 {
            // SAFETY: the caller's promise.
            unsafe {
                let words = _mm256_maskz_loadu_epi16(mask(count), from.cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)))
            }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, to: *mut bf16, a: __m512) {
            // SAFETY: the caller's promise.
            unsafe { _mm256_storeu_si256(to.cast(), round_to_bf16(a)) }
        }
        #[inline(always)]
        unsafe fn store_bf16_partial(self, to: *mut bf16, a: __m512, count: usize) {
            // SAFETY: the caller's promise.
            unsafe { _mm256_mask_storeu_epi16(to.cast(), mask(count), round_to_bf16(a)) }
        }
    }
}
