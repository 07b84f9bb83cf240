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
    fn begin(&self, signature: Signature, sequence: u64, inputs: &[Buffer], outputs: &[Buffer]) -> Entry {
        let sum = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.bytes()).sum();
        let bytes = Bytes { read: sum(inputs), written: sum(outputs) };
        self.driver.with_engine(|engine| engine.begin_on_device(Call::Collective(signature), sequence, bytes))
    }

    fn greatest(&self, own: u64, timeout: Duration) -> Result<u64, Error> {
        let told = device::all_gather(self, own.to_le_bytes().to_vec(), timeout)?;
        // What is no number is no rank's number.
        let number = |bytes: Vec<u8>| bytes.try_into().map(u64::from_le_bytes).unwrap_or_default();
        Ok(told.into_iter().map(number).fold(own, u64::max))
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
