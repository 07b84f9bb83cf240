//! How two sides that have proved themselves exchange their workers' addresses, and see that UCX leads both ways.
//!
//! The opener sends its address, and the acceptor sends its own and the stream's name, or why there is no stream. Then the opener
//! sends a probe by UCX, which the acceptor answers so. Once that has come the opener says so on the connection, and counts the
//! stream as open. The acceptor takes it when it hears that, so both take it or none does.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::sync::Arc;
use crate::transport::Detour;
use crate::transport::handshake::{Exchange, HANDSHAKE_TIMEOUT_FULL};
use crate::transport::pending::Candidate;
use crate::transport::ucx::hub::{Hub, Inflow, Outflow};
use crate::types::Rank;

/// What one side tells the other of its end: the stream's name, chosen by the acceptor, and its worker's address or a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    session: u64,
    pub(super) address: Result<Vec<u8>, String>,
}

impl Introduction {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, bytes) = match &self.address {
            Ok(address) => (ADDRESS, address.as_slice()),
            Err(refusal) => (REFUSAL, refusal.as_bytes()),
        };
        let bytes = &bytes[..bytes.len().min(PACKED_MAX)];
        let len = u32::try_from(bytes.len()).expect("it is shorter than the limit");
        [&[kind][..], &self.session.to_le_bytes(), &len.to_le_bytes(), bytes].concat()
    }
}

/// Reads an introduction piece by piece.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// The kind, the stream's name and the length, once they have come.
    head: Option<(u8, u64, usize)>,
}

impl Reading {
    /// None while it is not complete.
    pub(super) fn drive(
        &mut self,
        exchange: &mut Exchange,
        stream: &mut impl Read,
    ) -> Result<Option<Introduction>, LinkDown> {
        let (kind, session, len) = match self.head {
            Some(head) => head,
            None => {
                let Some(head) = exchange.next::<HEAD_BYTES>(stream)? else { return Ok(None) };
                *self.head.insert(parse_head(&head)?)
            }
        };
        let Some(bytes) = exchange.next_of(len, stream)? else { return Ok(None) };
        let refusal = || String::from_utf8_lossy(&bytes).into_owned();
        let address = if kind == ADDRESS { Ok(bytes.clone()) } else { Err(refusal()) };
        Ok(Some(Introduction { session, address }))
    }
}

fn parse_head(head: &[u8; HEAD_BYTES]) -> Result<(u8, u64, usize), LinkDown> {
    let session = u64::from_le_bytes(std::array::from_fn(|at| head[1 + at]));
    let len = u32::from_le_bytes(std::array::from_fn(|at| head[9 + at])) as usize;
    if !matches!(head[0], ADDRESS | REFUSAL) || len > PACKED_MAX {
        return Err(LinkDown::new("the peer garbled its address of UCX"));
    }
    Ok((head[0], session, len))
}

/// The opener's part, on a connection whose sides have proved themselves.
#[derive(Debug)]
pub(super) struct Opening {
    hub: Arc<Hub>,
    peer: Rank,
    detour: Detour,
    exchange: Exchange,
    stage: Stage,
    since: Instant,
}

#[derive(Debug)]
enum Stage {
    Introducing,
    Hearing(Reading),
    /// None once it is given away.
    Probing(Option<Outflow>),
    Confirming(Option<Outflow>),
}

impl Opening {
    pub(super) fn new(hub: Arc<Hub>, peer: Rank, detour: Detour) -> Opening {
        let (exchange, stage, since) = (Exchange::default(), Stage::Introducing, Instant::now());
        Opening { hub, peer, detour, exchange, stage, since }
    }

    /// Advances without blocking, and returns the stream once both sides take it. The error says that UCX does not lead to the peer,
    /// or that this process was too slow for it.
    pub(super) fn drive(&mut self, stream: &mut (impl Read + Write)) -> Result<Option<Outflow>, LinkDown> {
        let (age, detour) = (self.since.elapsed(), self.detour);
        self.next_stages(stream, age).map_err(|down| {
            let cause = format!("UCX with it fails: {down}");
            match (down.kind, detour) {
                // As in the handshake before: the acceptor hangs up on slow peers.
                (Down::HungUp, _) if age >= HANDSHAKE_TIMEOUT_FULL => LinkDown::busy(cause),
                // The same, where it tells of one that leaves.
                (Down::HungUp, Detour::Impossible) => LinkDown::refused(cause),
                _ => LinkDown::unfit(cause),
            }
        })
    }

    fn next_stages(&mut self, stream: &mut (impl Read + Write), age: Duration) -> Result<Option<Outflow>, LinkDown> {
        loop {
            match &mut self.stage {
                Stage::Introducing => {
                    let address = self.hub.address().map_err(LinkDown::new)?;
                    check_packed(&address)?;
                    self.exchange.queue(&Introduction { session: 0, address: Ok(address) }.encode());
                    self.stage = Stage::Hearing(Reading::default());
                }
                Stage::Hearing(reading) => {
                    if !self.exchange.flush(stream)? {
                        return Ok(None);
                    }
                    let Some(Introduction { session, address }) = reading.drive(&mut self.exchange, stream)? else {
                        return Ok(None);
                    };
                    let address = address.map_err(|refusal| LinkDown::new(format!("its answer is: {refusal}")))?;
                    let outflow = self.hub.open_to(self.peer, session, &address).map_err(LinkDown::new)?;
                    // The acceptor has made progress a moment ago; before, it may have been busy with something else.
                    self.since = Instant::now();
                    self.stage = Stage::Probing(Some(outflow));
                }
                Stage::Probing(outflow) => {
                    let granted = outflow.as_ref().map_or(Ok(false), Outflow::is_granted)?;
                    if !granted {
                        // Nothing is to come on the connection now: this notices its end.
                        let _ = self.exchange.next::<1>(stream)?;
                        if self.detour == Detour::Possible && age >= PROBE_TIMEOUT {
                            return Err(LinkDown::new(format!("no answer came through it within {PROBE_TIMEOUT:?}")));
                        }
                        return Ok(None);
                    }
                    self.exchange.queue(&[CONFIRMED]);
                    self.stage = Stage::Confirming(outflow.take());
                }
                Stage::Confirming(outflow) => {
                    return Ok(if self.exchange.flush(stream)? { outflow.take() } else { None });
                }
            }
        }
    }
}

/// A connection that a peer has made.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) stream: TcpStream,
    exchange: Exchange,
    reading: Reading,
    answer: Option<Answer>,
}

/// What the acceptor has said.
#[derive(Debug)]
enum Answer {
    Refused(String),
    /// The stream; none once it is given away.
    Invited(Option<Inflow>),
    /// The same, whose probe has come.
    Answered(Option<Inflow>),
}

impl Caller {
    pub(super) fn new(stream: TcpStream) -> Caller {
        Caller { stream, exchange: Exchange::default(), reading: Reading::default(), answer: None }
    }

    /// Advances without blocking. Returns the stream once both sides take it.
    fn drive(&mut self, peer: Rank, hub: &Arc<Hub>) -> Result<Option<Inflow>, LinkDown> {
        let answer = match &mut self.answer {
            Some(answer) => answer,
            None => {
                let introduced = self.reading.drive(&mut self.exchange, &mut self.stream)?;
                let Some(Introduction { address, .. }) = introduced else { return Ok(None) };
                let (answer, introduction) = invite(peer, hub, address);
                self.exchange.queue(&introduction.encode());
                self.answer.insert(answer)
            }
        };
        if !self.exchange.flush(&mut self.stream)? {
            return Ok(None);
        }
        loop {
            match answer {
                Answer::Refused(refusal) => return Err(LinkDown::new(format!("rank {peer} gets no UCX: {refusal}"))),
                Answer::Invited(inflow) => {
                    if !inflow.as_ref().map_or(Ok(false), Inflow::answer_probe)? {
                        return Ok(None);
                    }
                    *answer = Answer::Answered(inflow.take());
                }
                Answer::Answered(inflow) => {
                    let confirmed = self.exchange.next::<1>(&mut self.stream)?;
                    return Ok(confirmed.and_then(|_| inflow.take()));
                }
            }
        }
    }
}

/// What to tell a peer with this address, and what that means.
fn invite(peer: Rank, hub: &Arc<Hub>, address: Result<Vec<u8>, String>) -> (Answer, Introduction) {
    let invited = address.and_then(|address| {
        let inflow = hub.open_from(peer, &address)?;
        let own = hub.address()?;
        check_packed(&own).map_err(|down| down.to_string())?;
        Ok((inflow, own))
    });
    match invited {
        Ok((inflow, own)) => {
            let session = inflow.session();
            (Answer::Invited(Some(inflow)), Introduction { session, address: Ok(own) })
        }
        Err(refusal) => (Answer::Refused(refusal.clone()), Introduction { session: 0, address: Err(refusal) }),
    }
}

impl AsFd for Caller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Read for Caller {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.read(into)
    }
}

/// The acceptor's part: advances a connection without blocking, and returns the stream once both sides take it.
pub(super) fn accept(candidate: &mut Candidate<Caller>, hub: &Arc<Hub>) -> Result<Option<Inflow>, LinkDown> {
    if candidate.rank.is_none() {
        candidate.rank = candidate.accepting.drive(&mut candidate.stream.stream)?;
    }
    let Some(peer) = candidate.rank else { return Ok(None) };
    let accepted = candidate.stream.drive(peer, hub)?;
    if let Some(inflow) = &accepted {
        inflow.opened();
    }
    Ok(accepted)
}

/// Refuses what UCX packed if it is longer than a peer takes.
fn check_packed(address: &[u8]) -> Result<(), LinkDown> {
    if address.len() <= PACKED_MAX {
        return Ok(());
    }
    Err(LinkDown::new(format!("UCX packed an address of {} bytes, more than {PACKED_MAX}", address.len())))
}

/// What an introduction has: an address, or a refusal.
const ADDRESS: u8 = 1;
const REFUSAL: u8 = 2;

/// The kind, the stream's name, and the length of the rest.
const HEAD_BYTES: usize = 1 + 8 + 4;

/// The longest address or refusal that is taken.
const PACKED_MAX: usize = 64 * 1024;

/// The opener's last word. Its value has no meaning.
const CONFIRMED: u8 = 1;

/// How long an answer through UCX may take while another transport is left.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::poller::Poller;
    use crate::sys::ucx::fake::Fake;
    use crate::transport::ucx::header::Kind;
    use crate::transport::ucx::mock_peer::MockPeer;
    use crate::transport::ucx::offer::{Allowed, Need};

    const SESSION: u64 = 7;

    /// A connection on which the peer has said something, and what this side says.
    #[derive(Default)]
    struct Connection {
        said: Vec<u8>,
        told: Vec<u8>,
    }

    impl Read for Connection {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let count = self.said.len().min(into.len());
            if count == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            into[..count].copy_from_slice(&self.said[..count]);
            self.said.drain(..count);
            Ok(count)
        }
    }

    impl Write for Connection {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.told.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The opener's part up to the probe, which waits for its answer; the peer, and the connection.
    fn probing(detour: Detour) -> (Opening, MockPeer, Connection) {
        let (context, _fake) = Fake::context();
        let hub = Hub::new(Rank(0), Allowed::given(&context), Need::Any, Poller::new().unwrap());
        let mut peer = MockPeer::new(&context);
        peer.connect(&hub.address().unwrap());
        let mut connection = Connection::default();
        let mut opening = Opening::new(hub, MockPeer::RANK, detour);
        connection.said = Introduction { session: SESSION, address: Ok(peer.address()) }.encode();
        assert!(opening.next_stages(&mut connection, Duration::ZERO).unwrap().is_none());
        assert_eq!(peer.received(), [(Kind::Probe, SESSION, 0)]);
        connection.told.clear();
        (opening, peer, connection)
    }

    #[test]
    fn an_answer_is_waited_for_up_to_a_limit_where_another_transport_is_left() {
        let (mut opening, _peer, mut connection) = probing(Detour::Possible);
        let before = PROBE_TIMEOUT.checked_sub(Duration::from_nanos(1)).unwrap();
        assert!(opening.next_stages(&mut connection, before).unwrap().is_none());
        let down = opening.next_stages(&mut connection, PROBE_TIMEOUT).expect_err("it is over");
        assert_eq!(down.cause, format!("no answer came through it within {PROBE_TIMEOUT:?}"));
        assert!(connection.told.is_empty(), "the peer does not take the stream");
    }

    #[test]
    fn an_answer_is_waited_for_without_a_limit_where_no_other_transport_is_left() {
        let (mut opening, mut peer, mut connection) = probing(Detour::Impossible);
        assert!(opening.next_stages(&mut connection, 100 * PROBE_TIMEOUT).unwrap().is_none());
        peer.send(Kind::Credit, SESSION, 0, &[]);
        assert!(opening.next_stages(&mut connection, 100 * PROBE_TIMEOUT).unwrap().is_some());
        assert_eq!(connection.told, [CONFIRMED]);
    }

    #[test]
    fn an_answer_that_comes_late_is_taken_if_it_is_there_when_the_opener_looks() {
        let (mut opening, mut peer, mut connection) = probing(Detour::Possible);
        peer.send(Kind::Credit, SESSION, 0, &[]);
        assert!(opening.next_stages(&mut connection, 2 * PROBE_TIMEOUT).unwrap().is_some());
    }

    #[test]
    fn a_peer_that_garbles_its_introduction_is_left() {
        for (at, byte) in [(0, 9), (12, 0xff)] {
            let (context, _fake) = Fake::context();
            let hub = Hub::new(Rank(0), Allowed::given(&context), Need::Any, Poller::new().unwrap());
            let mut said = Introduction { session: SESSION, address: Err("no".to_owned()) }.encode();
            said[at] = byte;
            let mut connection = Connection { said, told: Vec::new() };
            let mut opening = Opening::new(hub, MockPeer::RANK, Detour::Possible);
            let down = opening.next_stages(&mut connection, Duration::ZERO).expect_err("it is garbled");
            assert_eq!(down.cause, "the peer garbled its address of UCX");
        }
    }
}
