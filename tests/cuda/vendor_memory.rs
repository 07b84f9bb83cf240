//! Memory by a vendor's library, and memory that is registered with its communicators, on the fake one of tests/fakenccl.

use std::time::{Duration, Instant};

use ncclx_rs::config::NcclFields;
use ncclx_rs::device::allocator::{self, Allocates, MemoryError};
use ncclx_rs::sync::{Arc, AtomicBool, Ordering};
use ncclx_rs::sys::cuda::{DeviceBytes, copy_from_host, copy_to_host};
use ncclx_rs::sys::nccl::{NcclComm, Progress, Vendor};
use ncclx_rs::{Buffer, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, StreamHandle, Work};

use crate::graphs::wait_until;
use crate::harness::{alone, calls_of_nccl, context};
use crate::ranks::{OnDevice, data, hosts_on, total, world_on};
use crate::vendor::library;

const NCCL: &[(&str, &str)] = &[("engine", "nccl")];
const FOUR: (&str, &str) = ("SOFTCUDA_DEVICES", "4");

/// Numbers in memory of the allocator, from some offset on.
struct Allocated {
    address: u64,
    device: u32,
    len: usize,
}

impl Allocated {
    fn new(rank: &OnDevice, by: Allocates, len: usize) -> Allocated {
        let device = rank.context.device().ordinal();
        let bytes = 4 * len;
        let address = match by {
            Allocates::Library => {
                assert_eq!(rank.comm.allocates(), Ok(Allocates::Library));
                allocator::allocate_by_library(bytes, device)
            }
            _ => allocator::allocate(bytes, device),
        };
        Allocated { address: address.expect("memory"), device, len }
    }

    /// `len` numbers from the `offset`-th on.
    fn part(&self, offset: usize, len: usize) -> Buffer {
        assert!(offset + len <= self.len);
        // SAFETY: tests free memory when nothing uses it any more, or wait until it is free.
        unsafe { Buffer::on_device(self.address + 4 * offset as u64, len, DType::F32, self.device) }
    }

    fn all(&self) -> Buffer {
        self.part(0, self.len)
    }

    fn free(self) {
        allocator::free(self.address).expect("it is given back");
    }
}

fn bytes(buffer: &Buffer) -> DeviceBytes<'_> {
    buffer.device_bytes().expect("of a device")
}

fn fill(rank: &OnDevice, buffer: Buffer, values: &[f32]) {
    let values: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    copy_from_host(&rank.context.enter().expect("a context"), &values, bytes(&buffer)).expect("a copy");
}

fn values(rank: &OnDevice, buffer: Buffer) -> Vec<f32> {
    let mut read = vec![0; buffer.bytes()];
    rank.stream.synchronize().expect("a stream that ends");
    copy_to_host(&rank.context.enter().expect("a context"), bytes(&buffer), &mut read).expect("a copy");
    read.chunks(4).map(|value| f32::from_ne_bytes(value.try_into().expect("four bytes"))).collect()
}

/// Begins a sum over all ranks, in place.
fn submit(rank: &OnDevice, buffer: Buffer) -> Result<Work, Error> {
    let device = rank.context.device().ordinal();
    let buffers = || std::iter::once(buffer).collect();
    // SAFETY: the stream lives as long as the rank.
    let mode = Mode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), device) });
    let (kind, timeout) = (OpKind::AllReduce(ReduceOp::Sum), Some(Duration::from_secs(20)));
    rank.comm.submit(Op { kind, inputs: buffers(), outputs: buffers(), timeout, mode })
}

fn sum(rank: &OnDevice, buffer: Buffer) -> Result<(), Error> {
    submit(rank, buffer)?.wait(None)
}

/// A sum of these numbers that must be right.
fn right_sum(rank: &OnDevice, buffer: Buffer) {
    fill(rank, buffer, &data(rank.me(), buffer.len()));
    sum(rank, buffer).expect("a sum");
    assert_eq!(values(rank, buffer), total(rank.comm.size(), buffer.len()));
}

/// Waits until all that was registered no longer is, and nothing was done that NCCL leaves undefined.
fn assert_all_ended() {
    let begin = Instant::now();
    while calls_of_nccl("registrations") != calls_of_nccl("deregistrations") + calls_of_nccl("left") {
        assert!(begin.elapsed() < Duration::from_secs(60), "something stays registered");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(calls_of_nccl("breaches"), 0);
}

#[test]
fn memory_of_either_allocator_is_registered_once() {
    let versions: &[&[(&str, &str)]] = &[
        &[FOUR],
        &[FOUR, ("FAKENCCL_VERSION", "22703"), ("SOFTCUDA_DELAY_US", "50")],
        &[FOUR, ("FAKENCCL_VERSION", "23203"), ("FAKENCCL_LAUNCH_US", "300")],
    ];
    alone("vendor_memory::memory_of_either_allocator_is_registered_once", versions, || {
        for (number, by) in [Allocates::Library, Allocates::Engine].into_iter().enumerate() {
            world_on(&[0, 1, 2], NCCL, |rank| {
                let memory = Allocated::new(&rank, by.clone(), 3000);
                right_sum(&rank, memory.part(0, 1000));
                right_sum(&rank, memory.part(1500, 700));
                rank.comm.barrier().expect("all are there");
                assert_eq!(calls_of_nccl("registrations"), 3 * (number as u64 + 1), "once on each rank");
                assert_eq!(calls_of_nccl("deregistrations"), 3 * number as u64);
                rank.leave(());
                // The communicator's end ends them.
                let begin = Instant::now();
                while calls_of_nccl("deregistrations") < 3 * (number as u64 + 1) {
                    assert!(begin.elapsed() < Duration::from_secs(60), "something stays registered");
                    std::thread::sleep(Duration::from_millis(5));
                }
                memory.free();
            });
            assert_eq!(calls_of_nccl("left"), 0);
            assert_all_ended();
        }
        assert_eq!((calls_of_nccl("allocations"), calls_of_nccl("frees")), (3, 3), "of the library alone");
    });
}

#[test]
fn memory_that_goes_is_deregistered_first_when_nothing_uses_it() {
    alone("vendor_memory::memory_that_goes_is_deregistered_first_when_nothing_uses_it", &[&[FOUR]], || {
        let run = |rank: OnDevice| {
            for by in [Allocates::Library, Allocates::Engine] {
                let memory = Allocated::new(&rank, by, 1000);
                right_sum(&rank, memory.all());
                rank.comm.barrier().expect("all are there");
                if rank.me() == 1 {
                    // Rank 0 gives its memory back meanwhile.
                    std::thread::sleep(Duration::from_millis(300));
                }
                let work = submit(&rank, memory.all()).expect("a work");
                memory.free();
                work.wait(None).expect("it was over when the memory went");
                rank.comm.barrier().expect("all are there");
            }
            let later = Allocated::new(&rank, Allocates::Library, 1000);
            right_sum(&rank, later.all());
            rank.leave(());
            later.free();
        };
        world_on(&[0, 1], NCCL, run);
        hosts_on(&[("a", 0), ("b", 1)], NCCL, run);
        assert_all_ended();
        assert_eq!((calls_of_nccl("registrations"), calls_of_nccl("left")), (12, 0));
    });
}

#[test]
fn memory_serves_several_communicators() {
    alone("vendor_memory::memory_serves_several_communicators", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            let memory = Allocated::new(&rank, Allocates::Library, 500);
            right_sum(&rank, memory.all());
            let ranks = [Rank(0), Rank(1)];
            let comm = rank.comm.split_with_all(&ranks, "part").expect("a part").expect("with this rank");
            let (context, stream) = (rank.context.clone(), ncclx_rs::sys::cuda::Stream::new(&rank.context, 0));
            let part = OnDevice { comm, context, stream: stream.expect("a stream") };
            right_sum(&part, memory.all());
            rank.comm.barrier().expect("all are there");
            assert_eq!(calls_of_nccl("registrations"), 4, "once a rank and communicator");
            // One of the communicators goes first.
            part.leave(());
            right_sum(&rank, memory.all());
            memory.free();
            rank.leave(());
        });
        assert_all_ended();
        assert_eq!(calls_of_nccl("left"), 0);
    });
}

/// Sends the first rank's data to all.
fn broadcast(rank: &OnDevice, buffer: Buffer) {
    let device = rank.context.device().ordinal();
    // SAFETY: the stream lives as long as the rank.
    let mode = Mode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), device) });
    let buffers = || std::iter::once(buffer).collect();
    let kind = OpKind::Broadcast { root: Rank(0) };
    let op = Op { kind, inputs: buffers(), outputs: buffers(), timeout: None, mode };
    rank.comm.submit(op).and_then(|work| work.wait(None)).expect("a broadcast");
}

#[test]
fn memory_goes_while_the_library_sends_what_has_left() {
    alone("vendor_memory::memory_goes_while_the_library_sends_what_has_left", &[&[FOUR]], || {
        let has_gone = AtomicBool::new(false);
        world_on(&[0, 1], NCCL, |rank| {
            let memory = Allocated::new(&rank, Allocates::Library, 1000);
            let lent = Allocated::new(&rank, Allocates::Engine, 1000);
            let owner = Owner::default();
            rank.comm.register_memory(lent.part(10, 500), owner.lent()).expect("it is lent");
            right_sum(&rank, lent.part(10, 500));
            fill(&rank, memory.all(), &data(rank.me(), 1000));
            if rank.me() == 1 {
                wait_until("the other rank's memory", || has_gone.load(Ordering::Acquire));
                broadcast(&rank, memory.all());
                assert_eq!(values(&rank, memory.all()), data(0, 1000));
                rank.comm.shutdown().expect("an end");
                return memory.free();
            }
            broadcast(&rank, memory.all());
            rank.comm.shutdown().expect("an end");
            wait_until("the end has begun", || calls_of_nccl("destroys") == 1);
            memory.free();
            wait_until("what was lent", || owner.is_gone());
            assert_eq!(calls_of_nccl("ends"), 0, "the other rank has not received");
            has_gone.store(true, Ordering::Release);
        });
        wait_until("both ends", || calls_of_nccl("ends") == 2);
        assert_all_ended();
        assert_eq!(calls_of_nccl("left"), 0);
    });
}

#[test]
fn what_a_call_hangs_on_goes_when_its_communicator_was_given_up() {
    let hang: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:2:hang")];
    alone("vendor_memory::what_a_call_hangs_on_goes_when_its_communicator_was_given_up", &[hang], || {
        world_on(&[0, 1], &[("engine", "nccl"), ("timeout_seconds", "2")], |rank| {
            let memory = Allocated::new(&rank, Allocates::Library, 500);
            right_sum(&rank, memory.all());
            let device = rank.context.device().ordinal();
            // SAFETY: the stream lives as long as the rank.
            let mode = Mode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), device) });
            let buffers = || std::iter::once(memory.all()).collect();
            let (kind, timeout) = (OpKind::AllReduce(ReduceOp::Sum), None);
            let work = rank.comm.submit(Op { kind, inputs: buffers(), outputs: buffers(), timeout, mode });
            // Until the time is over, the device does something with it.
            memory.free();
            work.and_then(|work| work.wait(None)).expect_err("it hung");
            assert!(submit(&rank, rank_memory(&rank)).is_err(), "nothing goes on");
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
        assert_all_ended();
        assert_eq!(calls_of_nccl("frees"), 2);
    });
}

/// Memory that stays until the process ends.
fn rank_memory(rank: &OnDevice) -> Buffer {
    Allocated::new(rank, Allocates::Engine, 10).all()
}

/// The text of the disagreement of a sum, on each rank.
fn disagreement(rank: &OnDevice, buffer: Buffer) -> String {
    match sum(rank, buffer) {
        Err(Error::Mismatch { detail, .. }) => detail,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_of_which_some_pass_registered_memory_disagree_and_go_on() {
    alone("vendor_memory::ranks_of_which_some_pass_registered_memory_disagree_and_go_on", &[&[FOUR]], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            let (memory, plain) = (Allocated::new(&rank, Allocates::Library, 100), rank.memory(&[1.0; 100]));
            let device = rank.context.device().ordinal();
            // SAFETY: it lives until the end of the test.
            let plain_buffer = unsafe { Buffer::on_device(plain.bytes().ptr().to_bits(), 100, DType::F32, device) };
            right_sum(&rank, memory.all());
            let text = disagreement(&rank, if rank.me() == 2 { plain_buffer } else { memory.all() });
            let expected = ["the ranks disagree on the memory of collective 2, all_reduce", "of get_mem_allocator()"];
            assert!(expected.iter().all(|part| text.contains(part)), "{text}");
            assert!(text.contains("that of rank 2 is not"), "{text}");
            right_sum(&rank, plain_buffer);
            right_sum(&rank, memory.all());
            rank.leave(plain);
            memory.free();
        });
        assert_all_ended();
    });
}

#[test]
fn a_rank_that_cannot_register_is_a_disagreement_on_all() {
    let error: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:register:error")];
    alone("vendor_memory::a_rank_that_cannot_register_is_a_disagreement_on_all", &[error], || {
        world_on(&[0, 1], NCCL, |rank| {
            let memory = Allocated::new(&rank, Allocates::Library, 100);
            let text = disagreement(&rank, memory.all());
            assert!(text.contains("that of rank 1 is not"), "{text}");
            let plain = rank.memory(&[1.0; 10]);
            rank.sum(&plain).expect("the communicator goes on");
            rank.leave(plain);
            memory.free();
        });
        assert_all_ended();
    });
}

#[test]
fn a_library_that_is_set_to_register_nothing_takes_any_memory() {
    let off: &[(&str, &str)] = &[FOUR, ("NCCL_LOCAL_REGISTER", "0")];
    alone("vendor_memory::a_library_that_is_set_to_register_nothing_takes_any_memory", &[off], || {
        world_on(&[0, 1], NCCL, |rank| {
            let memory = Allocated::new(&rank, Allocates::Library, 100);
            right_sum(&rank, memory.all());
            let plain = rank.memory(&[0.0; 100]);
            let device = rank.context.device().ordinal();
            // SAFETY: it lives until the end of the test.
            let other = unsafe { Buffer::on_device(plain.bytes().ptr().to_bits(), 100, DType::F32, device) };
            right_sum(&rank, if rank.me() == 0 { other } else { memory.all() });
            rank.leave(plain);
            memory.free();
        });
        assert_eq!((calls_of_nccl("registrations"), calls_of_nccl("breaches")), (0, 0));
    });
}

#[test]
fn a_library_without_memory_leaves_it_to_the_engine() {
    let home = std::env::var_os("SOFTCUDA_HOME").map(std::path::PathBuf::from).unwrap_or_default();
    let without = home.join("nccl/without-memory/libnccl.so.2");
    let lacks: &[(&str, &str)] = &[FOUR, ("NCCLX_RS_NCCL_LIBRARY", without.to_str().expect("a path"))];
    alone("vendor_memory::a_library_without_memory_leaves_it_to_the_engine", &[lacks], || {
        world_on(&[0, 1], NCCL, |rank| {
            let lacking = Allocates::InPlaceOfLibrary("NCCL 2.30.7 has no registered buffers".to_owned());
            assert_eq!(rank.comm.allocates(), Ok(lacking));
            assert_eq!(allocator::allocate_by_library(100, 0), Err(MemoryError::NoLibrary));
            let memory = Allocated::new(&rank, Allocates::Engine, 100);
            right_sum(&rank, memory.all());
            let owner = Owner::default();
            rank.comm.register_memory(memory.all(), owner.lent()).expect("nothing to do");
            assert!(owner.is_gone());
            rank.leave(());
            memory.free();
        });
        assert_eq!(calls_of_nccl("registrations"), 0);
    });
}

#[test]
fn engines_that_are_none_of_a_library_allocate_themselves() {
    alone("vendor_memory::engines_that_are_none_of_a_library_allocate_themselves", &[&[FOUR]], || {
        world_on(&[0, 1], &[("engine", "streams")], |rank| {
            assert_eq!(rank.comm.allocates(), Ok(Allocates::Engine));
            let memory = Allocated::new(&rank, Allocates::Engine, 100);
            let owner = Owner::default();
            rank.comm.register_memory(memory.all(), owner.lent()).expect("nothing to do");
            assert!(owner.is_gone());
            right_sum(&rank, memory.all());
            rank.comm.deregister_memory(memory.all()).expect("nothing to do");
            rank.leave(());
            memory.free();
        });
        world_on(&[0, 1], &[("engine", "nccl"), ("nccl_library", "/nowhere/libnccl.so.2")], |rank| {
            let error = rank.comm.allocates().expect_err("it has none").to_string();
            assert!(error.contains("engine=nccl: /nowhere/libnccl.so.2 cannot be loaded"), "{error}");
            rank.leave(());
        });
        assert_eq!((calls_of_nccl("registrations"), calls_of_nccl("allocations")), (0, 0));
    });
}

/// What keeps memory that is lent, and notes its end.
#[derive(Clone, Default)]
struct Owner(Arc<AtomicBool>);

struct Lent(Owner);

impl Drop for Lent {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

impl Owner {
    fn lent(&self) -> Box<dyn Send + Sync> {
        Box::new(Lent(self.clone()))
    }

    fn is_gone(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn memory_that_a_program_lends_is_kept_as_long_as_it_is_registered() {
    alone("vendor_memory::memory_that_a_program_lends_is_kept_as_long_as_it_is_registered", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            let plain = rank.memory(&[0.0; 100]);
            let device = rank.context.device().ordinal();
            let address = plain.bytes().ptr().to_bits();
            // SAFETY: it lives until the end of the test.
            let part = |at: u64, len| unsafe { Buffer::on_device(address + 4 * at, len, DType::F32, device) };
            let (whole, inner) = (Owner::default(), Owner::default());
            rank.comm.register_memory(part(0, 100), whole.lent()).expect("it is lent");
            rank.comm.register_memory(part(10, 10), inner.lent()).expect("a part of it, too");
            let again = rank.comm.register_memory(part(0, 50), Owner::default().lent()).expect_err("a second time");
            assert!(again.to_string().contains("memory that begins elsewhere"), "{again}");
            // SAFETY: nothing uses it.
            let on_host = unsafe { Buffer::from_raw(std::ptr::dangling_mut(), 1, DType::F32) };
            let error = rank.comm.register_memory(on_host, Owner::default().lent()).expect_err("the host's");
            assert!(error.to_string().contains("expected memory of a CUDA device, got memory of the host"), "{error}");
            rank.comm.barrier().expect("all are there");
            assert_eq!(calls_of_nccl("registrations"), 0, "no call has passed it");
            rank.comm.barrier().expect("all are there");
            right_sum(&rank, part(0, 100));
            right_sum(&rank, part(10, 20));
            right_sum(&rank, part(12, 5));
            rank.comm.barrier().expect("all are there");
            assert_eq!(calls_of_nccl("registrations"), 4, "two pieces on each rank");
            rank.comm.barrier().expect("all are there");
            assert!(!whole.is_gone() && !inner.is_gone());
            if rank.me() == 1 {
                // Rank 0 gives it back meanwhile.
                std::thread::sleep(Duration::from_millis(300));
            }
            let work = submit(&rank, part(10, 10)).expect("a work");
            rank.comm.deregister_memory(part(10, 10)).expect("it is given back");
            assert!(inner.is_gone() && !whole.is_gone());
            work.wait(None).expect("it was over before");
            right_sum(&rank, part(10, 10));
            rank.comm.barrier().expect("all are there");
            rank.comm.shutdown().expect("an end");
            drop(rank);
            let begin = Instant::now();
            while !whole.is_gone() {
                assert!(begin.elapsed() < Duration::from_secs(60), "it is kept after the end");
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        assert_all_ended();
        assert_eq!(calls_of_nccl("left"), 0);
    });
}

#[test]
fn the_library_refuses_what_is_no_memory_of_a_device() {
    alone("vendor_memory::the_library_refuses_what_is_no_memory_of_a_device", &[&[FOUR]], || {
        let (library, context) = (library(Vendor::Nccl), context().expect("the software CUDA"));
        let current = context.enter().expect("a context");
        let fields = Arc::<NcclFields>::default();
        let id = library.unique_id().expect("an id");
        let comm = NcclComm::begin(&library, &current, &[id], (0, 1), &fields).expect("a beginning");
        while comm.progress() == Ok(Progress::Going) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let host = [0_u8; 64];
        // SAFETY: the library refuses it.
        let bytes = unsafe { DeviceBytes::from_raw(host.as_ptr() as u64, 64) };
        let error = comm.register(&current, bytes).expect_err("it is the host's").to_string();
        assert_eq!(error, "ncclCommRegister: invalid argument: what is to be registered is no device memory");
        assert_eq!(comm.register(&current, bytes), Ok(false), "it is not tried again");
        comm.deregister(bytes.ptr()).expect("it is not registered");
        comm.abort();
        assert!(comm.register(&current, bytes).is_err(), "it is gone");
        comm.deregister(bytes.ptr()).expect("the library has ended all");
    });
}
