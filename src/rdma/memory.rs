//! Registered memory, and the keys by which other processes access it.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

use crate::error::UsageError;
use crate::rdma::error::RdmaError;
use crate::sync::{Arc, AtomicBool, AtomicU64, Condvar, Mutex, Ordering, fence, lock};
use crate::sys::fork::PerProcess;
use crate::sys::lent_bytes::LentBytes;
use crate::sys::random;
use crate::sys::ucx::RegisteredMemory;

/// What a process must know to access memory of another: 128 random bits. Printed only by [`Key::reveal`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 16]);

impl Key {
    /// The key of these bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Key {
        Key(bytes)
    }

    /// Its bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// The key as 32 hexadecimal digits, for those who may have it.
    pub fn reveal(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl FromStr for Key {
    type Err = UsageError;

    fn from_str(text: &str) -> Result<Key, UsageError> {
        let digits = text.as_bytes();
        let is_key = digits.len() == 32 && digits.iter().all(u8::is_ascii_hexdigit);
        let pair = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal digits");
        is_key.then(|| Key(std::array::from_fn(pair))).ok_or_else(|| UsageError {
            operation: "remote_buffer".to_owned(),
            argument: "access_key",
            expected: "a key of 32 hexadecimal digits".to_owned(),
            // Not the text, which may be most of a key.
            got: format!("{} bytes of something else", text.len()),
        })
    }
}

/// Memory of another process, and the key to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteBuffer {
    /// The first byte's address there.
    pub address: u64,
    /// The number of bytes.
    pub len: usize,
    /// The key.
    pub key: Key,
}

/// What its owner says of a key: where the bytes that it opens lie, and the stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Located {
    /// The first byte's address.
    pub(super) begin: u64,
    pub(super) len: u64,
    /// The stamp's address.
    pub(super) stamp_at: u64,
    /// Its value while the key is good, which is not zero.
    pub(super) stamp: u64,
}

impl Located {
    /// Whether all of so many bytes from `address` on are among those that the key opens.
    pub(super) fn contains(&self, address: u64, len: u64) -> bool {
        let offset = address.checked_sub(self.begin);
        offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= self.len)
    }
}

/// What a key stands for.
struct Grant {
    bytes: Arc<LentBytes>,
    offset: usize,
    len: usize,
    uses: Arc<Uses>,
    stamp: Stamp,
}

/// What readers of other processes look at to know whether a key is good ([`direct`](crate::rdma::direct)).
struct Stamp {
    /// It is read by other processes at any time, so it is never freed.
    word: &'static AtomicU64,
    value: u64,
}

impl Stamp {
    /// Relaxed: who uses the word next has the lock of the keys.
    fn new(word: &'static AtomicU64, value: u64) -> Stamp {
        word.store(value, Ordering::Relaxed);
        Stamp { word, value }
    }

    /// After this, the memory may be used for anything: no reader that sees that sees the stamp as well.
    fn revoke(&self) {
        self.word.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// The writes by a library that go on with a key.
#[derive(Debug, Default)]
struct Uses {
    revoked: AtomicBool,
    count: Mutex<usize>,
    fewer: Condvar,
}

impl Uses {
    /// Waits for their end, of which their threads take care.
    fn revoke(&self) {
        // Relaxed: it only hastens what the count says.
        self.revoked.store(true, Ordering::Relaxed);
        let mut count = lock(&self.count);
        while *count > 0 {
            count = self.fewer.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Bytes that a library writes for a peer. Until it is dropped, [`MemoryRegion::deregister`] waits.
pub(super) struct Lease {
    pub(super) bytes: Arc<LentBytes>,
    /// Where they begin there.
    pub(super) offset: usize,
    uses: Arc<Uses>,
}

impl Lease {
    /// Whether somebody waits for its end.
    pub(super) fn is_revoked(&self) -> bool {
        // Relaxed: as where it is stored.
        self.uses.revoked.load(Ordering::Relaxed)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        *lock(&self.uses.count) -= 1;
        self.uses.fewer.notify_all();
    }
}

#[derive(Default)]
struct Grants {
    by_key: HashMap<Key, Grant>,
    /// Words for stamps that are no key's.
    free: Vec<&'static AtomicU64>,
}

impl Grants {
    fn insert(&mut self, key: Key, bytes: Arc<LentBytes>, range: (usize, usize), stamp: u64) {
        if self.free.is_empty() {
            let words: Vec<_> = std::iter::repeat_with(AtomicU64::default).take(STAMPS_AT_ONCE).collect();
            self.free.extend(words.leak().iter());
        }
        let word = self.free.pop().expect("there are more now");
        let ((offset, len), stamp) = (range, Stamp::new(word, stamp));
        self.by_key.insert(key, Grant { bytes, offset, len, uses: Arc::default(), stamp });
    }

    fn remove(&mut self, key: Key) -> Option<Grant> {
        let grant = self.by_key.remove(&key)?;
        grant.stamp.revoke();
        self.free.push(grant.stamp.word);
        Some(grant)
    }
}

/// How many words for stamps are made at a time: a page.
const STAMPS_AT_ONCE: usize = 512;

/// The keys of this process. A forked child, whose memory is a copy, has none.
static GRANTS: PerProcess<RwLock<Grants>> = PerProcess::unset();

fn grants() -> RwLockWriteGuard<'static, Grants> {
    GRANTS.get().write().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that other processes may be given access to, until it is dropped or deregistered.
#[derive(Debug)]
pub struct MemoryRegion {
    bytes: Arc<LentBytes>,
    keys: Mutex<Keys>,
}

#[derive(Debug, Default)]
struct Keys {
    given: Vec<(usize, usize, Key)>,
    deregistered: bool,
}

impl MemoryRegion {
    /// Registers the bytes. Nobody can access them before [`MemoryRegion::remote_buffer`].
    pub fn new(bytes: Arc<LentBytes>) -> MemoryRegion {
        MemoryRegion { bytes, keys: Mutex::default() }
    }

    /// The bytes.
    pub fn bytes(&self) -> &Arc<LentBytes> {
        &self.bytes
    }

    /// A buffer of `len` bytes from `offset` on, for other processes. Its key opens these bytes and no others. The same range
    /// has the same key.
    ///
    /// # Errors
    /// The bytes are not all inside, the memory is deregistered, or the system has no random bytes.
    pub fn remote_buffer(&self, offset: usize, len: usize) -> Result<RemoteBuffer, RdmaError> {
        let operation = "to_remote_buffer";
        check_range(operation, offset, len, self.bytes.len())?;
        let mut keys = lock(&self.keys);
        if keys.deregistered {
            return Err(UsageError {
                operation: operation.to_owned(),
                argument: "self",
                expected: "memory that is registered".to_owned(),
                got: "memory that was deregistered".to_owned(),
            }
            .into());
        }
        let known = keys.given.iter().find(|(start, length, _)| (*start, *length) == (offset, len));
        let key = match known {
            Some((_, _, key)) => *key,
            None => {
                let lacking = |cause: std::io::Error| RdmaError::Os { operation, cause: cause.to_string() };
                let key = Key(random::bytes().map_err(lacking)?);
                // Never zero, which is that of no key.
                let stamp = u64::from_ne_bytes(random::bytes().map_err(lacking)?) | 1;
                grants().insert(key, self.bytes.clone(), (offset, len), stamp);
                keys.given.push((offset, len, key));
                key
            }
        };
        Ok(RemoteBuffer { address: self.bytes.address() + offset as u64, len, key })
    }

    /// Takes all keys back. Once this returns, no other process reads or writes the memory; operations of this process that have
    /// it as their own side go on.
    pub fn deregister(&self) {
        let mut keys = lock(&self.keys);
        keys.deregistered = true;
        // Waits for accesses under way, of which each copies one piece.
        let mut grants = grants();
        let revoked: Vec<Option<Grant>> = keys.given.drain(..).map(|(_, _, key)| grants.remove(key)).collect();
        // What follows takes no lock of the keys of others.
        drop(grants);
        RegisteredMemory::forget(&self.bytes);
        // Of what a library writes, the threads end each piece soon, whatever the peer does.
        revoked.iter().flatten().for_each(|grant| grant.uses.revoke());
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.deregister();
    }
}

/// Why a key does not open a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// There is no such key. Whether there ever was is not told.
    #[error("the memory is not registered with this key, or no longer")]
    Key,
    /// The key is for other bytes.
    #[error("the bytes are not all inside the registered memory")]
    Range,
    /// The bytes lie on a device, where only UCX reaches them.
    #[error("the memory is a CUDA device's, which only UCX reaches")]
    OnDevice,
}

/// Calls `access` on the bytes that `key` opens, `len` of them from `address` on, and where they begin there. They stay registered
/// until it returns.
pub(super) fn access<T>(
    key: Key,
    address: u64,
    len: usize,
    access: impl FnOnce(&Arc<LentBytes>, usize) -> T,
) -> Result<T, Refusal> {
    with_grant(key, address, len, |grant, offset| access(&grant.bytes, offset))
}

/// As [`access`], for code that touches the bytes.
pub(super) fn touch<T>(
    key: Key,
    address: u64,
    len: usize,
    touch: impl FnOnce(&LentBytes, usize) -> T,
) -> Result<T, Refusal> {
    let touched = |bytes: &Arc<LentBytes>, offset| match bytes.is_on_device() {
        true => Err(Refusal::OnDevice),
        false => Ok(touch(bytes, offset)),
    };
    access(key, address, len, touched)?
}

/// Where the bytes that `key` opens lie, and what tells whether it is still good, if it opens `len` bytes from `address` on.
pub(super) fn locate(key: Key, address: u64, len: usize) -> Result<Located, Refusal> {
    let located = |grant: &Grant, _| {
        (!grant.bytes.is_on_device()).then(|| Located {
            begin: grant.bytes.address() + grant.offset as u64,
            len: grant.len as u64,
            stamp_at: std::ptr::from_ref(grant.stamp.word).addr() as u64,
            stamp: grant.stamp.value,
        })
    };
    with_grant(key, address, len, located)?.ok_or(Refusal::OnDevice)
}

/// The bytes that `key` opens, for a library to write.
pub(super) fn lend(key: Key, address: u64, len: usize) -> Result<Lease, Refusal> {
    with_grant(key, address, len, |grant, offset| {
        *lock(&grant.uses.count) += 1;
        Lease { bytes: grant.bytes.clone(), offset, uses: grant.uses.clone() }
    })
}

fn with_grant<T>(key: Key, address: u64, len: usize, then: impl FnOnce(&Grant, usize) -> T) -> Result<T, Refusal> {
    let grants = GRANTS.get().read().unwrap_or_else(PoisonError::into_inner);
    let grant = grants.by_key.get(&key).ok_or(Refusal::Key)?;
    let begin = grant.bytes.address() + grant.offset as u64;
    let inside = address.checked_sub(begin).and_then(|offset| usize::try_from(offset).ok());
    let inside = inside.filter(|offset| offset.checked_add(len).is_some_and(|end| end <= grant.len));
    let offset = inside.ok_or(Refusal::Range)?;
    Ok(then(grant, grant.offset + offset))
}

/// Refuses a range that is not inside `size` bytes.
pub(super) fn check_range(operation: &str, offset: usize, len: usize, size: usize) -> Result<(), UsageError> {
    if offset.checked_add(len).is_some_and(|end| end <= size) {
        return Ok(());
    }
    Err(UsageError {
        operation: operation.to_owned(),
        argument: "offset",
        expected: format!("a range inside {size} bytes"),
        got: format!("{len} bytes at {offset}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(len: usize) -> MemoryRegion {
        MemoryRegion::new(Arc::new(LentBytes::owned(vec![0; len])))
    }

    #[test]
    fn a_key_opens_its_range_alone() {
        let memory = memory(100);
        let part = memory.remote_buffer(10, 20).expect("inside");
        assert_eq!(memory.remote_buffer(10, 20), Ok(part), "the same range");
        let whole = memory.remote_buffer(0, 100).expect("inside");
        assert_ne!(whole.key, part.key);
        let open = |key, address, len| access(key, address, len, |_, offset| offset);
        assert_eq!(open(part.key, part.address + 5, 15), Ok(15));
        assert_eq!(open(part.key, part.address + 20, 0), Ok(30));
        for (address, len) in [(part.address, 21), (part.address - 1, 2), (u64::MAX, 1), (part.address, usize::MAX)] {
            assert_eq!(open(part.key, address, len), Err(Refusal::Range), "{len} at {address}");
        }
        assert_eq!(open(Key([7; 16]), part.address, 1), Err(Refusal::Key));
        assert!(memory.remote_buffer(90, 11).is_err() && memory.remote_buffer(usize::MAX, 2).is_err());
    }

    #[test]
    fn what_is_deregistered_or_dropped_opens_to_nobody() {
        let (first, second) = (memory(10), memory(10));
        let keys = [&first, &second].map(|memory| memory.remote_buffer(0, 10).expect("inside"));
        first.deregister();
        drop(second);
        assert!(keys.iter().all(|buffer| access(buffer.key, buffer.address, 1, |_, _| ()) == Err(Refusal::Key)));
        let error = first.remote_buffer(0, 10).expect_err("no more keys");
        assert!(error.to_string().contains("memory that was deregistered"), "{error}");
    }

    #[test]
    fn a_word_is_used_again_with_another_stamp() {
        let (mut grants, bytes) = (Grants::default(), Arc::new(LentBytes::owned(vec![0; 10])));
        for number in 0..2 * STAMPS_AT_ONCE as u128 {
            grants.insert(Key(number.to_le_bytes()), bytes.clone(), (0, 10), 100 + number as u64);
        }
        let words: std::collections::HashSet<_> =
            grants.by_key.values().map(|grant| grant.stamp.word.as_ptr()).collect();
        assert_eq!(words.len(), 2 * STAMPS_AT_ONCE, "each key has a word of its own");
        let first = Key([0; 16]);
        let removed = grants.remove(first).expect("it is there");
        assert_eq!(removed.stamp.word.load(Ordering::Relaxed), 0);
        assert!(grants.remove(first).is_none());
        grants.insert(first, bytes, (0, 10), 7);
        let again = &grants.by_key[&first].stamp;
        assert_eq!((again.word.as_ptr(), again.word.load(Ordering::Relaxed)), (removed.stamp.word.as_ptr(), 7));
    }

    #[test]
    fn deregistering_waits_for_what_a_library_writes() {
        let memory = memory(10);
        let buffer = memory.remote_buffer(2, 8).expect("inside");
        let lease = lend(buffer.key, buffer.address + 1, 7).expect("its bytes");
        assert_eq!((lease.offset, lease.is_revoked()), (3, false));
        assert_eq!(lend(buffer.key, buffer.address, 9).err(), Some(Refusal::Range));
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                memory.deregister();
                is_done.store(true, Ordering::SeqCst);
            });
            while !lease.is_revoked() {
                std::thread::yield_now();
            }
            assert_eq!(lend(buffer.key, buffer.address, 1).err(), Some(Refusal::Key), "no more of them");
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!is_done.load(Ordering::SeqCst), "it did not wait");
            drop(lease);
        });
        assert!(is_done.load(Ordering::SeqCst));
    }

    #[test]
    fn a_key_survives_its_digits_and_is_not_printed() {
        let key = Key(random::any());
        assert_eq!(key.reveal().parse(), Ok(key));
        assert_eq!(format!("{key:?}"), "Key(..)");
        for text in ["", "0", &"g".repeat(32), &"0".repeat(33), &"ü".repeat(16)] {
            let error = text.parse::<Key>().expect_err("no key").to_string();
            assert!(text.len() < 2 || !error.contains(text), "{error}");
        }
    }
}
