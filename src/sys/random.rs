//! Random bytes from the system.
//!
//! Secrets, keys, names and numbers that nobody else is to have come from here, since a forked child's generator repeats its parent's
//! numbers.

use std::cell::Cell;
use std::io;

use rand::TryRngCore;
use rand::distr::{Distribution, StandardUniform};
use rand::rngs::OsRng;

use crate::sys::fork::Origin;

/// So many bytes.
///
/// # Errors
/// The system has none.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// A random value, by a generator of this thread that is seeded again in a forked child.
///
/// # Panics
/// When the system has no random bytes for a seed.
pub fn any<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    thread_local! {
        static SEEDED: Cell<Origin> = Cell::new(Origin::here());
    }
    if !SEEDED.get().is_here() {
        rand::rng().reseed().expect("random bytes of the system");
        SEEDED.set(Origin::here());
    }
    rand::random()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::sys::fork::testing::holds_in_a_child;

    #[test]
    fn a_child_draws_other_numbers_than_its_parent() {
        let _: u64 = any();
        let (mut reader, mut writer) = UnixStream::pair().expect("a pair of sockets");
        assert!(holds_in_a_child(|| writer.write_all(&any::<[u8; 16]>()).is_ok()));
        let mut childs = [0; 16];
        reader.read_exact(&mut childs).expect("what the child has drawn");
        assert_ne!(any::<[u8; 16]>(), childs);
    }
}
