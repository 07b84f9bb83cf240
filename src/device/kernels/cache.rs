//! Compiled kernels in a folder of the user, so that a machine compiles them once.
//!
//! An entry is named for the hash of all that it depends on, and begins with a hash of itself. It is written beside its place
//! and renamed, so that a reader finds all of it or nothing. What is loaded from here runs on the device: a folder that
//! another user may write to is not used.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use crate::sync::{AtomicU64, Ordering};

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    /// What is kept takes at most so many bytes.
    bytes: u64,
}

/// What an entry depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(String);

const SUFFIX: &str = "cubin";
/// How old an unfinished entry must be to count as left by a killed writer.
const LITTER_AGE: Duration = Duration::from_secs(3600);
const HASH_BYTES: usize = 32;

impl Key {
    /// The key of an entry that depends on these texts.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Key {
        let mut hash = Sha256::new();
        for text in texts {
            // Lengths first, so that no two lists give one hash.
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        Key(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl Cache {
    /// The cache in this folder, which is made when something is stored.
    pub fn new(folder: PathBuf, bytes: u64) -> Cache {
        Cache { folder, bytes }
    }

    /// Where an entry is.
    pub fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(format!("{}.{SUFFIX}", key.0))
    }

    /// What is stored; nothing if it is not there or not whole.
    pub fn load(&self, key: &Key) -> io::Result<Option<Vec<u8>>> {
        let path = self.path(key);
        let mut entry = Vec::new();
        match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
            Ok(mut file) => {
                self.check_owner()?;
                file.read_to_end(&mut entry)?;
                // Entries that are in use are removed last.
                let _ = file.set_modified(SystemTime::now());
            }
        }
        let whole =
            entry.split_at_checked(HASH_BYTES).is_some_and(|(hash, cubin)| hash == Sha256::digest(cubin).as_slice());
        Ok(whole.then(|| entry.split_off(HASH_BYTES)))
    }

    /// Stores an entry, and removes the oldest ones if all take too many bytes.
    pub fn store(&self, key: &Key, cubin: &[u8]) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        self.check_owner()?;
        let beside = self.beside(key);
        let written = write_private(&beside, cubin).and_then(|()| fs::rename(&beside, self.path(key)));
        if written.is_err() {
            let _ = fs::remove_file(&beside);
        }
        written?;
        self.make_room(&self.path(key))
    }

    /// A name that no other writer has.
    fn beside(&self, key: &Key) -> PathBuf {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!("{}.{}.{number}.part", key.0, std::process::id()))
    }

    fn check_owner(&self) -> io::Result<()> {
        let folder = fs::metadata(&self.folder)?;
        if folder.uid() != rustix::process::geteuid().as_raw() || folder.mode() & 0o022 != 0 {
            let reason = format!("{} is another user's, or others may write to it", self.folder.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        Ok(())
    }

    /// Removes entries over the bound, oldest first but never `newest`, and what killed writers have left.
    fn make_room(&self, newest: &Path) -> io::Result<()> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let Ok(metadata) = fs::metadata(&path) else { continue };
            let modified = metadata.modified()?;
            match path.extension().and_then(|extension| extension.to_str()) {
                Some(SUFFIX) => entries.push((modified, metadata.len(), path)),
                Some("part") if modified.elapsed().is_ok_and(|age| age > LITTER_AGE) => drop(fs::remove_file(path)),
                _ => {}
            }
        }
        entries.sort();
        let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in entries.iter().filter(|(_, _, path)| path != newest) {
            if total <= self.bytes {
                break;
            }
            // Another process may have removed it.
            let _ = fs::remove_file(path);
            total -= bytes;
        }
        Ok(())
    }
}

fn write_private(path: &Path, cubin: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(&Sha256::digest(cubin))?;
    file.write_all(cubin)
}
