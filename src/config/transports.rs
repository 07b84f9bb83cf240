//! Which ways bytes may take between ranks.

use std::path::PathBuf;

/// Which transports may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportChoice {
    /// Shared memory within a host; between hosts TCP, or UCX where both have RDMA devices and name its library.
    Auto,
    /// Shared memory only.
    Shm,
    /// TCP only.
    Tcp,
    /// UCX only, beside connections that say what it does.
    Ucx,
}

impl TransportChoice {
    /// Whether connections may be those of shared memory within a host.
    pub(crate) fn has_shm(self) -> bool {
        match self {
            TransportChoice::Auto | TransportChoice::Shm | TransportChoice::Ucx => true,
            TransportChoice::Tcp => false,
        }
    }

    /// Whether connections may be of TCP, which takes a network interface.
    pub(crate) fn has_tcp(self) -> bool {
        match self {
            TransportChoice::Auto | TransportChoice::Tcp | TransportChoice::Ucx => true,
            TransportChoice::Shm => false,
        }
    }

    /// Whether messages between ranks of a communicator take shared memory or TCP, as far as [`TransportChoice::has_shm`] and
    /// [`TransportChoice::has_tcp`] let them.
    pub(crate) fn has_others_than_ucx(self) -> bool {
        self != TransportChoice::Ucx
    }
}

impl TransportChoice {
    /// The values, in words.
    pub(super) const FORM: &'static str = "auto, shm, tcp or ucx";

    pub(super) fn read(text: &str) -> Option<TransportChoice> {
        match text {
            "auto" => Some(TransportChoice::Auto),
            "shm" => Some(TransportChoice::Shm),
            "tcp" => Some(TransportChoice::Tcp),
            "ucx" => Some(TransportChoice::Ucx),
            _ => None,
        }
    }
}

/// Whether UCX is used, and which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UcxChoice {
    /// The first that is found.
    Auto,
    /// None.
    Off,
    /// This file.
    File(PathBuf),
}

impl UcxChoice {
    /// The values, in words.
    pub(super) const FORM: &'static str = "auto, off or a file";

    pub(super) fn read(text: &str) -> UcxChoice {
        match text {
            "auto" => UcxChoice::Auto,
            "off" => UcxChoice::Off,
            file => UcxChoice::File(file.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucx_is_found_or_named_or_off() {
        let file = UcxChoice::File("/opt/ucx/lib/libucp.so.0".into());
        let values = ["auto", "off", "/opt/ucx/lib/libucp.so.0"].map(UcxChoice::read);
        assert_eq!(values, [UcxChoice::Auto, UcxChoice::Off, file]);
    }
}
