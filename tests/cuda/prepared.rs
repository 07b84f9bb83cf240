//! What communicators set up before their first operation, and factors of reductions that lie on the device.

use ncclx_rs::{Buffer, Buffers, DType, Error, Mode, Op, OpKind, ReduceOp, StreamHandle};

use crate::harness::alone;
use crate::ranks::{OnDevice, data, total, world};

/// An all_reduce of this memory, multiplied by what is at `factor`.
fn scaled(rank: &OnDevice, memory: Buffer, factor: Buffer, op: ReduceOp) -> Result<(), Error> {
    let device = rank.context.device().ordinal();
    // SAFETY: the test keeps the stream until the end.
    let mode = Mode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), device) });
    let buffers = || -> Buffers { [memory].into_iter().collect() };
    let op = Op { kind: OpKind::AllReduce(op), inputs: buffers(), outputs: buffers(), timeout: None, mode };
    rank.comm.submit_with_factor(op, factor)?.wait(None)
}

#[test]
fn a_factor_is_read_where_it_lies() {
    alone("prepared::a_factor_is_read_where_it_lies", &[&[]], || {
        world(3, &[], |rank| {
            let memory = rank.memory(&data(rank.me(), 1000));
            let factor = rank.memory(&[0.5, 4.0]);
            let at = |memory: &ncclx_rs::sys::cuda::DeviceMemory, skip: usize, len: usize| {
                let address = memory.bytes().ptr().to_bits() + 4 * skip as u64;
                // SAFETY: the test keeps memory until the end.
                unsafe { Buffer::on_device(address, len, DType::F32, 0) }
            };
            scaled(&rank, at(&memory, 0, 1000), at(&factor, 1, 1), ReduceOp::PreMulSum(0.0)).expect("a sum");
            let expected: Vec<f32> = total(3, 1000).iter().map(|sum| 4.0 * sum).collect();
            assert_eq!(rank.values(&memory), expected);
            for (factor, op) in [(at(&factor, 0, 2), ReduceOp::PreMulSum(0.0)), (at(&factor, 0, 1), ReduceOp::Sum)] {
                let refused = scaled(&rank, at(&memory, 0, 1000), factor, op);
                assert!(matches!(refused, Err(Error::Usage(_))), "{refused:?}");
            }
            rank.sum_on_the_cpu().expect("the communicator goes on");
            rank.leave((memory, factor));
        });
    });
}

#[test]
fn what_is_prepared_waits_for_nobody_at_its_first_operation() {
    alone("prepared::what_is_prepared_waits_for_nobody_at_its_first_operation", &[&[]], || {
        world(3, &[], |rank| {
            rank.comm.prepare_device(0).expect("a device");
            rank.comm.prepare_device(0).expect("again");
            let memory = rank.memory(&[1.0]);
            if rank.me() > 0 {
                // Rank 0 comes to this barrier once it has submitted.
                rank.comm.barrier().expect("all are there");
            }
            let work = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            if rank.me() == 0 {
                rank.comm.barrier().expect("all are there");
            }
            work.wait(None).expect("a sum");
            assert_eq!(rank.values(&memory), [3.0]);
            let Err(Error::Usage(_)) = rank.comm.prepare_device(1) else { panic!("it has one device") };
            rank.leave(memory);
        });
    });
}
