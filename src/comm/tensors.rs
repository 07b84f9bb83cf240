//! Tensors of [`tch`] as data of a communicator's methods.
//!
//! ```no_run
//! use ncclx_rs::{Launch, ReduceOp};
//! use tch::{Device, Kind, Tensor};
//!
//! let comm = Launch::from_env()?.communicator("world")?;
//! let mut sum = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
//! comm.all_reduce(&mut sum, ReduceOp::Sum)?;
//! assert_eq!(sum.double_value(&[0, 0]), comm.size() as f64);
//! # Ok::<(), ncclx_rs::Error>(())
//! ```

use tch::{Device, Kind, Tensor};

use super::data::{Data, Lend, Unfit};
use crate::buffer::Buffer;
use crate::types::DType;

impl Data for Tensor {
    type Element = Tensor;
}

impl Lend for Tensor {
    fn lend(&self) -> Result<Buffer, Unfit> {
        buffer(self)
    }

    fn lend_mut(&mut self) -> Result<Buffer, Unfit> {
        buffer(self)
    }
}

#[allow(unsafe_code, reason = "turns a tensor's storage into the engine's buffer; `Lent` keeps the borrow's lifetime")]
fn buffer(tensor: &Tensor) -> Result<Buffer, Unfit> {
    let dtype = fit(tensor).map_err(|got| Unfit { expected: "a contiguous tensor on the CPU", got })?;
    // SAFETY: the tensor owns its storage as long as it is borrowed, which is as long as `Lent` lives, and being dense and
    // contiguous has all its elements there in a row. That no other tensor on the same storage is used meanwhile is what
    // every operation of tch leaves to its caller.
    Ok(unsafe { Buffer::from_raw(tensor.data_ptr().cast(), tensor.numel(), dtype) })
}

/// The element type of a tensor that can be lent. The error says why another cannot.
fn fit(tensor: &Tensor) -> Result<DType, String> {
    if !tensor.defined() {
        return Err("an undefined one".to_owned());
    }
    if tensor.device() != Device::Cpu {
        return Err(format!("one on {:?}", tensor.device()));
    }
    if tensor.is_sparse() || tensor.is_mkldnn() {
        return Err("one that is not dense".to_owned());
    }
    if !tensor.is_contiguous() {
        return Err(format!("one of size {:?} with strides {:?}", tensor.size(), tensor.stride()));
    }
    let kind = tensor.f_kind().map_err(|error| error.to_string())?;
    dtype(kind).ok_or_else(|| format!("one of {kind:?}"))
}

fn dtype(kind: Kind) -> Option<DType> {
    Some(match kind {
        Kind::Bool => DType::Bool,
        Kind::Uint8 => DType::U8,
        Kind::Int8 => DType::I8,
        Kind::Int16 => DType::I16,
        Kind::Int => DType::I32,
        Kind::Int64 => DType::I64,
        Kind::Half => DType::F16,
        Kind::BFloat16 => DType::BF16,
        Kind::Float => DType::F32,
        Kind::Double => DType::F64,
        Kind::ComplexHalf => DType::C32,
        Kind::ComplexFloat => DType::C64,
        Kind::ComplexDouble => DType::C128,
        Kind::Float8e5m2 => DType::F8E5M2,
        Kind::Float8e4m3fn => DType::F8E4M3FN,
        Kind::Float8e5m2fnuz => DType::F8E5M2FNUZ,
        Kind::Float8e4m3fnuz => DType::F8E4M3FNUZ,
        Kind::QInt8 | Kind::QUInt8 | Kind::QInt32 => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_own_type_of_the_same_size() {
        use Kind::{
            BFloat16, Bool, ComplexDouble, ComplexFloat, ComplexHalf, Double, Float, Float8e4m3fn, Float8e4m3fnuz,
            Float8e5m2, Float8e5m2fnuz, Half, Int, Int8, Int16, Int64, Uint8,
        };
        let floats = [Half, BFloat16, Float, Double, Float8e5m2, Float8e4m3fn, Float8e5m2fnuz, Float8e4m3fnuz];
        let others = [Bool, Uint8, Int8, Int16, Int, Int64, ComplexHalf, ComplexFloat, ComplexDouble];
        let mut seen = Vec::new();
        for kind in floats.into_iter().chain(others) {
            let dtype = dtype(kind).expect("a type");
            assert_eq!(dtype.size(), kind.elt_size_in_bytes(), "{kind:?}");
            assert!(!seen.contains(&dtype), "{kind:?}");
            seen.push(dtype);
        }
    }
}
