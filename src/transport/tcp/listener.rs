//! Where connections come in: a listener, and those that have not proved themselves yet.

use std::io;
use std::net::TcpListener;
use std::time::Instant;

use crate::sys::net;
use crate::sys::poller::{Interest, Poller, Watched};
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::Identity;
use crate::transport::pending::{Pending, Proved};
use crate::transport::tcp::greeting::{Caller, Greeting};
use crate::transport::tls::{Stream, Tls};

/// The listener of one communicator.
#[derive(Debug)]
pub(super) struct Listener {
    tls: Option<Tls>,
    timeout: PeerTimeout,
    port: u16,
    socket: Watched<TcpListener>,
    pending: Pending<Caller>,
    expects_greeting: bool,
}

impl Listener {
    /// Listens on every address, and is watched by this poller. Streams have up to `streams` connections. What comes says what it is
    /// if it `expects_greeting`.
    pub(super) fn open(
        identity: Identity,
        tls: Option<Tls>,
        poller: &Poller,
        streams: usize,
        timeout: PeerTimeout,
        expects_greeting: bool,
    ) -> io::Result<Listener> {
        let socket = net::listen_anywhere()?;
        let port = socket.local_addr()?.port();
        let socket = poller.watch(socket, Interest::Read)?;
        let pending = Pending::new(identity, poller.clone()).with_streams(streams);
        Ok(Listener { tls, timeout, port, socket, pending, expects_greeting })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The connections that have come and proved themselves.
    pub(super) fn proved(&mut self) -> Vec<Proved<Caller, Option<Greeting>>> {
        let tls = self.tls.as_ref();
        self.pending.admit_tcp(&self.socket, self.timeout, |stream| Caller::new(Stream::accept(stream, tls)));
        let expects_greeting = self.expects_greeting;
        let mut proved = self.pending.drive(|candidate| {
            if candidate.rank.is_none() {
                candidate.rank = candidate.accepting.drive(&mut candidate.stream.stream)?;
            }
            match candidate.rank {
                None => Ok(None),
                Some(_) if expects_greeting => Ok(candidate.stream.greeting()?.map(Some)),
                Some(_) => Ok(Some(None)),
            }
        });
        self.pending.watch(&mut self.socket);
        proved.iter_mut().for_each(|proved| proved.stream.session = proved.session);
        proved
    }

    /// Who comes wakes nobody until [`Listener::proved`] is called.
    pub(super) fn pause(&mut self) -> io::Result<()> {
        self.socket.set(Interest::Nothing)
    }

    /// What this process lacks to take connections in, if it does.
    pub(super) fn shortage(&self) -> Option<String> {
        self.pending.shortage()
    }

    /// When to look after connections at the latest.
    pub(super) fn due(&self) -> Option<Instant> {
        self.pending.due()
    }
}
