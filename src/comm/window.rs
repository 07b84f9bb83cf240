//! Windows of a communicator: all ranks register and deregister them together; each rank accesses them on its own.

use std::io;
use std::time::Instant;

use smallvec::smallvec;

use crate::buffer::{Buffer, Memory};
use crate::comm::check;
use crate::comm::communicator::Communicator;
use crate::deadline::nap;
use crate::engine::driver::Driver;
use crate::engine::region::{Region, Words};
use crate::engine::remote_reads::Remote;
use crate::error::{Error, UsageError};
use crate::op::{CollectiveKind, Mode, Op, OpKind};
use crate::sync::Arc;
use crate::sys::cma;
use crate::sys::segment::{MappedMemory, SegmentId, SegmentPlace};
use crate::types::Rank;
use crate::window::{GetPath, Window, WindowId};

impl Communicator {
    /// Exposes `memory` to the other ranks. A collective: every rank calls it, with any number of bytes, and it returns when
    /// all ranks have. [`Communicator::submit`] puts, gets, accumulates, flushes, signals and waits for signals.
    ///
    /// The memory stays exposed until [`Communicator::window_deregister`] returns or the communicator closes; see [`Buffer`].
    /// Memory of a CUDA device must be such as other processes can map: that of [`allocator`](crate::device::allocator), for
    /// example. What streams do with it before is not waited for.
    pub fn window_register(&self, memory: Buffer) -> Result<Window, Error> {
        self.driver.check_here(REGISTER)?;
        check::lengths(REGISTER, "memory", &[memory])?;
        let (region, place) = match memory.memory() {
            Memory::Host => (Region::of(&[memory]), 0),
            Memory::Device(device) => {
                self.device.check_device(REGISTER, device)?;
                (Region::default(), 1)
            }
        };
        let lent = region.lend();
        let (id, exposer) = self.driver.with_engine(|engine| match engine.closed() {
            Some(how) => Err(engine.closed_error(REGISTER, how)),
            // Exposed before another rank can learn that this rank has called.
            None => Ok((engine.windows.expose(region), engine.context.endpoints.exposer())),
        })?;
        // Without the engine's lock: it may take long.
        let exposure = exposer.zip(lent).and_then(|(exposer, lent)| exposer.expose(&lent));
        let key = exposure.as_ref().map_or(Vec::new(), |exposure| words_of(exposure.key()));
        if let Some(exposure) = exposure {
            self.driver.with_engine(|engine| engine.windows.keep_exposure(id, exposure));
        }
        let mappable = match memory.memory() {
            Memory::Host => SegmentPlace::of(memory.ptr() as u64, memory.bytes()),
            Memory::Device(_) => None,
        };
        if mappable.is_some() {
            cma::allow_readers();
        }
        let [segment, offset, pid] =
            mappable.map_or([0; 3], |place| [place.id.to_bits(), place.offset, place.pid.unsigned_abs().into()]);
        let (address, key_words) = (memory.ptr() as u64, key.len() as u64);
        let told = [id.0, memory.bytes() as u64, place, segment, offset, pid, address, key_words];
        let exchanged = self.exchange(CollectiveKind::WindowRegister, told.to_vec());
        let agreed = exchanged.and_then(|answers| {
            let window = self.agree(id, memory, &answers)?;
            if let Memory::Device(device) = memory.memory() {
                self.device.register_window(self, id, memory, device, self.timeout())?;
            }
            let mapped = self.map_parts(&window)?;
            let remotes = self.exchange_keys(key, &answers)?;
            self.driver.with_engine(|engine| engine.windows.set_remotes(id, remotes));
            self.driver.with_engine(|engine| engine.windows.set_layout(self.rank(), window.clone(), mapped));
            Ok(window)
        });
        if agreed.is_err() {
            self.driver.with_engine(|engine| engine.conceal(id));
            self.driver.flush_finished();
        }
        agreed
    }

    /// Deregisters a window. A collective: every rank calls it, and it returns when no rank accesses the window any more. A
    /// put that no awaited signal follows may not have arrived.
    ///
    /// Also after an error, no rank accesses this rank's memory any more, unless it is a device's and the error says that
    /// accesses, of this rank or of another one, are still in flight, or ranks of the host have mapped it: one that was writing may
    /// end that first, which concerns no other memory. After an error, a rank whose get is still under way through UCX's `cma` may
    /// get what the memory is used for then.
    pub fn window_deregister(&self, window: WindowId) -> Result<(), Error> {
        self.driver.check_here(DEREGISTER)?;
        let known = self.driver.with_engine(|engine| match engine.closed() {
            Some(how) => Err(engine.closed_error(DEREGISTER, how)),
            None => engine
                .windows
                .window(window)
                .map(|_| ())
                .ok_or_else(|| check::unknown_window(DEREGISTER, window).into()),
        });
        // Where another thread aborts, its memory may go once this returns.
        known.inspect_err(|_| self.await_copies())?;
        let is_left = |driver: &Driver| driver.with_engine(|engine| !engine.windows.accesses_parts(window));
        self.driver.drive_until(is_left, None);
        let settled = self.device.settle_window(window, self.timeout());
        let told = self.exchange(CollectiveKind::WindowDeregister, vec![u64::from(settled.is_err())]);
        self.driver.with_engine(|engine| engine.conceal(window));
        self.device.conceal_window(window);
        self.driver.flush_finished();
        // Copies that other threads have begun meanwhile. There are no new ones.
        self.driver.drive_until(is_left, None);
        let unsettled = told.and_then(|told| self.window_barrier(CollectiveKind::WindowDeregister).map(|()| told))?;
        settled?;
        match unsettled.iter().position(|is_unsettled| *is_unsettled != 0) {
            None => Ok(()),
            Some(rank) => {
                let cause = format!("its accesses to window {window} are still in flight on its device");
                Err(Error::Remote { operation: DEREGISTER.to_owned(), rank: Rank::from(rank).0, cause })
            }
        }
    }

    /// Waits until everything that this rank has put and accumulated is in the other ranks' parts of a window, which lies in the
    /// memory of hosts.
    ///
    /// # Errors
    /// As those of [`OpKind::Flush`](crate::OpKind::Flush).
    pub fn window_flush_all(&self, window: WindowId) -> Result<(), Error> {
        self.driver.check_here(FLUSH)?;
        let flushes: Result<Vec<_>, Error> = self
            .driver
            .with_engine(|engine| engine.windows.unflushed(window))
            .into_iter()
            .map(|to| {
                let kind = OpKind::Flush { window, to };
                self.submit(Op { kind, inputs: smallvec![], outputs: smallvec![], timeout: None, mode: Mode::Async })
            })
            .collect();
        // All end before the first error is told.
        let ends: Vec<_> = flushes?.iter().map(|flush| flush.wait(None)).collect();
        ends.into_iter().collect()
    }

    /// Waits until everything that all ranks have put and accumulated is in the parts of a window. A collective: every rank calls
    /// it, for a window in the memory of hosts.
    ///
    /// # Errors
    /// The window is not registered, an access does not end in time, a rank did not call it, or a rank is lost.
    pub fn window_fence(&self, window: WindowId) -> Result<(), Error> {
        self.check_window(FENCE, window, Memory::Host)?;
        let flushed = self.window_flush_all(window);
        // Also after an error, for which the other ranks need not wait.
        let all_came = self.window_barrier(CollectiveKind::WindowFence);
        flushed.and(all_came)
    }

    /// Maps the part of a window of a rank on this rank's host, which lies in a [`SharedMemory`](crate::SharedMemory) there. The
    /// mapping may outlive the window.
    ///
    /// # Errors
    /// The window is not registered, the rank is on another host, its memory cannot be mapped, or the system forbids it.
    pub fn window_map(&self, window: WindowId, rank: Rank) -> Result<MappedMemory, Error> {
        check::one_of(MAP, "rank", rank, self.size())?;
        let known = self.check_window(MAP, window, Memory::Host)?;
        let refused = |expected: String, got: String| -> Error {
            UsageError { operation: MAP.to_owned(), argument: "rank", expected, got }.into()
        };
        if self.host_of(rank) != self.host_of(self.rank()) {
            return Err(refused("a rank on the same host".to_owned(), format!("rank {rank} on another host")));
        }
        let place = known.place(rank).ok_or_else(|| {
            let expected = "a rank whose part lies in shared memory, as get_mem_allocator and SharedMemory make it";
            refused(expected.to_owned(), format!("rank {rank}, whose part does not"))
        })?;
        place.map(known.bytes(rank)).map_err(|cause| {
            let expected = "a rank whose memory this process may map".to_owned();
            refused(expected, format!("rank {rank}, of which the system says: {cause}"))
        })
    }

    /// How a get of a rank's part goes now, where nothing that this rank has put there is unflushed. Of a rank to which no stream is
    /// open yet that is [`GetPath::Messages`], as its first get is.
    ///
    /// # Errors
    /// The window is not registered, or there is no such rank.
    pub fn window_get_path(&self, window: WindowId, rank: Rank) -> Result<GetPath, Error> {
        check::one_of(GET_PATH, "rank", rank, self.size())?;
        self.driver.check_here(GET_PATH)?;
        let (memory, path) = self.driver.with_engine(|engine| {
            engine.check_open(GET_PATH)?;
            let known = engine.windows.window(window).ok_or_else(|| check::unknown_window(GET_PATH, window))?;
            Ok::<_, Error>((known.memory(), engine.windows.get_path(&engine.context.endpoints, window, rank)))
        })?;
        Ok(match memory {
            Memory::Host => path,
            Memory::Device(_) => self.device.get_path(window, rank),
        })
    }

    /// Maps the parts of all other ranks; nothing unless all ranks are on one host, all parts lie in shared memory, and every rank
    /// could map them. The ranks agree on that.
    fn map_parts(&self, window: &Window) -> Result<Option<Vec<MappedMemory>>, Error> {
        let (me, ranks) = (self.rank(), (0..self.size()).map(Rank::from));
        let is_possible = |rank| self.host_of(rank) == self.host_of(me) && window.place(rank).is_some();
        if self.size() == 1 || !ranks.clone().all(is_possible) {
            return Ok(None);
        }
        let map = |rank| match self.maps_windows {
            true => window.place(rank).expect("looked at before").map(window.bytes(rank)),
            false => Err(io::Error::other("the setting `transport` has ranks share no memory")),
        };
        let mapped: io::Result<Vec<_>> = ranks.filter(|rank| *rank != me).map(map).collect();
        if let Err(cause) = &mapped {
            log::debug!("communicator `{}` rank {me}: window {} cannot be mapped: {cause}", self.name(), window.id());
        }
        let told = self.exchange(CollectiveKind::WindowRegister, vec![u64::from(mapped.is_ok())])?;
        Ok(mapped.ok().filter(|_| told.iter().all(|is_mapped| *is_mapped == 1)))
    }

    /// The window, if it is registered and lies in such memory.
    fn check_window(&self, operation: &'static str, window: WindowId, memory: Memory) -> Result<Window, Error> {
        self.driver.check_here(operation)?;
        self.driver.with_engine(|engine| {
            engine.check_open(operation)?;
            let known = engine.windows.window(window).ok_or_else(|| check::unknown_window(operation, window))?;
            check::access(operation, known, memory, self.rank(), None)?;
            Ok(known.clone())
        })
    }

    /// Tells every rank by which key it may read this one's part without its help, if any rank has such a key. Returns those of all.
    fn exchange_keys(&self, mut key: Vec<u64>, answers: &[u64]) -> Result<Vec<Option<Remote>>, Error> {
        let lengths =
            || answers.iter().skip(KEY_WORDS).step_by(TOLD).map(|words| usize::try_from(*words).unwrap_or(usize::MAX));
        let longest = lengths().max().unwrap_or_default();
        if longest == 0 || longest > KEY_WORDS_MAX {
            return Ok(Vec::new());
        }
        key.resize(longest, 0);
        let keys = self.exchange(CollectiveKind::WindowRegister, key)?;
        let remote = |((key, words), told): ((&[u64], usize), &[u64])| {
            let bytes = key[..words].iter().flat_map(|word| word.to_le_bytes()).collect::<Arc<[u8]>>();
            (words > 0).then_some(Remote { address: told[ADDRESS], key: bytes })
        };
        Ok(keys.chunks_exact(longest).zip(lengths()).zip(answers.chunks_exact(TOLD)).map(remote).collect())
    }

    /// Sends these words to every rank, as a part of a registration, and returns those of all, by rank.
    fn exchange(&self, kind: CollectiveKind, mine: Vec<u64>) -> Result<Vec<u64>, Error> {
        let (count, ranks) = (mine.len(), self.size());
        let (mut mine, mut all) = (Words::new(mine), Words::new(vec![0; count * ranks]));
        let op = Op {
            kind: OpKind::AllGather,
            inputs: smallvec![mine.buffer()],
            outputs: smallvec![all.buffer()],
            timeout: None,
            mode: Mode::Blocking,
        };
        // A wait without a timeout lasts until the engine has ended the operation, and no longer uses `mine` and `all`.
        self.collective(&op, Some(kind), self.timeout())?.wait()?;
        Ok(all.get().to_vec())
    }

    fn agree(&self, id: WindowId, memory: Buffer, answers: &[u64]) -> Result<Window, Error> {
        let column = |number| answers.iter().copied().skip(number).step_by(TOLD);
        if let Some((rank, other)) = column(0).enumerate().find(|(_, other)| *other != id.0) {
            let detail = format!("rank {rank} calls it window {other}, rank {} window {id}", self.rank());
            return Err(Error::Mismatch { operation: REGISTER.to_owned(), detail });
        }
        let kind = |place| if place == 0 { "the cpu" } else { "a CUDA device" };
        let own = u64::from(memory.memory() != Memory::Host);
        if let Some((rank, other)) = column(2).enumerate().find(|(_, other)| *other != own) {
            let (other, me, own) = (kind(other), self.rank(), kind(own));
            let detail = format!("rank {rank} exposes memory of {other}, rank {me} memory of {own}");
            return Err(Error::Mismatch { operation: REGISTER.to_owned(), detail });
        }
        let sizes = column(1).map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)).collect();
        let places = answers.chunks_exact(TOLD).map(|told| {
            let id = SegmentId::from_bits(told[3])?;
            Some(SegmentPlace { pid: i32::try_from(told[5]).ok()?, id, offset: told[4] })
        });
        Ok(Window::new(id, sizes, places.collect(), memory.memory()))
    }

    /// Waits for what threads of this rank copy to and from parts of windows by themselves: each is one copy, which nothing holds up.
    pub(super) fn await_copies(&self) {
        let begin = Instant::now();
        while self.driver.with_engine(|engine| engine.windows.has_copies()) {
            nap(begin.elapsed());
        }
    }

    fn window_barrier(&self, kind: CollectiveKind) -> Result<(), Error> {
        let op = Op {
            kind: OpKind::Barrier,
            inputs: smallvec![],
            outputs: smallvec![],
            timeout: None,
            mode: Mode::Blocking,
        };
        self.collective(&op, Some(kind), self.timeout())?.wait().map(|_| ())
    }
}

/// The bytes of a key, and zeros behind them, which the library that has made it does not read.
fn words_of(key: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|at| bytes.get(at).copied().unwrap_or_default()));
    key.chunks(size_of::<u64>()).map(word).collect()
}

/// The words that each rank tells of its part, and which of them say where it lies and how long its key is.
const TOLD: usize = 8;
const ADDRESS: usize = 6;
const KEY_WORDS: usize = 7;

/// No key is longer: it has some bytes for each device.
const KEY_WORDS_MAX: usize = 512;

const REGISTER: &str = CollectiveKind::WindowRegister.name();

const FLUSH: &str = "flush";

const FENCE: &str = CollectiveKind::WindowFence.name();

const MAP: &str = "window_map";

const GET_PATH: &str = "window_get_path";

const DEREGISTER: &str = CollectiveKind::WindowDeregister.name();

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::comm::communicator::CommOptions;
    use crate::comm::store::MemoryStore;

    #[test]
    fn an_abort_and_a_deregistration_after_it_wait_for_copies_of_other_threads() {
        let (name, store) = ("windows".to_owned(), Arc::new(MemoryStore::default()));
        let options = CommOptions { name, rank: Rank(0), size: 1, store, timeout: None, hints: vec![] };
        let comm = Communicator::new(options).expect("it is alone");
        let mut part = Words::new(vec![0; 4]);
        let window = comm.window_register(part.buffer()).expect("a window").id();
        comm.driver.with_engine(|engine| engine.windows.copy_begins(window));
        std::thread::scope(|scope| {
            let aborts = scope.spawn(|| comm.abort("for a test"));
            while comm.driver.with_engine(|engine| engine.closed().is_none()) {
                std::thread::yield_now();
            }
            let deregisters = scope.spawn(|| comm.window_deregister(window));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!aborts.is_finished() && !deregisters.is_finished(), "the memory is in use");
            comm.driver.with_engine(|engine| engine.windows.copy_ends(window));
            deregisters.join().expect("no panic").expect_err("it was aborted");
        });
    }
}
