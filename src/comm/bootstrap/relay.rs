//! How the table of all ranks goes down the [tree](super::tree): a rank that has it passes it on.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::context::{JoinContext, REPLY_TIMEOUT};
use super::groups::Groups;
use super::protocol::{Keys, TABLE_BYTES_MAX, framed};
use super::reply::World;
use super::server::{Event, Server};
use crate::error::InitError;
use crate::sync::Arc;
use crate::transport::tls::Tls;
use crate::types::Rank;

/// For how long to wait for ranks below this one while none comes. All have been told at about the same time.
const PATIENCE: Duration = REPLY_TIMEOUT.saturating_mul(2);

/// Answers the ranks below this one, which come to `listener`, with the message that this rank has had.
///
/// A rank that does not come in time is left to itself, as rank 0 does: the others may meet nevertheless.
pub(super) fn pass_on(
    context: &JoinContext<'_>,
    keys: &Keys,
    tls: Option<&Tls>,
    listener: TcpListener,
    world: &World,
    message: Vec<u8>,
) -> Result<(), InitError> {
    let children = world.tree(context.groups).children(context.rank);
    if children.is_empty() {
        return Ok(());
    }
    let failed = |error| context.os_error("the connections of ranks that ask for the table", &error);
    let message: Arc<[u8]> = framed(&message, TABLE_BYTES_MAX).map_err(|cause| context.config_error(cause))?.into();
    let mut server = Server::new(context.name, Groups::one(children.len()), keys, tls, listener).map_err(failed)?;
    let mut waiting: BTreeSet<Rank> = children.into_iter().collect();
    let last = context.table_deadline();
    let mut deadline = last.min(Instant::now() + PATIENCE);
    while !waiting.is_empty() && Instant::now() < deadline {
        for event in server.turn(deadline).map_err(failed)? {
            deadline = last.min(Instant::now() + PATIENCE);
            match event {
                Event::Joined(_, Ok(_)) => {}
                Event::Joined(rank, Err(cause)) => {
                    log::warn!("communicator `{}`: rank {rank} asks for the table of ranks: {cause}", context.name);
                }
                Event::Answered(rank) | Event::Left(rank) => _ = waiting.remove(&rank),
            }
        }
        // Who is refused is no rank of this world, which rank 0 would not have let come about with it. So it neither learns the
        // table nor takes the place of a rank that is still to come.
        server.drop_refused();
        server.answer(|_| vec![message.clone()]).map_err(failed)?;
    }
    if !waiting.is_empty() {
        log::warn!("communicator `{}`: ranks {waiting:?} have not come for the table of ranks", context.name);
    }
    Ok(())
}
