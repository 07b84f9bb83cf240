//! What a communicator lends to its device.

use std::time::Duration;

use crate::buffer::Buffer;
use crate::comm::check::Place;
use crate::comm::communicator::Communicator;
use crate::comm::device::{self, Group};
use crate::device::executor::Ranks;
use crate::engine::call::Call;
use crate::engine::driver::Driver;
use crate::engine::flight_recorder::Bytes;
use crate::error::Error;
use crate::signature::Signature;
use crate::sync::Arc;
use crate::types::{Rank, Source, Tag};
use crate::work::Entry;

impl Ranks for Communicator {
    fn begin(&self, signature: Signature, number: u64, inputs: &[Buffer], outputs: &[Buffer]) -> Entry {
        let sum = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.bytes()).sum();
        let bytes = Bytes { read: sum(inputs), written: sum(outputs) };
        self.driver.with_engine(|engine| engine.begin_on_device(Call::Collective(signature), number, bytes))
    }

    fn barrier(&self, timeout: Duration) -> Result<(), Error> {
        device::all_gather(self, Vec::new(), timeout).map(|_| ())
    }
}

impl Group for Communicator {
    fn name(&self) -> &str {
        self.name()
    }

    fn place(&self) -> Place {
        Place { me: self.rank(), size: self.size() }
    }

    fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    fn send_bytes(&self, data: Vec<u8>, to: Rank) -> Result<(), Error> {
        self.send_away(data, to, Tag::DEVICE)
    }

    fn recv_bytes(&self, data: &mut [u8], from: Rank, timeout: Duration) -> Result<(), Error> {
        self.recv_within(data, Source::Rank(from), Tag::DEVICE, Some(timeout)).map(|_| ())
    }
}
