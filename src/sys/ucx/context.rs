//! A process's context, and the memory that is registered with it.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use super::configuration::{Configuration, Reach};
use super::functions::{
    CUDA, ContextAttributes, FEATURE_AM, FEATURE_RMA, FEATURE_WAKEUP, HOST, MemoryParams, PARAM_FEATURES,
    PARAM_MT_WORKERS_SHARED, PARAM_REQUEST_INIT, Params, RawContext, RawMemory, THREAD_MODE_MULTI,
};
use super::library::{Ucx, UcxError};
use crate::sync::{Arc, AtomicUsize, Mutex, OnceLock, Ordering, lock};
use crate::sys::fork::{Origin, PerProcess};
use crate::sys::lent_bytes::LentBytes;

/// The library with the devices that it has found, as the variables `UCX_*` of the environment choose them.
#[derive(Debug)]
pub struct Context {
    ucx: Arc<Ucx>,
    raw: RawContext,
    /// A bit for each that it reaches.
    memory_types: u64,
}

// SAFETY: the library was checked to take calls of several threads at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// This process's context for such memory. The first call makes it, and later ones get the same; after an error the next one
    /// tries again. All are of the library that the first was made of.
    ///
    /// # Errors
    /// The library is not found, or of no use; or this process was forked from one that used it.
    pub fn of_process(reach: Reach, named: Option<&Path>, packages: &[PathBuf]) -> Result<Arc<Context>, UcxError> {
        static LIBRARY: PerProcess<Mutex<Option<Arc<Ucx>>>> = PerProcess::unset();
        // A lock for each, since who makes the one for devices may wait for them.
        static OF_HOST: PerProcess<Mutex<Option<Arc<Context>>>> = PerProcess::unset();
        static WITH_DEVICES: PerProcess<Mutex<Option<Arc<Context>>>> = PerProcess::unset();
        static FIRST: OnceLock<Origin> = OnceLock::new();
        if FIRST.get().is_some_and(|first| !first.is_here()) {
            return Err(UcxError::Forked);
        }
        let mut context = match reach {
            Reach::Host => lock(OF_HOST.get()),
            Reach::HostAndDevices => lock(WITH_DEVICES.get()),
        };
        if let Some(context) = &*context {
            return Ok(context.clone());
        }
        let mut library = lock(LIBRARY.get());
        let made = if let Some(ucx) = library.clone() {
            drop(library);
            Arc::new(Context::new(ucx, reach)?)
        } else {
            let ucx = Arc::new(Ucx::load(named, packages)?);
            FIRST.get_or_init(Origin::here);
            let made = Arc::new(Context::new(ucx.clone(), reach)?);
            *library = Some(ucx);
            made
        };
        log::info!("UCX {} of {}", made.ucx.version(), made.ucx.path().display());
        *context = Some(made.clone());
        Ok(made)
    }

    pub(super) fn new(ucx: Arc<Ucx>, reach: Reach) -> Result<Context, UcxError> {
        let configuration = Configuration::new(&ucx, reach)?;
        let params = Params {
            field_mask: PARAM_FEATURES | PARAM_REQUEST_INIT | PARAM_MT_WORKERS_SHARED,
            features: FEATURE_RMA | FEATURE_AM | FEATURE_WAKEUP,
            request_init: Some(zero_request),
            mt_workers_shared: 1,
            ..Params::default()
        };
        let mut raw = null_mut();
        // SAFETY: the structure is that of the version that is named, and the configuration is there.
        let status = unsafe { (ucx.functions().init)(1, 14, &raw const params, configuration.raw(), &raw mut raw) };
        drop(configuration);
        ucx.check("ucp_init", status)?;
        let mut context = Context { ucx, raw, memory_types: 0 };
        let mut attributes = ContextAttributes::asked();
        // SAFETY: the context lives, and the structure says what is asked for.
        let status = unsafe { (context.ucx.functions().context_query)(raw, &raw mut attributes) };
        context.ucx.check("ucp_context_query", status)?;
        if attributes.thread_mode != THREAD_MODE_MULTI {
            return Err(UcxError::OneThread { path: context.ucx.path().to_owned() });
        }
        context.memory_types = attributes.memory_types;
        // Relaxed: what makes requests is made after this, of this context.
        REQUEST_BYTES.store(attributes.request_size, Ordering::Relaxed);
        Ok(context)
    }

    /// The library.
    pub fn ucx(&self) -> &Ucx {
        &self.ucx
    }

    pub(super) fn raw(&self) -> RawContext {
        self.raw
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made in `new`; whatever is of it keeps it alive.
        unsafe { (self.ucx.functions().cleanup)(self.raw) };
    }
}

/// The size of the library's own part of a request: 0 before it is known.
static REQUEST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Zeros the memory of a new request. Where an endpoint closes before a peer has taken the answer to its read, the library
/// frees what the answer's data type has, which it never set (`ucp_request_send_state_ff`, from 1.12 to 1.22 at least): memory
/// with the wrong bits ends the process. Zeros are the type that has nothing.
///
/// # Safety
/// `request` is the library's pointer to a request that nothing uses yet.
unsafe extern "C" fn zero_request(request: *mut c_void) {
    let bytes = REQUEST_BYTES.load(Ordering::Relaxed);
    // SAFETY: the library's part lies before the pointer and is as long as the library says, as in the requests that its
    // users may allocate themselves (`UCP_ATTR_FIELD_REQUEST_SIZE`).
    let part = unsafe { request.cast::<u8>().sub(bytes) };
    // SAFETY: as above. Of it, only a number has been set, to zero (`UCS_PTR_MAP_KEY_INVALID`).
    unsafe { part.write_bytes(0, bytes) };
}

/// Memory that the devices of a context may access, and the peers read that have its key.
#[derive(Debug)]
pub struct RegisteredMemory {
    context: Arc<Context>,
    raw: RawMemory,
    key: Vec<u8>,
    origin: Origin,
}

// SAFETY: a handle that nothing changes; the library takes calls of several threads at once.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// The registration of these bytes, which stays until they are dropped or [forgotten](RegisteredMemory::forget), and then until
    /// nobody has it any more; with a second context, it is the caller's alone. The caller keeps the bytes for as long as it keeps this.
    ///
    /// # Errors
    /// A device refuses, as where too little memory may be locked; or the bytes are a CUDA device's, which the library does not reach.
    pub fn of(context: &Arc<Context>, bytes: &LentBytes) -> Result<Arc<RegisteredMemory>, UcxError> {
        let made = bytes.attached(|| {
            let made: Arc<dyn Any + Send + Sync> = Arc::new(RegisteredMemory::new(context, bytes)?);
            Ok(made)
        })?;
        let made: Arc<RegisteredMemory> = made.downcast().expect("nothing else is attached to bytes");
        if Arc::ptr_eq(&made.context, context) {
            return Ok(made);
        }
        RegisteredMemory::new(context, bytes).map(Arc::new)
    }

    /// Ends the registration of these bytes as soon as nobody has it any more.
    pub fn forget(bytes: &LentBytes) {
        bytes.detach();
    }

    fn new(context: &Arc<Context>, bytes: &LentBytes) -> Result<RegisteredMemory, UcxError> {
        let (ucx, functions) = (&context.ucx, context.ucx.functions());
        let memory_type = memory_type_of(bytes);
        if memory_type == CUDA && context.memory_types & (1 << CUDA) == 0 {
            return Err(UcxError::NoCuda { path: ucx.path().to_owned() });
        }
        let params = MemoryParams::readable(bytes.as_ptr(), bytes.len(), memory_type);
        let mut raw = null_mut();
        // SAFETY: the context lives, and so do the bytes: the registration is attached to them, or in use by what keeps them.
        let status = unsafe { (functions.mem_map)(context.raw, &raw const params, &raw mut raw) };
        ucx.check("ucp_mem_map", status)?;
        let mut memory = RegisteredMemory { context: context.clone(), raw, key: Vec::new(), origin: Origin::here() };
        let (mut packed, mut len) = (null_mut::<c_void>(), 0);
        // SAFETY: the memory was just mapped, and it writes to a pointer and a number, which live.
        let status = unsafe { (functions.rkey_pack)(context.raw, raw, &raw mut packed, &raw mut len) };
        ucx.check("ucp_rkey_pack", status)?;
        // SAFETY: the library made so many bytes there, which stay until they are released below.
        memory.key = unsafe { std::slice::from_raw_parts(packed.cast::<u8>(), len) }.to_vec();
        // SAFETY: made by `rkey_pack`, and not used any more.
        unsafe { (functions.rkey_buffer_release)(packed) };
        Ok(memory)
    }

    /// By which peers read it.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    pub(super) fn raw(&self) -> RawMemory {
        self.raw
    }
}

/// The library's number for where these bytes lie.
pub(super) fn memory_type_of(bytes: &LentBytes) -> c_int {
    if bytes.is_on_device() { CUDA } else { HOST }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // It is the parent's.
            return;
        }
        // SAFETY: mapped in `new`, and nothing uses it any more.
        let status = unsafe { (self.context.ucx.functions().mem_unmap)(self.context.raw, self.raw) };
        if let Err(error) = self.context.ucx.check("ucp_mem_unmap", status) {
            log::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut;

    use super::*;
    use crate::sys::ucx::fake::Fake;

    #[test]
    fn bytes_of_a_device_are_refused_by_a_library_that_does_not_reach_them() {
        let (context, fake) = Fake::context();
        // SAFETY: no device copies them.
        let bytes = unsafe { LentBytes::on_device(without_provenance_mut(64), 8, Box::new(())) };
        let error = RegisteredMemory::of(&context, &bytes).expect_err("it has no CUDA");
        assert!(matches!(error, UcxError::NoCuda { .. }) && fake.registered() == 0, "{error}");
        RegisteredMemory::of(&context, &LentBytes::owned(vec![0; 8])).expect("memory of the host");
    }

    #[test]
    fn bytes_are_registered_with_each_context() {
        let [(one, fake), (other, _other)] = [(); 2].map(|()| Fake::context());
        let bytes = LentBytes::owned(vec![0; 8]);
        let [first, again, second] =
            [&one, &one, &other].map(|context| RegisteredMemory::of(context, &bytes).expect("memory of the host"));
        assert!(Arc::ptr_eq(&first, &again) && Arc::ptr_eq(&second.context, &other));
        assert_eq!(fake.registered(), 1);
    }
}
