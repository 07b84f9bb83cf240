//! Rank 0's side of the rendezvous: lets ranks in, keeps strangers out, and tells all how it ended.
//!
//! One thread serves all connections and none can hold it up: sockets do not block, and whoever has not proved itself
//! within [`PROOF_PATIENCE`] is dropped.

use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::protocol::{
    Arrival, HELLO, Keys, Next, RankInfo, Reception, Reply, TABLE_LIMIT, World, frame, shared_secret,
};
use super::{Build, Notice, Party, ROOT_KEY, Record, RootNotice};
use crate::algo::Tuning;
use crate::comm::framing::{Intake, Outgoing, sleep};
use crate::error::InitError;
use crate::sync::Arc;
use crate::sys::net;
use crate::sys::socket;
use crate::transport::handshake::{Channel, is_passing};
use crate::transport::tls::{Protection, Stream, Tls};
use crate::types::Rank;

/// How long a connection may take to prove itself.
const PROOF_PATIENCE: Duration = Duration::from_secs(10);

/// How long the last word may take to reach all who joined.
const FAREWELL_PATIENCE: Duration = Duration::from_secs(30);

/// How long to leave callers waiting after the system refused to take one in.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections beyond one for each rank that may be waiting to prove themselves, and how many to take in at once.
const STRANGERS: usize = 256;

/// Publishes where to join and waits for all ranks.
pub(super) fn host(
    party: &Party<'_>,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<(Keys, World), InitError> {
    let Prepared { keys, tls, own, listener, record, tuning } = match prepare(party, describe) {
        Ok(prepared) => prepared,
        Err(error) => {
            publish(party, RootNotice::Failed { cause: error.to_string() })?;
            return Err(error);
        }
    };
    publish(party, RootNotice::Here(record))?;
    let seats = Seats::new(own);
    let mut door = Door {
        keys: &keys,
        tls: tls.as_ref(),
        listener,
        visitors: Vec::new(),
        seats,
        rested: Instant::now(),
        is_refused: false,
    };
    let outcome = door.admit_all(party).map(|ranks| World { ranks, tuning });
    let reply = match &outcome {
        Ok(world) => Reply::Complete(world.clone()),
        Err(InitError::Missing { missing, waited, .. }) => Reply::Missing { missing: missing.clone(), waited: *waited },
        Err(error) => Reply::Refused { cause: error.to_string() },
    };
    door.tell_all(&reply).map_err(|cause| party.misfit(cause))?;
    Ok((keys, outcome?))
}

/// What rank 0 needs to let others in.
struct Prepared {
    keys: Keys,
    tls: Option<Tls>,
    own: RankInfo,
    listener: TcpListener,
    record: Record,
    tuning: Tuning,
}

fn prepare(
    party: &Party<'_>,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<Prepared, InitError> {
    let tuning = party.tuning()?;
    let published = party.new_keys()?;
    let shared = shared_secret(party.config)?;
    let keys = published.mixed(shared.as_ref());
    let tls = Tls::new(party.config, &keys.secret)?;
    let own = describe(&keys)?;
    let listener = net::listen_anywhere().map_err(|error| party.system("a listening socket", &error))?;
    let port = listener.local_addr().map_err(|error| party.system("the listener's port", &error))?.port();
    let record = Record {
        host: party.host.clone(),
        addresses: party.advertised()?,
        port,
        patience: party.config.connect_timeout,
        keys: published,
        mixes: shared.is_some(),
        protection: Protection::of(party.config),
    };
    Ok(Prepared { keys, tls, own, listener, record, tuning })
}

fn publish(party: &Party<'_>, root: RootNotice) -> Result<(), InitError> {
    let notice = Notice { build: Build::own(), root };
    let value = serde_json::to_vec(&notice).map_err(|error| party.store_failed(error.to_string()))?;
    party.store.set(ROOT_KEY, &value).map_err(|cause| party.store_failed(cause))
}

/// Who has joined: the decisions, without a socket.
pub(super) struct Seats {
    taken: Vec<Option<RankInfo>>,
}

impl Seats {
    /// The seats of the world that rank 0 expects.
    pub(super) fn new(own: RankInfo) -> Self {
        let mut taken = vec![None; own.world_size as usize];
        taken[0] = Some(own);
        Seats { taken }
    }

    /// Seats a rank; the error says how it does not fit.
    pub(super) fn take(&mut self, info: RankInfo) -> Result<(), String> {
        let own = self.taken[0].as_ref().expect("rank 0 sits from the start");
        let differ = |what: &str, theirs: &str, ours: &str| {
            Err(format!("rank {} on host `{}` has {what} {theirs}, rank 0 has {ours}", info.rank, info.host_id))
        };
        if info.build != own.build {
            return differ("build", &info.build.to_string(), &own.build.to_string());
        }
        if info.world_size != own.world_size {
            return differ("world size", &info.world_size.to_string(), &own.world_size.to_string());
        }
        if info.name != own.name {
            return differ("communicator name", &format!("`{}`", info.name), &format!("`{}`", own.name));
        }
        if info.algorithm.is_some() && info.algorithm != own.algorithm {
            let algorithm = |info: &RankInfo| format!("`{}`", info.algorithm.as_deref().unwrap_or("auto"));
            return differ("algorithm", &algorithm(&info), &algorithm(own));
        }
        let (rank, host, size) = (info.rank, &info.host_id, own.world_size);
        match self.taken.get_mut(rank.index()) {
            None => Err(format!("rank {rank} on host `{host}` is beyond the world size {size}")),
            Some(Some(first)) => {
                Err(format!("rank {rank} joined twice, from host `{}` and from host `{host}`", first.host_id))
            }
            Some(seat) => {
                *seat = Some(info);
                Ok(())
            }
        }
    }

    /// The communicator's name, as rank 0 calls it.
    fn name(&self) -> &str {
        self.taken[0].as_ref().map_or("", |own| &own.name)
    }

    fn leave(&mut self, rank: Rank) {
        self.taken[rank.index()] = None;
    }

    pub(super) fn missing(&self) -> Vec<u32> {
        let empty = self.taken.iter().enumerate().filter(|(_, seat)| seat.is_none());
        empty.map(|(index, _)| Rank::from(index).0).collect()
    }

    pub(super) fn table(&self) -> Option<Vec<RankInfo>> {
        self.taken.iter().cloned().collect()
    }
}

struct Door<'a> {
    keys: &'a Keys,
    tls: Option<&'a Tls>,
    listener: TcpListener,
    visitors: Vec<Visitor>,
    seats: Seats,
    /// When to accept again, after the system refused to.
    rested: Instant,
    /// The system's refusal has been logged.
    is_refused: bool,
}

impl Door<'_> {
    fn admit_all(&mut self, party: &Party<'_>) -> Result<Vec<RankInfo>, InitError> {
        loop {
            if let Some(table) = self.seats.table() {
                return Ok(table);
            }
            let now = Instant::now();
            if now >= party.deadline {
                return Err(party.missing(self.seats.missing(), party.config.connect_timeout));
            }
            self.visitors.retain(|visitor| !visitor.overstays(now));
            let ready = self.wait(now, party.deadline).map_err(|error| party.system("poll", &error))?;
            self.serve(&ready).map_err(|cause| party.misfit(cause))?;
            if now >= self.rested {
                self.accept();
            }
        }
    }

    /// Sleeps until something happens or is due; what happened, by visitor.
    fn wait(&self, now: Instant, deadline: Instant) -> io::Result<Vec<PollFlags>> {
        let resting = self.rested > now;
        let due = self.visitors.iter().filter(|visitor| visitor.seat.is_none()).map(|visitor| visitor.proof_due);
        let until = due.chain([deadline]).chain(resting.then_some(self.rested)).min().unwrap_or(deadline);
        let mut watched: Vec<PollFd<'_>> = self.visitors.iter().map(Visitor::interest).collect();
        if !resting {
            watched.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        sleep(&mut watched, until.saturating_duration_since(now))?;
        Ok(watched.iter().take(self.visitors.len()).map(PollFd::revents).collect())
    }

    /// Moves every visitor on that `ready` marks; the error is a rank's that belongs here and does not fit.
    fn serve(&mut self, ready: &[PollFlags]) -> Result<(), String> {
        let marked = self.visitors.iter_mut().zip(ready).filter(|(_, flags)| !flags.is_empty());
        for (visitor, _) in marked {
            match visitor.advance(self.keys, self.tls) {
                Ok(None) => {}
                Ok(Some((rank, arrival))) => {
                    visitor.joined = true;
                    if self.tls.is_some() && !visitor.stream.is_protected() && arrival.is_ok() {
                        return Err(format!("rank {rank} joined without TLS, rank 0 has it"));
                    }
                    self.seats.take(arrival.map_err(|cause| format!("rank {rank} failed: {cause}"))?)?;
                    visitor.seat = Some(rank);
                }
                Err(cause) => {
                    let name = self.seats.name();
                    log::warn!("dropped the connection from {} to communicator `{name}`: {cause}", visitor.from);
                    visitor.gone = true;
                    if let Some(rank) = visitor.seat {
                        self.seats.leave(rank);
                    }
                }
            }
        }
        self.visitors.retain(|visitor| !visitor.gone);
        Ok(())
    }

    fn accept(&mut self) {
        for _ in 0..STRANGERS {
            match socket::admit(self.listener.accept(), |(stream, from)| Visitor::new(stream, from)) {
                Ok(Some(visitor)) => {
                    self.is_refused = false;
                    self.visitors.push(visitor);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The caller hung up before it was its turn.
                Ok(None) => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.is_refused, true) {
                        let name = self.seats.name();
                        log::warn!("communicator `{name}`: cannot take a joining rank in, trying again: {error}");
                    }
                    self.rested = Instant::now() + ACCEPT_PAUSE;
                    break;
                }
            }
        }
        let unproved = self.visitors.iter().filter(|visitor| !visitor.joined).count();
        let mut excess = unproved.saturating_sub(self.seats.taken.len() + STRANGERS);
        // The oldest stand first.
        self.visitors.retain(|visitor| {
            let leaves = excess > 0 && !visitor.joined;
            excess -= usize::from(leaves);
            !leaves
        });
    }

    /// Sends `reply` to all who proved themselves, as far as they take it.
    fn tell_all(&mut self, reply: &Reply) -> Result<(), String> {
        let message: Arc<[u8]> = frame(reply, TABLE_LIMIT)?.into();
        self.visitors.retain(|visitor| visitor.joined);
        for visitor in &mut self.visitors {
            visitor.outgoing = Outgoing::new(message.clone());
        }
        let deadline = Instant::now() + FAREWELL_PATIENCE;
        loop {
            self.visitors.retain_mut(|visitor| match visitor.send() {
                Ok(()) => !visitor.is_told(),
                Err(error) => {
                    let name = self.seats.name();
                    log::warn!(
                        "communicator `{name}`: {} did not take the outcome of the rendezvous: {error}",
                        visitor.from
                    );
                    false
                }
            });
            let left = deadline.saturating_duration_since(Instant::now());
            if self.visitors.is_empty() || left.is_zero() {
                return Ok(());
            }
            let mut watched: Vec<PollFd<'_>> =
                self.visitors.iter().map(|visitor| PollFd::new(visitor.stream.socket(), PollFlags::OUT)).collect();
            sleep(&mut watched, left).map_err(|error| error.to_string())?;
        }
    }
}

/// A connection, from a rank or from a stranger.
struct Visitor {
    stream: Stream,
    /// Whether it is known if the other side speaks TLS.
    sounded: bool,
    from: SocketAddr,
    proof_due: Instant,
    reception: Reception,
    intake: Intake,
    outgoing: Outgoing,
    /// Has proved itself and described itself.
    joined: bool,
    seat: Option<Rank>,
    gone: bool,
}

impl Visitor {
    fn new(stream: TcpStream, from: SocketAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Visitor {
            stream: Stream::plain(stream),
            sounded: false,
            from: SocketAddr::new(from.ip().to_canonical(), from.port()),
            proof_due: Instant::now() + PROOF_PATIENCE,
            reception: Reception::new(),
            intake: Intake::default(),
            outgoing: Outgoing::default(),
            joined: false,
            seat: None,
            gone: false,
        })
    }

    fn overstays(&self, now: Instant) -> bool {
        !self.joined && now >= self.proof_due
    }

    fn interest(&self) -> PollFd<'_> {
        let flags = if self.is_told() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        PollFd::new(self.stream.socket(), flags)
    }

    /// Whether all that it was to be told has left this process.
    fn is_told(&self) -> bool {
        self.outgoing.is_empty() && !self.stream.holds_bytes()
    }

    /// Learns from the first byte whether the other side speaks TLS. False: none has come.
    fn sound(&mut self, tls: Option<&Tls>) -> io::Result<bool> {
        if !self.sounded
            && let Some(tls) = tls
        {
            let mut first = [0];
            match self.stream.socket().peek(&mut first) {
                Ok(_) if first[0] == HELLO[0] => {}
                Ok(_) => self.stream.protect(tls),
                Err(error) if is_passing(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.sounded = true;
        Ok(true)
    }

    /// Reads and answers what there is; what the joiner says of itself once it is complete.
    fn advance(&mut self, keys: &Keys, tls: Option<&Tls>) -> Result<Option<(Rank, Arrival)>, String> {
        let closed = |error: io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => "it hung up".to_string(),
            _ => error.to_string(),
        };
        if !self.sound(tls).map_err(closed)? {
            return Ok(None);
        }
        self.send().map_err(closed)?;
        // One byte more than the last message: it never comes, but this is how a closed connection shows.
        while self.intake.fill(&mut self.stream, self.reception.expected().unwrap_or(1)).map_err(closed)? {
            match self.reception.take(keys, self.stream.binding(), &self.intake.take())? {
                Next::Listen => {}
                Next::Say(bytes) => {
                    self.outgoing = Outgoing::new(bytes.into());
                    self.send().map_err(closed)?;
                }
                Next::Joined(rank, arrival) => return Ok(Some((rank, *arrival))),
            }
        }
        Ok(None)
    }

    fn send(&mut self) -> io::Result<()> {
        self.outgoing.send(&mut self.stream)?;
        self.stream.flush().or_else(|error| if is_passing(&error) { Ok(()) } else { Err(error) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::process::ProcessId;
    use crate::topo::Cpus;

    fn info(rank: u32, build: Build) -> RankInfo {
        RankInfo {
            rank: Rank(rank),
            host_id: "there".to_owned(),
            addresses: [].into(),
            process: ProcessId::own(),
            cpus: Cpus::default(),
            build,
            world_size: 2,
            name: "test".to_owned(),
            algorithm: None,
        }
    }

    #[test]
    fn a_rank_of_another_build_gets_no_seat() {
        let own = Build::own();
        for other in [
            Build { version: "0.0.9".to_owned(), ..own.clone() },
            Build { sources: "0123456789abcdef".to_owned(), ..own.clone() },
            Build { byte_order: "middle".to_owned(), ..own.clone() },
            Build { pointer_bits: 16, ..own.clone() },
        ] {
            let mut seats = Seats::new(info(0, own.clone()));
            let cause = seats.take(info(1, other.clone())).expect_err("it differs");
            assert_eq!(cause, format!("rank 1 on host `there` has build {other}, rank 0 has {own}"));
            assert_eq!((seats.take(info(1, own.clone())), seats.missing()), (Ok(()), vec![]));
        }
    }
}
