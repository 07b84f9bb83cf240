//! A connection that another process has opened, on which communicators listen.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::envelope::{self, Content};
use super::manner::Protection;
use super::notice;
use super::outgoing::Place;
use crate::error::LinkDown;
use crate::transport::RecvStream;
use crate::transport::auth::{Identity, Membership, PROOF_BYTES, Secret};

/// What has come for somebody.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// Its sender has begun to speak.
    Begun,
    /// A notice, as bytes.
    Notice(Vec<u8>),
    /// Its sender has left the communicator.
    Left,
}

/// A rank of the other process that speaks here.
#[derive(Debug)]
enum Speaker {
    /// Of a communicator that this process does not have, or not yet; its proof, and what has come meanwhile.
    Stranger(Membership, [u8; PROOF_BYTES], Vec<Heard>),
    /// To this listener.
    Known(Place),
    /// To nobody any more.
    Unheard,
}

/// A rank of this process, and what it has to do with one that wants to speak to it.
pub(super) struct Listener<'a> {
    pub(super) identity: &'a Identity,
    pub(super) protection: &'a Protection,
    /// Where it listens to that rank; none if it does not.
    pub(super) place: Option<Place>,
}

/// The ranks of this process.
pub(super) trait Listeners {
    /// The one that somebody wants to speak to; none if there is none, or not yet.
    fn find(&self, membership: &Membership) -> Option<Listener<'_>>;

    /// What has come for one. The error says what is wrong with that.
    fn hear(&mut self, place: Place, heard: Heard) -> Result<(), LinkDown>;
}

/// A connection that another process has opened.
pub(super) struct Incoming {
    stream: Box<dyn RecvStream>,
    session: Secret,
    /// What protects the connection.
    protection: Protection,
    /// The bytes of a message that is not complete.
    bytes: Vec<u8>,
    /// By their numbers.
    speakers: FxHashMap<u32, Speaker>,
    /// The numbers of the strangers, and of those among them that have left, the first one first.
    strangers: Vec<u32>,
    departed: VecDeque<u32>,
}

impl Incoming {
    /// A connection that has come for `place`, if somebody listens there. None if nothing tells its two ends from others.
    pub(super) fn new(stream: Box<dyn RecvStream>, place: Option<Place>, protection: Protection) -> Option<Incoming> {
        let session = stream.session()?;
        let speakers = [(0, place.map_or(Speaker::Unheard, Speaker::Known))].into_iter().collect();
        let (bytes, strangers, departed) = (Vec::new(), Vec::new(), VecDeque::new());
        Some(Incoming { stream, session, protection, bytes, speakers, strangers, departed })
    }

    /// Reads what has come, and hands it to those who listen. The error: the connection has ended, or the peer sends what it must
    /// not.
    pub(super) fn read(&mut self, listeners: &mut impl Listeners) -> Result<(), LinkDown> {
        let read = self.read_on(listeners);
        // Also if it has ended, since what has come before was said before.
        self.introduce(listeners)?;
        read
    }

    fn read_on(&mut self, listeners: &mut impl Listeners) -> Result<(), LinkDown> {
        let mut bytes = [0; READ_BYTES];
        // What is left in the stream makes the poller wake at once.
        for _ in 0..READS_MAX {
            match self.stream.read(&mut bytes)? {
                0 => break,
                count => self.bytes.extend_from_slice(&bytes[..count]),
            }
            let mut taken = 0;
            while let Some((number, content, len)) = envelope::decode(&self.bytes[taken..])? {
                taken += len;
                self.take(number, content, listeners)?;
            }
            self.bytes.drain(..taken);
        }
        Ok(())
    }

    fn take(&mut self, number: u32, content: Content, listeners: &mut impl Listeners) -> Result<(), LinkDown> {
        match content {
            Content::Join(membership, proof) => {
                if self.strangers.len() - self.departed.len() >= STRANGERS_MAX {
                    return Err(LinkDown::new(format!("it speaks of more than {STRANGERS_MAX} unknown communicators")));
                }
                if self.speakers.insert(number, Speaker::Stranger(membership, proof, Vec::new())).is_some() {
                    return Err(LinkDown::new(format!("it gave number {number} to two ranks")));
                }
                self.strangers.push(number);
            }
            Content::Notice(notice) => match self.speakers.get_mut(&number) {
                Some(Speaker::Known(place)) => listeners.hear(*place, Heard::Notice(notice))?,
                Some(Speaker::Stranger(.., kept)) if kept.last() != Some(&Heard::Left) => {
                    // Heartbeats that are missed are repeated.
                    let limit = if notice::is_heartbeat(&notice) { HEARTBEATS_KEPT_MAX } else { KEPT_MAX };
                    if kept.len() < limit {
                        kept.push(Heard::Notice(notice));
                    }
                }
                Some(Speaker::Unheard) => {}
                Some(Speaker::Stranger(..)) | None => {
                    return Err(LinkDown::new(format!("it sent news under number {number}, which is of nobody")));
                }
            },
            Content::Leave => match self.speakers.get_mut(&number) {
                Some(Speaker::Known(place)) => {
                    let place = *place;
                    self.speakers.remove(&number);
                    listeners.hear(place, Heard::Left)?;
                }
                Some(Speaker::Stranger(.., kept)) if kept.last() != Some(&Heard::Left) => {
                    // Whoever is about to make the communicator is to hear that, too.
                    kept.push(Heard::Left);
                    self.departed.push_back(number);
                    if self.departed.len() > DEPARTED_MAX {
                        self.forget_departed();
                    }
                }
                Some(Speaker::Unheard) => _ = self.speakers.remove(&number),
                Some(Speaker::Stranger(..)) | None => {
                    return Err(LinkDown::new(format!("it took back number {number}, which is of nobody")));
                }
            },
        }
        Ok(())
    }

    /// Forgets the stranger that left first.
    fn forget_departed(&mut self) {
        if let Some(number) = self.departed.pop_front() {
            self.speakers.remove(&number);
            self.strangers.retain(|stranger| *stranger != number);
        }
    }

    /// Has those be heard whose listener this process has by now. The error: one of them has not proved that it belongs to the
    /// communicator.
    fn introduce(&mut self, listeners: &mut impl Listeners) -> Result<(), LinkDown> {
        for at in (0..self.strangers.len()).rev() {
            let number = self.strangers[at];
            let Some(Speaker::Stranger(membership, proof, _)) = self.speakers.get(&number) else { continue };
            let Some(listener) = listeners.find(membership) else { continue };
            if let Err(error) = membership.check(proof, &listener.identity.secret, &self.session) {
                return Err(LinkDown::new(format!("it speaks of a communicator, but {error}")));
            }
            let mut place = listener.place;
            if self.protection != *listener.protection {
                log::warn!(
                    "rank {} of a communicator speaks of it on a connection that is protected otherwise than this rank's, \
                     and is not heard: give `tls` and its files the same values on all ranks",
                    membership.from
                );
                place = None;
            }
            let known = place.map_or(Speaker::Unheard, Speaker::Known);
            let stranger = self.speakers.insert(number, known);
            self.strangers.swap_remove(at);
            if let Some(departed) = self.departed.iter().position(|departed| *departed == number) {
                self.departed.remove(departed);
                self.speakers.remove(&number);
            }
            if let (Some(place), Some(Speaker::Stranger(.., kept))) = (place, stranger) {
                listeners.hear(place, Heard::Begun)?;
                kept.into_iter().try_for_each(|heard| listeners.hear(place, heard))?;
            }
        }
        Ok(())
    }

    /// `place` listens no longer.
    pub(super) fn leave(&mut self, place: Place) {
        for speaker in self.speakers.values_mut() {
            if matches!(speaker, Speaker::Known(known) if *known == place) {
                *speaker = Speaker::Unheard;
            }
        }
    }

    /// Those who listen.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        self.speakers.values().filter_map(|speaker| match speaker {
            Speaker::Known(place) => Some(*place),
            Speaker::Stranger(..) | Speaker::Unheard => None,
        })
    }

    /// Asks the poller to wake when something comes. True: something has come.
    pub(super) fn arm(&mut self) -> bool {
        self.stream.arm()
    }

    /// Undoes [`Incoming::arm`].
    pub(super) fn disarm(&mut self) {
        self.stream.disarm();
    }
}

/// How much is read at a time.
pub(super) const READ_BYTES: usize = 2048;

/// How many communicators may be spoken of that this process does not have, or not yet.
const STRANGERS_MAX: usize = 1024;

/// How many of those are remembered that have left.
const DEPARTED_MAX: usize = 256;

/// How many notices are kept for each of them, and how many of those may be heartbeats.
const KEPT_MAX: usize = 64;
const HEARTBEATS_KEPT_MAX: usize = 16;

/// How often a connection is read before the others have their turn.
pub(super) const READS_MAX: usize = 64;
