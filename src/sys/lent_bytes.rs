//! Memory of the program that other parties read and write while the program may use it too: it is only ever copied.
#![allow(unsafe_code, reason = "copies of memory to which there may be no reference")]

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::sync::{Arc, Mutex, lock};
use crate::sys::cma::PeerMemory;

/// A run of bytes and what keeps them alive.
///
/// Nothing here makes a reference to the bytes. Two parties that write the same bytes at the same time leave either's there, or
/// a mixture.
pub struct LentBytes {
    ptr: *mut u8,
    len: usize,
    /// Whether they lie in the memory of a CUDA device, which no code of this process touches.
    is_on_device: bool,
    /// A registration of the bytes. Before their owner, so that it ends first.
    attached: Mutex<Attachment>,
    _owner: Box<dyn Any + Send + Sync>,
}

/// What ends with the bytes, or with its last user after that.
type Attached = Arc<dyn Any + Send + Sync>;

/// What is attached to bytes.
enum Attachment {
    Some(Attached),
    None,
    /// Nothing, and nothing will be.
    Detached,
}

// SAFETY: the bytes are plain data that any thread may copy, and the owner may be dropped by any thread.
unsafe impl Send for LentBytes {}
// SAFETY: as above; no reference to the bytes is made.
unsafe impl Sync for LentBytes {}

impl fmt::Debug for LentBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:p}", self.len, self.ptr)
    }
}

impl LentBytes {
    /// The `len` bytes at `ptr`, for as long as `owner` lives.
    ///
    /// # Safety
    /// The bytes are readable and writable until `owner` is dropped, and the program does not rely on their values while other
    /// parties may write them.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, owner: Box<dyn Any + Send + Sync>) -> LentBytes {
        LentBytes { ptr, len, is_on_device: false, attached: Mutex::new(Attachment::None), _owner: owner }
    }

    /// The `len` bytes at `ptr` in the memory of a CUDA device, for as long as `owner` lives. Only a library copies them.
    ///
    /// # Safety
    /// As for [`LentBytes::from_raw`], for copies by the device.
    pub unsafe fn on_device(ptr: *mut u8, len: usize, owner: Box<dyn Any + Send + Sync>) -> LentBytes {
        LentBytes { ptr, len, is_on_device: true, attached: Mutex::new(Attachment::None), _owner: owner }
    }

    /// Bytes of the engine's own, with such content.
    pub fn owned(content: Vec<u8>) -> LentBytes {
        let content: Box<[u8]> = content.into_boxed_slice();
        let len = content.len();
        let ptr = Box::into_raw(content);
        // SAFETY: the allocation is freed by `owner` alone, which frees it as what it was made.
        unsafe { LentBytes::from_raw(ptr.cast(), len, Box::new(Owned(ptr))) }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether they lie in the memory of a CUDA device.
    pub fn is_on_device(&self) -> bool {
        self.is_on_device
    }

    /// Where they are in this process.
    pub fn address(&self) -> u64 {
        self.ptr.addr() as u64
    }

    /// What is attached to the bytes, or else what `make` makes: for that, unless something was [detached](LentBytes::detach).
    pub(super) fn attached<E>(&self, make: impl FnOnce() -> Result<Attached, E>) -> Result<Attached, E> {
        let mut attached = lock(&self.attached);
        match &*attached {
            Attachment::Some(attached) => Ok(attached.clone()),
            Attachment::None => {
                let made = make()?;
                *attached = Attachment::Some(made.clone());
                Ok(made)
            }
            Attachment::Detached => make(),
        }
    }

    /// Takes away what is attached. What is made later is its caller's alone, who keeps these bytes longer than that.
    pub(super) fn detach(&self) {
        // Dropped without the lock.
        let _attached = std::mem::replace(&mut *lock(&self.attached), Attachment::Detached);
    }

    /// The first byte, for calls that only note where the bytes are.
    pub(super) fn as_ptr(&self) -> *mut std::ffi::c_void {
        self.ptr.cast()
    }

    /// The first of `len` bytes from `offset` on.
    ///
    /// # Panics
    /// When they are not all inside.
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{len} bytes at {offset} of {}", self.len);
        self.ptr.wrapping_add(offset)
    }

    /// As [`LentBytes::at`], for code that touches the bytes.
    ///
    /// # Panics
    /// When they are not all inside, or lie on a device.
    fn at_host(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(!self.is_on_device, "{self:?} are a device's");
        self.at(offset, len)
    }

    /// Copies the bytes from `offset` on.
    ///
    /// # Panics
    /// When they are not all inside, or lie on a device.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let from = self.at_host(offset, into.len());
        // SAFETY: `from` has as many readable bytes, as was just checked, and `into` is borrowed for this alone. Bytes of
        // this object are never borrowed, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Copies `from` to `offset`.
    ///
    /// # Panics
    /// When that is not all inside, or lies on a device.
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        let into = self.at_host(offset, from.len());
        // SAFETY: `into` has as many writable bytes, as was just checked; they do not overlap, as in `copy_out`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
    }

    /// Copies bytes at `address` of another process to `offset`, at most `len`. Returns how many, at least one.
    ///
    /// # Panics
    /// When they are not all inside, or lie on a device.
    pub fn read_from(&self, peer: &PeerMemory, address: u64, offset: usize, len: usize) -> io::Result<usize> {
        let into = self.at_host(offset, len);
        // SAFETY: `into` has `len` writable bytes, as was just checked, which are never borrowed.
        unsafe { peer.read_to(address, into, len) }
    }

    /// Writes bytes to a socket that does not block, at most `len` from `offset` on. Returns how many.
    ///
    /// # Panics
    /// When they are not all inside, or lie on a device.
    pub fn send(&self, socket: BorrowedFd<'_>, offset: usize, len: usize) -> io::Result<usize> {
        let from = self.at_host(offset, len).cast();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: `from` has `len` readable bytes, as was just checked.
        counted(unsafe { libc::send(socket.as_raw_fd(), from, len, flags) })
    }

    /// Reads bytes from a socket that does not block to `offset`, at most `len`. Returns how many; none at the stream's end.
    ///
    /// # Panics
    /// When they are not all inside, or lie on a device.
    pub fn receive(&self, socket: BorrowedFd<'_>, offset: usize, len: usize) -> io::Result<usize> {
        let into = self.at_host(offset, len).cast();
        // SAFETY: `into` has `len` writable bytes, as was just checked, which are never borrowed.
        counted(unsafe { libc::recv(socket.as_raw_fd(), into, len, libc::MSG_DONTWAIT) })
    }
}

/// The result of a system call that counts bytes.
fn counted(count: isize) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// An allocation that its drop frees.
struct Owned(*mut [u8]);

// SAFETY: it only frees the allocation.
unsafe impl Send for Owned {}
// SAFETY: it has no methods.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `LentBytes::owned`, and dropped once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn bytes_are_copied_where_they_are_inside_alone() {
        let bytes = LentBytes::owned(vec![0; 10]);
        bytes.copy_in(3, &[1, 2, 3]);
        let mut out = [9; 4];
        bytes.copy_out(2, &mut out);
        assert_eq!((out, bytes.len(), bytes.is_empty()), ([0, 1, 2, 3], 10, false));
        bytes.copy_in(10, &[]);
        for (offset, len) in [(0, 11), (8, 3), (usize::MAX, 2)] {
            let outside = || bytes.copy_in(offset, &vec![0; len]);
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(outside)).is_err(), "{len} at {offset}");
        }
    }

    #[test]
    fn bytes_of_a_device_are_never_touched() {
        // SAFETY: no device copies them.
        let bytes = unsafe { LentBytes::on_device(std::ptr::without_provenance_mut(64), 8, Box::new(())) };
        assert!(bytes.is_on_device() && bytes.address() == 64 && bytes.at(3, 5).addr() == 67);
        let (one, _other) = UnixStream::pair().expect("a pair of sockets");
        let touches: [&dyn Fn(); 4] = [
            &|| bytes.copy_in(0, &[1]),
            &|| bytes.copy_out(0, &mut [0]),
            &|| drop(bytes.send(one.as_fd(), 0, 1)),
            &|| drop(bytes.receive(one.as_fd(), 0, 1)),
        ];
        for touch in touches {
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(touch)).is_err());
        }
    }

    #[test]
    fn bytes_go_through_sockets_and_come_from_other_memory() {
        let (one, other) = UnixStream::pair().expect("a pair of sockets");
        let (from, into) = (LentBytes::owned((0..10).collect()), LentBytes::owned(vec![0; 10]));
        assert_eq!(from.send(one.as_fd(), 2, 5).expect("room"), 5);
        assert_eq!(into.receive(other.as_fd(), 1, 9).expect("bytes"), 5);
        assert_eq!(into.receive(other.as_fd(), 1, 9).expect_err("no more").kind(), io::ErrorKind::WouldBlock);
        let peer = PeerMemory::behind(one.as_fd()).expect("this process");
        assert_eq!(into.read_from(&peer, from.address() + 8, 8, 2).expect("readable"), 2);
        let mut out = [0; 10];
        into.copy_out(0, &mut out);
        assert_eq!(out, [0, 2, 3, 4, 5, 6, 0, 0, 8, 9]);
        drop(one);
        assert_eq!(into.receive(other.as_fd(), 0, 10).expect("the end"), 0);
    }
}
