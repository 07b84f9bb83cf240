//! The side of every rank but 0 in the rendezvous: finds rank 0, proves itself, and waits for the table.

use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::protocol::{
    Arrival, INFO_LIMIT, Introduction, Keys, NONCE_BYTES, PROOF_BYTES, RankInfo, Reply, TABLE_LIMIT, World, frame,
    frame_length, shared_secret,
};
use super::{Build, Host, Notice, Party, ROOT_KEY, Record, RootNotice, later};
use crate::comm::framing::{read, write};
use crate::error::InitError;
use crate::sys::limits;
use crate::transport::handshake::Channel;
use crate::transport::shortage;
use crate::transport::tls::{Protection, Stream, Tls};
use crate::types::Rank;

/// How long one address may take to answer, while others are left to try.
const CALL_PATIENCE: Duration = Duration::from_secs(10);

/// How much longer than rank 0 to wait for the outcome that rank 0 announces when its time is over.
const REPLY_GRACE: Duration = Duration::from_secs(30);

/// How often to hear "no" from every address before believing it. Rank 0 listens before it says where, so a refusal
/// means a wrong address, a firewall, or that rank 0 is gone.
const REFUSALS: u32 = 5;

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Learns where rank 0 listens and joins there.
pub(super) fn attend(
    party: &Party<'_>,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<(Keys, World), InitError> {
    let (build, record) = find(party)?;
    let routes = routes(&record, party.host).map_err(|cause| party.unreachable(Rank(0), cause))?;
    let (keys, prepared) = prepare(party, &build, &record, describe);
    // In the open, who cannot take part can still say so.
    let (tls, described) = match prepared {
        Ok((tls, info)) => (tls, Ok(info)),
        Err(error) => (None, Err(error)),
    };
    let arrival: Arrival = described.clone().map_err(|error| error.to_string());
    let arrival = frame(&arrival, INFO_LIMIT).map_err(|cause| party.misfit(cause))?;
    let reached = reach(party, &keys, tls.as_ref(), &routes);
    if let Err(error) = described {
        // Best effort: the others learn of it at once, or when their time is over.
        if let Err(unsent) = reached.map(|mut stream| stream.write_all(&arrival)) {
            let (name, rank) = (party.name, party.rank);
            log::warn!("communicator `{name}`: rank 0 could not be told that rank {rank} failed: {unsent}");
        }
        return Err(error);
    }
    if let (Err(error), true) = (&reached, tls.is_some()) {
        complain(party, &keys, &routes, error);
    }
    let mut stream = reached?;
    let patience = record.patience.saturating_add(REPLY_GRACE);
    let reply =
        exchange(&mut stream, &arrival, later(Instant::now(), patience)).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => party.missing(vec![0], patience),
            ErrorKind::UnexpectedEof => party.unreachable(Rank(0), "it hung up before all ranks had joined"),
            _ => party.unreachable(Rank(0), error.to_string()),
        })?;
    match reply {
        Reply::Complete(world) if is_whole(&world.ranks, party.size) => Ok((keys, world)),
        Reply::Complete(_) => Err(party.unreachable(Rank(0), "its table of ranks is not whole")),
        Reply::Missing { missing, waited } => Err(party.missing(missing, waited)),
        Reply::Refused { cause } => Err(InitError::Config(cause)),
    }
}

/// The keys to join with; this side of TLS and what this rank says of itself, unless it does not fit to rank 0.
fn prepare(
    party: &Party<'_>,
    build: &Build,
    record: &Record,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> (Keys, Result<(Option<Tls>, RankInfo), InitError>) {
    let shared = match shared_secret(party.config) {
        Ok(shared) => shared,
        Err(error) => return (record.keys.clone(), Err(error)),
    };
    // Where rank 0 has nothing to mix in, it understands a rank that has, so that both learn of it.
    let keys = record.keys.mixed(shared.as_ref().filter(|_| record.mixes));
    let fit = || {
        let differ = |what: &str, ours: &str, theirs: &str| {
            Err(party.misfit(format!("rank {} has {ours}, rank 0 {theirs}: see {what}", party.rank)))
        };
        if *build != Build::own() {
            return Err(another_build(party, build));
        }
        match (shared.is_some(), record.mixes) {
            (true, false) => return differ("job_secret", "a job secret", "none"),
            (false, true) => return differ("job_secret", "no job secret", "one"),
            _ => {}
        }
        let own = Protection::of(party.config);
        if own != record.protection {
            return differ("tls", &own.to_string(), &record.protection.to_string());
        }
        Ok((Tls::new(party.config, &keys.secret)?, describe(&keys)?))
    };
    let fitting = fit();
    (keys, fitting)
}

/// Tells rank 0 in the open why this rank does not reach it by TLS, if it can; else rank 0 waits until its time is over.
fn complain(party: &Party<'_>, keys: &Keys, routes: &[SocketAddr], error: &InitError) {
    let arrival: Arrival = Err(error.to_string());
    let Ok(arrival) = frame(&arrival, INFO_LIMIT) else { return };
    let patience = party.deadline.saturating_duration_since(Instant::now()).min(CALL_PATIENCE);
    let told = routes.iter().any(|route| {
        let called = call(*route, keys, None, party.rank, patience);
        called.is_ok_and(|mut stream| write(&mut stream, &arrival, later(Instant::now(), patience)).is_ok())
    });
    if !told {
        let (name, rank) = (party.name, party.rank);
        log::warn!("communicator `{name}`: rank 0 could not be told that rank {rank} failed: {error}");
    }
}

pub(super) fn is_whole(ranks: &[RankInfo], size: usize) -> bool {
    ranks.len() == size && ranks.iter().enumerate().all(|(index, info)| info.rank.index() == index)
}

fn another_build(party: &Party<'_>, root: &Build) -> InitError {
    let (rank, host, own) = (party.rank, &party.host.id, Build::own());
    party.misfit(format!("rank {rank} on host `{host}` has build {own}, rank 0 has {root}"))
}

/// What rank 0 was built from, and where it is.
pub(super) fn find(party: &Party<'_>) -> Result<(Build, Record), InitError> {
    #[derive(Deserialize)]
    struct Built {
        build: Build,
    }
    let patience = party.config.connect_timeout;
    let left = party.deadline.saturating_duration_since(Instant::now());
    let value = party.store.get(ROOT_KEY, left).map_err(|cause| {
        if Instant::now() >= party.deadline { party.missing(vec![0], patience) } else { party.store_failed(cause) }
    })?;
    let notice = serde_json::from_slice(&value).map_err(|error| match serde_json::from_slice(&value) {
        Ok(Built { build }) if build != Build::own() => another_build(party, &build),
        _ => party.store_failed(format!("the value is not what rank 0 writes: {error}")),
    })?;
    // Where another build's notice reads like this one's, rank 0 too is told of the difference.
    match notice {
        Notice { build, root: RootNotice::Here(record) } => Ok((build, record)),
        Notice { root: RootNotice::Failed { cause }, .. } => Err(party.unreachable(Rank(0), cause)),
    }
}

/// Where to look for rank 0, the most likely first; the error says why there is no way.
pub(super) fn routes(record: &Record, here: &Host) -> Result<Vec<SocketAddr>, String> {
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let together = record.host.id == here.id && record.host.machine == here.machine;
    let mut addresses = if together { loopback.to_vec() } else { Vec::new() };
    // On another machine, this machine's loopback would answer for rank 0's.
    let leads_there = |address: &IpAddr| record.host.machine == here.machine || !address.is_loopback();
    addresses.extend(record.addresses.iter().filter(|address| leads_there(address)));
    if addresses.is_empty() {
        return Err(format!(
            "it runs on host `{}` and this rank on host `{}`, but it has loopback addresses only: {:?}; \
             see the option socket_ifname",
            record.host.id, here.id, record.addresses
        ));
    }
    Ok(addresses.into_iter().map(|address| SocketAddr::new(address, record.port)).collect())
}

/// Why one address did not lead to rank 0.
enum Dead {
    /// Nobody is there, or somebody else.
    End(String),
    /// It may yet.
    Busy(String),
    /// This process lacks what it takes to call.
    Here(io::Error),
}

/// A connection to rank 0 on which both sides have proved themselves.
fn reach(party: &Party<'_>, keys: &Keys, tls: Option<&Tls>, routes: &[SocketAddr]) -> Result<Stream, InitError> {
    let mut refusals = 0;
    let mut pause = FIRST_PAUSE;
    loop {
        let mut causes = Vec::with_capacity(routes.len());
        let (mut all_end, mut lack) = (true, None);
        for route in routes {
            let left = party.deadline.saturating_duration_since(Instant::now());
            match call(*route, keys, tls, party.rank, left.min(CALL_PATIENCE)) {
                Ok(stream) => return Ok(stream),
                Err(Dead::End(cause)) => causes.push(format!("{route}: {cause}")),
                Err(Dead::Busy(cause)) => {
                    all_end = false;
                    causes.push(format!("{route}: {cause}"));
                }
                Err(Dead::Here(error)) => {
                    all_end = false;
                    lack = Some(error);
                }
            }
        }
        refusals += u32::from(all_end);
        if refusals >= REFUSALS || Instant::now() + pause >= party.deadline {
            if let Some(error) = lack {
                let cause = shortage::describe(&error, party.size);
                return Err(party.system("a connection to rank 0", &io::Error::new(error.kind(), cause)));
            }
            let hint = if all_end { " (either rank 0 has ended, or a firewall stands between)" } else { "" };
            return Err(party.unreachable(Rank(0), format!("{}{hint}", causes.join("; "))));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn call(route: SocketAddr, keys: &Keys, tls: Option<&Tls>, rank: Rank, patience: Duration) -> Result<Stream, Dead> {
    let deadline = Instant::now() + patience;
    // The system refuses to wait for no time at all.
    let connected = TcpStream::connect_timeout(&route, patience.max(Duration::from_millis(1)));
    let socket = connected.map_err(|error| match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionReset => {
            Dead::Busy(error.to_string())
        }
        _ if limits::is_shortage(&error) => Dead::Here(error),
        _ => Dead::End(error.to_string()),
    })?;
    let busy = |error: io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => Dead::Busy("it hung up".to_string()),
        ErrorKind::InvalidData => Dead::End(error.to_string()),
        _ => Dead::Busy(error.to_string()),
    };
    socket.set_nodelay(true).map_err(busy)?;
    let mut stream = Stream::open(socket, tls);
    let introduction = Introduction::new(rank).map_err(busy)?;
    write(&mut stream, &introduction.hello(), deadline).map_err(busy)?;
    let challenge = read(&mut stream, NONCE_BYTES + PROOF_BYTES, deadline).map_err(busy)?;
    let challenge = challenge.as_slice().try_into().expect("as many bytes as were asked for");
    let proof = introduction.answer(keys, stream.binding(), challenge);
    let proof = proof.ok_or_else(|| Dead::End("something answers that does not know the secret".to_string()))?;
    write(&mut stream, &proof, deadline).map_err(busy)?;
    Ok(stream)
}

fn exchange(stream: &mut Stream, arrival: &[u8], deadline: Instant) -> io::Result<Reply> {
    write(stream, arrival, deadline)?;
    let length = read(stream, size_of::<u32>(), deadline)?;
    let length = frame_length(&length, TABLE_LIMIT).map_err(io::Error::other)?;
    Ok(serde_json::from_slice(&read(stream, length, deadline)?)?)
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Secret;
    use super::*;

    fn host(id: &str, machine: &str) -> Host {
        Host { id: id.to_string(), machine: machine.to_string() }
    }

    fn record(addresses: &[&str]) -> Record {
        Record {
            host: host("a", "m"),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            port: 7,
            patience: Duration::from_secs(1),
            keys: Keys { comm_id: [0; 16], secret: Secret::new([0; 32]) },
            mixes: false,
            protection: Protection::None,
        }
    }

    fn way(addresses: &[&str], here: &Host) -> Vec<String> {
        routes(&record(addresses), here).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_neighbour_tries_loopback_first() {
        assert_eq!(way(&["10.0.0.1"], &host("a", "m")), ["127.0.0.1:7", "[::1]:7", "10.0.0.1:7"]);
        assert_eq!(way(&["10.0.0.1"], &host("b", "m")), ["10.0.0.1:7"]);
        assert_eq!(way(&["127.0.0.1"], &host("b", "m")), ["127.0.0.1:7"]);
        assert_eq!(way(&["127.0.0.1", "fd00::1"], &host("a", "n")), ["[fd00::1]:7"]);
    }

    #[test]
    fn loopback_leads_nowhere_on_another_machine() {
        let error = routes(&record(&["127.0.0.1", "::1"]), &host("b", "n")).unwrap_err();
        assert!(error.contains("`a`") && error.contains("`b`") && error.contains("127.0.0.1, ::1"), "{error}");
    }
}
