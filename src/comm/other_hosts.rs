//! The CPU engine, which exchanges the messages of operations on a device with other hosts.

use std::time::Instant;

use crate::device::control::Failure;
use crate::device::far_pairs::{Carrier, FarPair, FarPairs};
use crate::device::far_windows::{FarWindows, Port};
use crate::device::message_log::LoggedMessage;
use crate::device::network::Traffic;
use crate::device::other_hosts::{Exchange, Missing, OtherHosts};
use crate::device::rounds::Direction;
use crate::device::routes::Item;
use crate::engine::context::OpContext;
use crate::engine::device_accesses::DeviceAccesses;
use crate::engine::device_messages::DeviceMessages;
use crate::engine::driver::Driver;
use crate::engine::relay::Relay;
use crate::signature::Signature;
use crate::sync::Arc;
use crate::types::Rank;

pub(super) struct ThroughEngine(pub(super) Arc<Driver>);

impl ThroughEngine {
    fn with_relay<T>(&self, f: impl FnOnce(&mut Relay, &mut OpContext) -> T) -> T {
        self.0.with_engine(|engine| f(&mut engine.relay, &mut engine.context))
    }

    fn with_messages<T>(&self, f: impl FnOnce(&mut DeviceMessages, &mut OpContext) -> T) -> T {
        self.0.with_engine(|engine| f(&mut engine.device_messages, &mut engine.context))
    }

    fn with_accesses<T>(&self, f: impl FnOnce(&mut DeviceAccesses, &mut OpContext) -> T) -> T {
        self.0.with_engine(|engine| f(&mut engine.device_accesses, &mut engine.context))
    }

    /// Has what was queued go on even if no thread waits.
    fn go_on(&self) {
        self.0.want_progress_thread();
    }
}

impl OtherHosts for ThroughEngine {
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

    fn tell_of_wait(&self, number: u64, call: Option<Signature>) {
        if let Some(call) = call {
            self.with_relay(|relay, ctx| relay.tell_of_wait(ctx, number, call));
            self.go_on();
        }
    }

    fn ended(&self, number: u64) {
        self.with_relay(|relay, _| relay.ended(number));
    }

    fn give_up_library(&self) {
        self.with_relay(|relay, ctx| relay.give_up_library(ctx));
        self.go_on();
    }

    fn library_given_up_by(&self) -> Option<Rank> {
        self.with_relay(|relay, _| relay.library_given_up_by())
    }
}

impl Exchange for ThroughEngine {
    fn submit(&self, number: u64, call: Signature, all: &mut dyn Iterator<Item = &Traffic>) -> std::io::Result<()> {
        let is_idle = self.with_relay(|relay, ctx| {
            relay.submit(ctx, number, call, all);
            relay.is_idle()
        });
        if is_idle { Ok(()) } else { self.0.wake_progress_thread() }
    }

    fn listen(&self, number: u64) -> std::io::Result<()> {
        self.with_relay(|relay, _| relay.listen(number));
        self.0.wake_progress_thread()
    }

    fn reset(&self) {
        self.with_relay(|relay, ctx| relay.reset(ctx));
    }
}

impl FarPairs for ThroughEngine {
    fn open(&self, peer: Rank, pair: FarPair) {
        self.with_messages(|messages, _| messages.open(peer, pair));
    }

    fn forget(&self, peer: Rank) {
        self.with_messages(|messages, ctx| messages.forget(ctx, peer));
    }

    fn lane(&self, peer: Rank, lane: usize) -> Arc<dyn OtherHosts> {
        Arc::new(FarLane { engine: ThroughEngine(self.0.clone()), peer, lane })
    }

    fn submit(
        &self,
        channel: (Rank, Direction),
        first: u64,
        messages: &[LoggedMessage],
        carrier: Carrier,
    ) -> std::io::Result<()> {
        self.with_messages(|all, ctx| match carrier {
            Carrier::Engine => all.submit(ctx, channel, first, messages),
            Carrier::Library => all.listen(ctx, channel, first, messages),
        });
        self.0.wake_progress_thread()
    }

    fn reset(&self, peer: Rank, lane: usize) {
        self.with_messages(|messages, ctx| messages.reset(ctx, peer, lane));
    }
}

impl FarWindows for ThroughEngine {
    fn open(&self, port: Port) {
        self.with_accesses(|accesses, _| accesses.open(port));
    }

    fn submit(&self, peer: Rank, slot: usize, items: &[Item]) -> std::io::Result<()> {
        self.with_accesses(|accesses, ctx| accesses.submit(ctx, peer, slot, items));
        self.0.wake_progress_thread()
    }

    fn is_settled(&self, slot: usize) -> bool {
        self.with_accesses(|accesses, _| accesses.is_settled(slot))
    }

    fn fail(&self, failure: &Failure) {
        self.with_accesses(|accesses, ctx| accesses.fail(ctx, failure));
        self.go_on();
    }

    fn failure(&self) -> Option<(Rank, Failure)> {
        let now = Instant::now();
        self.with_accesses(|accesses, ctx| accesses.check(ctx, now));
        self.with_relay(|relay, ctx| relay.failure(ctx, now))
    }
}

/// A lane of messages with a rank of another host.
struct FarLane {
    engine: ThroughEngine,
    peer: Rank,
    lane: usize,
}

impl OtherHosts for FarLane {
    fn fail(&self, failure: &Failure) {
        self.engine.with_messages(|messages, ctx| messages.fail(ctx, self.peer, failure));
        self.engine.go_on();
    }

    fn give_up(&self, _: Rank, failure: &Failure) {
        self.engine.with_messages(|messages, ctx| messages.give_up(ctx, self.peer, self.lane, failure.number));
    }

    fn settle(&self, has_time: bool) -> bool {
        self.engine.with_messages(|messages, ctx| messages.settle(ctx, self.peer, self.lane, has_time))
    }

    /// What the other rank has told is in the control segment. After this call its loss is there too.
    fn failure(&self) -> Option<(Rank, Failure)> {
        self.engine.with_messages(|messages, ctx| messages.check(ctx, Instant::now()));
        None
    }

    /// What the other rank has called is in the control segment.
    fn missing(&self, _: u64) -> Missing {
        Missing::default()
    }

    fn tell_of_wait(&self, _: u64, _: Option<Signature>) {
        self.engine.with_messages(|messages, ctx| messages.tell_of_wait(ctx, self.peer, self.lane));
        self.engine.go_on();
    }

    /// For what a library carries: what the engine carries keeps it at work by itself.
    fn ended(&self, number: u64) {
        self.engine.with_messages(|messages, _| messages.ended(self.peer, self.lane, number));
    }

    fn give_up_library(&self) {
        self.engine.with_messages(|messages, ctx| messages.give_up_library(ctx, self.peer, self.lane));
        self.engine.go_on();
    }

    /// What the other rank has told is in the control segment.
    fn library_given_up_by(&self) -> Option<Rank> {
        None
    }
}
