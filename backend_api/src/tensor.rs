//! The tensors that a backend's own methods get. Their memory is valid during the call.
#![allow(unsafe_code, reason = "slices on the caller's memory")]

use std::marker::PhantomData;

use crate::error::Error;
use crate::operation::{Buffer, DType};

/// A contiguous tensor, valid during a call. The tensors of a call do not overlap.
#[derive(Debug)]
pub struct Tensor<'a> {
    buffer: Buffer,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Tensor<'a> {
    /// # Safety
    /// The buffer is in host memory, which is valid for `'a` and not used by anything else.
    pub(crate) unsafe fn lent(buffer: Buffer) -> Tensor<'a> {
        Tensor { buffer, memory: PhantomData }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.buffer.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.buffer.len == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.buffer.dtype
    }

    /// The elements; an error if their type is not `T`.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], Error> {
        let data = self.elements::<T>()?;
        // SAFETY: `lent` promises `len` elements there; `elements` has compared their type and alignment.
        Ok(unsafe { std::slice::from_raw_parts(data, self.buffer.len) })
    }

    /// The elements, mutable; an error if their type is not `T`.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], Error> {
        let data = self.elements::<T>()?;
        // SAFETY: as in `as_slice`; `lent` promises that nobody else uses the memory, and every bit pattern is a T.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, self.buffer.len) })
    }

    fn elements<T: Element>(&self) -> Result<*mut T, Error> {
        if self.buffer.dtype != T::DTYPE {
            let (expected, got) = (T::DTYPE.name(), self.buffer.dtype.name());
            return Err(Error::usage(format!("expected a tensor of {expected}, got one of {got}")));
        }
        let data = if self.is_empty() { std::ptr::NonNull::dangling().as_ptr() } else { self.buffer.ptr.cast::<T>() };
        if !data.is_aligned() {
            return Err(Error::usage(format!("expected a tensor whose memory is aligned for {}", T::DTYPE.name())));
        }
        Ok(data)
    }
}

/// A Rust type whose values are elements of a [`DType`]. Every bit pattern is a value.
pub trait Element: Copy + sealed::Sealed + 'static {
    /// The element type.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $dtype:ident,)*) => {
        $(
            const _: () = assert!(size_of::<$element>() == DType::$dtype.size());
            impl sealed::Sealed for $element {}
            impl Element for $element {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64, f32 => F32, f64 => F64,
}
