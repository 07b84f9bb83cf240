//! Cross-memory attach (CMA): reading another process's memory, process_vm_readv(2).
#![allow(unsafe_code, reason = "one system call that rustix does not have")]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use crate::sync::{AtomicU64, Ordering};
use crate::sys::fork::PerProcess;
use crate::sys::random;
use crate::sys::segment::{PeerSegment, SegmentId};
use crate::sys::socket::peer_credentials;

/// A random number in a process's memory, and where it is: where it is read, there is still the program that has written it there. A
/// process's number may be another's meanwhile, or the process may have started another program (execve(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The address of the number.
    pub address: u64,
    /// The number.
    pub value: u64,
}

impl Stamp {
    /// That of this process.
    pub fn own() -> io::Result<Stamp> {
        static VALUE: AtomicU64 = AtomicU64::new(0);
        let address = (&raw const VALUE).addr() as u64;
        // Relaxed: whoever reads it has learned the number from this process, later.
        if let value @ 1.. = VALUE.load(Ordering::Relaxed) {
            return Ok(Stamp { address, value });
        }
        let drawn = u64::from_ne_bytes(random::bytes()?) | 1;
        let faster = VALUE.compare_exchange(0, drawn, Ordering::Relaxed, Ordering::Relaxed).err();
        Ok(Stamp { address, value: faster.unwrap_or(drawn) })
    }
}

/// The memory of the process at the other end of a Unix socket.
#[derive(Clone, Copy, Debug)]
pub struct PeerMemory {
    pid: libc::pid_t,
    stamp: Option<Stamp>,
}

impl PeerMemory {
    /// The process that opened a Unix socket, as the system reports it. An error if it is not visible from here, as in another
    /// container.
    pub fn behind(socket: BorrowedFd<'_>) -> io::Result<PeerMemory> {
        let pid = peer_credentials(socket)?.pid;
        if pid <= 0 {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the peer's process is not visible from here"));
        }
        Ok(PeerMemory { pid, stamp: None })
    }

    /// The same, of the program that has this stamp.
    pub fn stamped(self, stamp: Stamp) -> PeerMemory {
        PeerMemory { stamp: Some(stamp), ..self }
    }

    /// Whether what was read before was the stamped program's.
    pub fn is_still_there(&self) -> bool {
        self.stamp.is_none_or(|stamp| self.holds(stamp).unwrap_or(false))
    }

    /// Whether the number is where the stamp says. The error: nothing can be read there.
    pub fn holds(&self, stamp: Stamp) -> io::Result<bool> {
        let mut read = [0; 8];
        let count = self.read(stamp.address, &mut read)?;
        Ok(count == read.len() && u64::from_ne_bytes(read) == stamp.value)
    }

    /// Maps a segment of the process.
    pub fn segment(&self, id: SegmentId) -> io::Result<PeerSegment> {
        PeerSegment::open(self.pid, id)
    }

    /// Copies bytes at `address` of the process into `into`. Returns how many, at least one. An error if the memory does not
    /// exist, the process is gone, or this process may not read it.
    pub fn read(&self, address: u64, into: &mut [u8]) -> io::Result<usize> {
        // SAFETY: `into` is writable, and borrowed for this alone.
        unsafe { self.read_to(address, into.as_mut_ptr(), into.len()) }
    }

    /// As [`PeerMemory::read`], to the `len` bytes at `into`.
    ///
    /// # Safety
    /// The bytes at `into` are writable, and no reference to them is used meanwhile.
    pub(super) unsafe fn read_to(&self, address: u64, into: *mut u8, len: usize) -> io::Result<usize> {
        let local = libc::iovec { iov_base: into.cast(), iov_len: len };
        let remote = libc::iovec { iov_base: address as usize as *mut libc::c_void, iov_len: len };
        // SAFETY: the kernel writes at most `len` bytes to `local`, which the caller lends for that, and checks the
        // remote range itself, which belongs to no object of this process that is borrowed (the peer's own tensors,
        // also where the peer is a communicator of this very process).
        let count = unsafe { libc::process_vm_readv(self.pid, &local, 1, &remote, 1, 0) };
        match usize::try_from(count) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => Ok(count),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

/// Lets the user's other processes read this process's memory, where the security module Yama allows that to parent processes
/// alone (`ptrace_scope` of 1). Changes nothing where Yama forbids more. Done once per process, and again in a forked child, for
/// which the kernel keeps no permission.
pub fn allow_readers() {
    static DONE: PerProcess<OnceLock<()>> = PerProcess::unset();
    DONE.get().get_or_init(|| {
        let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
        if scope.is_ok_and(|scope| scope.trim() == "1")
            && let Err(error) = rustix::process::set_ptracer(rustix::process::PTracer::Any)
        {
            log::debug!("other processes may not read this one's memory: {error}");
        }
    });
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn memory_is_read_where_it_is_and_an_error_where_it_is_not() {
        let (socket, _other) = UnixStream::pair().expect("a pair of sockets");
        let peer = PeerMemory::behind(socket.as_fd()).expect("this process");
        let there = *b"some bytes";
        let mut here = [0; 10];
        assert_eq!(peer.read(there.as_ptr() as u64, &mut here).expect("readable"), 10);
        assert_eq!(here, there);
        assert!(peer.read(8, &mut here).is_err());
    }

    #[test]
    fn another_program_with_the_number_of_a_process_is_told_from_it() {
        let (socket, _other) = UnixStream::pair().expect("a pair of sockets");
        let peer = PeerMemory::behind(socket.as_fd()).expect("this process");
        let own = Stamp::own().expect("a number");
        assert_eq!(Stamp::own().expect("a number"), own, "there is one in a process");
        assert!(peer.is_still_there() && peer.stamped(own).is_still_there());
        for other in [Stamp { value: own.value ^ 2, ..own }, Stamp { address: 8, ..own }] {
            assert!(!peer.stamped(other).is_still_there());
        }
    }
}
