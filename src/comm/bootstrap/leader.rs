//! The side of a [leader](super::groups): it takes the ranks of its group in as rank 0 does, and tells rank 0 of them over its own
//! connection. What rank 0 answers them goes back the same way.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::context::{JoinContext, JoinFailure, REPLY_TIMEOUT, RootAddress, RootRecord};
use super::groups::Groups;
use super::protocol::{Keys, RELAYED_BYTES_MAX, Relayed, TABLE_BYTES_MAX, frame, frame_length};
use super::rank_info::RankInfo;
use super::reply::JoinReply;
use super::server::{Event, Server};
use crate::comm::framing::{ReadBuffer, WriteBuffer};
use crate::deadline::deadline_after;
use crate::error::InitError;
use crate::sync::Arc;
use crate::transport::handshake::is_passing;
use crate::transport::tls::{Stream, Tls};
use crate::types::Rank;

/// Listens, and tells the group where. Its ranks need the keys and settings that rank 0 has.
pub(super) fn listen(context: &JoinContext<'_>, root: &RootAddress) -> Result<TcpListener, InitError> {
    let (listener, place) = context.listen()?;
    context.publish(context.rank, RootRecord::Listening(RootAddress { place, ..root.clone() }))?;
    Ok(listener)
}

/// Tells those that have not reached this rank, if it is a leader, why it takes nobody in.
pub(super) fn say_why(context: &JoinContext<'_>, why: RootRecord) {
    if context.groups.leads(context.rank)
        && let Err(unsaid) = context.publish(context.rank, why)
    {
        let (name, rank) = (context.name, context.rank);
        log::warn!(
            "communicator `{name}`: ranks that join through rank {rank} may not learn why they cannot: {unsaid}"
        );
    }
}

/// Takes the group in that comes to `listener`, until rank 0 has answered or `timeout` is over. `root` is the connection to rank 0,
/// which has had this rank's request. Returns this rank's own answer, and its bytes without the length.
pub(super) fn lead(
    context: &JoinContext<'_>,
    keys: &Keys,
    tls: Option<&Tls>,
    listener: TcpListener,
    root: Result<Stream, InitError>,
    timeout: Duration,
) -> Result<(JoinReply, Vec<u8>), InitError> {
    let group = Groups::one(context.groups.members(context.rank).len());
    let failed = |error: io::Error| context.os_error("the connections of ranks that join through this one", &error);
    // Before any connection ends: a rank that finds none looks here once more.
    let ended = |error: InitError| {
        say_why(context, RootRecord::Ended { comm_id: Some(keys.comm_id), failure: JoinFailure::of(&error) });
        error
    };
    let mut server = Server::new(context.name, group, keys, tls, listener).map_err(|error| ended(failed(error)))?;
    let outcome = root.and_then(|root| relay(context, &mut server, root, timeout));
    let outcome = outcome.map_err(|error| ended(context.failure_in_store().unwrap_or(error)));
    // For whoever has no answer yet.
    let failure = match &outcome {
        Ok((JoinReply::Failed(failure), _)) => {
            say_why(context, RootRecord::RootEnded);
            failure.clone()
        }
        Ok(_) => JoinFailure::Refused { cause: "all ranks have joined".to_owned() },
        Err(error) => JoinFailure::of(error),
    };
    let message = JoinReply::Failed(failure).message().map_err(|cause| context.config_error(cause));
    let finished = message
        .map(Arc::<[u8]>::from)
        .and_then(|message| server.finish(|_| vec![message.clone()], Instant::now() + REPLY_TIMEOUT).map_err(failed));
    match (outcome, finished) {
        (Ok((JoinReply::Complete(_) | JoinReply::Ask { .. }, _)), Err(error)) => Err(ended(error)),
        (outcome, _) => outcome,
    }
}

fn relay(
    context: &JoinContext<'_>,
    server: &mut Server<'_>,
    root: Stream,
    timeout: Duration,
) -> Result<(JoinReply, Vec<u8>), InitError> {
    let members = context.groups.members(context.rank);
    let lost = |error: io::Error| context.lost(Rank(0), &error, timeout);
    let serving = |error: io::Error| context.os_error("epoll", &error);
    server.watch_other(root.socket()).map_err(serving)?;
    let mut root = Uplink::new(root).map_err(lost)?;
    let deadline = deadline_after(Instant::now(), timeout);
    loop {
        while let Some(message) = root.advance().map_err(lost)? {
            let reply =
                JoinReply::parse(&message, context.groups.size).map_err(|cause| lost(io::Error::other(cause)))?;
            let JoinReply::Members(replies) = reply else { return Ok((reply, message)) };
            let answers = messages(replies).map_err(|cause| context.config_error(cause))?;
            server.answer(|rank| answers.get(&rank).cloned().into_iter().collect()).map_err(serving)?;
            // This rank's own answer may be long, and they need not wait until it has read that.
            server.turn(Instant::now()).map_err(serving)?;
        }
        if Instant::now() >= deadline {
            return Err(lost(io::ErrorKind::TimedOut.into()));
        }
        for event in server.turn(deadline).map_err(serving)? {
            let told = match event {
                Event::Joined(rank, joined) if !members.contains(&rank.0) => {
                    let cause = joined.map_or_else(|cause| cause, |joiner| stranger(context, &joiner.info));
                    // A leader speaks for its own ranks alone. Rank 0 tells all, this one too.
                    Relayed { rank: Rank(members.start), joined: Some(Err(cause)) }
                }
                Event::Left(rank) if !members.contains(&rank.0) => continue,
                Event::Joined(rank, joined) => Relayed { rank, joined: Some(joined.map(|joiner| *joiner)) },
                Event::Left(rank) => Relayed { rank, joined: None },
                Event::Answered(_) => continue,
            };
            root.tell(&told).map_err(|cause| context.config_error(cause))?;
        }
    }
}

/// Why a rank cannot take part that has come to this leader, but is not of its group.
fn stranger(context: &JoinContext<'_>, info: &RankInfo) -> String {
    let RankInfo { rank, host_id: host, common, .. } = info;
    let (own, size) = (context.rank, context.groups.size);
    let theirs = common.world_size;
    if theirs as usize == size {
        return format!("rank {rank} on host `{host}` came to rank {own}, which does not lead it");
    }
    format!("rank {rank} on host `{host}` has world size {theirs}, rank {own} has {size}")
}

/// The messages to the ranks of a group, as rank 0 would send them.
pub(super) fn messages(replies: BTreeMap<u32, JoinReply>) -> Result<BTreeMap<Rank, Arc<[u8]>>, String> {
    replies.into_iter().map(|(rank, reply)| Ok((Rank(rank), reply.message()?.into()))).collect()
}

/// A leader's connection to rank 0, which does not block.
struct Uplink {
    stream: Stream,
    incoming: ReadBuffer,
    /// The length of the message that is coming.
    length: Option<usize>,
    outgoing: WriteBuffer,
}

impl Uplink {
    fn new(stream: Stream) -> io::Result<Uplink> {
        stream.socket().set_nonblocking(true)?;
        Ok(Uplink { stream, incoming: ReadBuffer::default(), length: None, outgoing: WriteBuffer::default() })
    }

    fn tell(&mut self, told: &Relayed) -> Result<(), String> {
        self.outgoing.push(frame(told, RELAYED_BYTES_MAX)?.into());
        Ok(())
    }

    /// Reads and writes what the socket has and takes. Returns a message once it is complete.
    fn advance(&mut self) -> io::Result<Option<Vec<u8>>> {
        // First, since rank 0 may have closed the connection behind its answer.
        while self.incoming.fill(&mut self.stream, self.length.unwrap_or(size_of::<u32>()))? {
            let message = self.incoming.take();
            if self.length.take().is_some() {
                return Ok(Some(message));
            }
            self.length = Some(frame_length(&message, TABLE_BYTES_MAX).map_err(io::Error::other)?);
        }
        self.outgoing.send(&mut self.stream)?;
        match io::Write::flush(&mut self.stream) {
            Err(error) if !is_passing(&error) => Err(error),
            _ => Ok(None),
        }
    }
}
