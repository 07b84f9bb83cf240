//! A communicator made of some ranks of another. They bootstrap through the parent, so no store is needed.

use std::time::Duration;

use super::bootstrap::ROOT_KEY;
use super::communicator::Communicator;
use super::store::Store;
use crate::device::vendor::part::Part;
use crate::error::{Error, UsageError};
use crate::types::{Rank, Source, Tag};

/// The size limit of the value that ranks exchange.
const VALUE_BYTES_MAX: usize = 1 << 20;

impl Communicator {
    /// A new communicator of the ranks in `ranks`. Each of them calls this with the same list and the same name; the other
    /// ranks do not call it. A rank's number in the new communicator is its index in the list.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use ncclx_rs::comm::store::MemoryStore;
    /// # use ncclx_rs::{CommOptions, Communicator, Rank, ReduceOp};
    /// # let store = Arc::new(MemoryStore::default());
    /// # let run = &|rank: u32| {
    /// #     let options = CommOptions {
    /// #         name: "world".into(), rank: Rank(rank), size: 3, store: store.clone(), timeout: None, hints: vec![],
    /// #     };
    /// #     let world = Communicator::new(options)?;
    /// if world.rank() != Rank(1) {
    ///     let outer = world.split(&[Rank(2), Rank(0)], "outer")?;
    ///     let mut sum = [outer.rank().0, 1];
    ///     outer.all_reduce(&mut sum, ReduceOp::Sum)?;
    ///     assert_eq!(sum, [1, 2]);
    /// }
    /// #     world.barrier()
    /// # };
    /// # std::thread::scope(|scope| {
    /// #     let ranks = [0, 1, 2].map(|rank| scope.spawn(move || run(rank)));
    /// #     ranks.into_iter().try_for_each(|rank| rank.join().expect("no panic"))
    /// # })?;
    /// # Ok::<(), ncclx_rs::Error>(())
    /// ```
    pub fn split(&self, ranks: &[Rank], name: &str) -> Result<Communicator, Error> {
        self.driver.check_here("split")?;
        let own = self.rank_among(ranks)?;
        let parent = Parent { comm: self, ranks };
        let timeout = Some(self.timeout());
        let hints = self.inherited.hints.clone();
        let part = Communicator::bootstrap_with(name.to_owned(), own, ranks.len(), &parent, timeout, hints)?;
        part.set_members(
            self.driver.with_engine(|engine| ranks.iter().map(|rank| engine.members[rank.index()]).collect()),
        );
        Ok(part)
    }

    /// As [`split`](Communicator::split), but all ranks call it, so that the parts also take over what this communicator has of
    /// a vendor's library for tensors on devices. `ranks` is empty on a rank that is in no part. Other ranks give the lists of
    /// their own parts.
    ///
    /// # Errors
    /// Those of [`part`](Communicator::part) and [`split`](Communicator::split).
    pub fn split_with_all(&self, ranks: &[Rank], name: &str) -> Result<Option<Communicator>, Error> {
        let part = self.part(ranks)?;
        if ranks.is_empty() {
            return Ok(None);
        }
        let made = self.split(ranks, name)?;
        if let Some(part) = part {
            made.inherit(part);
        }
        Ok(Some(made))
    }

    /// Splits what this communicator has of a vendor's library (`engine=nccl`) for a communicator of the ranks in `ranks`, in
    /// their order, or for none if that is empty. All ranks call it, at the same place among their operations on devices; each
    /// gives its own part. None: no library runs operations on devices here, not yet, or it cannot be split; the parts begin
    /// with it by themselves then, when they need it.
    ///
    /// # Errors
    /// A rank does not come within the time limit of this communicator, the lists do not go together, or the library fails on a
    /// rank. This communicator still works, unless ranks are lost or have not told how their libraries have ended.
    pub fn part(&self, ranks: &[Rank]) -> Result<Option<LibraryPart>, Error> {
        if !ranks.is_empty() {
            self.rank_among(ranks)?;
        }
        Ok(self.device.part(self, ranks, self.timeout())?.map(LibraryPart))
    }

    /// Takes over a part that all ranks of this communicator have from [`part`](Communicator::part), before its first operation
    /// on a device. Where ranks have none, or not of one split, or settings of the library differ, all begin by themselves.
    pub fn inherit(&self, part: LibraryPart) {
        self.device.inherit(part.0);
    }

    fn rank_among(&self, ranks: &[Rank]) -> Result<Rank, UsageError> {
        let error = |expected: String, got: String| UsageError {
            operation: "split".to_owned(),
            argument: "ranks",
            expected,
            got,
        };
        for (index, rank) in ranks.iter().enumerate() {
            if rank.index() >= self.size() {
                return Err(error(format!("ranks in [0, {})", self.size()), rank.to_string()));
            }
            if ranks[..index].contains(rank) {
                return Err(error("every rank once".to_owned(), format!("rank {rank} twice")));
            }
        }
        let own = ranks.iter().position(|rank| *rank == self.rank()).map(Rank::from);
        own.ok_or_else(|| error(format!("a list with the calling rank, {}", self.rank()), format!("{ranks:?}")))
    }
}

/// What a communicator takes over of a vendor's library from the one that it was split from. Dropped, it is given back.
#[derive(Debug)]
pub struct LibraryPart(Part);

/// A store for the bootstrap of the new communicator: its first rank sends what it sets to the other ranks.
struct Parent<'a> {
    comm: &'a Communicator,
    ranks: &'a [Rank],
}

impl Store for Parent<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        debug_assert_eq!(key, ROOT_KEY);
        let length = u32::try_from(value.len()).map_err(|error| error.to_string())?;
        let tell = |rank: &Rank| {
            self.comm.send_away(length.to_le_bytes().to_vec(), *rank, Tag::SPLIT)?;
            self.comm.send_away(value.to_vec(), *rank, Tag::SPLIT)
        };
        self.ranks[1..].iter().try_for_each(tell).map_err(|error| error.to_string())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        debug_assert_eq!(key, ROOT_KEY);
        let hear =
            |data: &mut [u8]| self.comm.recv_within(data, Source::Rank(self.ranks[0]), Tag::SPLIT, Some(timeout));
        let mut length = [0; 4];
        hear(&mut length).map_err(|error| error.to_string())?;
        let length = u32::from_le_bytes(length) as usize;
        if length > VALUE_BYTES_MAX {
            return Err(format!("rank {} announces {length} bytes, more than {VALUE_BYTES_MAX}", self.ranks[0]));
        }
        let mut value = vec![0; length];
        hear(&mut value).map_err(|error| error.to_string())?;
        Ok(value)
    }

    /// What is set is sent at once. What a rank has not got in time comes first at its next split.
    fn keeps_values(&self) -> bool {
        false
    }

    fn rendezvous_host(&self) -> Option<String> {
        self.comm.inherited.host.clone()
    }
}
