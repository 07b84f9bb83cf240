//! Kernels.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::{CStr, c_void};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};

use super::context::{Context, Current};
use super::error::CudaError;
use super::functions::call;
use super::stream::Stream;
use crate::sync::Arc;

/// Code for a device.
#[derive(Debug)]
pub struct Module {
    raw: CUmodule,
    context: Arc<Context>,
}

// SAFETY: a module may be used by any thread.
unsafe impl Send for Module {}
// SAFETY: calls do not change it.
unsafe impl Sync for Module {}

/// A kernel of a module.
#[derive(Clone, Debug)]
pub struct Function {
    raw: CUfunction,
    module: Arc<Module>,
}

// SAFETY: as its module.
unsafe impl Send for Function {}
// SAFETY: as its module.
unsafe impl Sync for Function {}

impl Module {
    /// Loads a compiled image, or PTX with a zero at its end.
    ///
    /// # Safety
    /// The image is whole: the driver takes its length from what is in it.
    pub unsafe fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Module>, CudaError> {
        let mut raw = std::ptr::null_mut();
        let _current = context.enter()?;
        // SAFETY: `raw` is a place for the result; the caller answers for the image.
        unsafe { call!(cuModuleLoadData(&raw mut raw, image.as_ptr().cast())) }?;
        Ok(Arc::new(Module { raw, context: context.clone() }))
    }

    /// The kernel of that name, on the device: a launch has nothing to load, for which it might wait for the device.
    pub fn function(self: &Arc<Self>, name: &CStr) -> Result<Function, CudaError> {
        let (mut raw, mut threads) = (std::ptr::null_mut(), 0);
        let _current = self.context.enter()?;
        // SAFETY: `raw` is a place for the result, and the name ends with a zero.
        unsafe { call!(cuModuleGetFunction(&raw mut raw, self.raw, name.as_ptr())) }?;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        // SAFETY: `threads` is a place for the result. To tell anything, the driver loads what it loads lazily.
        unsafe { call!(cuFuncGetAttribute(&raw mut threads, attribute, raw)) }?;
        Ok(Function { raw, module: self.clone() })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, and no function of it is left; the driver waits for kernels that run.
        self.context.give_back(|| unsafe { call!(cuModuleUnload(self.raw)) });
    }
}

impl Function {
    /// The module that has it. A graph does not keep the modules of its kernels.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// Puts the kernel on a stream: `blocks` times `threads` of them, with pointers to its parameters.
    ///
    /// # Safety
    /// The parameters are as many as the kernel has, of its types; what it reads and writes through them is device memory, or
    /// words of registered memory.
    pub unsafe fn launch(
        &self,
        _: &Current<'_>,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let (parameters, no_more) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the stream and the function live, the driver copies the parameters before it returns, and the caller answers
        // for what they are.
        unsafe { call!(cuLaunchKernel(self.raw, blocks, 1, 1, threads, 1, 1, 0, stream.raw, parameters, no_more)) }
    }
}
