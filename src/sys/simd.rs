//! Loops compiled for several instruction sets; the processor runs the widest that it has.
//!
//! The compiler vectorises a loop for the instruction set of the function that it is inlined into. So every function below
//! [`Kernel::run`] must be `#[inline(always)]`.
#![allow(unsafe_code, reason = "calls functions for instructions that not every processor has")]

/// A computation over memory that is compiled for several instruction sets.
pub trait Kernel {
    /// Computes, by instructions for half precision where there are any. Implementations are `#[inline(always)]`.
    fn run(self, halves: Option<Halves>);
}

/// How many numbers of half precision are converted at a time.
pub const EIGHT: usize = 8;

/// The instructions that convert half precision: whoever has this runs on a processor that has them.
#[derive(Clone, Copy, Debug)]
pub struct Halves(Instructions);

#[cfg(target_arch = "x86_64")]
type Instructions = ();
#[cfg(not(target_arch = "x86_64"))]
type Instructions = std::convert::Infallible;

impl Halves {
    /// Numbers as ones of single precision. A NaN is quiet afterwards.
    #[inline(always)]
    pub fn widen(self, halves: [[u8; 2]; EIGHT]) -> [f32; EIGHT] {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions.
        return unsafe { x86::widen(halves) };
        #[cfg(not(target_arch = "x86_64"))]
        match (self.0, halves).0 {}
    }

    /// Numbers of single precision, rounded to nearest, ties to even. A NaN keeps what it has room for.
    #[inline(always)]
    pub fn narrow(self, singles: [f32; EIGHT]) -> [[u8; 2]; EIGHT] {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions.
        return unsafe { x86::narrow(singles) };
        #[cfg(not(target_arch = "x86_64"))]
        match (self.0, singles).0 {}
    }
}

/// Runs `kernel` with the widest instructions of this processor.
pub fn widest(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("f16c") {
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            // SAFETY: the processor has the instructions.
            return unsafe { x86::avx512(kernel) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the instructions.
            return unsafe { x86::avx2(kernel) };
        }
    }
    // Elsewhere the target's own are as wide as any that the compiler uses: SSE2, NEON.
    kernel.run(None);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph};
    use std::mem::transmute;

    use super::{EIGHT, Halves, Kernel};

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    pub(super) fn avx512(kernel: impl Kernel) {
        kernel.run(Some(Halves(())));
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn avx2(kernel: impl Kernel) {
        kernel.run(Some(Halves(())));
    }

    #[inline]
    #[target_feature(enable = "f16c")]
    pub(super) fn widen(halves: [[u8; 2]; EIGHT]) -> [f32; EIGHT] {
        // SAFETY: as many bytes, and any are a vector.
        let halves = unsafe { transmute::<[[u8; 2]; EIGHT], __m128i>(halves) };
        let singles = _mm256_cvtph_ps(halves);
        // SAFETY: a vector of eight numbers.
        unsafe { transmute::<__m256, [f32; EIGHT]>(singles) }
    }

    #[inline]
    #[target_feature(enable = "f16c")]
    pub(super) fn narrow(singles: [f32; EIGHT]) -> [[u8; 2]; EIGHT] {
        // SAFETY: a vector of eight numbers.
        let singles = unsafe { transmute::<[f32; EIGHT], __m256>(singles) };
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(singles);
        // SAFETY: as many bytes.
        unsafe { transmute::<__m128i, [[u8; 2]; EIGHT]>(halves) }
    }
}
