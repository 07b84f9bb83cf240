//! Random bytes from the system.
//!
//! Secrets, keys and unguessable names come from here, since a forked child's generator repeats its parent's numbers.

use std::io;

use rand::TryRngCore;
use rand::rngs::OsRng;

/// So many bytes.
///
/// # Errors
/// The system has none.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}
