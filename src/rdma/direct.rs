//! Reads of another process's memory on the same host, in which that process takes no part.
//!
//! For each key its owner has a word, the stamp, in its own memory. It holds a random number while the key is good, and zero from
//! then on, before the memory may be used for anything else. A reader is told once where a key's bytes and its stamp lie. It
//! copies bytes (process_vm_readv(2)) and then the stamp: if that is still there, so was the registration when the bytes were
//! copied. Any other end is for the owner to explain, which is asked in that case.

use std::os::fd::AsFd;

use rustc_hash::FxHashMap;
use rustix::io::Errno;

use crate::rdma::memory::{Key, Located};
use crate::rdma::span::Span;
use crate::rdma::wire::Wire;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, fence, lock};
use crate::sys::cma::{PeerMemory, Stamp};
use crate::sys::socket;

/// Why a span was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// Nothing is known of its key, or the span is not among the key's bytes.
    Unknown,
    /// The key is not good any more, the memory or the connection is gone, or the system did not copy it now.
    Revoked,
    /// The system does not let this process read that one's memory.
    Forbidden,
}

/// The way to the memory of the process behind a connection.
pub(super) struct Direct {
    wire: Arc<Wire>,
    peer: PeerMemory,
    is_forbidden: AtomicBool,
    known: Mutex<FxHashMap<Key, Located>>,
}

impl Direct {
    /// None if the process is on another host, or not visible from here.
    pub(super) fn new(wire: &Arc<Wire>) -> Option<Direct> {
        let (wire, peer) = (wire.clone(), wire.peer_memory()?);
        Some(Direct { wire, peer, is_forbidden: AtomicBool::new(false), known: Mutex::default() })
    }

    /// Whether nothing is known to forbid it.
    pub(super) fn is_allowed(&self) -> bool {
        // Relaxed: an attempt too many does no harm.
        !self.is_forbidden.load(Ordering::Relaxed)
    }

    /// Memory of the two processes cannot be read from one to the other. Whether that is news.
    pub(super) fn forbid(&self) -> bool {
        !self.is_forbidden.swap(true, Ordering::Relaxed)
    }

    /// The owner has told where the key's bytes lie.
    pub(super) fn learn(&self, key: Key, located: Located) {
        let mut known = lock(&self.known);
        if known.len() >= KNOWN_MAX {
            // Those that are still used are asked for again.
            known.clear();
        }
        known.insert(key, located);
    }

    /// Reads a span. Unless it succeeds, its bytes here may be anything.
    pub(super) fn read(&self, span: &Span) -> Result<(), Unread> {
        self.copy(span, 0, span.len)?;
        self.confirm(span)
    }

    /// Copies a part of a span, whose bytes count once [`Direct::confirm`] says so.
    pub(super) fn copy(&self, span: &Span, begin: usize, len: usize) -> Result<(), Unread> {
        let Span { local, offset, remote, .. } = span;
        self.located(span)?;
        let mut done = 0;
        while done < len {
            let from = remote.address.wrapping_add((begin + done) as u64);
            done += local.read_from(&self.peer, from, offset + begin + done, len - done).map_err(unread)?;
        }
        Ok(())
    }

    /// Whether the bytes of a span, all of which have been copied, were those that its key opens.
    pub(super) fn confirm(&self, span: &Span) -> Result<(), Unread> {
        let located = self.located(span)?;
        // The stamp is not read before the bytes. Its other half is in `Stamp::revoke`.
        fence(Ordering::SeqCst);
        let stamp = Stamp { address: located.stamp_at, value: located.stamp };
        let is_good = self.peer.holds(stamp).map_err(unread)?;
        // A peer that has closed its transport is not read any more.
        if is_good && !socket::is_hung_up(self.wire.as_fd()) {
            return Ok(());
        }
        lock(&self.known).remove(&span.remote.key);
        Err(Unread::Revoked)
    }

    fn located(&self, span: &Span) -> Result<Located, Unread> {
        if !self.is_allowed() {
            return Err(Unread::Forbidden);
        }
        let located = lock(&self.known).get(&span.remote.key).copied();
        located.filter(|located| located.contains(span.remote.address, span.len as u64)).ok_or(Unread::Unknown)
    }
}

fn unread(error: std::io::Error) -> Unread {
    match Errno::from_io_error(&error) {
        Some(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => Unread::Forbidden,
        // The memory is gone, or the process, or the system lacks something.
        _ => Unread::Revoked,
    }
}

/// How many keys are remembered.
const KNOWN_MAX: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::rdma::memory::{self, MemoryRegion};
    use crate::sys::lent_bytes::LentBytes;

    /// The way to this process's own memory, and the other end of its connection.
    fn direct() -> (Direct, UnixStream) {
        let (one, other) = UnixStream::pair().expect("a pair of sockets");
        (Direct::new(&Arc::new(Wire::unix(one).expect("a wire"))).expect("this process"), other)
    }

    fn region(value: u8, len: usize) -> MemoryRegion {
        MemoryRegion::new(Arc::new(LentBytes::owned(vec![value; len])))
    }

    /// Reads `len` bytes from `offset` on of what the buffer's key opens.
    fn span(memory: &MemoryRegion, offset: usize, len: usize) -> Span {
        let remote = memory.remote_buffer(10, 50).expect("inside");
        let remote = memory::RemoteBuffer { address: remote.address.wrapping_add(offset as u64), ..remote };
        Span { local: Arc::new(LentBytes::owned(vec![0; 100])), offset: 1, len, remote }
    }

    fn learn(direct: &Direct, memory: &MemoryRegion) {
        let remote = memory.remote_buffer(10, 50).expect("inside");
        direct.learn(remote.key, memory::locate(remote.key, remote.address, 50).expect("registered"));
    }

    #[test]
    fn a_span_of_a_known_key_is_read() {
        let (direct, _other) = direct();
        let memory = region(7, 100);
        assert_eq!(direct.read(&span(&memory, 0, 50)), Err(Unread::Unknown));
        learn(&direct, &memory);
        let whole = span(&memory, 0, 50);
        assert_eq!(direct.read(&whole), Ok(()));
        let mut here = [0; 53];
        whole.local.copy_out(0, &mut here);
        assert_eq!((here[0], &here[1..51], here[51]), (0, &[7; 50][..], 0));
        assert_eq!(direct.read(&span(&memory, 50, 0)), Ok(()));
        for (offset, len) in [(0, 51), (50, 1), (usize::MAX, 1), (51, 0)] {
            assert_eq!(direct.read(&span(&memory, offset, len)), Err(Unread::Unknown), "{len} at {offset}");
        }
    }

    #[test]
    fn what_is_deregistered_is_not_read() {
        let (direct, _other) = direct();
        let memory = region(7, 100);
        learn(&direct, &memory);
        let known = span(&memory, 0, 50);
        memory.deregister();
        assert_eq!(direct.read(&known), Err(Unread::Revoked));
        assert_eq!(direct.read(&known), Err(Unread::Unknown), "it is forgotten");
    }

    #[test]
    fn neither_a_wrong_word_nor_memory_that_is_gone_nor_a_closed_peer_is_trusted() {
        let (direct, other) = direct();
        let memory = region(7, 100);
        let known = span(&memory, 0, 50);
        let key = known.remote.key;
        let located = memory::locate(key, known.remote.address, 50).expect("registered");
        for wrong in [
            Located { stamp: located.stamp ^ 1, ..located },
            Located { stamp_at: 8, ..located },
            Located { begin: 8, len: u64::MAX - 8, stamp_at: 8, ..located },
        ] {
            direct.learn(key, wrong);
            let remote = memory::RemoteBuffer { address: wrong.begin, ..known.remote };
            assert_eq!(direct.read(&Span { remote, ..known.clone() }), Err(Unread::Revoked), "{wrong:?}");
        }
        direct.learn(key, located);
        assert_eq!(direct.read(&known), Ok(()));
        drop(other);
        assert_eq!(direct.read(&known), Err(Unread::Revoked));
        assert!(direct.forbid() && !direct.forbid());
        assert_eq!((direct.read(&known), direct.is_allowed()), (Err(Unread::Forbidden), false));
    }

    #[test]
    fn the_keys_that_are_remembered_have_a_bound() {
        let (direct, _other) = direct();
        let located = Located { begin: 0, len: 0, stamp_at: 0, stamp: 1 };
        for number in 0..KNOWN_MAX as u128 + 5 {
            direct.learn(Key::from_bytes(number.to_le_bytes()), located);
        }
        assert_eq!(lock(&direct.known).len(), 5);
    }
}
