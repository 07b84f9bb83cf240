//! A device's primary context, which PyTorch uses too.
#![allow(unsafe_code, reason = "calls the driver")]

use std::marker::PhantomData;

use cudarc::driver::sys::CUcontext;

use super::device::Device;
use super::error::CudaError;
use super::functions::call;
use crate::sync::Arc;

/// Keeps a device's primary context.
#[derive(Debug)]
pub struct Context {
    raw: CUcontext,
    device: Device,
}

// SAFETY: a context may be made current on any thread, on several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device, made if nobody has it yet.
    pub fn primary(device: Device) -> Result<Arc<Context>, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a place for the result.
        unsafe { call!(cuDevicePrimaryCtxRetain(&raw mut raw, device.raw)) }?;
        Ok(Arc::new(Context { raw, device }))
    }

    /// Whose it is.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Makes it this thread's, until what is returned goes. Not by pushing and popping: HIP's pop leaves the thread where it is.
    pub fn enter(&self) -> Result<Current<'_>, CudaError> {
        let mut before = std::ptr::null_mut();
        // SAFETY: `before` is a place for the result.
        unsafe { call!(cuCtxGetCurrent(&raw mut before)) }?;
        if before == self.raw {
            return Ok(Current { before: None, _context: self, _of_this_thread: PhantomData });
        }
        // SAFETY: the context is kept by self.
        unsafe { call!(cuCtxSetCurrent(self.raw)) }?;
        Ok(Current { before: Some(before), _context: self, _of_this_thread: PhantomData })
    }

    /// Gives something back, and says whether that worked. Where it did not there is nobody to tell, so it is logged.
    pub(super) fn give_back(&self, give: impl FnOnce() -> Result<(), CudaError>) -> bool {
        // Tried also where it cannot be entered: most calls find the context by what they are given.
        let _current = self.enter();
        let result = give();
        if let Err(error) = &result {
            log::warn!("something of device {} was not given back: {error}", self.device.ordinal());
        }
        result.is_ok()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `primary`; whatever is in the context keeps self.
        let result = unsafe { call!(cuDevicePrimaryCtxRelease_v2(self.device.raw)) };
        if let Err(error) = result {
            log::warn!("the context of device {} was not released: {error}", self.device.ordinal());
        }
    }
}

/// That a context is this thread's current one. Calls that need one take this.
#[derive(Debug)]
pub struct Current<'a> {
    /// The one before, if that was another one.
    before: Option<CUcontext>,
    _context: &'a Context,
    _of_this_thread: PhantomData<*const ()>,
}

impl Current<'_> {
    /// Waits until all that is on streams of the device has run.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: it asks for nothing but a current context, which self says that there is.
        unsafe { call!(cuCtxSynchronize()) }
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let Some(before) = self.before else { return };
        // SAFETY: it was this thread's; if it is gone since, this is an error.
        let result = unsafe { call!(cuCtxSetCurrent(before)) };
        if let Err(error) = result {
            log::warn!("a context stays current: {error}");
        }
    }
}
