//! The joiner's side of the bootstrap: finds rank 0, proves itself, and waits for the table of all ranks, which it may have to get
//! from another rank.

use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::build::Build;
use super::context::{JoinContext, ROOT_KEY, RootAddress, RootRecord, StoreRecord};
use super::protocol::{
    Host, INFO_BYTES_MAX, JoinRequest, Joiner, JoinerState, Keys, NONCE_BYTES, PROOF_BYTES, Place, RankInfo,
    TABLE_BYTES_MAX, frame, frame_length, shared_secret,
};
use super::relay;
use super::reply::{JoinReply, REPLY_TIMEOUT, World};
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

/// How long the store may take to tell why rank 0 waits no longer.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// How many times every address must refuse before the joiner gives up. Rank 0 listens before it publishes its address,
/// so a refusal means a wrong address, a firewall, or that rank 0 is gone.
const REFUSALS_MAX: u32 = 5;

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Reads rank 0's address from the store and joins there.
pub(super) fn join_root(
    context: &JoinContext<'_>,
    mut describe: impl FnMut(&Keys) -> Result<RankInfo, InitError>,
) -> Result<(Keys, World), InitError> {
    loop {
        let outcome = join_at(context, find(context)?, &mut describe);
        // Where another rank is what cannot be reached, rank 0 was the right one.
        let is_elsewhere =
            matches!(outcome, Err(InitError::Unreachable { rank: 0, .. })) && context.store.skip_earlier_value();
        if !is_elsewhere {
            return outcome;
        }
    }
}

fn join_at(
    context: &JoinContext<'_>,
    (build, root): (Build, RootAddress),
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<(Keys, World), InitError> {
    let (keys, prepared) = prepare_join(context, &build, &root, describe);
    // Without TLS, a rank that cannot join can still tell rank 0 why.
    let (tls, described) = match prepared {
        Ok(Prepared { tls, joiner, listener }) => (tls, Ok((joiner, listener))),
        Err(error) => (None, Err(error)),
    };
    let request: JoinRequest = described.as_ref().map(|(joiner, _)| joiner.clone()).map_err(InitError::to_string);
    let request = frame(&request, INFO_BYTES_MAX).map_err(|cause| context.config_error(cause))?;
    let find = |rank: Rank, place: &Place, deadline| {
        let routes = routes(place, context.host).map_err(|cause| context.unreachable(rank, cause))?;
        connect_any(context, &keys, tls.as_ref(), rank, &routes, deadline)
    };
    let connected = find(Rank(0), &root.place, context.deadline);
    let listener = match described {
        Ok((_, listener)) => listener,
        Err(error) => {
            // Best effort: the other ranks learn of it now, or when their time is over.
            if let Err(unsent) = connected.map(|mut stream| stream.write_all(&request)) {
                let (name, rank) = (context.name, context.rank);
                log::warn!("communicator `{name}`: rank 0 could not be told that rank {rank} failed: {unsent}");
            }
            return Err(error);
        }
    };
    if let (Err(error), true) = (&connected, tls.is_some()) {
        report_tls_failure(context, &keys, &root.place, error);
    }
    let hear = |rank: Rank, mut stream: Stream, timeout: Duration| {
        let deadline = deadline_after(Instant::now(), timeout);
        exchange(&mut stream, &request, context.size, deadline).map_err(|error| match error.kind() {
            ErrorKind::TimedOut if rank == Rank(0) => context.missing(vec![0], timeout),
            ErrorKind::TimedOut => context.unreachable(rank, format!("no table of ranks came in {timeout:?}")),
            ErrorKind::UnexpectedEof if rank == Rank(0) => {
                context.unreachable(rank, "it hung up before all ranks had joined")
            }
            ErrorKind::UnexpectedEof => {
                context.unreachable(rank, "it hung up before it had passed the table of ranks on")
            }
            _ => context.unreachable(rank, error.to_string()),
        })
    };
    // Rank 0 announces the outcome when its own time is over.
    let reply = connected.and_then(|stream| hear(Rank(0), stream, root.timeout.saturating_add(REPLY_TIMEOUT)));
    let mut reply = reply.map_err(|error| failure_in_store(context).unwrap_or(error))?;
    if let (JoinReply::Ask { rank, place }, _) = &reply {
        let stream = find(*rank, place, Instant::now() + REPLY_TIMEOUT)?;
        reply = hear(*rank, stream, REPLY_TIMEOUT)?;
    }
    match reply {
        (JoinReply::Complete(world), message) => {
            if let Some(listener) = listener {
                relay::pass_on(context, &keys, tls.as_ref(), listener, &world, message)?;
            }
            Ok((keys, world))
        }
        (JoinReply::Ask { rank, .. }, _) => {
            Err(context.config_error(format!("the rank that should have the table of ranks asks rank {rank} for it")))
        }
        (JoinReply::Failed(failure), _) => Err(failure.into_error(context)),
    }
}

/// Why rank 0 waits no longer, if it has written that: another rank may have made it give up before this one reached it.
fn failure_in_store(context: &JoinContext<'_>) -> Option<InitError> {
    if !context.store.keeps_values() {
        return None;
    }
    let value = context.store.get(ROOT_KEY, STORE_TIMEOUT).ok()?;
    match serde_json::from_slice(&value).ok()? {
        StoreRecord { root: RootRecord::Ended(failure), .. } => Some(failure.into_error(context)),
        StoreRecord { root: RootRecord::Listening(_) | RootRecord::Failed { .. }, .. } => None,
    }
}

/// What a rank needs before it can join.
struct Prepared {
    tls: Option<Tls>,
    joiner: Joiner,
    /// In a large world, for those that it passes the table on to.
    listener: Option<TcpListener>,
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
        let (listener, place) = (context.size > STAR_RANKS).then(|| context.listen()).transpose()?.unzip();
        Ok(Prepared { tls, joiner: Joiner { info: describe(&keys)?, place }, listener })
    };
    let fitting = fit();
    (keys, fitting)
}

/// Tells rank 0, without TLS, why this rank cannot connect with TLS. If that fails too, rank 0 waits for its timeout.
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
        log::warn!("communicator `{name}`: rank 0 could not be told that rank {rank} failed: {error}");
    }
}

fn another_build(context: &JoinContext<'_>, root: &Build) -> InitError {
    let (rank, host, own) = (context.rank, &context.host.id, Build::own());
    context.config_error(format!("rank {rank} on host `{host}` has build {own}, rank 0 has {root}"))
}

/// What rank 0 was built from, and where it listens.
pub(super) fn find(context: &JoinContext<'_>) -> Result<(Build, RootAddress), InitError> {
    #[derive(Deserialize)]
    struct Built {
        build: Build,
    }
    let timeout = context.config.connect_timeout;
    let left = context.deadline.saturating_duration_since(Instant::now());
    let value = context.store.get(ROOT_KEY, left).map_err(|cause| {
        if Instant::now() >= context.deadline { context.missing(vec![0], timeout) } else { context.store_failed(cause) }
    })?;
    let record = serde_json::from_slice(&value).map_err(|error| match serde_json::from_slice(&value) {
        Ok(Built { build }) if build != Build::own() => another_build(context, &build),
        _ => context.store_failed(format!("the value is not what rank 0 writes: {error}")),
    })?;
    // A record of another build that can be read leads to rank 0, which then learns of the difference too.
    match record {
        StoreRecord { build, root: RootRecord::Listening(address) } => Ok((build, address)),
        StoreRecord { root: RootRecord::Failed { cause }, .. } => Err(context.unreachable(Rank(0), cause)),
        StoreRecord { root: RootRecord::Ended(failure), .. } => Err(failure.into_error(context)),
    }
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

/// Connects to `rank` by the first of `routes` that leads there. Tries again until the deadline.
pub(super) fn connect_any(
    context: &JoinContext<'_>,
    keys: &Keys,
    tls: Option<&Tls>,
    rank: Rank,
    routes: &[SocketAddr],
    deadline: Instant,
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
        if refusals >= REFUSALS_MAX || Instant::now() + pause >= deadline {
            if let Some(error) = lack {
                let cause = shortage::describe(&error, context.size, 1);
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
