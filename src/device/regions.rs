//! Pieces of device memory that communicators of a vendor's library may have registered, each as a whole.
//!
//! A piece is registered with a communicator when a call first passes some of it. Before it goes, its registrations end: first
//! the device does nothing with it any more, then the library forgets it. A communicator that is being given up ends those
//! that it has itself, which is waited for.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::PoisonError;

use crate::buffer::Buffer;
use crate::sync::{Arc, Mutex, Weak, lock};
use crate::sys::cuda::{Context, CudaError, Current, DeviceBytes, DevicePtr, Relaxed, SharedDeviceMemory};
use crate::sys::fork::Origin;
use crate::sys::nccl::{LibraryMemory, NcclComm, NcclError};

/// Why there is no memory, or why it is not given back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The driver refused something.
    #[error(transparent)]
    Driver(#[from] CudaError),
    /// The vendor's library refused something.
    #[error(transparent)]
    Library(#[from] NcclError),
    /// No library was set to allocate in this process.
    #[error("no vendor's library allocates in this process")]
    NoLibrary,
}

/// Where a piece of memory is from.
pub(crate) enum Memory {
    /// The engine has allocated it.
    Own(SharedDeviceMemory),
    /// A vendor's library has.
    Library(LibraryMemory),
    /// A program has, which keeps it by the owner.
    Lent { buffer: Buffer, _owner: Owner },
}

/// What keeps memory that a program lends: dropped once nothing is registered.
pub(crate) type Owner = Box<dyn Send + Sync>;

impl Memory {
    fn bytes(&self) -> DeviceBytes<'_> {
        match self {
            Memory::Own(memory) => memory.bytes(),
            Memory::Library(memory) => memory.bytes(),
            Memory::Lent { buffer, .. } => buffer.device_bytes().expect("it was checked when it was lent"),
        }
    }
}

/// A piece of memory.
pub(crate) struct Region {
    begin: DevicePtr,
    len: usize,
    context: Arc<Context>,
    origin: Origin,
    state: Mutex<State>,
}

struct State {
    /// None once it is to go.
    memory: Option<Memory>,
    /// With which it may be registered.
    comms: Vec<Weak<NcclComm>>,
}

impl Region {
    pub(crate) fn new(memory: Memory, context: Arc<Context>) -> Region {
        let (begin, len) = (memory.bytes().ptr(), memory.bytes().len());
        let state = Mutex::new(State { memory: Some(memory), comms: Vec::new() });
        Region { begin, len, context, origin: Origin::here(), state }
    }

    pub(crate) fn begin(&self) -> DevicePtr {
        self.begin
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether it is registered with a communicator on its device, which is tried once.
    ///
    /// # Errors
    /// The library fails, at the first call.
    pub(crate) fn is_registered(&self, current: &Current<'_>, comm: &Arc<NcclComm>) -> Result<bool, NcclError> {
        let mut state = lock(&self.state);
        let State { memory, comms } = &mut *state;
        let Some(memory) = memory else { return Ok(false) };
        if !comms.iter().any(|known| known.as_ptr() == Arc::as_ptr(comm)) {
            // Those that are still being given back stay, so that the memory can wait for them.
            comms.retain(|known| known.strong_count() > 0);
            comms.push(Arc::downgrade(comm));
        }
        comm.register(current, memory.bytes())
    }

    /// Ends its registrations, once the device does nothing more. What it was, which is nobody's any more; none if that has
    /// been called before.
    ///
    /// # Errors
    /// It may still be used or registered, and so it stays.
    pub(crate) fn end(&self) -> Result<Option<Memory>, MemoryError> {
        let State { memory, comms } = &mut *lock(&self.state);
        let comms: Vec<_> = std::mem::take(comms).iter().filter_map(Weak::upgrade).collect();
        let ended = self.end_with(&comms);
        let memory = memory.take();
        match ended {
            Ok(()) => Ok(memory),
            Err(error) => {
                std::mem::forget(memory);
                Err(error)
            }
        }
    }

    fn end_with(&self, comms: &[Arc<NcclComm>]) -> Result<(), MemoryError> {
        if comms.iter().any(|comm| !comm.is_gone()) {
            // The library would end a registration below an operation that uses it.
            self.wait()?;
        }
        // All are tried.
        let ended = comms.iter().map(|comm| comm.deregister(self.begin)).fold(Ok(()), Result::and);
        Ok(ended?)
    }

    /// Waits until all that is on streams of its device has run.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        // To wait for a device spoils captures otherwise.
        let _relaxed = Relaxed::enter()?;
        self.context.enter()?.synchronize()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.origin.is_here() {
            if let Err(error) = self.end() {
                log::warn!("device memory of {} bytes stays: {error}", self.len);
            }
        } else {
            // Registrations and memory are the parent's, and so are the threads that may hold locks.
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(state.memory.take());
        }
    }
}

/// Pieces of memory.
#[derive(Default)]
pub(crate) struct Regions(BTreeMap<DevicePtr, Arc<Region>>);

impl Regions {
    /// Adds one. It comes back if there is one that begins there, to go once no lock is held: its owner may be anything.
    pub(crate) fn insert(&mut self, region: Region) -> Option<Region> {
        match self.0.entry(region.begin) {
            Entry::Vacant(place) => {
                place.insert(Arc::new(region));
                None
            }
            Entry::Occupied(_) => Some(region),
        }
    }

    pub(crate) fn get(&self, begin: DevicePtr) -> Option<Arc<Region>> {
        self.0.get(&begin).cloned()
    }

    pub(crate) fn remove(&mut self, begin: DevicePtr) -> Option<Arc<Region>> {
        self.0.remove(&begin)
    }

    /// One in which all these bytes lie.
    pub(crate) fn around(&self, bytes: DeviceBytes<'_>) -> Option<Arc<Region>> {
        let end = |begin: DevicePtr, len: usize| begin.to_bits().saturating_add(len as u64);
        // Programs may lend parts of what they have lent already.
        let mut before = self.0.range(..=bytes.ptr()).rev().map(|(_, region)| region);
        before.find(|region| end(bytes.ptr(), bytes.len()) <= end(region.begin, region.len)).cloned()
    }
}

impl std::fmt::Debug for Regions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
