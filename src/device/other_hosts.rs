//! What operations on a device ask of the engine that exchanges their messages with other hosts.

use crate::device::control::Failure;
use crate::device::network::Traffic;
use crate::signature::Signature;
use crate::types::Rank;

/// The engine that sends and receives what operations on a device exchange with other hosts.
pub(crate) trait OtherHosts: Send + Sync {
    /// Gives up the failed operation and all later ones, and tells all other ranks, unless they know.
    fn fail(&self, failure: &Failure);

    /// As [`fail`](OtherHosts::fail), but `reporter` tells the other ranks.
    fn give_up(&self, reporter: Rank, failure: &Failure);

    /// Whether everything has been sent that was ready before a failure. If there is no time for that, gives it up as well.
    fn settle(&self, has_time: bool) -> bool;

    /// The failure that is known, if there is one, and the rank that has told of it.
    fn failure(&self) -> Option<(Rank, Failure)>;

    /// The ranks of other hosts that keep the operation of this number from its end.
    fn missing(&self, number: u64) -> Missing;

    /// Tells the ranks of other hosts that this one waits in an operation: in a collective if there is a call.
    fn tell_of_wait(&self, number: u64, call: Option<Signature>);

    /// The operations up to this number have ended here.
    fn ended(&self, number: u64);

    /// Tells all other ranks that this one has given up the library that runs operations.
    fn give_up_library(&self);

    /// A rank that has told so, if one has.
    fn library_given_up_by(&self) -> Option<Rank>;
}

/// What collectives ask of it.
pub(crate) trait Exchange: OtherHosts {
    /// Takes up an operation: what its programs send and receive. Every rank takes up every operation.
    fn submit(&self, number: u64, call: Signature, all: &mut dyn Iterator<Item = &Traffic>) -> std::io::Result<()>;

    /// Listens to other ranks until the operation of this number has ended: for one that exchanges nothing through the engine.
    fn listen(&self, number: u64) -> std::io::Result<()>;

    /// Begins anew after a disagreement, when nothing is on any rank's stream.
    fn reset(&self);
}

/// Ranks of other hosts that keep an operation from its end.
#[derive(Debug, Default)]
pub(crate) struct Missing {
    /// Those of which nothing has been heard in it.
    pub(crate) unheard: Vec<Rank>,
    /// Those that have called it.
    pub(crate) called: Vec<Rank>,
    /// Those that have called it and have not sent everything.
    pub(crate) slow: Vec<Rank>,
}
