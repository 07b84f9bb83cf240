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
