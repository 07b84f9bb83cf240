//! Splits: communicators of some of the ranks of one that has begun, which need no unique id and use what it knows of its ranks.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::c_int;
use std::mem::ManuallyDrop;

use super::communicator::{IN_PROGRESS, NcclComm, Progress, SUCCESS};
use super::config::Config;
use super::functions::RawComm;
use super::library::{Feature, NcclError};
use crate::config::NcclFields;
use crate::sync::{Arc, AtomicPtr, Ordering};
use crate::sys::cuda::Current;

/// Which part of a split communicator a rank is in, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// A number that the ranks of a part have alike.
    pub color: u32,
    /// The ranks of a part are numbered in the order of these.
    pub key: u32,
}

/// A split that the library is at.
pub struct Splitting {
    parent: Arc<NcclComm>,
    /// Where the library puts the new communicator. It stays if nobody waits until the library is done with it.
    made: ManuallyDrop<Box<AtomicPtr<std::ffi::c_void>>>,
    fields: Arc<NcclFields>,
}

impl NcclComm {
    /// Begins communicators of some of the ranks of this one. All its ranks call it, also those in no part, when nothing of it is
    /// on a stream. Until the split is done nothing else may be called of it. Whether the parts share what it has is set by its
    /// own fields.
    pub fn split(
        self: &Arc<NcclComm>,
        _: &Current<'_>,
        place: Option<Place>,
        fields: &Arc<NcclFields>,
    ) -> Result<Splitting, NcclError> {
        let library = self.library();
        let (true, Some(split)) = (library.features().contains(&Feature::Split), library.functions().comm_split) else {
            return Err(library.lacks(Feature::Split));
        };
        let made = Box::new(AtomicPtr::new(std::ptr::null_mut()));
        let mut config = Config::non_blocking(library.version().to_code(), fields);
        let (color, key) = place.map_or((NO_COLOR, 0), |place| (place.color as c_int, place.key as c_int));
        // SAFETY: the communicator lives, since it is only taken out under the lock that is held here; `made` stays in its place
        // until the library is done; `config` is as long as it says, and the name that it refers to stays with the communicator.
        let code = self.with_raw(|raw| unsafe { split(raw, color, key, made.as_ptr(), &raw mut config) })?;
        let splitting = Splitting { parent: self.clone(), made: ManuallyDrop::new(made), fields: fields.clone() };
        match code {
            SUCCESS | IN_PROGRESS => Ok(splitting),
            code => Err(library.failed("ncclCommSplit", code)),
        }
    }
}

impl Splitting {
    /// How far it is, which the communicator that is split tells. An error: what is left is to abort that, too.
    pub fn progress(&self) -> Result<Progress, NcclError> {
        self.parent.progress()
    }

    /// The new communicator, once the split is done or has failed; none on a rank that is in no part. It can be used once it is
    /// [done](Progress::Done) itself.
    pub fn finish(self) -> Option<NcclComm> {
        // Acquire: as the library stores it.
        let raw: RawComm = self.made.load(Ordering::Acquire);
        if matches!(self.parent.progress(), Ok(Progress::Done)) {
            drop(ManuallyDrop::into_inner(self.made));
        }
        (!raw.is_null()).then(|| NcclComm::of(self.parent.library().clone(), raw, self.fields))
    }
}

/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
