//! What a communicator lends to its device.

use std::time::Duration;

use crate::buffer::Buffer;
use crate::comm::check::RankAndSize;
use crate::comm::communicator::Communicator;
use crate::comm::device::{self, Group};
use crate::device::executor::Ranks;
use crate::device::messages::{Message, Peers};
use crate::device::rounds;
use crate::device::setup::Presence;
use crate::engine::call::Call;
use crate::engine::driver::Driver;
use crate::engine::flight_recorder::Bytes;
use crate::engine::message::Direction;
use crate::error::Error;
use crate::op::Op;
use crate::signature::Signature;
use crate::sync::Arc;
use crate::sys::cuda::StreamHandle;
use crate::types::{Rank, Source, Tag};
use crate::work::{Entry, Work};

impl Presence for Communicator {
    fn are_there(&self) -> bool {
        self.driver.with_engine(|engine| engine.is_whole())
    }
}

impl Ranks for Communicator {
    fn begin(&self, signature: Signature, sequence: u64, inputs: &[Buffer], outputs: &[Buffer]) -> Entry {
        let sum = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.bytes()).sum();
        let bytes = Bytes { read: sum(inputs), written: sum(outputs) };
        self.driver.with_engine(|engine| engine.begin_on_device(Call::Collective(signature), sequence, bytes))
    }

    fn all_gather(&self, own: Vec<u8>, timeout: Duration) -> Result<Vec<Vec<u8>>, Error> {
        device::all_gather(self, own, timeout)
    }
}

impl Peers for Communicator {
    fn begin(&self, message: &Message<'_>, number: u64) -> Entry {
        let (Message { peer, direction, tag, .. }, bytes) = (*message, message.bytes());
        let way = match direction {
            rounds::Direction::Send => Direction::Send(peer),
            rounds::Direction::Receive => Direction::Receive(Source::Rank(peer)),
        };
        let (call, bytes) = (way.call(tag, bytes), way.bytes(bytes));
        self.driver.with_engine(|engine| engine.begin_on_device(call, number, bytes))
    }

    fn tell(&self, peer: Rank, tag: Tag, told: Vec<u8>) -> Result<(), Error> {
        device::tell(self, peer, tag, told)
    }

    fn hear(&self, peer: Rank, tag: Tag, timeout: Duration) -> Result<Vec<u8>, Error> {
        device::hear(self, peer, tag, timeout)
    }
}

impl Group for Communicator {
    fn name(&self) -> &str {
        self.name()
    }

    fn place(&self) -> RankAndSize {
        RankAndSize { me: self.rank(), size: self.size() }
    }

    fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    fn through_host(&self, ops: &[Op], factor: Option<Buffer>, stream: StreamHandle) -> Result<Work, Error> {
        self.run_through_host(ops, factor, stream)
    }

    fn send_bytes(&self, data: Vec<u8>, to: Rank, tag: Tag) -> Result<(), Error> {
        self.send_away(data, to, tag)
    }

    fn recv_bytes(&self, data: &mut [u8], from: Rank, tag: Tag, timeout: Duration) -> Result<(), Error> {
        self.recv_within(data, Source::Rank(from), tag, Some(timeout)).map(|_| ())
    }
}
