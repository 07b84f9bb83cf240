//! What ranks of other hosts put into this rank's windows, and take from there.
//!
//! The engine receives what comes into pinned memory and calls no driver, so that nobody who waits for the device holds up the
//! network. A thread for each communicator puts the copies on a stream of its own, in the order in which the items of each rank
//! have come, with a word after each that says that it is done. Nothing on that stream waits, so all of it ends.

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
use crate::sys::fork::PerProcess;
use crate::types::Rank;

/// The thread, as the communicator has it. It goes with this.
pub(crate) struct LandingThread {
    shared: Arc<Shared>,
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
    /// Something has come, or the thread is to end, or has ended.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    landings: VecDeque<Landing>,
    is_over: bool,
    has_ended: bool,
}

/// What it works with.
pub(crate) struct Tools {
    pub(crate) comm: String,
    pub(crate) me: Rank,
    pub(crate) context: Arc<Context>,
    pub(crate) words: FarWords,
    pub(crate) registered: Arc<RegisteredWords>,
    pub(crate) memory: BTreeMap<Rank, FarMemory>,
    pub(crate) accesses: Arc<Accesses>,
}

/// Why it could not begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LandingError {
    #[error(transparent)]
    Driver(#[from] CudaError),
    #[error("a thread cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}

impl LandingThread {
    /// Begins.
    pub(crate) fn begin(tools: Tools) -> Result<LandingThread, LandingError> {
        let Tools { comm, me, context, words, registered, memory, accesses } = tools;
        let stream = Stream::new(&context, 0)?;
        let (exposed, queue, changed) = (Mutex::new([None; SLOTS]), Mutex::default(), Condvar::new());
        let shared = Shared { comm, me, context, stream, words, registered, memory, exposed, accesses, queue, changed };
        let shared = Arc::new(shared);
        let (own, gate) = (shared.clone(), Gate::of_process()?);
        sync::spawn("ncclx_rs windows", move || own.run(gate))?;
        Ok(LandingThread { shared })
    }

    /// As the engine knows it.
    pub(crate) fn lands(&self) -> Arc<dyn Lands> {
        self.shared.clone()
    }

    /// Lends a part of a window to other hosts, before they know of it.
    pub(crate) fn expose(&self, slot: usize, part: Buffer) {
        lock(&self.shared.exposed)[slot] = Some(part);
    }

    /// Takes it back: when this returns, the device does nothing to it that other hosts have asked for.
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
    /// Waits until the thread and its stream have ended, which wait for nothing but the driver.
    fn drop(&mut self) {
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
        // What is put on streams here must not spoil what is captured elsewhere.
        let _relaxed = Relaxed::enter().inspect_err(|error| log::warn!("captures may be spoilt: {error}"));
        while let Some(landing) = self.next() {
            // The process ends otherwise.
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
        // Held while the copy is put on the stream, so that whoever takes a part back waits for it.
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

/// Whether threads may call the driver: not while the process ends, when the driver goes.
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

/// A thread that calls the driver.
struct Passage<'a>(&'a Gate);

static GATE: PerProcess<Gate> = PerProcess::unset();

impl Gate {
    /// That of this process, which closes when that ends.
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

    /// Lets no thread into the driver any more, and waits a while for those that are in it.
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
