//! Operations of communicators on device memory, as programs call them.

use std::time::{Duration, Instant};

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::sync::Arc;
use ncclx_rs::sys::cuda::{Context, Device, DeviceMemory, Stream, copy_from_host, copy_to_host};
use ncclx_rs::{
    Buffer, Buffers, CommOptions, Communicator, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, StreamHandle, Work,
};

use crate::harness::alone;

/// One rank with a stream of its own.
struct OnDevice {
    comm: Communicator,
    context: Arc<Context>,
    stream: Stream,
}

impl OnDevice {
    fn memory(&self, values: &[f32]) -> DeviceMemory {
        let memory = DeviceMemory::new(&self.context, size_of_val(values)).expect("memory");
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        copy_from_host(&self.context.enter().expect("a context"), &bytes, memory.bytes()).expect("a copy");
        memory
    }

    /// Leaves, and gives memory back: that waits for the device, which in a world of threads is everybody's.
    fn leave<T>(self, memory: T) {
        self.comm.barrier().expect("all are there");
        drop(memory);
        self.comm.shutdown().expect("an end");
    }

    fn values(&self, memory: &DeviceMemory) -> Vec<f32> {
        let mut bytes = vec![0; memory.bytes().len()];
        self.stream.synchronize().expect("a stream that ends");
        copy_to_host(&self.context.enter().expect("a context"), memory.bytes(), &mut bytes).expect("a copy");
        bytes.chunks(4).map(|value| f32::from_ne_bytes(value.try_into().expect("four bytes"))).collect()
    }

    fn submit(&self, kind: OpKind, inputs: &[&DeviceMemory], outputs: &[&DeviceMemory]) -> Result<Work, Error> {
        self.submit_within(kind, inputs, outputs, None)
    }

    fn submit_within(
        &self,
        kind: OpKind,
        inputs: &[&DeviceMemory],
        outputs: &[&DeviceMemory],
        timeout: Option<Duration>,
    ) -> Result<Work, Error> {
        let buffers = |list: &[&DeviceMemory]| -> Buffers { list.iter().map(|memory| buffer(memory)).collect() };
        // SAFETY: tests keep streams and memory until the end.
        let mode = Mode::Stream(unsafe { StreamHandle::from_raw(self.stream.to_raw(), 0) });
        self.comm.submit(Op { kind, inputs: buffers(inputs), outputs: buffers(outputs), timeout, mode })
    }
}

fn buffer(memory: &DeviceMemory) -> Buffer {
    let bytes = memory.bytes();
    // SAFETY: tests keep memory until the end.
    unsafe { Buffer::on_device(bytes.ptr().to_bits(), bytes.len() / 4, DType::F32, 0) }
}

/// Runs `body` on every rank of a world, in threads.
fn world(size: usize, hints: &[(&str, &str)], body: impl Fn(OnDevice) + Sync) {
    let store = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        for rank in (0..size).map(Rank::from) {
            let (store, body) = (store.clone(), &body);
            scope.spawn(move || {
                let hints = hints.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
                let options = CommOptions { name: "cuda".to_owned(), rank, size, store, timeout: None, hints };
                let comm = Communicator::new(options).expect("a communicator");
                let context = Context::primary(Device::new(0).expect("a device")).expect("a context");
                let stream = Stream::new(&context, 0).expect("a stream");
                body(OnDevice { comm, context, stream });
            });
        }
    });
}

fn data(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| ((rank * 31 + at * 7) % 101) as f32).collect()
}

#[test]
fn an_all_reduce_adds_what_all_ranks_have() {
    let weak: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];
    alone("communicators::an_all_reduce_adds_what_all_ranks_have", &[&[], weak], || {
        for size in 1..=5 {
            world(size, &[("device_staging_bytes", "65536")], |rank| {
                let me = rank.comm.rank().index();
                let lengths = [1, 3, 1000, 50_000];
                let memory = lengths.map(|len| rank.memory(&data(me, len)));
                for (len, memory) in lengths.into_iter().zip(&memory) {
                    let inputs: Vec<Vec<f32>> = (0..size).map(|rank| data(rank, len)).collect();
                    let sum: Vec<f32> = (0..len).map(|at| inputs.iter().map(|input| input[at]).sum()).collect();
                    let work = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[memory], &[memory]).expect("a work");
                    work.wait(None).expect("a sum");
                    assert_eq!(rank.values(memory), sum, "{len} on rank {me} of {size}");
                }
                rank.leave(memory);
            });
        }
    });
}

#[test]
fn many_operations_are_submitted_before_anybody_waits() {
    alone("communicators::many_operations_are_submitted_before_anybody_waits", &[&[]], || {
        world(3, &[], |rank| {
            let me = rank.comm.rank().index();
            let memory = rank.memory(&[me as f32, 1.0]);
            let all = rank.memory(&[0.0; 6]);
            let mut works = Vec::new();
            for _ in 0..1500 {
                works.push(rank.submit(OpKind::AllReduce(ReduceOp::Max), &[&memory], &[&memory]).expect("a work"));
                works.push(rank.submit(OpKind::AllGather, &[&memory], &[&all]).expect("a work"));
                works.push(rank.submit(OpKind::Barrier, &[], &[]).expect("a work"));
            }
            assert_eq!(rank.values(&all), [2.0, 1.0, 2.0, 1.0, 2.0, 1.0]);
            assert!(works.iter().all(|work| work.wait(None) == Ok(())));
            rank.leave((memory, all));
        });
    });
}

#[test]
fn ranks_that_call_something_else_are_told_and_go_on() {
    alone("communicators::ranks_that_call_something_else_are_told_and_go_on", &[&[]], || {
        world(3, &[], |rank| {
            let me = rank.comm.rank().index();
            let memory = rank.memory(&data(me, 10));
            let one = rank.memory(&[1.0]);
            let op = if me == 1 { ReduceOp::Max } else { ReduceOp::Sum };
            let outcome = rank.submit(OpKind::AllReduce(op), &[&memory], &[&memory]).and_then(|work| work.wait(None));
            let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
            assert!(detail.contains("all_reduce(MAX, 10 × float32)") && detail.contains("(SUM, 10"), "{detail}");
            let work = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&one], &[&one]).expect("a work");
            work.wait(None).expect("a sum");
            assert_eq!(rank.values(&one), [3.0]);
            rank.leave((memory, one));
        });
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_stream_runs_out() {
    alone("communicators::a_rank_that_does_not_come_is_named_and_the_stream_runs_out", &[&[]], || {
        world(3, &[], |rank| {
            let me = rank.comm.rank().index();
            let memory = rank.memory(&data(me, 10));
            let first = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            first.wait(None).expect("a sum");
            if me != 2 {
                let (kind, limit) = (OpKind::AllReduce(ReduceOp::Sum), Some(Duration::from_millis(500)));
                let work = rank.submit_within(kind, &[&memory], &[&memory], limit).expect("a work");
                let begin = Instant::now();
                match work.wait(None) {
                    Err(Error::Timeout { detail, .. }) => {
                        let expected = "device collective 2: rank(s) 2 did not call it; rank(s) 0, 1 did";
                        assert_eq!(detail, expected);
                    }
                    Err(Error::Remote { cause, .. }) => assert!(cause.contains("rank(s) 2 did not call it"), "{cause}"),
                    other => panic!("{other:?}"),
                }
                rank.stream.synchronize().expect("a stream that runs out");
                assert!(begin.elapsed() < Duration::from_secs(20), "it was released");
            }
            // All are there until the end: what ranks do when one leaves is another test's.
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn what_waits_for_a_rank_that_leaves_ends() {
    alone("communicators::what_waits_for_a_rank_that_leaves_ends", &[&[]], || {
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            let first = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            first.wait(None).expect("a sum");
            if rank.comm.rank() == Rank(0) {
                rank.comm.abort("it had enough");
            } else {
                let outcome = rank.submit(OpKind::Barrier, &[], &[]).and_then(|work| work.wait(None));
                let Err(Error::PeerLost { rank: 0, .. }) = &outcome else { panic!("{outcome:?}") };
                rank.stream.synchronize().expect("a stream that runs out");
                rank.comm.shutdown().expect("an end");
            }
        });
    });
}
