//! The limit of file descriptors, and the errors when this process lacks resources.

use std::io;
use std::sync::Once;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Whether this process or its host lacks a resource for the call, which may succeed later.
pub fn is_shortage(error: &io::Error) -> bool {
    // ENOSPC is what epoll_ctl(2) says where the user watches as many files as the system lets, and fallocate(2) where
    // there is no memory for a file in memory; ETOOMANYREFS what sendmsg(2) says where too many descriptors are on their way.
    const SHORTAGES: [Errno; 6] =
        [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::NOSPC, Errno::TOOMANYREFS];
    Errno::from_io_error(error).is_some_and(|errno| SHORTAGES.contains(&errno))
}

/// Whether the error is a lack of file descriptors, of the process or of its host.
pub fn lacks_descriptors(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| [Errno::MFILE, Errno::NFILE].contains(&errno))
}

/// How many file descriptors this process may have; none if there is no limit.
pub fn descriptors() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Raises the soft limit of file descriptors to the hard limit: once, so that a limit that the program sets later stays. The
/// soft limit protects programs that pass descriptors to select(2), which the engine never does.
pub fn raise_descriptors() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let limit = getrlimit(Resource::Nofile);
        if limit.current != limit.maximum
            && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        {
            log::debug!("the limit of file descriptors stays at {:?}: {error}", limit.current);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_resources_is_told_from_an_error_of_the_peer() {
        let error = |errno: Errno| io::Error::from(errno);
        assert!(is_shortage(&error(Errno::MFILE)) && is_shortage(&error(Errno::NOBUFS)));
        assert!(is_shortage(&error(Errno::NOMEM)) && is_shortage(&error(Errno::NOSPC)));
        assert!(!is_shortage(&error(Errno::CONNREFUSED)) && !is_shortage(&io::ErrorKind::UnexpectedEof.into()));
        assert!(lacks_descriptors(&error(Errno::NFILE)) && !lacks_descriptors(&error(Errno::NOMEM)));
    }
}
