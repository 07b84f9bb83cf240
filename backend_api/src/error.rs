//! What can go wrong in a backend.

use std::fmt;

/// What an error means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's mistake: nothing was begun, and the communicator is as it was. A ValueError in Python.
    Usage = 2,
    /// The backend does not have it.
    Unsupported = 3,
    /// The operation failed; the communicator works on.
    Failure = 4,
    /// Its time ran out; the communicator is of no more use.
    Timeout = 5,
    /// A rank is lost or has given up, or the communicator was aborted; it is of no more use.
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

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What it means for the caller.
    pub kind: ErrorKind,
    /// What happened, for people: the operation, and the argument or rank at fault.
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

    /// The operation failed, and the communicator works on.
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
