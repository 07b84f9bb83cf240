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

/// Runs `kernel` with the widest instructions of this processor, rounding and keeping subnormal numbers as IEEE 754 has it by
/// default, whatever the thread's program has set.
pub fn widest(kernel: impl Kernel) {
    let _default = Arithmetic::default_here();
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

/// What a thread has set for floating-point numbers, which it gets back.
pub struct Arithmetic(Option<State>);

impl Arithmetic {
    /// Has this thread compute by the default until it is dropped.
    pub fn default_here() -> Arithmetic {
        let set = state::get();
        let differs = set & state::RELEVANT != state::DEFAULT;
        if differs {
            state::set(set & !state::RELEVANT | state::DEFAULT);
        }
        Arithmetic(differs.then_some(set))
    }
}

impl Drop for Arithmetic {
    fn drop(&mut self) {
        if let Some(set) = self.0 {
            state::set(set);
        }
    }
}

#[cfg(target_arch = "x86_64")]
type State = u32;
#[cfg(not(target_arch = "x86_64"))]
type State = u64;

/// The register MXCSR (Intel SDM, volume 1, 10.2.3), which compilers take to be as it is by default.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod state {
    use std::arch::asm;

    /// Flush to zero, the direction of rounding, the masks of exceptions, and subnormal numbers as zeros.
    pub(super) const RELEVANT: u32 = 0xffc0;
    pub(super) const DEFAULT: u32 = 0x1f80;

    pub(super) fn get() -> u32 {
        let mut set = 0;
        // SAFETY: it writes the register to `set`.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut set, options(nostack, preserves_flags)) };
        set
    }

    pub(super) fn set(to: u32) {
        // SAFETY: what is set is the default, or what the program had set: nothing computes between with another one.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const to, options(nostack, preserves_flags)) };
    }
}

/// The register FPCR (Arm ARM, C5.2.8).
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod state {
    use std::arch::asm;

    /// Default NaN, flush to zero, the direction of rounding, and flush to zero of half precision.
    pub(super) const RELEVANT: u64 = 0x03c8_0000;
    pub(super) const DEFAULT: u64 = 0;

    pub(super) fn get() -> u64 {
        let set;
        // SAFETY: it reads the register.
        unsafe { asm!("mrs {}, fpcr", out(reg) set, options(nostack, preserves_flags)) };
        set
    }

    pub(super) fn set(to: u64) {
        // SAFETY: what is set is the default, or what the program had set: nothing computes between with another one.
        unsafe { asm!("msr fpcr, {}", in(reg) to, options(nostack, preserves_flags)) };
    }
}

/// Elsewhere it is not known, and left alone.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod state {
    use super::State;

    pub(super) const RELEVANT: State = 0;
    pub(super) const DEFAULT: State = 0;

    pub(super) fn get() -> State {
        0
    }

    pub(super) fn set(_: State) {}
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

#[cfg(all(test, not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use super::*;

    /// Flush to zero; on x86_64 also subnormal numbers as zeros.
    const FLUSHES: State = if cfg!(target_arch = "x86_64") { 0x8040 } else { 0x0100_0000 };

    struct Halve<'a>(&'a mut [f32]);

    impl Kernel for Halve<'_> {
        #[inline(always)]
        fn run(self, _: Option<Halves>) {
            self.0.iter_mut().for_each(|number| *number *= 0.5);
        }
    }

    #[test]
    fn what_a_program_has_set_for_its_own_numbers_stays_its_own() {
        let subnormal = f32::from_bits(64);
        let mut numbers = std::hint::black_box([subnormal; 40]);
        let before = state::get();
        state::set(before | FLUSHES);
        widest(Halve(&mut numbers));
        let set = state::get();
        state::set(before);
        assert_eq!(numbers.map(f32::to_bits), [32; 40]);
        assert_eq!(set & FLUSHES, FLUSHES);
    }
}
