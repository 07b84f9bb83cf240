//! One-sided operations of ranks 0 and 1: puts with signals, and writes and reads by a transport.
#![allow(unsafe_code, reason = "lends memory to a window")]

use std::error::Error;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ncclx_rs::rdma::{Key, Kind, MemoryRegion, RemoteBuffer, Span, Transport};
use ncclx_rs::sys::lent_bytes::LentBytes;
use ncclx_rs::{Buffer, Buffers, Communicator, DType, Mode, Op, OpKind, Rank, SharedMemory, WindowId};

pub(crate) const OPERATIONS: [&str; 4] = ["PutPingPong", "Uniput", "Write", "Read"];

/// The longest that they take.
const MOST_BYTES: usize = 256 << 20;

/// More than the bytes that a transport is connected by.
const ADDRESS_BYTES: usize = 4096;

const LONG: Duration = Duration::from_secs(600);

/// One call of an operation.
type Call = Box<dyn FnMut(&Communicator) -> Result<(), ncclx_rs::Error>>;

/// A call of an operation of [`OPERATIONS`].
pub(crate) fn call(comm: &Communicator, operation: &str, bytes: usize) -> Result<Call, Box<dyn Error>> {
    if bytes > MOST_BYTES {
        return Err(format!("one-sided operations take up to {MOST_BYTES} bytes").into());
    }
    let (write, read) = (("Write", Kind::Write), ("Read", Kind::Read));
    if let Some((_, kind)) = [write, read].into_iter().find(|(name, _)| *name == operation) {
        return transfer(comm, kind, bytes);
    }
    let (window, source) = exposed(comm, bytes)?;
    let (me, answers) = (comm.rank(), operation == "PutPingPong");
    Ok(Box::new(move |comm| {
        if me == Rank(1) {
            wait_signal(comm, window, Rank(0))?;
        }
        match me {
            Rank(0) => put(comm, window, Rank(1), source)?,
            Rank(1) if answers => put(comm, window, Rank(0), source)?,
            _ => {}
        }
        if me == Rank(0) && answers { wait_signal(comm, window, Rank(1)) } else { Ok(()) }
    }))
}

fn run(comm: &Communicator, kind: OpKind, inputs: &[Buffer]) -> Result<(), ncclx_rs::Error> {
    let op = Op { kind, inputs: inputs.into(), outputs: Buffers::new(), timeout: Some(LONG), mode: Mode::Blocking };
    comm.submit(op)?.wait(None)
}

/// Puts and signals.
fn put(comm: &Communicator, window: WindowId, to: Rank, source: Buffer) -> Result<(), ncclx_rs::Error> {
    run(comm, OpKind::Put { window, to, offset: 0 }, &[source])?;
    run(comm, OpKind::Signal { window, to }, &[])
}

fn wait_signal(comm: &Communicator, window: WindowId, from: Rank) -> Result<(), ncclx_rs::Error> {
    run(comm, OpKind::WaitSignal { window, from }, &[])
}

/// The window of this process, whose first half is written to, and the first bytes of the other half.
fn exposed(comm: &Communicator, bytes: usize) -> Result<(WindowId, Buffer), Box<dyn Error>> {
    static WINDOW: OnceLock<(WindowId, usize)> = OnceLock::new();
    if WINDOW.get().is_none() {
        // Shared, so that the ranks of a host can map it. It stays as long as the process.
        let memory = Box::leak(Box::new(SharedMemory::<u8>::new(2 * MOST_BYTES)?));
        memory[MOST_BYTES..].fill(1);
        // SAFETY: the memory is never freed, and is accessed by operations alone.
        let lent = unsafe { Buffer::from_raw(memory.as_mut_ptr(), memory.len(), DType::U8) };
        let _ = WINDOW.set((comm.window_register(lent)?.id(), memory.as_mut_ptr().expose_provenance()));
    }
    let (window, memory) = WINDOW.get().expect("it was just set");
    let source = std::ptr::with_exposed_provenance_mut::<u8>(memory + MOST_BYTES);
    // SAFETY: the second half of the memory, as above.
    Ok((*window, unsafe { Buffer::from_raw(source, bytes, DType::U8) }))
}

/// A write that is over once the bytes are in the memory of rank 1, or a read of them.
fn transfer(comm: &Communicator, kind: Kind, bytes: usize) -> Result<Call, Box<dyn Error>> {
    let peer = match comm.rank() {
        Rank(0) => 1,
        _ => 0,
    };
    let memory = MemoryRegion::new(Arc::new(LentBytes::owned(vec![1; bytes])));
    let own = memory.remote_buffer(0, bytes)?;
    let transport = Transport::new(&[])?;
    let mut told = own.address.to_le_bytes().to_vec();
    told.extend(own.key.to_bytes());
    told.extend(transport.bind()?);
    told.resize(ADDRESS_BYTES, b' ');
    let mut all = vec![0; ADDRESS_BYTES * comm.size()];
    comm.all_gather(&mut all, &told)?;
    let (address, rest) = all[peer * ADDRESS_BYTES..][..ADDRESS_BYTES].split_first_chunk().expect("it is longer");
    let (key, place) = rest.split_first_chunk().expect("it is longer");
    let remote = RemoteBuffer { address: u64::from_le_bytes(*address), len: bytes, key: Key::from_bytes(*key) };
    if comm.rank().0 < 2 {
        transport.connect(place.trim_ascii_end(), LONG)?;
    }
    let me = comm.rank();
    Ok(Box::new(move |_| {
        if me == Rank(0) {
            let span = Span { local: memory.bytes().clone(), offset: 0, len: bytes, remote };
            let ended = transport.post(kind, vec![span], LONG).and_then(|pending| pending.wait(None));
            ended.unwrap_or_else(|error| panic!("{error}"));
        }
        Ok(())
    }))
}
