//! Functions of vectors: exponentials and functions built on them.

use super::simd::Simd;

/// eˣ to about one unit in the last place; 0 below the smallest normal number, finite above the largest. NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    // Slightly above the logarithm of the smallest normal number: even the discarded power must be normal, since CPUs take a
    // hundred cycles for a subnormal one.
    const LOWEST: f32 = -87.3;
    const HIGHEST: f32 = 88.376_26;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Taylor's coefficients up to r⁷/7!: |r| <= ln2 / 2 leaves an error below 3e-9.
    const POLYNOMIAL: [f32; 7] = [1.984_127e-4, 1.388_889e-3, 8.333_334e-3, 4.166_666_8e-2, 0.166_666_67, 0.5, 1.0];
    let clamped = s.min(s.splat(HIGHEST), s.max(s.splat(LOWEST), x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    let r = s.mul_add(n, s.splat(-LN2_HIGH), clamped);
    let r = s.mul_add(n, s.splat(-LN2_LOW), r);
    let mut sum = s.splat(POLYNOMIAL[0]);
    for &coefficient in &POLYNOMIAL[1..] {
        sum = s.mul_add(sum, r, s.splat(coefficient));
    }
    let power = s.scale_by_power_of_two(s.mul_add(sum, r, s.splat(1.0)), n);
    s.select_less(x, s.splat(LOWEST), s.splat(0.0), power)
}

/// 2ˣ to 4e-6, a thousandth of bf16's resolution, at half the cost of [`exp`]; exact for integers. NaN stays NaN.
#[inline(always)]
pub(crate) fn power_of_two<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    // The least relative error over 0..1 of a polynomial that is 1 at 0 and 2 at 1.
    const POLYNOMIAL: [f32; 4] = [1.355_574_7e-2, 5.203_237e-2, 0.241_379_77, 0.693_032_15];
    let fraction = s.fraction(x);
    let mut sum = s.splat(POLYNOMIAL[0]);
    for &coefficient in &POLYNOMIAL[1..] {
        sum = s.mul_add(sum, fraction, s.splat(coefficient));
    }
    s.scale_by_floor(s.mul_add(sum, fraction, s.splat(1.0)), x)
}

/// 1 / (1 + e⁻ˣ)
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// The hyperbolic tangent to about two units in the last place. NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    // Below this, one minus a quotient would cancel: an odd polynomial, Cephes' `tanhf`.
    const SMALL: f32 = 0.625;
    const POLYNOMIAL: [f32; 5] = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 0.133_314_42, -0.333_332_8];
    let (one, magnitude) = (s.splat(1.0), s.abs(x));
    let square = s.mul(x, x);
    let mut sum = s.splat(POLYNOMIAL[0]);
    for &coefficient in &POLYNOMIAL[1..] {
        sum = s.mul_add(sum, square, s.splat(coefficient));
    }
    let small = s.mul_add(s.mul(sum, square), x, x);
    let large = s.sub(one, s.div(s.splat(2.0), s.add(one, exp(s, s.add(magnitude, magnitude)))));
    s.select_less(magnitude, s.splat(SMALL), small, s.copysign(large, x))
}

/// The error function by formula 7.1.26 of Abramowitz and Stegun: to 6e-7 absolute.
#[inline(always)]
pub(crate) fn erf<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    const P: f32 = 0.327_591_1;
    const A: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];
    let (one, magnitude) = (s.splat(1.0), s.abs(x));
    let t = s.div(one, s.mul_add(s.splat(P), magnitude, one));
    let mut sum = s.splat(A[0]);
    for &coefficient in &A[1..] {
        sum = s.mul_add(sum, t, s.splat(coefficient));
    }
    let tail = s.mul(s.mul(sum, t), exp(s, s.mul(s.sub(s.splat(0.0), magnitude), magnitude)));
    s.copysign(s.sub(one, tail), x)
}

#[cfg(test)]
mod tests {
    use super::super::simd::{LANES, Vectorised, vectorise};
    use super::*;

    struct Apply<'a>(Function, &'a mut [f32]);

    #[derive(Clone, Copy)]
    enum Function {
        Exp,
        PowerOfTwo,
        Erf,
        Sigmoid,
        Tanh,
    }

    impl Vectorised for Apply<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for chunk in self.1.chunks_exact_mut(LANES) {
                // SAFETY: the chunk has LANES elements.
                unsafe {
                    let x = s.load(chunk.as_ptr());
                    let y = match self.0 {
                        Function::Exp => exp(s, x),
                        Function::PowerOfTwo => power_of_two(s, x),
                        Function::Erf => erf(s, x),
                        Function::Sigmoid => sigmoid(s, x),
                        Function::Tanh => tanh(s, x),
                    };
                    s.store(chunk.as_mut_ptr(), y);
                }
            }
        }
    }

    fn plain_erf(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / n as f64;
            sum += term / (2 * n + 1) as f64;
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    }

    #[test]
    fn functions_agree_with_double_precision() {
        let xs: Vec<f32> = (0..16 * 500).map(|i| (i as f32 / 4000.0 - 1.0) * 5.0).collect();
        type Case = (Function, fn(f64) -> f64, f64, f64);
        let cases: [Case; 5] = [
            (Function::Exp, f64::exp, 2e-7, 0.0),
            (Function::PowerOfTwo, f64::exp2, 4e-6, 0.0),
            (Function::Erf, plain_erf, 0.0, 6e-7),
            (Function::Sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 4e-7, 0.0),
            (Function::Tanh, f64::tanh, 2e-7, 0.0),
        ];
        for (function, plain, relative, absolute) in cases {
            let mut ys = xs.clone();
            vectorise(Apply(function, &mut ys));
            for (&x, &y) in xs.iter().zip(&ys) {
                let expected = plain(x as f64);
                let error = (y as f64 - expected).abs();
                assert!(error <= relative * expected.abs() + absolute, "f({x}) = {y}, expected {expected}");
            }
        }
    }

    #[test]
    fn exp_of_extremes_is_zero_finite_or_nan() {
        let mut xs = [f32::NEG_INFINITY, -1000.0, -87.4, 0.0, 1000.0, f32::INFINITY, f32::NAN, 88.0].repeat(2);
        vectorise(Apply(Function::Exp, &mut xs));
        assert_eq!(&xs[..4], &[0.0, 0.0, 0.0, 1.0]);
        assert!(xs[4].is_finite() && xs[5].is_finite() && xs[6].is_nan());
        assert!((xs[7] as f64 / 88f64.exp() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn tanh_of_extremes_is_one_or_nan() {
        let mut xs = [f32::NEG_INFINITY, -1000.0, -0.0, 1e-30, 20.0, 1e30, f32::INFINITY, f32::NAN].repeat(2);
        vectorise(Apply(Function::Tanh, &mut xs));
        assert_eq!(&xs[..7], &[-1.0, -1.0, 0.0, 1e-30, 1.0, 1.0, 1.0]);
        assert!(xs[7].is_nan());
    }

    #[test]
    fn power_of_two_of_extremes_is_zero_infinite_or_nan() {
        let mut xs = [f32::NEG_INFINITY, -1e30, -1000.0, 0.0, 1000.0, f32::INFINITY, f32::NAN, -126.0].repeat(2);
        vectorise(Apply(Function::PowerOfTwo, &mut xs));
        assert_eq!(&xs[..6], &[0.0, 0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY]);
        assert!(xs[6].is_nan());
        assert_eq!(xs[7], f32::MIN_POSITIVE);
    }
}
