//! The errors of a backend.

use std::fmt;

/// The kind of an error: what it means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's mistake: no operation was started, and the communicator is unchanged. A ValueError in Python.
    Usage = 2,
    /// The backend does not have the operation or method.
    Unsupported = 3,
    /// The operation failed; the communicator stays usable.
    Failure = 4,
    /// The operation timed out; the communicator is unusable.
    Timeout = 5,
    /// A rank is lost or has given up, or the communicator was aborted; the communicator is unusable.
    Lost = 6,
    /// The backend panicked.
    Panic = 7,
}

impl ErrorKind {
    /// Every kind.
    pub const ALL: [ErrorKind; 6] = [
        ErrorKind::Usage,
        ErrorKind::Unsupported,
        ErrorKind::Failure,
        ErrorKind::Timeout,
        ErrorKind::Lost,
        ErrorKind::Panic,
    ];
}

/// The error of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The kind.
    pub kind: ErrorKind,
    /// The text for people: it names the operation, and the argument or rank at fault.
    pub text: String,
}

impl Error {
    /// An error of any kind.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Error { kind, text: text.into() }
    }

    /// The caller's mistake.
    pub fn usage(text: impl Into<String>) -> Self {
        Error::new(ErrorKind::Usage, text)
    }

    /// A failure of the operation; the communicator stays usable.
    pub fn failure(text: impl Into<String>) -> Self {
        Error::new(ErrorKind::Failure, text)
    }

    /// An operation or method that the backend does not have.
    pub fn unsupported(operation: &str, backend: &str) -> Self {
        Error::new(ErrorKind::Unsupported, format!("{operation}: the backend {backend} does not have it"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}
