//! Loops compiled for several instruction sets; the processor runs the widest that it has.
//!
//! The compiler vectorises a loop for the instruction set of the function that it is inlined into. So every function below
//! [`Kernel::run`] must be `#[inline(always)]`.
#![allow(unsafe_code, reason = "calls functions for instructions that not every processor has")]

/// A computation over memory that is compiled for several instruction sets.
pub trait Kernel {
    /// Computes. Implementations are `#[inline(always)]`.
    fn run(self);
}

/// Runs `kernel` with the widest instructions of this processor.
pub fn widest(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
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
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Kernel;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) fn avx512(kernel: impl Kernel) {
        kernel.run();
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn avx2(kernel: impl Kernel) {
        kernel.run();
    }
}
