//! The root's side of the bootstrap: rank 0 takes joiners in, by themselves or through their [leaders](super::groups), and tells
//! all of them the outcome.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::Instant;

use super::context::{JoinContext, JoinFailure, REPLY_TIMEOUT, RootAddress, RootRecord};
use super::groups::Groups;
use super::protocol::{Joiner, Keys, Place, shared_secret};
use super::rank_info::RankInfo;
use super::reply::{JoinReply, World};
use super::roster::Roster;
use super::server::{Event, Server};
use crate::algo::Tuning;
use crate::error::InitError;
use crate::sync::Arc;
use crate::transport::tls::{Protection, Tls};
use crate::types::Rank;

/// Publishes this rank's address and waits for all ranks.
pub(super) fn serve(
    context: &JoinContext<'_>,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<(Keys, World), InitError> {
    let failed = |error: InitError| {
        context.publish(Rank(0), RootRecord::Failed { cause: error.to_string() })?;
        Err(error)
    };
    let Prepared { keys, tls, own, listener, address, tuning } = match prepare(context, describe) {
        Ok(prepared) => prepared,
        Err(error) => return failed(error),
    };
    let listening = |error: std::io::Error| context.os_error("the connections of joining ranks", &error);
    let mut server = match Server::new(context.name, context.groups, &keys, tls.as_ref(), listener) {
        Ok(server) => server,
        Err(error) => return failed(listening(error)),
    };
    context.publish(Rank(0), RootRecord::Listening(address))?;
    let mut roster = Roster::new(own);
    let admitted = admit_all(context, &mut server, &mut roster).and_then(|(ranks, places)| {
        let world = World { ranks, tuning, scratch_bytes: context.config.scratch_bytes };
        let answers = answers(&world, &places, context.groups).map_err(|cause| context.config_error(cause))?;
        Ok((world, answers))
    });
    let (outcome, answers) = match admitted {
        Ok((world, answers)) => (Ok(world), answers),
        Err(error) => {
            let failure = JoinFailure::of(&error);
            // Before any connection ends: a rank that finds none looks here once more. Those that wait for a leader look under its key.
            let mut lacking = roster.missing().into_iter().map(Rank).filter(|rank| context.groups.leads(*rank));
            let mut tell = || {
                context
                    .publish(Rank(0), RootRecord::Ended { comm_id: Some(keys.comm_id), failure: failure.clone() })?;
                lacking.try_for_each(|leader| context.publish(leader, RootRecord::RootEnded))
            };
            if let Err(unsaid) = tell() {
                log::warn!("ranks that have not reached rank 0 may not learn why it waits no longer: {unsaid}");
            }
            let failed = JoinReply::Failed(failure).message().map_err(|cause| context.config_error(cause))?;
            (Err(error), vec![vec![failed.into()]; context.groups.size])
        }
    };
    // Where one beyond the world has come, all have failed alike.
    let answer = |rank: Rank| answers[rank.index().min(context.groups.size - 1)].clone();
    let deadline = if outcome.is_ok() { context.table_deadline() } else { Instant::now() + REPLY_TIMEOUT };
    let finished = server.finish(answer, deadline).map_err(listening);
    let world = outcome?;
    finished?;
    Ok((keys, world))
}

/// The messages to each rank: the table, or from which rank to get it; to a leader what to tell its members, and then its own. To
/// the members, none.
pub(super) fn answers(world: &World, places: &[Option<Place>], groups: Groups) -> Result<Vec<Vec<Arc<[u8]>>>, String> {
    let tree = world.tree(groups);
    let complete: Arc<[u8]> = JoinReply::Complete(world.clone()).message()?.into();
    let ask = |rank: Rank| {
        let place = places[rank.index()].clone();
        let place = place.ok_or_else(|| format!("rank {rank} does not say where it listens"))?;
        Ok::<_, String>(JoinReply::Ask { rank, place })
    };
    let answer = |rank: Rank| {
        let mut messages = Vec::new();
        if groups.listener_of(rank) != Rank(0) {
            return Ok(messages);
        }
        let members = groups.members(rank);
        if !members.is_empty() {
            let replies = members.map(|member| Ok((member, ask(tree.parent(Rank(member)))?)));
            messages.push(JoinReply::Members(replies.collect::<Result<BTreeMap<_, _>, String>>()?).message()?.into());
        }
        messages.push(match tree.parent(rank) {
            Rank(0) => complete.clone(),
            parent => ask(parent)?.message()?.into(),
        });
        Ok(messages)
    };
    (0..places.len()).map(Rank::from).map(answer).collect()
}

/// What rank 0 needs before it can accept joiners.
struct Prepared {
    keys: Keys,
    tls: Option<Tls>,
    own: RankInfo,
    listener: TcpListener,
    address: RootAddress,
    tuning: Tuning,
}

fn prepare(
    context: &JoinContext<'_>,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<Prepared, InitError> {
    let tuning = context.tuning()?;
    let published = context.new_keys()?;
    let shared = shared_secret(context.config)?;
    let keys = published.mixed(shared.as_ref());
    let tls = Tls::new(context.config, &keys.secret)?;
    let own = describe(&keys)?;
    let (listener, place) = context.listen()?;
    let address = RootAddress {
        place,
        world_size: own.common.world_size,
        timeout: context.config.connect_timeout,
        keys: published,
        uses_job_secret: shared.is_some(),
        protection: Protection::of(context.config),
    };
    Ok(Prepared { keys, tls, own, listener, address, tuning })
}

/// Waits for all ranks. Returns them in order, and where each listens.
fn admit_all(
    context: &JoinContext<'_>,
    server: &mut Server<'_>,
    roster: &mut Roster,
) -> Result<(Vec<RankInfo>, Vec<Option<Place>>), InitError> {
    let mut places = vec![None; context.groups.size];
    loop {
        if let Some(table) = roster.table() {
            return Ok((table, places));
        }
        if Instant::now() >= context.deadline {
            return Err(context.missing(roster.missing(), context.config.connect_timeout));
        }
        for event in server.turn(context.deadline).map_err(|error| context.os_error("epoll", &error))? {
            match event {
                Event::Joined(rank, joiner) => {
                    let Joiner { info, place } = *joiner.map_err(|cause| context.config_error(cause))?;
                    roster.add(info).map_err(|cause| context.config_error(cause))?;
                    places[rank.index()] = place;
                }
                Event::Left(rank) => {
                    roster.remove(rank);
                    context.groups.members(rank).for_each(|member| roster.remove(Rank(member)));
                }
                Event::Answered(_) => {}
            }
        }
    }
}
