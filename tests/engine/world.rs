//! Ranks as threads of this process: a world of communicators to run a test in.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::{Buffer, CommOptions, Communicator, DType, Element, Error, Mode, Op, OpKind, Rank, Topology};

use crate::ucx_process;

/// Which transports a world runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    Shm,
    Tcp,
    /// TCP with TLS, whose keys come from the secret.
    Tls,
    /// UCX, which [`ucx_process`] has found.
    Ucx,
    /// One host, with all transports.
    Auto,
    /// One host, whose ranks say that they are on two NUMA nodes.
    Nodes,
    /// Two "hosts": shared memory inside, all of it copied through rings of the smallest size, and TCP between.
    Mixed,
}

/// The wires that a test runs over: in a process of [`ucx_process`], that which its environment chooses.
pub(crate) fn wires() -> Vec<Wire> {
    if ucx_process::is_under_test() { vec![Wire::Ucx] } else { vec![Wire::Shm, Wire::Tcp, Wire::Tls, Wire::Mixed] }
}

/// Runs `f` on every rank of a new communicator, each in its own thread, and returns the results by rank.
///
/// A rank that panics fails the test; a world that hangs is caught by the watchdog, which names the test's wire.
pub(crate) fn world<T, F>(wire: Wire, size: usize, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(&Communicator) -> T + Send + Sync + 'static,
{
    world_with(wire, size, Duration::from_secs(60), f)
}

/// As [`world`], with a time limit for operations.
pub(crate) fn world_with<T, F>(wire: Wire, size: usize, timeout: Duration, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(&Communicator) -> T + Send + Sync + 'static,
{
    world_hinted(wire, size, timeout, &[], f)
}

/// As [`world_with`], with these hints besides the wire's.
pub(crate) fn world_hinted<T, F>(wire: Wire, size: usize, timeout: Duration, more: &[(&str, &str)], f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(&Communicator) -> T + Send + Sync + 'static,
{
    let more: Vec<(String, String)> = more.iter().map(|(name, value)| hint(name, value)).collect();
    let store = Arc::new(MemoryStore::default());
    let f = Arc::new(f);
    let (tell, told) = mpsc::channel();
    for rank in 0..size {
        let (store, f, tell, more) = (store.clone(), f.clone(), tell.clone(), more.clone());
        std::thread::spawn(move || {
            let run = || {
                let options = CommOptions {
                    name: format!("{wire:?}"),
                    rank: Rank::from(rank),
                    size,
                    store,
                    // It limits joining, too, which takes as long as the machine's other work has it take.
                    timeout: Some(timeout.max(Duration::from_secs(60))),
                    hints: hints(wire, rank, size).into_iter().chain(more).collect(),
                };
                let comm = Communicator::new(options).expect("the world forms");
                comm.set_timeout(timeout);
                let result = f(&comm);
                comm.shutdown().expect("shutdown");
                result
            };
            // Nobody listens any more when another rank has panicked.
            let _ = tell.send((rank, panic::catch_unwind(AssertUnwindSafe(run))));
        });
    }
    let mut results: Vec<Option<T>> = (0..size).map(|_| None).collect();
    for _ in 0..size {
        // Those that wait for a rank that panicked are left alone.
        let (rank, result) = told.recv_timeout(WATCHDOG).unwrap_or_else(|_| panic!("{wire:?}: the ranks hang"));
        results[rank] = Some(result.unwrap_or_else(|_| panic!("{wire:?}: rank {rank} panicked; see above")));
    }
    results.into_iter().flatten().collect()
}

/// Longer than any test, also on a machine that has other work.
const WATCHDOG: Duration = Duration::from_secs(300);

fn hint(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// Who shares a "host" with whom, and a NUMA node if that is told.
pub(crate) fn topology(wire: Wire, size: usize) -> Topology {
    let hosts: Vec<&str> = (0..size).map(|rank| host_of(wire, rank, size)).collect();
    let nodes: Vec<Option<u32>> = (0..size).map(|rank| (wire == Wire::Nodes).then(|| node_of(rank, size))).collect();
    Topology::new(&hosts).on_nodes(&nodes)
}

/// The NUMA node of a rank, where ranks say that they are on two.
fn node_of(rank: usize, size: usize) -> u32 {
    u32::from(rank >= size.div_ceil(2))
}

/// The "host" of a rank.
fn host_of(wire: Wire, rank: usize, size: usize) -> &'static str {
    if wire == Wire::Mixed && rank >= size.div_ceil(2) { "right" } else { "left" }
}

fn hints(wire: Wire, rank: usize, size: usize) -> Vec<(String, String)> {
    match wire {
        Wire::Shm => vec![hint("transport", "shm")],
        Wire::Auto => vec![],
        Wire::Nodes => vec![hint("numa_node", &node_of(rank, size).to_string())],
        Wire::Tcp => vec![hint("transport", "tcp")],
        Wire::Ucx => vec![hint("transport", "ucx")],
        Wire::Tls => vec![hint("transport", "tcp"), hint("tls", "on")],
        Wire::Mixed => vec![
            hint("host_id", host_of(wire, rank, size)),
            hint("single_copy_bytes", "0"),
            hint("shm_ring_bytes", &rustix::param::page_size().to_string()),
        ],
    }
}

/// A buffer over `data`, which the caller keeps until the operation is done.
pub(crate) fn buffer<T: Element>(data: &mut [T]) -> Buffer {
    buffer_as(data, T::DTYPE)
}

/// As [`buffer`], of elements of a type that may have no name in Rust.
///
/// # Panics
/// When the data is not whole elements of it.
#[allow(unsafe_code, reason = "tests lend plain memory to the engine")]
pub(crate) fn buffer_as<T: Element>(data: &mut [T], dtype: DType) -> Buffer {
    let bytes = size_of_val(data);
    assert!(bytes.is_multiple_of(dtype.size()), "whole elements");
    // SAFETY: the elements take the bytes of `data`, of any alignment and any bits; the tests keep it and leave it alone until
    // they have waited for the operation.
    unsafe { Buffer::from_raw(data.as_mut_ptr().cast(), bytes / dtype.size(), dtype) }
}

/// A blocking operation.
pub(crate) fn op(kind: OpKind, inputs: Vec<Buffer>, outputs: Vec<Buffer>) -> Op {
    Op { kind, inputs: inputs.into(), outputs: outputs.into(), timeout: None, mode: Mode::Blocking }
}

/// Submits and waits.
pub(crate) fn run(comm: &Communicator, kind: OpKind, inputs: Vec<Buffer>, outputs: Vec<Buffer>) -> Result<(), Error> {
    comm.submit(op(kind, inputs, outputs))?.wait(None)
}
