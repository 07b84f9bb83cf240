//! The receiving end.

use std::collections::VecDeque;
use std::io::Read;
use std::time::{Duration, Instant};

use crate::error::LinkDown;
use crate::sys::poller::Watched;
use crate::sys::ucx::Arrived;
use crate::transport::RecvStream;
use crate::transport::handshake::is_passing;
use crate::transport::ucx::handover::Caller;
use crate::transport::ucx::header::Header;
use crate::transport::ucx::hub::Inflow;
use crate::transport::ucx::link::{CREDIT_INTERVAL, cost};

/// The receiving end of a stream: messages by UCX, and the connection beside them.
#[derive(Debug)]
pub(super) struct UcxRecvStream {
    inflow: Inflow,
    connection: Watched<Caller>,
    /// What has come on the connection: at its end, the number of all pieces that were sent.
    said: Vec<u8>,
    /// When the connection was found to have ended.
    hung_up: Option<Instant>,
    ended: Option<LinkDown>,
    /// The pieces that are not read, the first of them up to `read`.
    pieces: VecDeque<Arrived>,
    read: usize,
    /// What the pieces that were read have cost, and of how much of it the writer knows.
    consumed: u64,
    credited: u64,
}

impl UcxRecvStream {
    pub(super) fn new(connection: Watched<Caller>, inflow: Inflow) -> UcxRecvStream {
        UcxRecvStream {
            inflow,
            connection,
            said: Vec::new(),
            hung_up: None,
            ended: None,
            pieces: VecDeque::new(),
            read: Header::BYTES,
            consumed: 0,
            credited: 0,
        }
    }

    /// Takes what has come, and finds out whether it was the last.
    fn fill(&mut self) {
        if self.ended.is_some() {
            return;
        }
        let (taken, down) = self.inflow.receive(&mut self.pieces);
        if self.hung_up.is_none() && down.is_some() {
            // That of the connection says more, if it has ended too.
            self.look_for_end();
        }
        let is_over = match (self.hung_up, self.total()) {
            (None, _) => down.is_some(),
            // Its process has ended, and what UCX had of it is here.
            (Some(_), None) => self.pieces.is_empty(),
            (Some(since), Some(total)) => taken >= total || down.is_some() || since.elapsed() >= LAST_PIECES_TIMEOUT,
        };
        if is_over {
            self.ended = Some(match (self.hung_up, down) {
                (None, Some(down)) => down,
                _ => LinkDown::new("it closed the connection"),
            });
        }
    }

    /// How many pieces the writer has sent in all, once it has said so.
    fn total(&self) -> Option<u64> {
        self.said.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
    }

    /// Notices the end of the connection.
    fn look_for_end(&mut self) {
        let mut bytes = [0; 8];
        while self.hung_up.is_none() {
            match self.connection.read(&mut bytes) {
                Ok(count @ 1..) if self.said.len() + count <= bytes.len() => self.said.extend(&bytes[..count]),
                Err(error) if is_passing(&error) => return,
                // More than a writer says is no number.
                Ok(_) | Err(_) => self.hung_up = Some(Instant::now()),
            }
        }
    }

    /// The rest of the first piece.
    fn front(&self) -> &[u8] {
        self.pieces.front().map_or(&[], |piece| &piece[self.read..])
    }
}

impl RecvStream for UcxRecvStream {
    fn peek(&mut self) -> Result<&[u8], LinkDown> {
        if self.pieces.is_empty() {
            self.fill();
        }
        match &self.ended {
            Some(down) if self.pieces.is_empty() => Err(down.clone()),
            _ => Ok(self.front()),
        }
    }

    fn end(&self) -> Option<LinkDown> {
        self.ended.clone()
    }

    fn consume(&mut self, count: usize) {
        self.read += count;
        if count == 0 || !self.front().is_empty() {
            return;
        }
        self.consumed += self.pieces.pop_front().map_or(0, |piece| cost(piece.len()));
        self.read = Header::BYTES;
        if self.consumed - self.credited >= CREDIT_INTERVAL {
            self.credited = self.consumed;
            // A link that has failed is found out when something is read.
            let _ = self.inflow.credit(self.consumed);
        }
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let mut done = 0;
        while done < into.len() {
            let bytes = match self.peek() {
                Ok(bytes) => bytes,
                Err(down) if done == 0 => return Err(down),
                Err(_) => break,
            };
            let count = bytes.len().min(into.len() - done);
            if count == 0 {
                break;
            }
            into[done..done + count].copy_from_slice(&bytes[..count]);
            self.consume(count);
            done += count;
        }
        Ok(done)
    }

    fn patience(&self) -> u32 {
        self.inflow.patience()
    }

    fn named(&mut self) {
        self.look_for_end();
    }

    fn arm(&mut self) -> bool {
        self.look_for_end();
        self.hung_up.is_some() || self.ended.is_some() || !self.pieces.is_empty() || self.inflow.arm()
    }

    fn disarm(&mut self) {
        self.inflow.disarm();
    }
}

/// How long the last pieces of a writer that has left may be behind the end of its connection.
const LAST_PIECES_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::*;
    use crate::sys::poller::{Interest, Poller};
    use crate::sys::ucx::fake::Fake;
    use crate::transport::ucx::header::Kind;
    use crate::transport::ucx::hub::Hub;
    use crate::transport::ucx::mock_peer::MockPeer;
    use crate::transport::ucx::offer::{Allowed, Need};
    use crate::types::Rank;

    /// The library, a stream over it, its session, the peer that sends to it, and that one's end of the connection.
    fn stream() -> (Fake, UcxRecvStream, u64, MockPeer, TcpStream) {
        let (context, fake) = Fake::context();
        let poller = Poller::new().unwrap();
        let hub = Hub::new(Rank(0), Allowed::given(&context), Need::Any, poller.clone());
        let mut peer = MockPeer::new(&context);
        peer.connect(&hub.address().unwrap());
        let inflow = hub.open_from(MockPeer::RANK, &peer.address()).unwrap();
        let session = inflow.session();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        ours.set_nonblocking(true).unwrap();
        let connection = poller.watch(Caller::new(ours), Interest::Read).unwrap();
        (fake, UcxRecvStream::new(connection, inflow), session, peer, theirs)
    }

    /// The peer's last word, and the end of its connection unless it goes on.
    fn say(stream: &mut UcxRecvStream, mut theirs: &TcpStream, word: &[u8]) {
        std::io::Write::write_all(&mut theirs, word).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        while stream.hung_up.is_none() {
            stream.look_for_end();
        }
        // So that no pause of this thread counts.
        stream.hung_up = Some(Instant::now() + Duration::from_secs(3600));
    }

    #[test]
    fn pieces_behind_the_end_of_the_connection_are_waited_for() {
        let (_fake, mut stream, session, mut peer, theirs) = stream();
        peer.send(Kind::Piece, session, 0, b"a");
        say(&mut stream, &theirs, &2u64.to_le_bytes());
        assert_eq!(stream.peek(), Ok(&b"a"[..]));
        stream.consume(1);
        assert_eq!(stream.peek(), Ok(&b""[..]), "one is missing");
        assert!(stream.arm(), "it is looked at again");
        peer.send(Kind::Piece, session, 1, b"b");
        assert_eq!(stream.peek(), Ok(&b"b"[..]));
        stream.consume(1);
        assert_eq!(stream.peek().expect_err("it was the last").cause, "it closed the connection");
    }

    #[test]
    fn pieces_that_never_come_are_waited_for_no_longer_than_a_while() {
        let (_fake, mut stream, session, mut peer, theirs) = stream();
        peer.send(Kind::Piece, session, 1, b"b");
        say(&mut stream, &theirs, &2u64.to_le_bytes());
        assert_eq!(stream.peek(), Ok(&b""[..]));
        assert_eq!(stream.end(), None);
        stream.hung_up = Instant::now().checked_sub(LAST_PIECES_TIMEOUT);
        assert_eq!(stream.peek().expect_err("it is over").cause, "it closed the connection");
        assert!(stream.end().is_some());
    }

    #[test]
    fn pieces_are_not_waited_for_once_their_way_has_failed() {
        let (fake, mut stream, _, _peer, theirs) = stream();
        say(&mut stream, &theirs, &1u64.to_le_bytes());
        assert_eq!(stream.peek(), Ok(&b""[..]));
        fake.fail_endpoints();
        assert!(stream.peek().is_err());
    }

    #[test]
    fn who_leaves_without_a_number_has_sent_what_is_here() {
        for word in [&b""[..], b"1234567"] {
            let (_fake, mut stream, session, mut peer, theirs) = stream();
            peer.send(Kind::Piece, session, 0, b"a");
            say(&mut stream, &theirs, word);
            assert_eq!(stream.peek(), Ok(&b"a"[..]));
            stream.consume(1);
            assert!(stream.peek().is_err(), "nobody says that there are more");
        }
    }

    #[test]
    fn who_says_more_than_a_number_has_hung_up() {
        let (_fake, mut stream, _, _peer, mut theirs) = stream();
        let all = stream.connection.stream.try_clone().unwrap();
        std::io::Write::write_all(&mut theirs, &[0; 9]).unwrap();
        while all.peek(&mut [0; 9]).unwrap_or_default() < 9 {
            std::thread::yield_now();
        }
        stream.look_for_end();
        assert!(stream.hung_up.is_some());
        assert!(stream.peek().is_err(), "it has sent none");
    }

    #[test]
    fn what_was_read_is_credited_once_it_is_worth_a_message() {
        let (_fake, mut stream, session, mut peer, _theirs) = stream();
        peer.received();
        for number in 0..CREDIT_INTERVAL {
            assert_eq!(peer.received(), [], "before piece {number} was read");
            peer.send(Kind::Piece, session, number, b"ab");
            assert_eq!(stream.read(&mut [0; 1]), Ok(1));
            assert_eq!(stream.read(&mut [0; 8]), Ok(1));
        }
        assert_eq!(peer.received(), [(Kind::Credit, session, CREDIT_INTERVAL)]);
    }
}
