//! The data that a communicator's methods take: memory with an element type, lent for the time of a call.

use std::marker::PhantomData;

use crate::buffer::Buffer;
use crate::error::UsageError;
use crate::op::OpKind;
use crate::types::Element;

/// Memory that a communicator's methods read and write: slices, arrays and vectors of an [`Element`], and with the feature
/// `tch` contiguous tensors on the CPU.
pub trait Data: Lend {
    /// The type that all data of one call must share. The element types of tensors are compared at run time.
    type Element;
}

/// The half of [`Data`] that callers do not use.
pub trait Lend {
    /// The memory, which the engine reads.
    fn lend(&self) -> Result<Buffer, Unfit>;

    /// The memory, which the engine reads and writes.
    fn lend_mut(&mut self) -> Result<Buffer, Unfit>;
}

/// Why data cannot be lent.
#[derive(Clone, Debug)]
pub struct Unfit {
    /// What data can be lent.
    pub expected: &'static str,
    /// What the caller gave.
    pub got: String,
}

impl Unfit {
    #[cold]
    fn error(&self, operation: &OpKind, argument: &'static str) -> UsageError {
        UsageError {
            operation: operation.name().to_owned(),
            argument,
            expected: self.expected.to_owned(),
            got: self.got.clone(),
        }
    }
}

/// Data that the engine may use for as long as `'a`.
pub(super) struct Lent<'a> {
    buffer: Result<Buffer, Unfit>,
    memory: PhantomData<&'a mut ()>,
}

impl<'a> Lent<'a> {
    /// Lends `data` to be read.
    pub(super) fn of<D: Data + ?Sized>(data: &'a D) -> Self {
        Lent { buffer: data.lend(), memory: PhantomData }
    }

    /// Lends `data` to be read and written.
    pub(super) fn of_mut<D: Data + ?Sized>(data: &'a mut D) -> Self {
        Lent { buffer: data.lend_mut(), memory: PhantomData }
    }

    /// The number of elements; 0 if the data cannot be lent.
    pub(super) fn len(&self) -> usize {
        self.buffer.as_ref().map_or(0, |buffer| buffer.len())
    }

    /// The engine's view of the memory, which must not be used after `'a`.
    pub(super) fn buffer(&self, operation: &OpKind, argument: &'static str) -> Result<Buffer, UsageError> {
        match &self.buffer {
            Ok(buffer) => Ok(*buffer),
            Err(unfit) => Err(unfit.error(operation, argument)),
        }
    }
}

impl<T: Element> Data for [T] {
    type Element = T;
}

#[allow(unsafe_code, reason = "turns borrows into the engine's buffers; `Lent` keeps the borrows' lifetime")]
impl<T: Element> Lend for [T] {
    fn lend(&self) -> Result<Buffer, Unfit> {
        // SAFETY: the slice is valid and not written to as long as it is borrowed, which is as long as `Lent` lives. It is
        // used as an input alone, which is only read.
        Ok(unsafe { Buffer::from_raw(self.as_ptr().cast_mut().cast(), self.len(), T::DTYPE) })
    }

    fn lend_mut(&mut self) -> Result<Buffer, Unfit> {
        // SAFETY: the slice is valid and the borrower's alone as long as it is borrowed, as above. What the engine writes
        // are values of `T`, since every bit pattern of an `Element` is one.
        Ok(unsafe { Buffer::from_raw(self.as_mut_ptr().cast(), self.len(), T::DTYPE) })
    }
}

macro_rules! as_slices {
    ($([$($parameters:tt)*] $kind:ty;)*) => {
        $(
            impl<T: Element, $($parameters)*> Data for $kind {
                type Element = T;
            }

            impl<T: Element, $($parameters)*> Lend for $kind {
                fn lend(&self) -> Result<Buffer, Unfit> {
                    self.as_slice().lend()
                }

                fn lend_mut(&mut self) -> Result<Buffer, Unfit> {
                    self.as_mut_slice().lend_mut()
                }
            }
        )*
    };
}

as_slices! {
    [const N: usize] [T; N];
    [] Vec<T>;
}
