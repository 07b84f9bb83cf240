//! What a split makes: a communicator of a vendor's library, for ranks that have not set up yet.

use serde::{Deserialize, Serialize};

use crate::config::NcclFields;
use crate::device::vendor::ending::{abort_aside, destroy_aside};
use crate::sync::Arc;
use crate::sys::fork::Origin;
use crate::sys::nccl::{Nccl, NcclComm, Progress};

/// A communicator of a library for ranks that have none yet, split from that of others.
///
/// Dropped, it is destroyed.
#[derive(Debug)]
pub(crate) struct Part {
    /// None once it is taken.
    raw: Option<Arc<NcclComm>>,
    origin: Origin,
    id: PartId,
    /// The number of its device.
    device: u32,
    fields: Arc<NcclFields>,
}

/// Which split a part is from: the communicator's identity, and how many splits it had before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartId {
    pub(super) comm: String,
    pub(super) number: u64,
}

impl Part {
    pub(super) fn new(raw: Arc<NcclComm>, id: PartId, device: u32, fields: Arc<NcclFields>) -> Part {
        Part { raw: Some(raw), origin: Origin::here(), id, device, fields }
    }

    pub(crate) fn id(&self) -> PartId {
        self.id.clone()
    }

    /// The number of the device that it is on.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    /// Whether it is what this library would begin with these fields, and has not failed.
    pub(super) fn fits(&self, library: Option<&Nccl>, fields: &NcclFields) -> bool {
        let Some(raw) = &self.raw else { return false };
        let is_its = library.is_some_and(|library| library.path() == raw.library().path());
        is_its && *self.fields == *fields && matches!(raw.progress(), Ok(Progress::Done))
    }

    /// The communicator, for the ranks that have chosen the library.
    pub(super) fn taken(mut self) -> Arc<NcclComm> {
        self.raw.take().expect("it is taken once")
    }

    /// Gives it up, as after a failure.
    pub(crate) fn give_up(mut self) {
        self.take_own().into_iter().for_each(abort_aside);
    }

    /// The communicator, if it was not taken and is this process's.
    fn take_own(&mut self) -> Option<Arc<NcclComm>> {
        self.raw.take().filter(|_| self.origin.is_here())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let Some(raw) = self.take_own() else { return };
        // An abort would end what shares with it. What has failed the library does not destroy.
        match raw.progress() {
            Ok(Progress::Done) => destroy_aside(raw),
            Ok(Progress::Going) | Err(_) => abort_aside(raw),
        }
    }
}
