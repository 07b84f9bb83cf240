//! Compiled kernels, loaded into a context.
#![allow(unsafe_code, reason = "says what the kernels of the source are")]

use std::ffi::CString;

use crate::device::kernels::compile::{CompileError, Compiler};
use crate::device::kernels::{Computation, Module};
use crate::sync::Arc;
use crate::sys::cuda::{self, Combine, Context, CudaError, Parameters};
use crate::types::DType;

/// Why there are no kernels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// They cannot be compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The driver does not take them.
    #[error("the kernels of {module} cannot be loaded: {reason}")]
    Driver {
        /// The type of their elements.
        module: &'static str,
        /// Why not.
        reason: CudaError,
    },
}

/// A module of the source, in a context.
#[derive(Debug)]
pub(crate) struct Loaded {
    module: Module,
    code: Arc<cuda::Module>,
}

impl Loaded {
    /// Loads a module for devices of this compute capability, compiled now or before.
    pub(crate) fn new(
        context: &Arc<Context>,
        compiler: &Compiler,
        module: Module,
        architecture: u32,
    ) -> Result<Loaded, LoadError> {
        let image = compiler.module(module, architecture)?;
        // SAFETY: the compiler has made all of it, now or before: the cache gives out only what has the hash that it had.
        let code = unsafe { cuda::Module::load(context, &image) };
        let code = code.map_err(|reason| LoadError::Driver { module: module.name(), reason })?;
        Ok(Loaded { module, code })
    }

    pub(crate) fn module(&self) -> Module {
        self.module
    }

    /// The kernel that computes this with elements of `dtype`; nothing if that is not defined or not of this module.
    pub(crate) fn kernel(&self, computation: Computation, dtype: DType) -> Result<Option<Combine>, LoadError> {
        let wanted = computation.function(dtype).filter(|function| function.module == self.module);
        let Some(wanted) = wanted else { return Ok(None) };
        let name = CString::new(wanted.name).expect("names of the source have no zeros");
        let failed = |reason| LoadError::Driver { module: self.module.name(), reason };
        let function = self.code.function(&name).map_err(failed)?;
        let (element, sum) = self.module.sizes();
        let (parameters, from, into) = match computation {
            Computation::Fold(_) => (Parameters::Blocks, element, element),
            Computation::FoldSums => (Parameters::Blocks, sum, sum),
            Computation::Widen => (Parameters::One, element, sum),
            Computation::Average => (Parameters::BlocksAndDivisor, element, element),
            Computation::AverageSums => (Parameters::BlocksAndDivisor, sum, element),
            Computation::Scale => (Parameters::OneAndFactor, element, element),
        };
        // SAFETY: it is a kernel of `kernels.cu`, which has these parameters under this name. It reads and writes the
        // elements of its blocks and its results, and a factor by its type.
        Ok(Some(unsafe { Combine::new(function, parameters, from, into) }))
    }
}
