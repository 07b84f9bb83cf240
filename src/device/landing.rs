//! Accesses of other hosts' ranks to this rank's windows, as this rank carries them out.
//!
//! The CPU engine receives data into pinned memory and calls no driver, so that no thread that waits for the device holds up
//! the network. One thread for each communicator puts the copies on a stream of its own, in the order in which each rank's
//! items have come. After each item the stream writes a word which says that it is done. The stream waits for nothing, so
//! everything on it ends.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Once;
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::device::accesses::Accesses;
use crate::device::control::FailureKind;
use crate::device::far_windows::{FarMemory, FarWord, FarWords, Landing, Lands};
use crate::device::lane::flush;
use crate::device::routes::Item;
use crate::device::signals::SLOTS;
use crate::error::Error;
use crate::sync::{self, Arc, Condvar, Mutex, lock};
use crate::sys::cuda::{Batch, Context, CudaError, RegisteredWords, Relaxed, Stream};
use crate::sys::exit::at_exit;
use crate::sys::fork::{Origin, PerProcess};
use crate::types::Rank;

/// A communicator's handle of the thread, which ends when this is dropped.
pub(crate) struct LandingThread {
    shared: Arc<Shared>,
    origin: Origin,
}

struct Shared {
    comm: String,
    me: Rank,
    context: Arc<Context>,
    stream: Stream,
    words: FarWords,
    registered: Arc<RegisteredWords>,
    memory: BTreeMap<Rank, FarMemory>,
    /// By slot, this rank's part of the window.
    exposed: Mutex<[Option<Buffer>; SLOTS]>,
    accesses: Arc<Accesses>,
    queue: Mutex<Queue>,
    /// Notified when an item has come, or the thread is to end, or has ended.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    landings: VecDeque<Landing>,
    is_over: bool,
    has_ended: bool,
}

/// What the thread works with.
pub(crate) struct Tools {
    pub(crate) comm: String,
    pub(crate) me: Rank,
    pub(crate) context: Arc<Context>,
    pub(crate) words: FarWords,
    pub(crate) registered: Arc<RegisteredWords>,
    pub(crate) memory: BTreeMap<Rank, FarMemory>,
    pub(crate) accesses: Arc<Accesses>,
}

/// Why the thread could not begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LandingError {
    #[error(transparent)]
    Driver(#[from] CudaError),
    #[error("a thread cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}

impl LandingThread {
    pub(crate) fn begin(tools: Tools) -> Result<LandingThread, LandingError> {
        let Tools { comm, me, context, words, registered, memory, accesses } = tools;
        let stream = Stream::new(&context, 0)?;
        let (exposed, queue, changed) = (Mutex::new([None; SLOTS]), Mutex::default(), Condvar::new());
        let shared = Shared { comm, me, context, stream, words, registered, memory, exposed, accesses, queue, changed };
        let shared = Arc::new(shared);
        let (own, gate) = (shared.clone(), Gate::of_process()?);
        sync::spawn("ncclx_rs windows", move || own.run(gate))?;
        Ok(LandingThread { shared, origin: Origin::here() })
    }

    /// What the CPU engine hands items to.
    pub(crate) fn lands(&self) -> Arc<dyn Lands> {
        self.shared.clone()
    }

    /// Lets other hosts access a part of a window, before they know of the window.
    pub(crate) fn expose(&self, slot: usize, part: Buffer) {
        lock(&self.shared.exposed)[slot] = Some(part);
    }

    /// Takes the part back: when this returns, the device carries out no access of other hosts to it.
    pub(crate) fn conceal(&self, slot: usize) {
        if lock(&self.shared.exposed)[slot].take().is_some()
            && let Err(error) = self.shared.stream.synchronize()
        {
            log::warn!("communicator `{}`: {error}, with a window that was taken back", self.shared.comm);
        }
    }

    /// Has the thread end, and does not wait for that.
    pub(crate) fn end(&self) {
        lock(&self.shared.queue).is_over = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for LandingThread {
    /// Waits until the thread and its stream have ended. Both wait for nothing but the driver. In a forked child there is neither.
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        self.end();
        let mut queue = lock(&self.shared.queue);
        while !queue.has_ended {
            queue = self.shared.changed.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        drop(queue);
        if let Err(error) = self.shared.stream.synchronize() {
            log::warn!("communicator `{}`: {error}, at the end of its windows", self.shared.comm);
        }
    }
}

impl Lands for Shared {
    fn land(&self, landing: Landing) {
        lock(&self.queue).landings.push_back(landing);
        self.changed.notify_all();
    }
}

impl Shared {
    fn run(&self, gate: &Gate) {
        // Calls of the driver here must not spoil a capture of another thread.
        let _relaxed = Relaxed::enter().inspect_err(|error| log::warn!("captures may be spoilt: {error}"));
        while let Some(landing) = self.next() {
            // Otherwise the process is ending.
            let Some(_passage) = gate.pass() else { break };
            if let Err(error) = self.put(landing) {
                let Landing { from, .. } = landing;
                let operation = format!("an access of rank {from} to a window");
                let error = Error::Device { operation, cause: error.to_string() };
                self.accesses.fail(FailureKind::Driver, self.me, error);
                break;
            }
        }
        let mut queue = lock(&self.queue);
        (queue.is_over, queue.has_ended) = (true, true);
        queue.landings.clear();
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Landing> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.is_over {
                return None;
            }
            if let Some(landing) = queue.landings.pop_front() {
                return Some(landing);
            }
            queue = self.changed.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// Puts what an item asks for on the stream, and the word that says that it is done.
    fn put(&self, Landing { from, number, slot, item }: Landing) -> Result<(), CudaError> {
        let (_, width) = self.words.words();
        let (current, mut batch) = (self.context.enter()?, Batch::new(width));
        let Some(memory) = self.memory.get(&from) else { return Ok(()) };
        // Locked while the copy is put on the stream, so that `conceal` waits for the copy.
        let exposed = lock(&self.exposed);
        let part = |offset: usize, bytes: usize| {
            let part = exposed.get(slot)?.as_ref()?.device_bytes()?;
            let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= part.len());
            if !is_inside {
                log::warn!("communicator `{}`: dropped rank {from}'s access beyond a window", self.comm);
            }
            is_inside.then(|| part.part(offset, bytes))
        };
        match item {
            Item::Put { offset, bytes, cell } => {
                if let Some(part) = part(offset, bytes) {
                    self.stream.copy(&current, memory.puts.inbound(cell).part(0, bytes), part)?;
                }
            }
            Item::Get { offset, bytes, cell } => {
                if let Some(part) = part(offset, bytes) {
                    self.stream.copy(&current, part, memory.gets.outbound(cell).part(0, bytes))?;
                }
            }
            Item::Signal { count } => {
                let word = self.words.index(FarWord::Signals { from, slot });
                batch.write(self.registered.word(word), count);
            }
        }
        batch.write(self.registered.word(self.words.index(FarWord::Landed(from))), number);
        flush(&current, &self.stream, &mut batch)
    }
}

/// Lets threads call the driver until the process ends, when the driver goes.
#[derive(Default)]
struct Gate {
    state: Mutex<Passages>,
    changed: Condvar,
}

#[derive(Default)]
struct Passages {
    is_closed: bool,
    count: usize,
}

/// Held by a thread while it calls the driver.
struct Passage<'a>(&'a Gate);

static GATE: PerProcess<Gate> = PerProcess::unset();

impl Gate {
    /// The gate of this process, which closes when the process ends.
    fn of_process() -> std::io::Result<&'static Gate> {
        static AT_EXIT: Once = Once::new();
        let mut registered = Ok(());
        AT_EXIT.call_once(|| registered = at_exit(end));
        registered.map(|()| GATE.get())
    }

    fn pass(&self) -> Option<Passage<'_>> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return None;
        }
        state.count += 1;
        Some(Passage(self))
    }

    /// Lets no thread into the driver any more, and waits for those that are in it, for `limit` at most.
    fn close(&self, limit: Duration) {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        state.is_closed = true;
        while state.count > 0
            && let Some(left) = limit.checked_sub(begin.elapsed())
        {
            state = self.changed.wait_timeout(state, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).count -= 1;
        self.0.changed.notify_all();
    }
}

extern "C" fn end() {
    GATE.get().close(END_TIMEOUT);
}

/// How long the end of the process waits for the driver.
const END_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_passes_a_closed_gate_which_waits_for_those_who_have() {
        let gate = Gate::default();
        std::thread::scope(|scope| {
            let passage = gate.pass().expect("it is open");
            let closing = scope.spawn(|| gate.close(Duration::from_secs(60)));
            while !lock(&gate.state).is_closed {
                std::thread::yield_now();
            }
            assert!(gate.pass().is_none() && !closing.is_finished());
            drop(passage);
        });
        assert!(gate.pass().is_none());
        assert_eq!(lock(&gate.state).count, 0);
    }
}
