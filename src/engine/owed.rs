//! What ranks have yet to say of a collective that has ended on this one.

use smallvec::SmallVec;

use crate::engine::frame::Header;
use crate::engine::request::Request;
use crate::signature::Signature;
use crate::types::Rank;

/// Empty messages that have not come yet, of the collective that ended last.
#[derive(Default)]
pub(crate) struct Owed {
    sequence: u64,
    signature: Signature,
    /// Their senders, and their places among the messages from there.
    from: SmallVec<[(Rank, u32); 7]>,
}

impl Owed {
    pub(crate) fn new(sequence: u64, signature: Signature, from: impl Iterator<Item = (Rank, u32)>) -> Owed {
        Owed { sequence, signature, from: from.collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.from.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.from.clear();
    }

    /// Whether some of collective `sequence` have not come.
    pub(crate) fn is_of(&self, sequence: u64) -> bool {
        self.sequence == sequence && !self.is_empty()
    }

    /// Their senders and headers.
    pub(crate) fn words(&self) -> impl Iterator<Item = (Rank, Header)> {
        let header = |index| Request::header_of(self.signature, self.sequence, index, 0);
        self.from.iter().map(move |(from, index)| (*from, header(*index)))
    }

    /// What is wrong if `from` has called the collective by `theirs`.
    pub(crate) fn disagreement(&self, me: Rank, from: Rank, theirs: &Signature) -> Option<String> {
        (self.signature != *theirs).then(|| self.signature.disagreement(self.sequence, me, from, theirs))
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.from.iter().map(|(from, _)| *from)
    }

    pub(crate) fn heard(&mut self, rank: Rank) {
        self.from.retain(|(from, _)| *from != rank);
    }
}
