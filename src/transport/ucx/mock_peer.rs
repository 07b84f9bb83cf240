//! A peer that sends what a test says, over a library that is a fake.

use crate::sync::Arc;
use crate::sys::ucx::{Context, Messenger, Recipient};
use crate::transport::ucx::header::{Header, Kind};
use crate::types::Rank;

/// The peer with its rank.
pub(super) struct MockPeer {
    rank: Rank,
    messenger: Messenger,
    recipient: Option<Recipient>,
}

impl MockPeer {
    pub(super) const RANK: Rank = Rank(1);

    pub(super) fn new(context: &Arc<Context>) -> MockPeer {
        MockPeer { rank: MockPeer::RANK, messenger: Messenger::new(context).unwrap(), recipient: None }
    }

    pub(super) fn address(&self) -> Vec<u8> {
        self.messenger.address().unwrap()
    }

    /// What it sends goes to the worker with this address.
    pub(super) fn connect(&mut self, address: &[u8]) {
        self.recipient = Some(self.messenger.recipient(address).unwrap());
    }

    /// Sends as another rank from now on.
    pub(super) fn pose_as(&mut self, rank: Rank) {
        self.rank = rank;
    }

    pub(super) fn send(&mut self, kind: Kind, session: u64, number: u64, payload: &[u8]) {
        let header = Header { kind, from: self.rank, session, number };
        let message = [&header.encode(), payload].concat();
        self.recipient.as_mut().unwrap().send(message).unwrap();
    }

    /// The kinds, sessions and numbers of what has come.
    pub(super) fn received(&self) -> Vec<(Kind, u64, u64)> {
        let mut arrived = Vec::new();
        self.messenger.progress(&mut arrived);
        let headers = arrived.iter().map(|message| Header::decode(message).unwrap());
        headers.map(|header| (header.kind, header.session, header.number)).collect()
    }
}
