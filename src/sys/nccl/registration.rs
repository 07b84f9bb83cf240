//! Memory that is registered with a communicator, so that the library reads and writes it in place.
#![allow(unsafe_code, reason = "calls a library in C")]

use super::communicator::NcclComm;
use super::functions::{Address, RawComm, RawHandle};
use super::library::{Feature, NcclError};
use super::registered::{Handle, Registration};
use crate::sync::lock;
use crate::sys::cuda::{Current, DeviceBytes, DevicePtr};

impl NcclComm {
    /// Registers memory, if that was not tried before. Whether it is registered; it is not where the library's own settings
    /// say so. It stays until it is [deregistered](NcclComm::deregister), or until the communicator has been given back.
    ///
    /// # Errors
    /// The library fails, which is not tried again; or the communicator is gone.
    pub fn register(&self, _: &Current<'_>, bytes: DeviceBytes<'_>) -> Result<bool, NcclError> {
        let library = self.library();
        let register = library.functions().comm_register.filter(|_| library.features().contains(&Feature::Memory));
        let register = register.ok_or_else(|| library.lacks(Feature::Memory))?;
        self.with_raw(|raw| {
            let mut registered = lock(&self.registered);
            if let Some(known) = registered.get(&bytes.ptr()) {
                return Ok(matches!(known, Registration::Done(_)));
            }
            let address: Address = std::ptr::with_exposed_provenance_mut(bytes.ptr().to_bits() as usize);
            let mut handle: RawHandle = std::ptr::null_mut();
            // SAFETY: the communicator lives, since it is only taken out under the lock that is held here; `handle` is a place
            // for the result. The memory is there as long as `bytes`.
            let code = unsafe { register(raw, address, bytes.len(), &raw mut handle) };
            let is_done = code == 0 && !handle.is_null();
            let made = if is_done { Registration::Done(Handle(handle)) } else { Registration::None };
            registered.insert(bytes.ptr(), made);
            library.check("ncclCommRegister", code).map(|()| is_done)
        })?
    }

    /// Ends the registration of memory that begins here, if there is one. Nothing on a stream uses it any more. Of a
    /// communicator that is being given back with it, the library ends it: this waits for that.
    ///
    /// # Errors
    /// The library fails; or the communicator has been given up, and a CUDA graph still has calls of it.
    pub fn deregister(&self, at: DevicePtr) -> Result<(), NcclError> {
        let ended = self.with_raw(|raw| match lock(&self.registered).remove(&at) {
            Some(Registration::Done(handle)) => self.end_registration(raw, &handle),
            Some(Registration::None) | None => Ok(()),
        });
        ended.unwrap_or_else(|_gone| {
            if !matches!(lock(&self.registered).get(&at), Some(Registration::Done(_))) {
                // Its end may wait for other ranks for as long as they please.
                return Ok(());
            }
            // Whoever calls this may be who is to destroy the graph.
            if self.is_held() {
                return Err(NcclError::Held);
            }
            self.wait_for_the_end();
            Ok(())
        })
    }

    /// Ends all registrations. Nothing of the communicator is on a stream.
    ///
    /// # Errors
    /// The library fails. What it fails at stays registered.
    pub fn deregister_all(&self) -> Result<(), NcclError> {
        let ended = self.with_raw(|raw| {
            let mut all = Ok(());
            // Each is tried.
            lock(&self.registered).retain(|_, registration| {
                let Registration::Done(handle) = registration else { return false };
                let ended = self.end_registration(raw, handle);
                let stays = ended.is_err();
                if all.is_ok() {
                    all = ended;
                }
                stays
            });
            all
        });
        ended.unwrap_or(Ok(()))
    }

    fn end_registration(&self, raw: RawComm, Handle(handle): &Handle) -> Result<(), NcclError> {
        let deregister = self.library().functions().comm_deregister;
        let deregister = deregister.ok_or_else(|| self.library().lacks(Feature::Memory))?;
        // SAFETY: of this communicator, which lives as its lock is held, and not deregistered yet.
        self.library().check("ncclCommDeregister", unsafe { deregister(raw, *handle) })
    }
}
