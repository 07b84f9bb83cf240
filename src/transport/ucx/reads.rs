//! Reads of what a peer has exposed. UCX writes to memory of the engine's own, which is copied from: so what is read may be given up at
//! any time, also where a device goes on, and an operation's memory needs no registration.

use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;
use crate::sys::ucx::{Device, Recipient, Version};
use crate::transport::{READ_MAX, Read, RemoteMemory, TakeRead};

/// Those of one peer.
#[derive(Debug)]
pub(super) struct Reads {
    is_able: bool,
    /// Only calls of the library bring them forward, of which no descriptor tells.
    needs_calls: bool,
    /// By their tokens.
    under_way: Vec<(u64, Arc<LentBytes>)>,
}

/// Memory for reads to come, of all peers.
#[derive(Debug, Default)]
pub(super) struct Spare(Vec<Arc<LentBytes>>);

impl Reads {
    /// Of a peer to which this version of UCX goes through these.
    pub(super) fn new(devices: &[Device], version: Version) -> Reads {
        let is_able = devices.iter().any(|device| device.reads_alone(version));
        Reads { is_able, needs_calls: devices.iter().any(Device::is_cma), under_way: Vec::new() }
    }

    /// Whether the peer's memory is read; no more once that has failed.
    pub(super) fn is_able(&self) -> bool {
        self.is_able
    }

    pub(super) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether somebody has to call before a thread sleeps.
    pub(super) fn are_due(&self, recipient: &Recipient) -> bool {
        !self.is_empty() && (self.needs_calls || recipient.has_got())
    }

    pub(super) fn begin(
        &mut self,
        recipient: &mut Recipient,
        spare: &mut Spare,
        token: u64,
        from: RemoteMemory<'_>,
    ) -> Read {
        if !self.is_able {
            return Read::Unable;
        }
        if self.under_way.len() >= UNDER_WAY_MAX {
            return Read::Busy;
        }
        let RemoteMemory { address, len, key } = from;
        let buffer = spare.0.pop().unwrap_or_else(|| Arc::new(LentBytes::owned(vec![0; READ_MAX])));
        match recipient.get(token, (address, key), (&buffer, 0, len)) {
            Ok(()) => {
                self.under_way.push((token, buffer));
                Read::Begun
            }
            Err(error) => {
                self.give_up(&error.to_string());
                Read::Unable
            }
        }
    }

    /// Tells of those that have ended.
    pub(super) fn take(&mut self, recipient: &mut Recipient, spare: &mut Spare, take: &mut TakeRead<'_>) {
        for (token, result) in recipient.take_got() {
            let Some(at) = self.under_way.iter().position(|(of, _)| *of == token) else { continue };
            let (_, buffer) = self.under_way.swap_remove(at);
            match result {
                Ok(()) => {
                    take(token, Ok(&buffer));
                    if spare.0.len() < SPARE_MAX {
                        spare.0.push(buffer);
                    }
                }
                Err(error) => {
                    self.give_up(&error.to_string());
                    take(token, Err(error.to_string()));
                }
            }
        }
    }

    /// Reads no more: what fails once, as where the system forbids it, would fail again.
    fn give_up(&mut self, cause: &str) {
        log::debug!("UCX reads no more of a peer's memory: {cause}");
        self.is_able = false;
    }
}

/// How many reads of one peer may be under way: a mebibyte, as what is unread of a stream.
const UNDER_WAY_MAX: usize = 4;

/// How much memory is kept for reads to come.
const SPARE_MAX: usize = 8;
