//! The root's side of the bootstrap: rank 0 takes joiners in and tells all of them the outcome.

use std::net::TcpListener;
use std::time::Instant;

use super::build::Build;
use super::context::{JoinContext, JoinFailure, ROOT_KEY, RootAddress, RootRecord, StoreRecord};
use super::protocol::{Joiner, Keys, Place, RankInfo, shared_secret};
use super::reply::{JoinReply, REPLY_TIMEOUT, World};
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
        publish(context, RootRecord::Failed { cause: error.to_string() })?;
        Err(error)
    };
    let Prepared { keys, tls, own, listener, address, tuning } = match prepare(context, describe) {
        Ok(prepared) => prepared,
        Err(error) => return failed(error),
    };
    let listening = |error: std::io::Error| context.os_error("the connections of joining ranks", &error);
    let mut server = match Server::new(context.name, context.size, &keys, tls.as_ref(), listener) {
        Ok(server) => server,
        Err(error) => return failed(listening(error)),
    };
    publish(context, RootRecord::Listening(address))?;
    let admitted = admit_all(context, &mut server, own).and_then(|(ranks, places)| {
        let world = World { ranks, tuning, scratch_bytes: context.config.scratch_bytes };
        let answers = answers(&world, &places).map_err(|cause| context.config_error(cause))?;
        Ok((world, answers))
    });
    let (outcome, answers) = match admitted {
        Ok((world, answers)) => (Ok(world), answers),
        Err(error) => {
            let failure = JoinFailure::of(&error);
            // Before any connection ends: a rank that finds none looks here once more.
            if context.store.keeps_values()
                && let Err(unsaid) = publish(context, RootRecord::Ended(failure.clone()))
            {
                log::warn!("ranks that have not reached rank 0 may not learn why it waits no longer: {unsaid}");
            }
            let failed = JoinReply::Failed(failure).message().map_err(|cause| context.config_error(cause))?;
            (Err(error), vec![failed.into(); context.size])
        }
    };
    // Where one beyond the world has come, all have failed alike.
    let answer = |rank: Rank| answers[rank.index().min(context.size - 1)].clone();
    server.finish(answer, Instant::now() + REPLY_TIMEOUT).map_err(listening)?;
    Ok((keys, outcome?))
}

/// What each rank is told: the table, or from which rank to get it.
pub(super) fn answers(world: &World, places: &[Option<Place>]) -> Result<Vec<Arc<[u8]>>, String> {
    let tree = world.tree();
    let complete: Arc<[u8]> = JoinReply::Complete(world.clone()).message()?.into();
    let answer = |rank: usize| match tree.parent(Rank::from(rank)) {
        Rank(0) => Ok(complete.clone()),
        parent => {
            let place = places[parent.index()].clone();
            let place = place.ok_or_else(|| format!("rank {parent} does not say where it listens"))?;
            JoinReply::Ask { rank: parent, place }.message().map(Arc::from)
        }
    };
    (0..places.len()).map(answer).collect()
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
        timeout: context.config.connect_timeout,
        keys: published,
        uses_job_secret: shared.is_some(),
        protection: Protection::of(context.config),
    };
    Ok(Prepared { keys, tls, own, listener, address, tuning })
}

fn publish(context: &JoinContext<'_>, root: RootRecord) -> Result<(), InitError> {
    let record = StoreRecord { build: Build::own(), root };
    let value = serde_json::to_vec(&record).map_err(|error| context.store_failed(error.to_string()))?;
    context.store.set(ROOT_KEY, &value).map_err(|cause| context.store_failed(cause))
}

/// Waits for all ranks. Returns them in order, and where each listens.
fn admit_all(
    context: &JoinContext<'_>,
    server: &mut Server<'_>,
    own: RankInfo,
) -> Result<(Vec<RankInfo>, Vec<Option<Place>>), InitError> {
    let (mut roster, mut places) = (Roster::new(own), vec![None; context.size]);
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
                Event::Left(rank) => roster.remove(rank),
                Event::Answered(_) => {}
            }
        }
    }
}
