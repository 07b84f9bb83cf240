//! The joiner's side of the bootstrap: finds rank 0, proves itself, and waits for the table of all ranks.

use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::build::Build;
use super::context::{Host, JoinContext, ROOT_KEY, RootAddress, RootRecord, StoreRecord};
use super::protocol::{
    INFO_BYTES_MAX, JoinRequest, JoinerState, Keys, NONCE_BYTES, PROOF_BYTES, RankInfo, TABLE_BYTES_MAX, frame,
    frame_length, shared_secret,
};
use super::reply::{JoinReply, World};
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

/// How much longer than rank 0 to wait, since rank 0 announces the outcome when its own time is over.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

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
        let is_elsewhere = matches!(outcome, Err(InitError::Unreachable { .. })) && context.store.skip_earlier_value();
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
    let routes = routes(&root, context.host).map_err(|cause| context.unreachable(Rank(0), cause))?;
    let (keys, prepared) = prepare_join(context, &build, &root, describe);
    // Without TLS, a rank that cannot join can still tell rank 0 why.
    let (tls, described) = match prepared {
        Ok((tls, info)) => (tls, Ok(info)),
        Err(error) => (None, Err(error)),
    };
    let request: JoinRequest = described.clone().map_err(|error| error.to_string());
    let request = frame(&request, INFO_BYTES_MAX).map_err(|cause| context.config_error(cause))?;
    let connected = connect_any(context, &keys, tls.as_ref(), &routes);
    if let Err(error) = described {
        // Best effort: the other ranks learn of it now, or when their time is over.
        if let Err(unsent) = connected.map(|mut stream| stream.write_all(&request)) {
            let (name, rank) = (context.name, context.rank);
            log::warn!("communicator `{name}`: rank 0 could not be told that rank {rank} failed: {unsent}");
        }
        return Err(error);
    }
    if let (Err(error), true) = (&connected, tls.is_some()) {
        report_tls_failure(context, &keys, &routes, error);
    }
    let timeout = root.timeout.saturating_add(REPLY_TIMEOUT);
    let reply = connected.and_then(|mut stream| {
        exchange(&mut stream, &request, context.size, deadline_after(Instant::now(), timeout)).map_err(|error| {
            match error.kind() {
                ErrorKind::TimedOut => context.missing(vec![0], timeout),
                ErrorKind::UnexpectedEof => context.unreachable(Rank(0), "it hung up before all ranks had joined"),
                _ => context.unreachable(Rank(0), error.to_string()),
            }
        })
    });
    match reply.map_err(|error| failure_in_store(context).unwrap_or(error))? {
        JoinReply::Complete(world) => Ok((keys, world)),
        JoinReply::Failed(failure) => Err(failure.into_error(context)),
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

/// The keys to join with; and this rank's side of TLS with its description, or how it does not fit to rank 0.
fn prepare_join(
    context: &JoinContext<'_>,
    build: &Build,
    root: &RootAddress,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> (Keys, Result<(Option<Tls>, RankInfo), InitError>) {
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
        Ok((Tls::new(context.config, &keys.secret)?, describe(&keys)?))
    };
    let fitting = fit();
    (keys, fitting)
}

/// Tells rank 0, without TLS, why this rank cannot connect with TLS. If that fails too, rank 0 waits for its timeout.
fn report_tls_failure(context: &JoinContext<'_>, keys: &Keys, routes: &[SocketAddr], error: &InitError) {
    let request: JoinRequest = Err(error.to_string());
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

/// The addresses at which to try rank 0, the most likely first. The error says why there are none.
pub(super) fn routes(root: &RootAddress, here: &Host) -> Result<Vec<SocketAddr>, String> {
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let same_host = root.host.id == here.id && root.host.machine == here.machine;
    let mut addresses = if same_host { loopback.to_vec() } else { Vec::new() };
    // From another machine, a loopback address leads to this machine and not to rank 0's.
    let leads_there = |address: &IpAddr| root.host.machine == here.machine || !address.is_loopback();
    addresses.extend(root.addresses.iter().filter(|address| leads_there(address)));
    if addresses.is_empty() {
        return Err(format!(
            "it runs on host `{}` and this rank on host `{}`, but it has loopback addresses only: {:?}; \
             see the option socket_ifname",
            root.host.id, here.id, root.addresses
        ));
    }
    Ok(addresses.into_iter().map(|address| SocketAddr::new(address, root.port)).collect())
}

/// Why one address did not lead to rank 0.
enum ConnectError {
    /// Nothing listens there, or something that is not rank 0.
    Fatal(String),
    /// Another attempt may succeed.
    Retry(String),
    /// This process lacks a resource, such as file descriptors.
    Shortage(io::Error),
}

/// Connects to rank 0 by the first of `routes` that leads there. Tries again until the deadline.
fn connect_any(
    context: &JoinContext<'_>,
    keys: &Keys,
    tls: Option<&Tls>,
    routes: &[SocketAddr],
) -> Result<Stream, InitError> {
    let mut refusals = 0;
    let mut pause = FIRST_PAUSE;
    loop {
        let mut causes = Vec::with_capacity(routes.len());
        let (mut all_fatal, mut lack) = (true, None);
        for route in routes {
            let left = context.deadline.saturating_duration_since(Instant::now());
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
        if refusals >= REFUSALS_MAX || Instant::now() + pause >= context.deadline {
            if let Some(error) = lack {
                let cause = shortage::describe(&error, context.size);
                return Err(context.os_error("a connection to rank 0", &io::Error::new(error.kind(), cause)));
            }
            let hint = if all_fatal { " (either rank 0 has ended, or a firewall stands between)" } else { "" };
            return Err(context.unreachable(Rank(0), format!("{}{hint}", causes.join("; "))));
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

fn exchange(stream: &mut Stream, request: &[u8], size: usize, deadline: Instant) -> io::Result<JoinReply> {
    write(stream, request, deadline)?;
    let length = read(stream, size_of::<u32>(), deadline)?;
    let length = frame_length(&length, TABLE_BYTES_MAX).map_err(io::Error::other)?;
    JoinReply::parse(&read(stream, length, deadline)?, size).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::bootstrap::protocol::Secret;

    fn host(id: &str, machine: &str) -> Host {
        Host { id: id.to_string(), machine: machine.to_string() }
    }

    fn root(addresses: &[&str]) -> RootAddress {
        RootAddress {
            host: host("a", "m"),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            port: 7,
            timeout: Duration::from_secs(1),
            keys: Keys { comm_id: [0; 16], secret: Secret::new([0; 32]) },
            uses_job_secret: false,
            protection: Protection::None,
        }
    }

    fn way(addresses: &[&str], here: &Host) -> Vec<String> {
        routes(&root(addresses), here).unwrap().iter().map(ToString::to_string).collect()
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
        let error = routes(&root(&["127.0.0.1", "::1"]), &host("b", "n")).unwrap_err();
        assert!(error.contains("`a`") && error.contains("`b`") && error.contains("127.0.0.1, ::1"), "{error}");
    }
}
