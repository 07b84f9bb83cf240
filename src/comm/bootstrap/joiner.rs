//! The joiner's side of the bootstrap: finds rank 0, or its leader in a large world, proves itself, and waits for the table of all
//! ranks, which it may have to get from another rank.

use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::build::Build;
use super::context::{JoinContext, JoinFailure, REPLY_TIMEOUT, RootAddress, RootRecord, STORE_TIMEOUT, StoreRecord};
use super::groups::Groups;
use super::leader;
use super::protocol::{
    Host, INFO_BYTES_MAX, JoinRequest, Joiner, JoinerState, Keys, NONCE_BYTES, PROOF_BYTES, Place, TABLE_BYTES_MAX,
    frame, frame_length, shared_secret,
};
use super::rank_info::RankInfo;
use super::relay;
use super::reply::{JoinReply, World};
use super::tree::STAR_RANKS;
use crate::comm::framing::{read, write};
use crate::deadline::deadline_after;
use crate::error::InitError;
use crate::sys::limits;
use crate::transport::handshake::Channel;
use crate::transport::shortage;
use crate::transport::tls::{Protection, Stream, Tls};
use crate::types::Rank;

/// How long one address may take to answer while others are left to try.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How many times every address must refuse before the joiner gives up. Rank 0 listens before it publishes its address,
/// so a refusal means a wrong address, a firewall, or that rank 0 is gone.
const REFUSALS_MAX: u32 = 5;

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// After this part of its time a rank whose leader is not there looks whether rank 0 has the same world.
const FIRST_LOOK: u32 = 10;

/// For how long at most a record in the store that leads nowhere may be that of an earlier rank 0, which another one replaces: where
/// a launcher starts a job again with the same store, ranks may be there before the new rank 0.
const DOUBT: Duration = Duration::from_secs(10);

/// The pause before the record of a rank that has ended is read again.
const FIRST_REREAD: Duration = Duration::from_millis(100);

/// Reads from the store where rank 0 or the leader listens, and joins there.
pub(super) fn join_root(
    context: &JoinContext<'_>,
    mut describe: impl FnMut(&Keys) -> Result<RankInfo, InitError>,
) -> Result<(Keys, World), InitError> {
    let at = context.groups.listener_of(context.rank);
    let without_leader = &JoinContext { groups: Groups::one(context.groups.size), ..*context };
    let doubted_until = Instant::now() + doubt(context);
    let mut unreached: Option<([u8; 16], InitError)> = None;
    loop {
        let comm_id = unreached.as_ref().map(|(comm_id, _)| *comm_id);
        let (found_at, build, root) = find(context, unreached.take(), doubted_until).inspect_err(|error| {
            leader::say_why(context, RootRecord::Ended { comm_id, failure: JoinFailure::of(error) });
        })?;
        let (comm_id, theirs) = (root.keys.comm_id, root.world_size);
        let has_leader = found_at == at;
        // Otherwise it tells rank 0, which tells all.
        let context = if has_leader { context } else { without_leader };
        match join_at(context, (build, root), &mut describe) {
            Ok(joined) => return joined.receive_table(context),
            Err(InitError::Unreachable { rank: 0, .. }) if !has_leader => {
                let (rank, host, own) = (context.rank, &context.host.id, context.groups.size);
                let cause = format!("rank {rank} on host `{host}` has world size {own}, rank 0 has {theirs}");
                return Err(context.config_error(cause));
            }
            Err(error @ InitError::Unreachable { rank, .. }) if at.0 == rank => unreached = Some((comm_id, error)),
            Err(error) => return Err(error),
        }
    }
}

/// A rank that has joined, and what its leader or rank 0 has answered.
struct Joined {
    keys: Keys,
    tls: Option<Tls>,
    request: Vec<u8>,
    /// In a large world, for those that it passes the table on to.
    listener: Option<TcpListener>,
    reply: (JoinReply, Vec<u8>),
}

fn join_at(
    context: &JoinContext<'_>,
    (build, root): (Build, RootAddress),
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<Joined, InitError> {
    let (keys, prepared) = prepare_join(context, &build, &root, describe);
    // Without TLS, a rank that cannot join can still tell rank 0 why.
    let framed = |request: JoinRequest| frame(&request, INFO_BYTES_MAX).map_err(|cause| context.config_error(cause));
    let described =
        prepared.and_then(|Prepared { tls, joiner, listener, group }| Ok((tls, framed(Ok(joiner))?, listener, group)));
    let (tls, described) = match described {
        Ok((tls, request, listener, group)) => (tls, Ok((request, listener, group))),
        Err(error) => (None, Err(error)),
    };
    let at = context.groups.listener_of(context.rank);
    // Where a host is gone, nothing refuses: only the store may tell that a job began anew without it.
    let is_over = || context.store.keeps_values() && !is_listening(context, at, &keys);
    let connected = connect_at(context, (&keys, tls.as_ref()), (at, &root.place), context.deadline, is_over);
    let (request, listener, group) = match described {
        Ok(described) => described,
        Err(error) => {
            let failure = JoinFailure::Refused { cause: format!("rank {} failed: {error}", context.rank) };
            leader::say_why(context, RootRecord::Ended { comm_id: Some(keys.comm_id), failure });
            // Best effort: the other ranks learn of it now, or when their time is over.
            let told = connected.and_then(|mut stream| {
                let sent = stream.write_all(&framed(Err(error.to_string()))?);
                sent.map_err(|error| context.unreachable(at, error.to_string()))
            });
            if let Err(unsent) = told {
                let (name, rank) = (context.name, context.rank);
                log::warn!("communicator `{name}`: rank {at} could not be told that rank {rank} failed: {unsent}");
            }
            return Err(error);
        }
    };
    if let (Err(error), true) = (&connected, tls.is_some()) {
        report_tls_failure(context, &keys, &root.place, error);
    }
    // Rank 0 announces the outcome when its own time is over. A leader, which waits for that, says so if rank 0 does not.
    let replies = if at == Rank(0) { REPLY_TIMEOUT } else { 2 * REPLY_TIMEOUT };
    let timeout = root.timeout.saturating_add(replies);
    let reply = match group {
        None => connected
            .and_then(|mut stream| {
                exchange(&mut stream, &request, context.groups.size, deadline_after(Instant::now(), timeout))
                    .map_err(|error| context.lost(at, &error, timeout))
            })
            .map_err(|error| context.failure_in_store().unwrap_or(error)),
        Some(group) => {
            let told = connected.and_then(|mut stream| {
                let deadline = deadline_after(Instant::now(), timeout);
                write(&mut stream, &request, deadline).map_err(|error| context.lost(at, &error, timeout))?;
                Ok(stream)
            });
            leader::lead(context, &keys, tls.as_ref(), group, told, timeout)
        }
    };
    Ok(Joined { reply: reply?, keys, tls, request, listener })
}

impl Joined {
    /// The table of all ranks, from whom this rank is told to ask for it, and passes it on.
    fn receive_table(self, context: &JoinContext<'_>) -> Result<(Keys, World), InitError> {
        let Joined { keys, tls, request, listener, mut reply } = self;
        if let (JoinReply::Ask { rank, place }, _) = &reply {
            let (asked_at, deadline) = (Instant::now(), context.table_deadline());
            let mut stream = connect_at(context, (&keys, tls.as_ref()), (*rank, place), deadline, || false)?;
            let asked = exchange(&mut stream, &request, context.groups.size, deadline);
            reply = asked.map_err(|error| match error.kind() {
                ErrorKind::TimedOut => {
                    context.unreachable(*rank, format!("no table of ranks came in {:.1?}", asked_at.elapsed()))
                }
                ErrorKind::UnexpectedEof => {
                    context.unreachable(*rank, "it hung up before it had passed the table of ranks on")
                }
                _ => context.unreachable(*rank, error.to_string()),
            })?;
        }
        match reply {
            (JoinReply::Complete(world), message) => {
                if let Some(listener) = listener {
                    relay::pass_on(context, &keys, tls.as_ref(), listener, &world, message)?;
                }
                Ok((keys, world))
            }
            (JoinReply::Ask { rank, .. }, _) => {
                let cause = format!("the rank that should have the table of ranks asks rank {rank} for it");
                Err(context.config_error(cause))
            }
            (JoinReply::Failed(failure), _) => Err(failure.into_error(context)),
            (JoinReply::Members(_), _) => {
                let at = context.groups.listener_of(context.rank);
                Err(context.config_error(format!("rank {at} takes this rank for a leader")))
            }
        }
    }
}

/// What a rank needs before it can join.
struct Prepared {
    tls: Option<Tls>,
    joiner: Joiner,
    /// In a large world, for those that it passes the table on to.
    listener: Option<TcpListener>,
    /// Of a leader, for its group.
    group: Option<TcpListener>,
}

/// The keys to join with; and what else it takes, or how this rank does not fit to rank 0.
fn prepare_join(
    context: &JoinContext<'_>,
    build: &Build,
    root: &RootAddress,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> (Keys, Result<Prepared, InitError>) {
    let shared = match shared_secret(context.config) {
        Ok(shared) => shared,
        Err(error) => return (root.keys.clone(), Err(error)),
    };
    // Where rank 0 has no job secret, this rank does not use its own either, so that it can tell rank 0 of the difference.
    let keys = root.keys.mixed(shared.as_ref().filter(|_| root.uses_job_secret));
    let fit = || {
        let differ = |what: &str, ours: &str, theirs: &str| {
            Err(context.config_error(format!("rank {} has {ours}, rank 0 {theirs}: see {what}", context.rank)))
        };
        if *build != Build::own() {
            return Err(another_build(context, build));
        }
        match (shared.is_some(), root.uses_job_secret) {
            (true, false) => return differ("job_secret", "a job secret", "none"),
            (false, true) => return differ("job_secret", "no job secret", "one"),
            _ => {}
        }
        let own = Protection::of(context.config);
        if own != root.protection {
            return differ("tls", &own.to_string(), &root.protection.to_string());
        }
        let tls = Tls::new(context.config, &keys.secret)?;
        let (listener, place) = (context.groups.size > STAR_RANKS).then(|| context.listen()).transpose()?.unzip();
        let joiner = Joiner { info: describe(&keys)?, place };
        // Last: this rank will join unless rank 0 cannot be reached.
        let group = context.groups.leads(context.rank).then(|| leader::listen(context, root)).transpose()?;
        Ok(Prepared { tls, joiner, listener, group })
    };
    let fitting = fit();
    (keys, fitting)
}

/// Tells rank 0 or the leader, without TLS, why this rank cannot connect with TLS. If that fails too, they wait for their timeout.
fn report_tls_failure(context: &JoinContext<'_>, keys: &Keys, root: &Place, error: &InitError) {
    let request: JoinRequest = Err(error.to_string());
    let routes = routes(root, context.host).unwrap_or_default();
    let Ok(request) = frame(&request, INFO_BYTES_MAX) else { return };
    let timeout = context.deadline.saturating_duration_since(Instant::now()).min(CONNECT_TIMEOUT);
    let reported = routes.iter().any(|route| {
        let connected = connect(*route, keys, None, context.rank, timeout);
        connected.is_ok_and(|mut stream| write(&mut stream, &request, deadline_after(Instant::now(), timeout)).is_ok())
    });
    if !reported {
        let (name, rank) = (context.name, context.rank);
        let at = context.groups.listener_of(rank);
        log::warn!("communicator `{name}`: rank {at} could not be told that rank {rank} failed: {error}");
    }
}

fn another_build(context: &JoinContext<'_>, root: &Build) -> InitError {
    let (rank, host, own) = (context.rank, &context.host.id, Build::own());
    context.config_error(format!("rank {rank} on host `{host}` has build {own}, rank 0 has {root}"))
}

/// Where this rank joins: at rank 0 or its leader, which was built from this. It could not be reached there for the communicator
/// in `unreached`. What rank 0 says of its end may be an earlier one's until `doubted_until`.
pub(super) fn find(
    context: &JoinContext<'_>,
    unreached: Option<([u8; 16], InitError)>,
    doubted_until: Instant,
) -> Result<(Rank, Build, RootAddress), InitError> {
    let at = context.groups.listener_of(context.rank);
    let is_doubtful = |error: &InitError| {
        !matches!(error, InitError::Store { .. }) && (at != Rank(0) || context.store.keeps_values())
    };
    let until = if at == Rank(0) { doubted_until } else { context.deadline };
    let mut pause = FIRST_REREAD;
    // What follows a record that leads nowhere is on its way, unless the ranks are to make another communicator first.
    let follows = unreached.is_some() && !context.store.keeps_values();
    let mut deadline = if follows { context.deadline.min(Instant::now() + doubt(context)) } else { context.deadline };
    loop {
        let record = match (await_record(context, at, deadline), &unreached) {
            (Ok((_, record)), _) if is_earlier(context, &record, unreached.as_ref()) => {
                deadline = context.deadline;
                continue;
            }
            // Nothing follows the record that led nowhere.
            (Err(InitError::Missing { .. } | InitError::Store { .. }), Some((_, error))) if at == Rank(0) => {
                return Err(error.clone());
            }
            (record, _) => record,
        };
        let comm_id = record.as_ref().ok().and_then(|(_, record)| record.root.comm_id());
        let found = record.and_then(|(from, record)| {
            let (build, root) = address_in(context, from, record)?;
            Ok((from, build, root))
        });
        let error = match (found, &unreached) {
            (Ok(_), Some((unreached, error))) if comm_id == Some(*unreached) => error.clone(),
            (Err(error), _) if is_doubtful(&error) => error,
            (found, _) => return found,
        };
        if at != Rank(0) {
            // Another communicator may have left the leader's record in the store. And a leader may be silent since rank 0 has not
            // come, or has given up.
            let root = read_record(context, Rank(0), STORE_TIMEOUT).and_then(|root| address_in(context, Rank(0), root));
            match root {
                Ok((_, root)) if comm_id == Some(root.keys.comm_id) => return Err(error),
                Err(ended) if !matches!(ended, InitError::Store { .. }) => return Err(ended),
                _ => {}
            }
        }
        if Instant::now() + pause >= until {
            return Err(error);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// For how long what the store says may be about to change.
fn doubt(context: &JoinContext<'_>) -> Duration {
    (context.config.connect_timeout / FIRST_LOOK).min(DOUBT)
}

/// Whether a record, of a store that keeps none, says how a communicator ended that is over for this call: the rank took part by an
/// earlier call, or was missed there. The record of the next communicator may follow.
fn is_earlier(context: &JoinContext<'_>, record: &StoreRecord, unreached: Option<&([u8; 16], InitError)>) -> bool {
    let RootRecord::Ended { comm_id, failure } = &record.root else { return false };
    let is_this = || unreached.is_some_and(|(unreached, _)| *comm_id == Some(*unreached));
    let has_missed = matches!(failure, JoinFailure::Missing { missing, .. } if missing.contains(&context.rank.0));
    !context.store.keeps_values() && (has_missed || !is_this())
}

/// What has been published where this rank joins, once it is there. Of rank 0 in place of the leader, if rank 0 has another world
/// or waits no longer: the leader may never come then.
fn await_record(context: &JoinContext<'_>, at: Rank, deadline: Instant) -> Result<(Rank, StoreRecord), InitError> {
    let left = || deadline.saturating_duration_since(Instant::now());
    if at != Rank(0) {
        match read_record(context, at, left().min(context.config.connect_timeout / FIRST_LOOK)) {
            Err(InitError::Store { .. }) => {}
            record => return Ok((at, record?)),
        }
        // A leader publishes after rank 0.
        let record = read_record(context, Rank(0), left())?;
        match &record.root {
            RootRecord::Listening(root) if root.world_size as usize == context.groups.size => {}
            _ => return Ok((Rank(0), record)),
        }
    }
    Ok((at, read_record(context, at, left())?))
}

/// What rank 0 or a leader has published.
fn read_record(context: &JoinContext<'_>, at: Rank, timeout: Duration) -> Result<StoreRecord, InitError> {
    #[derive(Deserialize)]
    struct Built {
        build: Build,
    }
    let value = context.published(at, timeout).map_err(|cause| match Instant::now() >= context.deadline {
        true => context.missing(vec![at.0], context.config.connect_timeout),
        false => context.store_failed(at, cause),
    })?;
    serde_json::from_slice(&value).map_err(|error| match serde_json::from_slice(&value) {
        Ok(Built { build }) if build != Build::own() => another_build(context, &build),
        _ => context.store_failed(at, format!("the value is not what rank {at} writes: {error}")),
    })
}

/// Where rank 0 or a leader listens that has published this, and what it was built from.
fn address_in(context: &JoinContext<'_>, at: Rank, record: StoreRecord) -> Result<(Build, RootAddress), InitError> {
    // A record of another build that can be read leads to rank 0, which then learns of the difference too.
    match record.root {
        RootRecord::Listening(address) => Ok((record.build, address)),
        RootRecord::Failed { cause } => Err(context.unreachable(Rank(0), cause)),
        RootRecord::Ended { failure, .. } => Err(failure.into_error(context)),
        RootRecord::RootEnded if at != Rank(0) => {
            Err(context.unreachable(at, "rank 0 waits no longer, but does not say why"))
        }
        RootRecord::RootEnded => Err(context.store_failed(at, "the value is a leader's".to_owned())),
    }
}

/// Whether rank 0 or a leader still says in the store that it listens for the communicator of these keys; also where the store
/// does not answer.
fn is_listening(context: &JoinContext<'_>, at: Rank, keys: &Keys) -> bool {
    let record = read_record(context, at, STORE_TIMEOUT).map(|record| record.root);
    let other = |root: &RootRecord| !matches!(root, RootRecord::Listening(root) if root.keys.comm_id == keys.comm_id);
    !record.as_ref().is_ok_and(other)
}

/// The addresses at which to try a rank, the most likely first. The error says why there are none.
pub(super) fn routes(place: &Place, here: &Host) -> Result<Vec<SocketAddr>, String> {
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let same_host = place.host.id == here.id && place.host.machine == here.machine;
    let mut addresses = if same_host { loopback.to_vec() } else { Vec::new() };
    // From another machine, a loopback address leads to this machine and not to that rank's.
    let leads_there = |address: &IpAddr| place.host.machine == here.machine || !address.is_loopback();
    addresses.extend(place.addresses.iter().filter(|address| leads_there(address)));
    if addresses.is_empty() {
        return Err(format!(
            "it runs on host `{}` and this rank on host `{}`, but it has loopback addresses only: {:?}; \
             see the option socket_ifname",
            place.host.id, here.id, place.addresses
        ));
    }
    Ok(addresses.into_iter().map(|address| SocketAddr::new(address, place.port)).collect())
}

/// Why one address did not lead to a rank.
enum ConnectError {
    /// Nothing listens there, or something that is not that rank.
    Fatal(String),
    /// Another attempt may succeed.
    Retry(String),
    /// This process lacks a resource, such as file descriptors.
    Shortage(io::Error),
}

/// Connects to a rank that listens at `place`; see [`connect_any`].
fn connect_at(
    context: &JoinContext<'_>,
    (keys, tls): (&Keys, Option<&Tls>),
    (rank, place): (Rank, &Place),
    deadline: Instant,
    is_over: impl Fn() -> bool,
) -> Result<Stream, InitError> {
    let routes = routes(place, context.host).map_err(|cause| context.unreachable(rank, cause))?;
    connect_any(context, keys, tls, rank, &routes, deadline, is_over)
}

/// Connects to `rank` by the first of `routes` that leads there. Tries again until the deadline, or until it is over there, which is
/// asked where an address is silent.
pub(super) fn connect_any(
    context: &JoinContext<'_>,
    keys: &Keys,
    tls: Option<&Tls>,
    rank: Rank,
    routes: &[SocketAddr],
    deadline: Instant,
    is_over: impl Fn() -> bool,
) -> Result<Stream, InitError> {
    let mut refusals = 0;
    let mut pause = FIRST_PAUSE;
    loop {
        let mut causes = Vec::with_capacity(routes.len());
        let (mut all_fatal, mut lack) = (true, None);
        for route in routes {
            let left = deadline.saturating_duration_since(Instant::now());
            match connect(*route, keys, tls, context.rank, left.min(CONNECT_TIMEOUT)) {
                Ok(stream) => return Ok(stream),
                Err(ConnectError::Fatal(cause)) => causes.push(format!("{route}: {cause}")),
                Err(ConnectError::Retry(cause)) => {
                    all_fatal = false;
                    causes.push(format!("{route}: {cause}"));
                }
                Err(ConnectError::Shortage(error)) => {
                    all_fatal = false;
                    lack = Some(error);
                }
            }
        }
        refusals += u32::from(all_fatal);
        let is_over = !all_fatal && is_over();
        if refusals >= REFUSALS_MAX || Instant::now() + pause >= deadline || is_over {
            if let Some(error) = lack.filter(|_| !is_over) {
                let cause = shortage::describe(&error, context.groups.size, 1);
                let what = format!("a connection to rank {rank}");
                return Err(context.os_error(&what, &io::Error::new(error.kind(), cause)));
            }
            let hint = format!(" (either rank {rank} has ended, or a firewall stands between)");
            let hint = if all_fatal { &hint } else { "" };
            return Err(context.unreachable(rank, format!("{}{hint}", causes.join("; "))));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Connects to one address. Both sides have proved that they know the secret when this returns.
fn connect(
    route: SocketAddr,
    keys: &Keys,
    tls: Option<&Tls>,
    rank: Rank,
    timeout: Duration,
) -> Result<Stream, ConnectError> {
    let deadline = Instant::now() + timeout;
    // The system call rejects a timeout of zero.
    let connected = TcpStream::connect_timeout(&route, timeout.max(Duration::from_millis(1)));
    let socket = connected.map_err(|error| match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionReset => {
            ConnectError::Retry(error.to_string())
        }
        _ if limits::is_shortage(&error) => ConnectError::Shortage(error),
        _ => ConnectError::Fatal(error.to_string()),
    })?;
    let failed = |error: io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => ConnectError::Retry("it hung up".to_string()),
        ErrorKind::InvalidData => ConnectError::Fatal(error.to_string()),
        _ => ConnectError::Retry(error.to_string()),
    };
    socket.set_nodelay(true).map_err(failed)?;
    let mut stream = Stream::open(socket, tls);
    let joiner = JoinerState::new(rank).map_err(failed)?;
    write(&mut stream, &joiner.hello(), deadline).map_err(failed)?;
    let challenge = read(&mut stream, NONCE_BYTES + PROOF_BYTES, deadline).map_err(failed)?;
    let challenge = challenge.as_slice().try_into().expect("as many bytes as were asked for");
    let proof = joiner.answer(keys, stream.binding(), challenge);
    let proof =
        proof.ok_or_else(|| ConnectError::Fatal("something answers that does not know the secret".to_string()))?;
    write(&mut stream, &proof, deadline).map_err(failed)?;
    Ok(stream)
}

/// Sends the request. Returns the answer, and its bytes without the length.
pub(super) fn exchange(
    stream: &mut Stream,
    request: &[u8],
    size: usize,
    deadline: Instant,
) -> io::Result<(JoinReply, Vec<u8>)> {
    write(stream, request, deadline)?;
    let length = read(stream, size_of::<u32>(), deadline)?;
    let length = frame_length(&length, TABLE_BYTES_MAX).map_err(io::Error::other)?;
    let message = read(stream, length, deadline)?;
    Ok((JoinReply::parse(&message, size).map_err(io::Error::other)?, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(id: &str, machine: &str) -> Host {
        Host { id: id.to_string(), machine: machine.to_string() }
    }

    fn place(addresses: &[&str]) -> Place {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        Place { host: host("a", "m"), addresses, port: 7 }
    }

    fn way(addresses: &[&str], here: &Host) -> Vec<String> {
        routes(&place(addresses), here).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_rank_of_the_same_host_tries_loopback_first() {
        assert_eq!(way(&["10.0.0.1"], &host("a", "m")), ["127.0.0.1:7", "[::1]:7", "10.0.0.1:7"]);
        assert_eq!(way(&["10.0.0.1"], &host("b", "m")), ["10.0.0.1:7"]);
        assert_eq!(way(&["127.0.0.1"], &host("b", "m")), ["127.0.0.1:7"]);
        assert_eq!(way(&["127.0.0.1", "fd00::1"], &host("a", "n")), ["[fd00::1]:7"]);
    }

    #[test]
    fn loopback_leads_nowhere_on_another_machine() {
        let error = routes(&place(&["127.0.0.1", "::1"]), &host("b", "n")).unwrap_err();
        assert!(error.contains("`a`") && error.contains("`b`") && error.contains("127.0.0.1, ::1"), "{error}");
    }
}
