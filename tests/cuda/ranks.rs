//! Communicators whose ranks have streams on a device, as threads or as processes.

use std::process::{Child, Output, Stdio};
use std::time::Duration;

use ncclx_rs::comm::store::{MemoryStore, PrefixStore, Store, TcpStore};
use ncclx_rs::sync::Arc;
use ncclx_rs::sys::cuda::{
    Batch, Context, Device, DeviceMemory, RegisteredWords, Stream, Width, copy_from_host, copy_to_host,
};
use ncclx_rs::sys::words::SharedWords;
use ncclx_rs::{
    Buffer, Buffers, CommOptions, Communicator, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, StreamHandle, Work,
};

use crate::harness::{can_have, check_threads, program, watch};

/// One rank with a stream of its own.
pub(crate) struct OnDevice {
    pub(crate) comm: Communicator,
    pub(crate) context: Arc<Context>,
    pub(crate) stream: Stream,
}

impl OnDevice {
    /// This rank on this device of a communicator of this name.
    pub(crate) fn new(
        (name, rank, size): (&str, Rank, usize),
        store: Arc<dyn Store>,
        device: u32,
        hints: &[(&str, &str)],
    ) -> OnDevice {
        let comm = communicator((name, rank, size), store, hints);
        let context = Context::primary(Device::new(device).expect("a device")).expect("a context");
        let stream = Stream::new(&context, 0).expect("a stream");
        OnDevice { comm, context, stream }
    }

    pub(crate) fn me(&self) -> usize {
        self.comm.rank().index()
    }

    pub(crate) fn memory(&self, values: &[f32]) -> DeviceMemory {
        let memory = DeviceMemory::new(&self.context, size_of_val(values)).expect("memory");
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        copy_from_host(&self.context.enter().expect("a context"), &bytes, memory.bytes()).expect("a copy");
        memory
    }

    /// Leaves, and gives memory back: that waits for the device, which in a world of threads is everybody's.
    pub(crate) fn leave<T>(self, memory: T) {
        self.comm.barrier().expect("all are there");
        drop(memory);
        self.comm.shutdown().expect("an end");
    }

    pub(crate) fn values(&self, memory: &DeviceMemory) -> Vec<f32> {
        let mut bytes = vec![0; memory.bytes().len()];
        self.stream.synchronize().expect("a stream that ends");
        copy_to_host(&self.context.enter().expect("a context"), memory.bytes(), &mut bytes).expect("a copy");
        bytes.chunks(4).map(|value| f32::from_ne_bytes(value.try_into().expect("four bytes"))).collect()
    }

    pub(crate) fn submit(
        &self,
        kind: OpKind,
        inputs: &[&DeviceMemory],
        outputs: &[&DeviceMemory],
    ) -> Result<Work, Error> {
        self.submit_within(kind, inputs, outputs, None)
    }

    pub(crate) fn submit_within(
        &self,
        kind: OpKind,
        inputs: &[&DeviceMemory],
        outputs: &[&DeviceMemory],
        timeout: Option<Duration>,
    ) -> Result<Work, Error> {
        self.submit_on(&self.stream, kind, (inputs, outputs), timeout)
    }

    /// As the others, on another stream.
    pub(crate) fn submit_on(
        &self,
        stream: &Stream,
        kind: OpKind,
        (inputs, outputs): (&[&DeviceMemory], &[&DeviceMemory]),
        timeout: Option<Duration>,
    ) -> Result<Work, Error> {
        self.comm.submit(self.op(stream, kind, inputs, outputs, timeout))
    }

    /// An operation on a stream.
    pub(crate) fn op(
        &self,
        stream: &Stream,
        kind: OpKind,
        inputs: &[&DeviceMemory],
        outputs: &[&DeviceMemory],
        timeout: Option<Duration>,
    ) -> Op {
        let device = self.context.device().ordinal();
        let buffers =
            |list: &[&DeviceMemory]| -> Buffers { list.iter().map(|memory| buffer(memory, device)).collect() };
        // SAFETY: tests keep streams and memory until the end.
        let mode = Mode::Stream(unsafe { StreamHandle::from_raw(stream.to_raw(), device) });
        Op { kind, inputs: buffers(inputs), outputs: buffers(outputs), timeout, mode }
    }

    /// Holds its stream up until the word that is returned is 1.
    pub(crate) fn hold(&self) -> (Arc<SharedWords>, RegisteredWords) {
        let word = Arc::new(SharedWords::new(1).expect("a word"));
        let registered = RegisteredWords::new(&self.context, &word).expect("a word");
        let mut batch = Batch::new(Width::Bits64);
        batch.wait(registered.word(0), 1);
        self.stream.submit(&self.context.enter().expect("a context"), &mut batch).expect("a wait");
        (word, registered)
    }

    /// Adds up what all ranks have in this memory.
    pub(crate) fn sum(&self, memory: &DeviceMemory) -> Result<(), Error> {
        self.submit(OpKind::AllReduce(ReduceOp::Sum), &[memory], &[memory])?.wait(None)
    }

    /// The CPU's half of the communicator.
    pub(crate) fn sum_on_the_cpu(&self) -> Result<f32, Error> {
        let mut data = [self.me() as f32 + 1.0];
        self.comm.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[0])
    }
}

fn communicator(
    (name, rank, size): (&str, Rank, usize),
    store: Arc<dyn Store>,
    hints: &[(&str, &str)],
) -> Communicator {
    let hints = hints.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    let options = CommOptions { name: name.to_owned(), rank, size, store, timeout: None, hints };
    Communicator::new(options).expect("a communicator")
}

fn buffer(memory: &DeviceMemory, device: u32) -> Buffer {
    let bytes = memory.bytes();
    // SAFETY: tests keep memory until the end.
    unsafe { Buffer::on_device(bytes.ptr().to_bits(), bytes.len() / 4, DType::F32, device) }
}

/// What a rank has, for sums that are exact.
pub(crate) fn data(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| ((rank * 31 + at * 7) % 101) as f32).collect()
}

/// The sum of what so many ranks have.
pub(crate) fn total(size: usize, len: usize) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..size).map(|rank| data(rank, len)).collect();
    (0..len).map(|at| all.iter().map(|data| data[at]).sum()).collect()
}

/// Runs `body` on every rank of a world, in threads, on the first device.
pub(crate) fn world(size: usize, hints: &[(&str, &str)], body: impl Fn(OnDevice) + Sync) {
    world_on(&vec![0; size], hints, body);
}

/// As [`world`], each rank on the device of this number.
pub(crate) fn world_on(devices: &[u32], hints: &[(&str, &str)], body: impl Fn(OnDevice) + Sync) {
    let store = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        for (rank, device) in devices.iter().enumerate() {
            let (store, body) = (store.clone(), &body);
            let place = ("cuda", Rank::from(rank), devices.len());
            scope.spawn(move || body(OnDevice::new(place, store, *device, hints)));
        }
    });
}

/// Runs `body` on every rank of a world, in threads, on the first device. Each letter is the host that a rank poses to be on.
pub(crate) fn hosts(places: &str, hints: &[(&str, &str)], body: impl Fn(OnDevice) + Sync) {
    let places: Vec<(&str, u32)> = places.split("").filter(|host| !host.is_empty()).map(|host| (host, 0)).collect();
    hosts_on(&places, hints, body);
}

/// As [`hosts`], each rank on the device of this number.
pub(crate) fn hosts_on(places: &[(&str, u32)], hints: &[(&str, &str)], body: impl Fn(OnDevice) + Sync) {
    let store = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        for (rank, (host, device)) in places.iter().enumerate() {
            let (store, body) = (store.clone(), &body);
            let place = ("cuda", Rank::from(rank), places.len());
            let hints = [hints, &[("host_id", host)]].concat();
            scope.spawn(move || body(OnDevice::new(place, store, *device, &hints)));
        }
    });
}

/// Which rank a process is, of how many, and where the store of all is.
const RANK: &str = "NCCLX_RS_TEST_RANK_OF";

/// A rank that is a process.
pub(crate) struct Process {
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    store: Arc<TcpStore>,
}

impl Process {
    /// This process, which [`of_processes`] has begun for the test of this name.
    pub(crate) fn new(test: &str) -> Process {
        watch(test);
        let text = std::env::var(RANK).expect("set by the parent");
        let mut parts = text.split(' ');
        let mut next = || parts.next().expect("three parts");
        let (rank, size) = (next().parse::<usize>().expect("a rank"), next().parse().expect("a number"));
        let store = TcpStore::connect(next(), Duration::from_secs(60)).expect("the store");
        Process { rank: Rank::from(rank), size, store: Arc::new(store) }
    }

    /// The store of all, apart from what communicators have in it.
    pub(crate) fn store(&self) -> PrefixStore {
        PrefixStore::new("test", self.store.clone())
    }

    /// This rank of a communicator of this name.
    pub(crate) fn join(&self, name: &str, device: u32, hints: &[(&str, &str)]) -> OnDevice {
        let store = Arc::new(PrefixStore::new(name, self.store.clone()));
        OnDevice::new((name, self.rank, self.size), store, device, hints)
    }

    /// As [`Process::join`], of a rank that has no device.
    pub(crate) fn join_without_device(&self, name: &str, hints: &[(&str, &str)]) -> Communicator {
        let store = Arc::new(PrefixStore::new(name, self.store.clone()));
        communicator((name, self.rank, self.size), store, hints)
    }
}

/// Runs the test of this name in a process for each rank, which has these settings.
pub(crate) fn of_processes(test: &str, settings: &[&[(&str, &str)]]) {
    of_processes_that_end(test, settings, &vec![true; settings.len()]);
}

/// As [`of_processes`]; each process ends well or not.
pub(crate) fn of_processes_that_end(test: &str, settings: &[&[(&str, &str)]], expected: &[bool]) {
    if !settings.iter().all(|own| can_have(own)) {
        return;
    }
    let store = TcpStore::serve("127.0.0.1:0").expect("a store");
    let size = settings.len();
    let start = |(rank, own): (usize, &&[(&str, &str)])| -> Child {
        let mut program = program(test);
        program.env(RANK, format!("{rank} {size} {}", store.address())).env("RANK", rank.to_string());
        program.envs(own.iter().copied()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("a process")
    };
    let children: Vec<Child> = settings.iter().enumerate().map(start).collect();
    // All at once, so that none waits for room to write.
    let ends: Vec<Output> = std::thread::scope(|scope| {
        let ends: Vec<_> = children.into_iter().map(|child| scope.spawn(|| child.wait_with_output())).collect();
        ends.into_iter().map(|end| end.join().expect("no panic").expect("an end")).collect()
    });
    let texts: Vec<_> = ends.iter().map(|end| String::from_utf8_lossy(&end.stderr)).collect();
    let well: Vec<bool> = ends.iter().map(|end| end.status.success()).collect();
    assert_eq!(well, expected, "with {settings:?}: {}", texts.join("\n"));
    texts.iter().for_each(|text| check_threads(text));
}
