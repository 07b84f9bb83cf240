//! Runs the handshake of [`auth`](super::auth) over a connection that never blocks.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::transport::auth::{ANSWER_BYTES, Acceptor, Binding, CHALLENGE_BYTES, Identity, Opener, PROOF_BYTES, Secret};
use crate::types::Rank;

/// A connection on which both sides prove themselves.
pub(crate) trait Channel: Read + Write {
    /// The TLS session's binding, known once a byte of the other side has come; zeros without TLS.
    fn binding(&self) -> Binding {
        [0; 32]
    }

    /// Whether the acceptor's challenge comes before all else, whatever the opener does.
    fn begins_with_challenge(&self) -> bool {
        true
    }
}

impl Channel for UnixStream {}

/// Without TLS.
impl Channel for TcpStream {}

/// Sends and receives messages of known sizes.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    outgoing: Vec<u8>,
    sent: usize,
    incoming: Vec<u8>,
}

impl Exchange {
    pub(crate) fn queue(&mut self, bytes: &[u8]) {
        self.outgoing.extend_from_slice(bytes);
    }

    /// Writes queued bytes. True: all are written.
    pub(crate) fn flush(&mut self, stream: &mut impl Write) -> Result<bool, LinkDown> {
        while self.sent < self.outgoing.len() {
            match stream.write(&self.outgoing[self.sent..]) {
                Ok(0) => return Err(LinkDown::hung_up("the connection was closed during the handshake")),
                Ok(count) => self.sent += count,
                Err(error) if is_passing(&error) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Reads the next message of `N` bytes; none while it is not complete.
    pub(crate) fn next<const N: usize>(&mut self, stream: &mut impl Read) -> Result<Option<[u8; N]>, LinkDown> {
        let message = self.next_of(N, stream)?;
        Ok(message.map(|message| message.try_into().expect("exactly N bytes were read")))
    }

    /// The same of `len` bytes.
    pub(crate) fn next_of(&mut self, len: usize, stream: &mut impl Read) -> Result<Option<Vec<u8>>, LinkDown> {
        let mut buffer = [0; 256];
        while self.incoming.len() < len {
            let missing = (len - self.incoming.len()).min(buffer.len());
            match stream.read(&mut buffer[..missing]) {
                Ok(0) => return Err(LinkDown::hung_up("the connection was closed during the handshake")),
                Ok(count) => self.incoming.extend_from_slice(&buffer[..count]),
                Err(error) if is_passing(&error) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some(std::mem::take(&mut self.incoming)))
    }
}

/// The opening side.
#[derive(Debug)]
pub(crate) struct Opening {
    opener: Opener,
    exchange: Exchange,
    /// Known once it has answered.
    session: Option<Secret>,
    is_proved: bool,
    begun: Instant,
}

impl Opening {
    pub(crate) fn new(identity: Identity, peer: Rank) -> Self {
        let (opener, exchange) = (Opener::new(identity, peer), Exchange::default());
        Opening { opener, exchange, session: None, is_proved: false, begun: Instant::now() }
    }

    /// The same, on a connection that was begun then.
    pub(crate) fn since(mut self, begun: Instant) -> Opening {
        self.begun = begun;
        self
    }

    /// Turns the failure of a handshake that this side was too slow for, as after the process was stopped, or that had to make room
    /// for others, into one that is tried again: the other side hangs up on slow peers.
    pub(crate) fn classify(&self, down: LinkDown, stream: &impl Channel) -> LinkDown {
        // Whoever does not believe the answer hangs up at once.
        let is_cut_short = self.is_challenged() && !self.is_proved;
        // Who makes room there has heard nothing of the other side.
        let is_unspoken = !self.is_challenged() && !stream.begins_with_challenge();
        let makes_room = is_cut_short || is_unspoken;
        let patience = if makes_room { HANDSHAKE_TIMEOUT_CROWDED } else { HANDSHAKE_TIMEOUT_FULL };
        match down.kind {
            Down::HungUp if self.begun.elapsed() >= patience => LinkDown::busy(down.cause),
            _ => down,
        }
    }

    /// What only the two ends know, once both have proved themselves.
    pub(crate) fn session(&self) -> Option<Secret> {
        self.session
    }

    /// Whether the acceptor has spoken.
    pub(crate) fn is_challenged(&self) -> bool {
        self.session.is_some()
    }

    /// When it has begun.
    pub(crate) fn begun(&self) -> Instant {
        self.begun
    }

    /// As if it had begun `age` ago.
    #[cfg(test)]
    pub(crate) fn aged(mut self, age: Duration) -> Opening {
        self.begun = Instant::now().checked_sub(age).expect("a clock that is older");
        self
    }

    /// Advances without blocking. True: both sides have proved themselves.
    pub(crate) fn drive(&mut self, stream: &mut impl Channel) -> Result<bool, LinkDown> {
        if self.session.is_none() {
            let Some(challenge) = self.exchange.next::<CHALLENGE_BYTES>(stream)? else { return Ok(false) };
            let answer =
                self.opener.answer(&challenge, &stream.binding()).map_err(|error| LinkDown::new(error.to_string()))?;
            self.exchange.queue(&answer);
            self.session = Some(self.opener.session(&challenge, &stream.binding()));
        }
        if !self.exchange.flush(stream)? {
            return Ok(false);
        }
        let Some(proof) = self.exchange.next::<PROOF_BYTES>(stream)? else { return Ok(false) };
        self.opener.check(&proof, &stream.binding()).map_err(|error| LinkDown::new(error.to_string()))?;
        self.is_proved = true;
        Ok(true)
    }
}

/// The accepting side.
#[derive(Debug)]
pub(crate) struct Accepting {
    acceptor: Acceptor,
    exchange: Exchange,
    opener: Option<Rank>,
    session: Option<Secret>,
}

impl Accepting {
    pub(crate) fn new(identity: Identity) -> Self {
        let acceptor = Acceptor::new(identity);
        let mut exchange = Exchange::default();
        exchange.queue(&acceptor.challenge());
        Accepting { acceptor, exchange, opener: None, session: None }
    }

    /// Advances without blocking. Returns the opener's rank once it has proved itself and has this side's proof.
    pub(crate) fn drive(&mut self, stream: &mut impl Channel) -> Result<Option<Rank>, LinkDown> {
        if !self.exchange.flush(stream)? {
            return Ok(None);
        }
        if self.opener.is_none() {
            let Some(answer) = self.exchange.next::<ANSWER_BYTES>(stream)? else { return Ok(None) };
            let checked = self.acceptor.check(&answer, &stream.binding());
            let (rank, proof) = checked.map_err(|error| LinkDown::new(error.to_string()))?;
            self.exchange.queue(&proof);
            self.opener = Some(rank);
            self.session = Some(self.acceptor.session(&answer, &stream.binding()));
        }
        Ok(if self.exchange.flush(stream)? { self.opener } else { None })
    }

    /// What only the two ends know, once both have proved themselves.
    pub(crate) fn session(&self) -> Option<Secret> {
        self.session
    }
}

/// How long a connection may take to prove itself.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);

/// The same while the queue of connections is full.
pub(crate) const HANDSHAKE_TIMEOUT_FULL: Duration = Duration::from_secs(5);

/// The same for those that have come last, where further ones wait.
pub(crate) const HANDSHAKE_TIMEOUT_CROWDED: Duration = Duration::from_millis(100);

/// Whether the call may be tried again later.
pub(crate) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
