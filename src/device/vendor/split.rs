//! Splits of a library's communicator, whose parts need no beginning of their own.
//!
//! All ranks of the communicator take part, in stages. Each tells which part it makes, and whether it can: all [`decide`] the
//! same. Each tells that it has heard all of that, and only then calls the library, so that a rank that gives up before keeps
//! none of them waiting there. Each tells how it has ended. Stages of a split that a rank has given up are told apart from
//! those of the next one by its number.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::ending::abort_aside;
use super::part::{Part, PartId};
use super::{Beginning, Chosen, VendorComm, problem, wait};
use crate::deadline::deadline_after;
use crate::device::in_flight::Runner;
use crate::device::setup::{AllGather, named};
use crate::error::{Error, InitError};
use crate::sync::{Arc, Ordering, lock};
use crate::sys::cuda::Current;
use crate::sys::nccl::{Feature, NcclComm, NcclError, Place, Progress};
use crate::types::Rank;

/// The other ranks of a communicator, as they split it.
pub(crate) trait Others {
    /// Sends a rank bytes, in the background.
    fn tell(&self, rank: Rank, told: Vec<u8>) -> Result<(), Error>;

    /// Waits for bytes that a rank sends by `tell`.
    fn hear(&self, rank: Rank, timeout: Duration) -> Result<Vec<u8>, Error>;

    /// Whether no rank is lost, and this one has not left.
    fn are_there(&self) -> bool;
}

/// Which part a rank makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Wish {
    /// The part's ranks in their order; none if this rank is in no part.
    ranks: Vec<u32>,
    /// Whether this rank's communicator of the library can be split.
    can: bool,
}

/// What ranks do with the library's communicator when they split their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    /// They split it. This rank's place, if it is in a part.
    Split(Option<Place>),
    /// Each part begins a communicator by itself, when it needs one.
    Apart,
}

/// What rank `me` does where all ranks have these wishes.
///
/// # Errors
/// The wishes do not go together. The text is the same on all ranks.
fn decide(me: Rank, wishes: &[Wish]) -> Result<Decision, String> {
    for (rank, wish) in wishes.iter().enumerate() {
        let other = wish.ranks.iter().map(|other| *other as usize);
        let mut other = other.filter(|other| wishes.get(*other).is_none_or(|other| other.ranks != wish.ranks));
        if let Some(other) = other.next() {
            let theirs = wishes.get(other).map_or(&[][..], |wish| &wish.ranks);
            return Err(format!(
                "rank {rank} makes a part of ranks {:?}, and rank {other} one of {theirs:?}",
                wish.ranks
            ));
        }
    }
    if !wishes.iter().all(|wish| wish.can) {
        return Ok(Decision::Apart);
    }
    let own = &wishes[me.index()].ranks;
    let place = own.iter().position(|rank| *rank == me.0).map(|key| Place { color: own[0], key: key as u32 });
    Ok(Decision::Split(place))
}

/// What a rank tells the others.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    number: u64,
    said: Said,
}

#[derive(Debug, Serialize, Deserialize)]
enum Said {
    Wish(Wish),
    /// It has heard the wishes of all.
    Ready,
    Ended(Beginning),
    /// It does not go on, and why.
    GivesUp(String),
}

/// One rank's side of a split.
struct Stages<'a> {
    chosen: &'a Chosen,
    number: u64,
    others: &'a dyn Others,
}

impl Stages<'_> {
    /// Tells all other ranks, and hears from each what `take` takes of it. Returns that of all ranks, by rank.
    fn stage<T>(&self, own: Said, timeout: Duration, take: impl Fn(Said) -> Option<T>) -> Result<Vec<T>, Error> {
        let (begin, me) = (Instant::now(), self.chosen.me);
        let ranks = || self.chosen.names.iter().copied();
        let lacking = match own {
            Said::Wish(_) => {
                let library = self.chosen.library();
                format!("did not call it; all ranks of a communicator that {library} serves split it together")
            }
            _ => "did not go on with it".to_owned(),
        };
        let told = serde_json::to_vec(&Told { number: self.number, said: own }).expect("plain data");
        ranks().filter(|rank| *rank != me).try_for_each(|rank| self.others.tell(rank, told.clone()))?;
        let until = deadline_after(begin, timeout);
        let (mut heard, mut missing) = (Vec::new(), Vec::new());
        for rank in ranks() {
            let bytes = if rank == me { Ok(told.clone()) } else { self.hear(rank, until) };
            match bytes.and_then(|bytes| self.read(rank, &bytes, &take)) {
                Ok(said) => heard.push(said),
                // All that are missing are named.
                Err(Error::Timeout { .. }) => missing.push(rank.index()),
                Err(error) => return Err(error),
            }
        }
        if missing.is_empty() {
            return Ok(heard);
        }
        let detail = format!("{} {lacking}", named(&self.chosen.names, &missing));
        Err(Error::Timeout { operation: OPERATION.to_owned(), waited: begin.elapsed(), detail })
    }

    /// What a rank tells of this split; what it has told of earlier ones is passed over.
    fn hear(&self, rank: Rank, until: Instant) -> Result<Vec<u8>, Error> {
        loop {
            let left = until.saturating_duration_since(Instant::now()).max(LEAST_WAIT);
            let bytes = self.others.hear(rank, left)?;
            match serde_json::from_slice::<Told>(&bytes) {
                Ok(told) if told.number < self.number => {}
                _ => return Ok(bytes),
            }
        }
    }

    fn read<T>(&self, rank: Rank, bytes: &[u8], take: impl Fn(Said) -> Option<T>) -> Result<T, Error> {
        let remote = |cause: String| Error::Remote { operation: OPERATION.to_owned(), rank: rank.0, cause };
        let Told { number, said } = serde_json::from_slice(bytes).map_err(|error| remote(error.to_string()))?;
        if number > self.number {
            return Err(remote(format!("it splits for the {number}th time, this rank for the {}th", self.number)));
        }
        match said {
            Said::GivesUp(cause) => Err(remote(cause)),
            said => take(said).ok_or_else(|| remote("it is at another stage of the split".to_owned())),
        }
    }

    /// Tells all other ranks that this one does not go on.
    fn give_up(&self, error: &Error) {
        let told = Told { number: self.number, said: Said::GivesUp(error.to_string()) };
        let told = serde_json::to_vec(&told).expect("plain data");
        for rank in self.chosen.names.iter().filter(|rank| **rank != self.chosen.me) {
            if self.others.tell(*rank, told.clone()).is_err() {
                return;
            }
        }
    }
}

/// What a rank wants of a split, and how long it waits for the others to call it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// The identity of the communicator.
    pub(crate) id: &'a str,
    /// The ranks of this rank's part in their order; none if it is in no part.
    pub(crate) ranks: &'a [Rank],
    /// The number of its device.
    pub(crate) device: u32,
    pub(crate) timeout: Duration,
}

impl VendorComm {
    /// Splits it with all its ranks, if all can: this one has nothing of it on a stream, and `current` is its device's context.
    /// Returns this rank's part; none if it is in no part, or if each part begins a communicator by itself.
    ///
    /// # Errors
    /// A rank does not come, wants something else or fails: nothing is split. After a loss, only what is split here is undone.
    pub(crate) fn split(
        &self,
        current: Option<&Current<'_>>,
        wanted: &Wanted<'_>,
        others: &dyn Others,
        all_gather: &mut AllGather<'_>,
    ) -> Result<Option<Part>, Error> {
        // Relaxed, here and below: the executor's lock orders splits.
        let number = self.splits.fetch_add(1, Ordering::Relaxed) + 1;
        let (chosen, raw) = (&self.chosen, lock(&self.raw).clone());
        let stages = Stages { chosen, number, others };
        let decided = stages.decide(wanted, current.is_some() && self.can_split(&raw));
        let place = match decided.inspect_err(|error| stages.give_up(error))? {
            Decision::Apart => return Ok(None),
            Decision::Split(place) => place,
        };
        let current = current.expect("each rank has told that it can");
        let limit = wanted.timeout.min(chosen.limit);
        let (made, beginning) = split(chosen, &raw, current, (place, limit), others);
        let told = stages.stage(Said::Ended(beginning), wanted.timeout.saturating_add(limit), |said| match said {
            Said::Ended(beginning) => Some(beginning),
            _ => None,
        });
        let problem = match told {
            Ok(told) => problem(&chosen.names, &told, limit),
            Err(error) => {
                // The library may wait for a rank for ever.
                made.into_iter().for_each(|made| abort_aside(Arc::new(made)));
                self.give_up();
                return Err(error);
            }
        };
        let Some(cause) = problem else {
            let id = PartId { comm: wanted.id.to_owned(), number };
            let (device, fields) = (wanted.device, chosen.fields.clone());
            return Ok(made.map(|made| Part::new(Arc::new(made), id, device, fields)));
        };
        made.into_iter().for_each(|made| abort_aside(Arc::new(made)));
        // The library is done for with the one that it could not split.
        self.begin_anew(current, true, limit, all_gather, &|| others.are_there()).inspect_err(|_| self.give_up())?;
        let what = format!("a split of its communicator of {}", chosen.library());
        Err(InitError::Os { comm: chosen.comm.clone(), what, cause }.into())
    }

    /// Not where CUDA graphs have calls of it: nothing tells whether a replay is on a stream that has yet to come to a call.
    fn can_split(&self, raw: &NcclComm) -> bool {
        let has_split = self.chosen.library.features().contains(&Feature::Split);
        has_split && !self.is_given_up() && !raw.is_held() && matches!(raw.progress(), Ok(Progress::Done))
    }
}

impl Stages<'_> {
    /// Decides with all ranks. When it returns each has heard the wishes of all, or gives up.
    fn decide(&self, wanted: &Wanted<'_>, can: bool) -> Result<Decision, Error> {
        let wish = Wish { ranks: wanted.ranks.iter().map(|rank| rank.0).collect(), can };
        let wishes = self.stage(Said::Wish(wish), wanted.timeout, |said| match said {
            Said::Wish(wish) => Some(wish),
            _ => None,
        })?;
        let decision = decide(self.chosen.me, &wishes)
            .map_err(|detail| Error::Mismatch { operation: OPERATION.to_owned(), detail })?;
        if let Decision::Split(_) = decision {
            self.stage(Said::Ready, wanted.timeout, |said| matches!(said, Said::Ready).then_some(()))?;
        }
        Ok(decision)
    }
}

/// Has the library split a communicator. What it has made, which is to be given up if it has not begun.
fn split(
    chosen: &Chosen,
    raw: &Arc<NcclComm>,
    current: &Current<'_>,
    (place, limit): (Option<Place>, Duration),
    others: &dyn Others,
) -> (Option<NcclComm>, Beginning) {
    let failed = |error: NcclError| Beginning::Failed(error.to_string());
    let splitting = match raw.split(current, place, &chosen.fields) {
        Ok(splitting) => splitting,
        Err(error) => return (None, failed(error)),
    };
    let progress = wait(|| splitting.progress(), limit, || !others.are_there());
    let made = splitting.finish();
    match (progress, made) {
        (Err(error), made) => (made, failed(error)),
        (Ok(Progress::Going), made) => (made, Beginning::Late),
        (Ok(Progress::Done), None) if place.is_some() => {
            (None, Beginning::Failed("it made no communicator".to_owned()))
        }
        (Ok(Progress::Done), None) => (None, Beginning::Begun),
        (Ok(Progress::Done), Some(made)) => {
            let begun = match wait(|| made.progress(), limit, || !others.are_there()) {
                Ok(Progress::Done) => Beginning::Begun,
                Ok(Progress::Going) => Beginning::Late,
                Err(error) => failed(error),
            };
            (Some(made), begun)
        }
    }
}

/// The operation's name, in errors.
const OPERATION: &str = "split";

/// What has come is heard also after the time is over.
const LEAST_WAIT: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes(parts: &[&[u32]]) -> Vec<Wish> {
        parts.iter().map(|ranks| Wish { ranks: ranks.to_vec(), can: true }).collect()
    }

    #[test]
    fn the_ranks_of_a_part_are_numbered_as_they_are_listed() {
        let wishes = wishes(&[&[3, 0], &[], &[2], &[3, 0]]);
        let decided: Vec<_> = (0..4).map(|rank| decide(Rank(rank), &wishes).expect("they go together")).collect();
        let place = |color, key| Decision::Split(Some(Place { color, key }));
        assert_eq!(decided, [place(3, 1), Decision::Split(None), place(2, 0), place(3, 0)]);
    }

    #[test]
    fn one_that_cannot_be_split_is_split_by_no_rank() {
        let mut wishes = wishes(&[&[0, 1], &[0, 1], &[]]);
        wishes[2].can = false;
        assert!((0..3).all(|rank| decide(Rank(rank), &wishes) == Ok(Decision::Apart)));
    }

    #[test]
    fn parts_that_do_not_go_together_are_the_same_error_on_all_ranks() {
        let error = |parts: &[&[u32]], ranks: u32| {
            let errors: Vec<_> = (0..ranks).map(|rank| decide(Rank(rank), &wishes(parts)).expect_err("none")).collect();
            assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
            errors[0].clone()
        };
        let overlap = error(&[&[0, 1], &[1, 2], &[1, 2]], 3);
        assert_eq!(overlap, "rank 0 makes a part of ranks [0, 1], and rank 1 one of [1, 2]");
        let order = error(&[&[0, 1], &[1, 0]], 2);
        assert_eq!(order, "rank 0 makes a part of ranks [0, 1], and rank 1 one of [1, 0]");
        assert_eq!(error(&[&[0, 2], &[]], 2), "rank 0 makes a part of ranks [0, 2], and rank 2 one of []");
    }
}
