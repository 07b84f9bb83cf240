//! The CPU engine as what exchanges the messages of operations on a device with other hosts.

use std::time::Instant;

use crate::device::control::Failure;
use crate::device::network::Traffic;
use crate::device::other_hosts::{Missing, OtherHosts};
use crate::engine::context::OpContext;
use crate::engine::driver::Driver;
use crate::engine::relay::Relay;
use crate::signature::Signature;
use crate::sync::Arc;
use crate::types::Rank;

/// The engine of a communicator.
pub(super) struct ThroughEngine(pub(super) Arc<Driver>);

impl ThroughEngine {
    fn with_relay<T>(&self, f: impl FnOnce(&mut Relay, &mut OpContext) -> T) -> T {
        self.0.with_engine(|engine| f(&mut engine.relay, &mut engine.context))
    }

    /// Has what was queued go on, whoever else waits.
    fn go_on(&self) {
        if let Err(error) = self.0.wake_progress_thread() {
            log::error!("the progress thread could not be started: {error}");
        }
    }
}

impl OtherHosts for ThroughEngine {
    fn submit(
        &self,
        number: u64,
        call: Signature,
        segments: &mut dyn Iterator<Item = &Traffic>,
    ) -> std::io::Result<()> {
        let is_idle = self.with_relay(|relay, ctx| {
            relay.submit(ctx, number, call, segments);
            relay.is_idle()
        });
        if is_idle { Ok(()) } else { self.0.wake_progress_thread() }
    }

    fn fail(&self, failure: &Failure) {
        self.with_relay(|relay, ctx| relay.fail(ctx, failure.clone()));
        self.go_on();
    }

    fn give_up(&self, reporter: Rank, failure: &Failure) {
        self.with_relay(|relay, ctx| relay.fail_from(ctx, (reporter, failure.clone())));
    }

    fn settle(&self, has_time: bool) -> bool {
        self.with_relay(|relay, ctx| relay.settle(ctx, has_time))
    }

    fn failure(&self) -> Option<(Rank, Failure)> {
        self.with_relay(|relay, ctx| relay.failure(ctx, Instant::now()))
    }

    fn missing(&self, number: u64) -> Missing {
        self.with_relay(|relay, ctx| relay.missing(ctx, number))
    }

    fn tell_of_wait(&self, number: u64, call: Signature) {
        self.with_relay(|relay, ctx| relay.tell_of_wait(ctx, number, call));
        self.go_on();
    }

    fn reset(&self) {
        self.with_relay(|relay, ctx| relay.reset(ctx));
    }
}
