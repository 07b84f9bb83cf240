//! How windows come to be and go: each rank maps the parts of the others on its host.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Exposed, Part, State, Windows};
use crate::buffer::Buffer;
use crate::deadline::deadline_after;
use crate::device::descriptors::{Address, Post};
use crate::device::setup::{AllGather, SetupFailure, failed, split, tell};
use crate::device::signals::SLOTS;
use crate::device::watch;
use crate::error::Error;
use crate::sync::{Arc, lock};
use crate::sys::cuda::{Context, ExportError, ImportedMemory, export};
use crate::types::Rank;
use crate::window::WindowId;

/// What a rank tells the others of its memory.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    address: Address,
    /// The slots of words that are free here, a bit each.
    free: u64,
    /// The lengths of its pieces, where the window begins in them, and the window's length.
    pieces: Vec<usize>,
    offset: usize,
    len: usize,
}

impl Windows {
    /// Maps the memory that all ranks expose. All ranks call it; a failure on one is an error on all.
    ///
    /// Calls `all_gather` equally often on every rank, until one of them fails, and asks `are_there` now and then.
    pub(crate) fn register(
        &self,
        window: WindowId,
        memory: Buffer,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let (own, offer) = split(self.offer(memory));
        let (slot, parts) = self.share(own, offer, memory, timeout, all_gather, are_there)?;
        let (none, parts) = (vec![0; parts.len()], Arc::new(parts));
        let mut state = lock(&self.state);
        let Some(state) = state.as_mut() else {
            self.reap(parts);
            return Err(self.closed("window_register"));
        };
        state.slots |= 1 << slot;
        state.exposed.insert(window, Exposed { slot, parts, sent: none.clone(), taken: none, gathered: 0 });
        Ok(())
    }

    /// What this rank brings: descriptors of its memory, and a place for those of the others.
    fn offer(&self, memory: Buffer) -> Result<(Own, Offer), SetupFailure> {
        const MEMORY: &str = "the memory of its window";
        let refused = |cause: String| SetupFailure::new(MEMORY, cause);
        if let Some(obstacle) = self.obstacle {
            return Err(refused(obstacle.to_owned()));
        }
        let bytes = memory.device_bytes().ok_or_else(|| refused("it is not on a device".to_owned()))?;
        let context = match lock(&self.state).as_ref() {
            Some(state) => state.context.clone(),
            None => return Err(refused("the communicator is closed".to_owned())),
        };
        let exported = export(&context, bytes).map_err(|error| match error {
            ExportError::Closed => refused(format!("{error}: {FROM_WHERE}")),
            error => refused(error.to_string()),
        })?;
        let most = usize::from(u8::MAX);
        if exported.pieces.len() > most {
            let count = exported.pieces.len();
            return Err(refused(format!("it consists of {count} pieces, more than {most}: {FROM_WHERE}")));
        }
        self.begin_far(&context)?;
        let post = Post::open().map_err(failed("a place for file descriptors"))?;
        let pieces = exported.pieces.iter().map(|(_, len)| *len).collect();
        let free = match lock(&self.state).as_ref() {
            Some(state) => {
                let is_kept = |slot: &usize| state.recordings.keeps(*slot);
                !(0..SLOTS).filter(is_kept).fold(state.slots, |used, slot| used | 1 << slot)
            }
            None => return Err(refused("the communicator is closed".to_owned())),
        };
        let offer =
            Offer { address: post.address().clone(), free, pieces, offset: exported.offset, len: memory.bytes() };
        Ok((Own { post, exported: exported.pieces, context: context.clone() }, offer))
    }

    /// Exchanges memory with the other ranks, and maps theirs. Returns the window's slot of words, and the parts.
    fn share(
        &self,
        own: Option<Own>,
        offer: Result<Offer, SetupFailure>,
        memory: Buffer,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(usize, Vec<Part>), Error> {
        let names: Vec<Rank> = (0..self.world).map(Rank::from).collect();
        let offers: Vec<Offer> = tell(&self.comm, &names, all_gather, offer)?;
        let own = own.expect("no rank has told a failure");
        let (parts, told) = split(self.map(own, &offers, memory, timeout, are_there).map(|parts| (parts, ())));
        match (tell(&self.comm, &names, all_gather, told), parts) {
            (Ok(_), parts) => Ok(parts.expect("no rank has told a failure")),
            (Err(error), parts) => {
                // The reaper unmaps them once nothing is in flight.
                if let Some((slot, parts)) = parts {
                    self.conceal_far(slot);
                    self.reap(Arc::new(parts));
                }
                Err(error)
            }
        }
    }

    fn map(
        &self,
        own: Own,
        offers: &[Offer],
        memory: Buffer,
        timeout: Duration,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(usize, Vec<Part>), SetupFailure> {
        let Own { post, exported, context } = own;
        let slot = offers.iter().fold(u64::MAX, |free, offer| free & offer.free).trailing_zeros() as usize;
        if slot == SLOTS {
            let cause =
                format!("{SLOTS} windows are registered, or CUDA graphs have accesses to them, which is the most");
            return Err(SetupFailure::new("its window", cause));
        }
        // No rank uses the slot before all have told that they are done.
        self.signals.reset(slot, self.seat);
        let here: Vec<Rank> = self.control.ranks().map(|seat| self.control.name(seat)).collect();
        let addresses: Vec<Address> = here.iter().map(|rank| offers[rank.index()].address.clone()).collect();
        let fds: Vec<BorrowedFd<'_>> = exported.iter().map(|(fd, _)| fd.as_fd()).collect();
        let taken = post.exchange(self.seat, &addresses, &fds, deadline_after(Instant::now(), timeout), are_there);
        let taken = taken.map_err(|error| error.naming(&here)).map_err(failed("the exchange of file descriptors"))?;
        let part = |(rank, fds): (Rank, Vec<OwnedFd>)| {
            let offer = &offers[rank.index()];
            let what = format!("the window's memory on rank {rank}");
            let end = offer.pieces.iter().try_fold(0, |sum: usize, len| sum.checked_add(*len));
            let is_whole = fds.len() == offer.pieces.len()
                && end.is_some_and(|end| offer.offset.checked_add(offer.len).is_some_and(|last| last <= end));
            if !is_whole && offer.len > 0 {
                return Err(failed(&what)("it has handed too little over"));
            }
            if rank == self.me {
                return Ok(Part::Own(memory));
            }
            if offer.len == 0 {
                return Ok(Part::Empty);
            }
            let pieces: Vec<_> = fds.iter().map(AsFd::as_fd).zip(offer.pieces.iter().copied()).collect();
            let memory = ImportedMemory::new(&context, &pieces).map_err(failed(what))?;
            Ok(Part::Mapped { memory, offset: offer.offset, len: offer.len })
        };
        let mut parts: Vec<Part> = offers.iter().map(|_| Part::Far).collect();
        for (rank, fds) in here.iter().copied().zip(taken) {
            parts[rank.index()] = part((rank, fds))?;
        }
        self.expose_far(slot, memory);
        Ok((slot, parts))
    }

    /// Waits until no access of this rank to a window is in flight, and no collective that writes to its parts.
    pub(crate) fn settle(&self, window: WindowId, timeout: Duration) -> Result<(), Error> {
        let of_window = |state: &State| state.exposed.get(&window).map(|exposed| (exposed.slot, exposed.gathered));
        let (slot, gathered) = lock(&self.state).as_ref().and_then(of_window).unzip();
        let is_settled = || slot.is_none_or(|slot| self.is_settled_far(slot));
        let settled = self.accesses.wait_until(timeout, |accesses| !accesses.uses(window) && is_settled());
        let settled = settled.and_then(|()| self.accesses.collectives().wait_for(gathered.unwrap_or(0), timeout));
        settled.map_err(|waited| Error::Timeout {
            operation: "window_deregister".to_owned(),
            waited,
            detail: format!("accesses to window {window} are still in flight on the device"),
        })
    }

    /// Forgets a window, which no rank accesses any more. The reaper unmaps it once nothing is in flight.
    pub(crate) fn conceal(&self, window: WindowId) {
        let mut state = lock(&self.state);
        let Some(state) = state.as_mut() else { return };
        let Some(exposed) = state.exposed.remove(&window) else { return };
        if let Some(far) = &state.far {
            far.landing.conceal(exposed.slot);
        }
        // While an access is in flight, its word is too: the slot stays taken.
        if !self.accesses.uses(window) && self.is_settled_far(exposed.slot) {
            state.slots &= !(1 << exposed.slot);
        }
        self.reap(exposed.parts);
    }

    fn reap(&self, parts: Arc<Vec<Part>>) {
        watch::reap(vec![self.accesses.clone(), self.accesses.collectives()], Box::new(parts));
    }
}

/// A rank's memory on its way to the others.
struct Own {
    post: Post,
    exported: Vec<(OwnedFd, usize)>,
    context: Arc<Context>,
}

const FROM_WHERE: &str = "allocate from get_mem_allocator()";
