//! The sending end.

use std::io::{IoSlice, Write};

use crate::error::LinkDown;
use crate::sync::Arc;
use crate::transport::tcp::connect::Connection;
use crate::transport::ucx::handover::Opening;
use crate::transport::ucx::hub::{Hub, Outflow};
use crate::transport::{Detour, PATIENCE_WITH_CALLS, SendStream};
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
        if let Stage::Open(outflow) = &self.stage {
            outflow.finish();
            let sent = outflow.sent().to_le_bytes();
            // Eight bytes, the only ones that this side sends on the open connection: there is room, or it has ended.
            let _ = self.connection.stream().write(&sent);
        }
    }
}
