//! The sending end.

use std::io::{IoSlice, Write};

use crate::error::LinkDown;
use crate::sync::Arc;
use crate::transport::tcp::connect::Connection;
use crate::transport::ucx::handover::Opening;
use crate::transport::ucx::hub::{Hub, Outflow};
use crate::transport::{Detour, PATIENCE_WITH_CALLS, Read, RemoteMemory, SendStream};
use crate::types::Rank;

/// The sending end of a stream: messages by UCX, and the connection beside them.
#[derive(Debug)]
pub(super) struct UcxSendStream {
    connection: Connection,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Opening(Opening),
    Open(Outflow),
}

impl UcxSendStream {
    pub(super) fn new(connection: Connection, peer: Rank, detour: Detour, hub: Arc<Hub>) -> UcxSendStream {
        UcxSendStream { connection, stage: Stage::Opening(Opening::new(hub, peer, detour)) }
    }

    /// The stream, once it is open.
    fn outflow(&mut self) -> Result<Option<&Outflow>, LinkDown> {
        if let Stage::Opening(opening) = &mut self.stage {
            if !self.connection.drive()? {
                return Ok(None);
            }
            match opening.drive(self.connection.stream())? {
                Some(outflow) => self.stage = Stage::Open(outflow),
                None => return Ok(None),
            }
        }
        match &self.stage {
            Stage::Open(outflow) => Ok(Some(outflow)),
            Stage::Opening(_) => Ok(None),
        }
    }

    /// Notices a closed connection.
    fn check_connection(&mut self) -> Result<(), LinkDown> {
        if self.connection.stream().has_ended()? { Err(LinkDown::new("it closed the connection")) } else { Ok(()) }
    }
}

impl SendStream for UcxSendStream {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        let Some(outflow) = self.outflow()? else { return Ok(0) };
        if head.is_empty() && body.iter().all(|run| run.is_empty()) {
            outflow.check()?;
            return self.check_connection().map(|()| 0);
        }
        outflow.write(head, body)
    }

    fn arm(&mut self) -> bool {
        match &self.stage {
            // The connection wakes the poller for the next part of the handshake, and the hub names the stream at the last.
            Stage::Opening(_) => false,
            Stage::Open(outflow) => outflow.arm() || self.check_connection().is_err(),
        }
    }

    fn disarm(&mut self) {
        if let Stage::Open(outflow) = &self.stage {
            outflow.disarm();
        }
    }

    fn patience(&self) -> u32 {
        match &self.stage {
            Stage::Opening(_) => PATIENCE_WITH_CALLS,
            Stage::Open(outflow) => outflow.patience(),
        }
    }

    fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open(_))
    }

    fn can_read(&self) -> bool {
        matches!(&self.stage, Stage::Open(outflow) if outflow.can_read())
    }

    fn begin_read(&mut self, token: u64, from: RemoteMemory<'_>) -> Read {
        match &self.stage {
            Stage::Opening(_) => Read::Unable,
            Stage::Open(outflow) => outflow.begin_read(token, from),
        }
    }

    fn devices(&self) -> Vec<String> {
        match &self.stage {
            Stage::Opening(_) => Vec::new(),
            Stage::Open(outflow) => outflow.devices(),
        }
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        match &self.stage {
            // It has taken no byte.
            Stage::Opening(_) => Ok(true),
            Stage::Open(outflow) => outflow.flushed(),
        }
    }
}

impl Drop for UcxSendStream {
    fn drop(&mut self) {
        // A forked child drops what is its parent's, whose hub it must not touch.
        if let Stage::Open(outflow) = &self.stage
            && outflow.is_here()
        {
            outflow.finish();
            let sent = outflow.sent().to_le_bytes();
            // Eight bytes, the only ones that this side sends on the open connection: there is room, or it has ended.
            let _ = self.connection.stream().write(&sent);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::sys::poller::Poller;
    use crate::sys::socket::PeerTimeout;
    use crate::sys::ucx::fake::Fake;
    use crate::transport::auth::{Identity, Secret};
    use crate::transport::tcp::paths::Target;
    use crate::transport::ucx::header::Kind;
    use crate::transport::ucx::mock_peer::MockPeer;
    use crate::transport::ucx::offer::{Allowed, Need};

    const LONG: Duration = Duration::from_secs(60);

    /// An open stream, and where its connection ends.
    fn stream() -> (Fake, UcxSendStream, TcpListener) {
        let (context, fake) = Fake::context();
        let poller = Poller::new().unwrap();
        let hub = Hub::new(Rank(0), Allowed::given(&context), Need::Any, poller.clone());
        let mut peer = MockPeer::new(&context);
        peer.connect(&hub.address().unwrap());
        let outflow = hub.open_to(MockPeer::RANK, 7, &peer.address()).unwrap();
        peer.send(Kind::Credit, 7, 0, &[]);
        assert_eq!(outflow.is_granted(), Ok(true));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let identity = Identity { comm: [1; 16], me: Rank(0), size: 2, secret: Secret::new([5; 32]) };
        let targets = [Target { source: None, address: listener.local_addr().unwrap() }].into();
        let timeout = PeerTimeout::Always(LONG);
        let connection = Connection::begin(identity, None, MockPeer::RANK, targets, &poller, timeout, 1).unwrap();
        (fake, UcxSendStream { connection, stage: Stage::Open(outflow) }, listener)
    }

    #[test]
    fn a_stream_that_ends_sends_what_was_written_on_its_way_and_says_how_much_that_is() {
        let (fake, mut stream, listener) = stream();
        for _ in 0..3 {
            assert_eq!(stream.write(b"piece", &[]), Ok(5));
        }
        let mut theirs = listener.accept().unwrap().0;
        assert_eq!(fake.flushes(), 0);
        drop(stream);
        assert_eq!(fake.flushes(), 1);
        let mut said = Vec::new();
        theirs.read_to_end(&mut said).unwrap();
        assert_eq!(said, 3u64.to_le_bytes());
    }

    #[test]
    fn a_stream_ends_also_where_its_bytes_do_not_leave() {
        let (fake, mut stream, _listener) = stream();
        fake.flushes_take(u32::MAX);
        assert_eq!((stream.write(b"piece", &[]), stream.flushed()), (Ok(5), Ok(false)));
        let (sender, ended) = channel();
        std::thread::spawn(move || {
            drop(stream);
            sender.send(()).unwrap();
        });
        assert_eq!(ended.recv_timeout(LONG), Ok(()));
        assert_eq!(fake.requests(), 0);
    }
}
