//! Gets that this rank reads in the target's memory by itself, piece by piece, where a transport can (UCX: `ucp_get_nbx`).
//!
//! A piece lands in the transport's memory and is copied from there. So a get may end before its pieces do: what comes for one that is
//! gone is taken from the transport and dropped. Where a piece fails, its whole get is handed back, to go by a frame.

use std::collections::HashMap;

use crate::engine::endpoint::Endpoints;
use crate::engine::region::Region;
use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;
use crate::transport::{READ_MAX, Read, RemoteMemory};
use crate::types::Rank;

/// What a rank has exposed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    /// Where it begins in that rank's memory.
    pub(crate) address: u64,
    /// By what it is read.
    pub(crate) key: Arc<[u8]>,
}

/// A get.
pub(crate) struct RemoteRead {
    /// Its number.
    pub(crate) id: u64,
    pub(crate) peer: Rank,
    pub(crate) remote: Remote,
    /// Where in what the rank has exposed.
    pub(crate) offset: usize,
    pub(crate) into: Region,
}

struct Reading {
    read: RemoteRead,
    /// How many bytes were asked for, and how many have come.
    begun: usize,
    came: usize,
    has_failed: bool,
}

/// A piece under way: of which get, of which rank, where in it, and how long.
struct Piece {
    id: u64,
    peer: Rank,
    at: usize,
    len: usize,
}

/// How a get ended.
pub(crate) enum ReadEnd {
    /// Its bytes are there.
    Read(u64),
    /// It cannot be read.
    Unreadable(RemoteRead),
}

/// All gets that are being read.
#[derive(Default)]
pub(crate) struct RemoteReads {
    list: Vec<Reading>,
    /// By their tokens; also those of gets that have ended.
    pieces: HashMap<u64, Piece>,
    next: u64,
    /// How many gets were read, of each rank.
    counts: HashMap<Rank, u64>,
}

impl RemoteReads {
    /// Whether nothing is under way at the transport.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.pieces.is_empty()
    }

    /// Begins to read, if its first piece can be asked for; otherwise hands it back.
    pub(crate) fn begin(&mut self, endpoints: &mut Endpoints, read: RemoteRead) -> Result<(), RemoteRead> {
        let mut reading = Reading { read, begun: 0, came: 0, has_failed: false };
        self.ask(endpoints, &mut reading);
        if reading.has_failed {
            return Err(reading.read);
        }
        self.list.push(reading);
        Ok(())
    }

    /// Asks for as many pieces as the transport takes.
    fn ask(&mut self, endpoints: &mut Endpoints, reading: &mut Reading) {
        let RemoteRead { id, peer, remote, offset, into } = &reading.read;
        while !reading.has_failed && reading.begun < into.len() {
            let len = (into.len() - reading.begun).min(READ_MAX);
            let address = remote.address.wrapping_add((offset + reading.begun) as u64);
            match endpoints.begin_read(*peer, self.next, RemoteMemory { address, len, key: &remote.key }) {
                Read::Begun => {
                    self.pieces.insert(self.next, Piece { id: *id, peer: *peer, at: reading.begun, len });
                    self.next += 1;
                    reading.begun += len;
                }
                Read::Busy => return,
                Read::Unable => reading.has_failed = true,
            }
        }
    }

    /// Goes on, and appends what has ended. True: something moved.
    pub(crate) fn progress(&mut self, endpoints: &mut Endpoints, ended: &mut Vec<ReadEnd>) -> bool {
        let RemoteReads { list, pieces, .. } = self;
        let mut moved = false;
        endpoints.take_reads(&mut |token, result| {
            let Some(Piece { id, at, len, .. }) = pieces.remove(&token) else { return };
            let Some(reading) = list.iter_mut().find(|reading| reading.read.id == id) else { return };
            moved = true;
            match result {
                Ok(bytes) => {
                    copy(bytes, reading.read.into.part(at, len));
                    reading.came += len;
                }
                Err(_) => reading.has_failed = true,
            }
        });
        let mut list = std::mem::take(&mut self.list);
        list.iter_mut().for_each(|reading| self.ask(endpoints, reading));
        for reading in list {
            if reading.has_failed {
                ended.push(ReadEnd::Unreadable(reading.read));
            } else if reading.came == reading.read.into.len() {
                *self.counts.entry(reading.read.peer).or_default() += 1;
                ended.push(ReadEnd::Read(reading.read.id));
            } else {
                self.list.push(reading);
            }
        }
        moved || !ended.is_empty()
    }

    /// How many gets of this rank were read.
    pub(crate) fn count(&self, peer: Rank) -> u64 {
        self.counts.get(&peer).copied().unwrap_or_default()
    }

    /// Gives a get up, if it is being read.
    pub(crate) fn cancel(&mut self, id: u64) {
        self.list.retain(|reading| reading.read.id != id);
    }

    /// Forgets what was asked of a rank that is lost: its transport says no more of it.
    pub(crate) fn lose(&mut self, peer: Rank) {
        self.pieces.retain(|_, piece| piece.peer != peer);
    }
}

/// Copies as many bytes as `into` has from the beginning of `bytes`.
fn copy(bytes: &LentBytes, mut into: Region) {
    let mut at = 0;
    into.each_mut(|run| {
        bytes.copy_out(at, run);
        at += run.len();
    });
}
