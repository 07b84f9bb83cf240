//! Accesses to windows of ranks on other hosts.
//!
//! The stream copies what it puts into pinned memory, from where the engine sends it, and copies what it gets out of there. The
//! engine and the other rank's [landing thread](crate::device::landing) do the rest. A put ends on the stream once all of it is
//! in pinned memory.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::{Access, AccessRequest, FarSide, OtherHosts, Plan, State, Windows};
use crate::buffer::Buffer;
use crate::device::accesses::Awaited;
use crate::device::far_windows::{FarMemory, FarWord, FarWords, Port};
use crate::device::landing::{LandingThread, Tools};
use crate::device::lane::{copy, flush};
use crate::device::network::NetworkMemory;
use crate::device::routes::{Action, Route, Steps};
use crate::device::setup::{SetupFailure, failed};
use crate::sync::{Arc, lock};
use crate::sys::cuda::{Batch, Context, CudaError, Current, DeviceBytes, RegisteredWords, Stream};
use crate::sys::words::SharedWords;
use crate::types::Rank;

impl Windows {
    /// Makes what accesses to other hosts need, if there are other hosts, before the first window is registered.
    pub(super) fn begin_far(&self, context: &Arc<Context>) -> Result<(), SetupFailure> {
        let Some(OtherHosts { engine, cell }) = &self.hosts else { return Ok(()) };
        let closed = || failed("its windows")("the communicator is closed");
        if lock(&self.state).as_ref().ok_or_else(closed)?.far.is_some() {
            return Ok(());
        }
        let peers = (0..self.world).map(Rank::from).filter(|rank| self.control.local(*rank).is_none());
        let (peers, cell) = (peers.collect::<Vec<_>>(), (*cell).min(CELL_MAX));
        let cells = || NetworkMemory::new(context, cell).map(Arc::new);
        let memory = peers.iter().map(|peer| Ok((*peer, FarMemory { puts: cells()?, gets: cells()? })));
        let bytes = 8 * cell * peers.len();
        let memory = memory.collect::<Result<BTreeMap<_, _>, crate::sys::cuda::HostMemoryError>>();
        let memory =
            memory.map_err(failed(format_args!("{bytes} bytes of memory for accesses to windows of other hosts")))?;
        let words = SharedWords::new(FarWords::count(self.world)).map(Arc::new);
        let words = words.map_err(failed("words for windows of other hosts"))?;
        let registered = RegisteredWords::new(context, &words).map(Arc::new);
        let registered = registered.map_err(failed("words for windows of other hosts"))?;
        let (_, width) = self.signals.words();
        let words = FarWords::new(words, self.world, width);
        let landing = LandingThread::begin(Tools {
            comm: self.comm.clone(),
            me: self.me,
            context: context.clone(),
            words: words.clone(),
            registered: registered.clone(),
            memory: memory.clone(),
            accesses: self.accesses.clone(),
        });
        let landing = landing.map_err(failed("what puts into its windows what comes from other hosts"))?;
        let (marks, lands) = (self.accesses.marks().clone(), landing.lands());
        let routes = peers.into_iter().map(|peer| (peer, Route::new(cell))).collect();
        let mut state = lock(&self.state);
        let state = state.as_mut().ok_or_else(closed)?;
        // No rank of another host knows of a window here yet.
        engine.open(Port { words: words.clone(), memory: memory.clone(), cell, marks, lands });
        state.far = Some(FarSide { landing, words, registered, memory, routes });
        Ok(())
    }

    /// Exposes this rank's part of the window in `slot` to other hosts, with no signals yet.
    pub(super) fn expose_far(&self, slot: usize, part: Buffer) {
        let state = lock(&self.state);
        let Some(far) = state.as_ref().and_then(|state| state.far.as_ref()) else { return };
        far.memory.keys().for_each(|from| far.words.tell(FarWord::Signals { from: *from, slot }, 0));
        far.landing.expose(slot, part);
    }

    /// Ends [`expose_far`](Windows::expose_far).
    pub(super) fn conceal_far(&self, slot: usize) {
        if let Some(far) = lock(&self.state).as_ref().and_then(|state| state.far.as_ref()) {
            far.landing.conceal(slot);
        }
    }

    /// Whether no access of this rank to other hosts' parts of the window in `slot` is on its way.
    pub(super) fn is_settled_far(&self, slot: usize) -> bool {
        self.hosts.as_ref().is_none_or(|hosts| hosts.engine.is_settled(slot))
    }

    /// Hands the engine the items of an access.
    pub(super) fn take_up(&self, state: &State, request: &AccessRequest<'_>, plan: &Plan) -> std::io::Result<()> {
        let Some(OtherHosts { engine, .. }) = &self.hosts else { return Ok(()) };
        let items = plan.far.as_ref().map_or(&[][..], |steps| &steps.items);
        engine.submit(request.peer, state.exposed[&request.window].slot, items)
    }
}

impl State {
    /// What an access to another host becomes, and what its stream waits for.
    pub(super) fn plan_far(&mut self, request: &AccessRequest<'_>) -> (Steps, SmallVec<[Awaited; 2]>) {
        let (peer, len) = (request.peer, request.buffers.iter().map(|buffer| buffer.bytes()).sum());
        let exposed = self.exposed.get_mut(&request.window).expect("looked up before");
        let far = self.far.as_mut().expect("made before there was a window");
        let route = far.routes.get_mut(&peer).expect("one for each rank of other hosts");
        let steps = match request.access {
            Access::Put(offset) => route.put(offset, len),
            Access::Get(offset) => route.get(offset, len),
            Access::Signal => route.signal(exposed.send_signal(peer)),
            Access::WaitSignal => Steps::default(),
        };
        let greatest = |number: fn(&Action) -> Option<u64>| steps.actions.iter().filter_map(number).max();
        let done = greatest(|action| match action {
            Action::AwaitDone(number) => Some(*number),
            _ => None,
        });
        let answered = greatest(|action| match action {
            Action::AwaitAnswer(number) => Some(*number),
            _ => None,
        });
        let signals = (request.access == Access::WaitSignal)
            .then(|| (FarWord::Signals { from: peer, slot: exposed.slot }, exposed.take_signal(peer)));
        let waits = [
            done.map(|number| (FarWord::Done(peer), number)),
            answered.map(|number| (FarWord::Answered(peer), number)),
            signals,
        ];
        let awaits = waits.into_iter().flatten().map(|(word, number)| Awaited::far(&far.words, word, number));
        (steps, awaits.collect())
    }

    /// Puts what an access to another host becomes on a stream.
    pub(super) fn put_far(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        request: &AccessRequest<'_>,
        steps: &Steps,
    ) -> Result<(), CudaError> {
        let far = self.far.as_ref().expect("made before there was a window");
        let (peer, memory) = (request.peer, &far.memory[&request.peer]);
        let own: SmallVec<[DeviceBytes<'_>; 8]> = request.buffers.iter().filter_map(Buffer::device_bytes).collect();
        let word = |word| far.registered.word(far.words.index(word));
        let mut batch = Batch::new(self.width);
        for action in &steps.actions {
            match *action {
                Action::AwaitDone(number) => batch.wait(word(FarWord::Done(peer)), number),
                Action::AwaitAnswer(number) => batch.wait(word(FarWord::Answered(peer)), number),
                Action::Publish(number) => batch.write(word(FarWord::Ready(peer)), number),
                Action::Fill { from, bytes, cell } => {
                    flush(current, stream, &mut batch)?;
                    copy(current, stream, &cut(&own, from, bytes), &[memory.puts.outbound(cell).part(0, bytes)])?;
                }
                Action::Take { into, bytes, cell } => {
                    flush(current, stream, &mut batch)?;
                    copy(current, stream, &[memory.gets.inbound(cell).part(0, bytes)], &cut(&own, into, bytes))?;
                }
            }
        }
        if request.access == Access::WaitSignal {
            let exposed = &self.exposed[&request.window];
            let signals = FarWord::Signals { from: peer, slot: exposed.slot };
            batch.wait(word(signals), exposed.taken[peer.index()]);
        }
        flush(current, stream, &mut batch)
    }
}

/// `len` bytes from `offset` on of stretches end to end.
fn cut<'a>(stretches: &[DeviceBytes<'a>], offset: usize, len: usize) -> SmallVec<[DeviceBytes<'a>; 8]> {
    let mut begin = 0;
    let part = |bytes: &DeviceBytes<'a>| {
        let (from, until) = (offset.max(begin), (offset + len).min(begin + bytes.len()));
        let part = (from < until).then(|| bytes.part(from - begin, until - from));
        begin += bytes.len();
        part
    };
    stretches.iter().filter_map(part).collect()
}

/// The most bytes of a cell: a rank has eight for each rank of other hosts.
const CELL_MAX: usize = 256 << 10;
