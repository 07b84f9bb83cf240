//! Messages on streams: sends, receives, batches of them and all_to_all, in worlds of threads and of
//! processes.

use std::os::fd::AsFd;

use ncclx_rs::device::lane::Edges;
use ncclx_rs::device::ring_lane::RingLane;
use ncclx_rs::device::rounds::{Direction, Message, TensorPart, all_to_all};
use ncclx_rs::device::staging::Staging;
use ncclx_rs::device::words::WordLayout;
use ncclx_rs::sync::Arc;
use ncclx_rs::sys::cuda::{
    Context, CudaError, Device, DeviceBytes, DeviceMemory, RegisteredWords, Stream, Width, copy_from_host, copy_to_host,
};
use ncclx_rs::sys::words::SharedWords;
use ncclx_rs::{Counts, Rank};

use crate::harness::{Software, alone, context, is_alone};
use crate::processes::{Process, of_processes};
use crate::world::{Others, of_threads};

/// Bytes of a cell.
const CELL: usize = 4096;

/// What a rank submits at once: on which of its streams, and in which tensors.
#[derive(Clone, Debug)]
struct Call {
    stream: usize,
    messages: Vec<Message>,
    tensors: Vec<usize>,
}

/// Bytes that only this message has there.
fn byte(sender: usize, receiver: usize, index: usize) -> u8 {
    (sender * 31 + receiver * 7 + index * 13 + index / 251 + 1) as u8
}

/// Sends and receives, each with a tensor of its own.
fn call(stream: usize, messages: &[(Direction, usize, usize)]) -> Call {
    let message = |(tensor, (direction, peer, len)): (usize, &(Direction, usize, usize))| {
        let part = TensorPart { tensor, offset: 0, len: *len };
        Message { peer: Rank::from(*peer), direction: *direction, part }
    };
    let tensors = messages.iter().map(|(_, _, len)| *len).collect();
    Call { stream, messages: messages.iter().enumerate().map(message).collect(), tensors }
}

const SEND: Direction = Direction::Send;
const RECEIVE: Direction = Direction::Receive;

/// An all_to_all with blocks without bytes, short ones, and such as take several chunks.
fn exchange(me: usize, size: usize) -> Call {
    let count = |from: usize, to: usize| match (from * 3 + to * 5) % 4 {
        0 => 0,
        1 => 7,
        more => more * CELL / 3 + from,
    };
    let sent: Counts = (0..size).map(|to| count(me, to)).collect();
    let received: Counts = (0..size).map(|from| count(from, me)).collect();
    let messages = all_to_all(&sent, &received, 4);
    Call { stream: 0, messages, tensors: vec![4 * sent.total(), 4 * received.total()] }
}

/// What every rank of a world does.
fn calls(me: usize, size: usize) -> Vec<Call> {
    let (next, previous) = ((me + 1) % size, (me + size - 1) % size);
    let long = 9 * CELL + 5;
    let ring = call(0, &[(SEND, next, long), (RECEIVE, previous, long)]);
    let both = match size {
        1 => vec![call(0, &[(SEND, 0, 3), (RECEIVE, 0, 3)])],
        _ if me.is_multiple_of(2) && next != 0 => vec![
            call(0, &[(SEND, next, 11), (SEND, next, 2 * long)]),
            call(0, &[(RECEIVE, next, 0)]),
            call(0, &[(RECEIVE, next, CELL)]),
        ],
        _ if !me.is_multiple_of(2) => vec![
            call(0, &[(RECEIVE, previous, 11)]),
            call(0, &[(RECEIVE, previous, 2 * long)]),
            call(0, &[(SEND, previous, 0), (SEND, previous, CELL)]),
        ],
        _ => vec![],
    };
    let own =
        [call(0, &[(SEND, me, CELL)]), call(0, &[(SEND, me, 0)]), call(0, &[(RECEIVE, me, CELL), (RECEIVE, me, 0)])];
    [&[ring, exchange(me, size)], &both[..], &own[..], &[exchange(me, size)]].concat()
}

/// A rank's lane, once all have theirs.
fn lane(
    context: &Arc<Context>,
    me: usize,
    size: usize,
    width: Width,
    words: SharedWords,
    others: &mut impl Others,
) -> Result<RingLane, CudaError> {
    let words = Arc::new(RegisteredWords::new(context, &Arc::new(words))?);
    let mut cells = Staging::new(context, Rank::from(me), size, RingLane::half(size, CELL))?;
    let (fd, len) = cells.export().expect("memory that can be shared");
    for (other, fd) in others.exchange(fd).into_iter().enumerate() {
        cells.import(Rank::from(other), fd.as_fd(), len).expect("memory that can be mapped");
    }
    let lane = RingLane::new(1, Rank::from(me), WordLayout::new(size, 2), words, cells, width);
    assert_eq!(lane.cell(), CELL);
    Ok(lane)
}

/// The tensors of a call: what is sent, and room for what is received.
fn tensors(context: &Arc<Context>, me: usize, call: &Call) -> Result<Vec<DeviceMemory>, CudaError> {
    let fill = |(tensor, len): (usize, &usize)| {
        let (memory, mut bytes) = (DeviceMemory::new(context, *len)?, vec![0xee; *len]);
        for message in call.messages.iter().filter(|message| message.part.tensor == tensor) {
            let TensorPart { offset, len, .. } = message.part;
            let value = |index| byte(me, message.peer.index(), index);
            if message.direction == SEND {
                bytes[offset..offset + len].iter_mut().enumerate().for_each(|(index, byte)| *byte = value(index));
            }
        }
        if !bytes.is_empty() {
            copy_from_host(&context.enter()?, &bytes, memory.bytes())?;
        }
        Ok(memory)
    };
    call.tensors.iter().enumerate().map(fill).collect()
}

/// One rank: everything three times, without waiting in between.
fn rank(
    me: usize,
    size: usize,
    width: Width,
    words: SharedWords,
    others: &mut impl Others,
    calls: &[Call],
) -> Result<(), CudaError> {
    let context = Context::primary(Device::new(0)?)?;
    let mut lane = lane(&context, me, size, width, words, others)?;
    let streams = [Stream::new(&context, 0)?, Stream::new(&context, 0)?];
    let current = context.enter()?;
    let memory = calls.iter().map(|call| tensors(&context, me, call)).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..3 {
        for (call, memory) in calls.iter().zip(&memory) {
            let rounds = lane.plan(&call.messages).expect("a batch that can end");
            let tensors: Vec<[DeviceBytes<'_>; 1]> = memory.iter().map(|memory| [memory.bytes()]).collect();
            let tensors: Vec<&[DeviceBytes<'_>]> = tensors.iter().map(|tensor| &tensor[..]).collect();
            lane.submit(&current, &streams[call.stream], &rounds, &tensors, Edges::default())?;
        }
    }
    streams.iter().try_for_each(Stream::synchronize)?;
    for (number, (call, memory)) in calls.iter().zip(&memory).enumerate() {
        for Message { peer, part, .. } in call.messages.iter().filter(|message| message.direction == RECEIVE) {
            let mut bytes = vec![0; part.len];
            if !bytes.is_empty() {
                copy_to_host(&current, memory[part.tensor].bytes().part(part.offset, part.len), &mut bytes)?;
            }
            let wrong = bytes.iter().enumerate().find(|(index, value)| **value != byte(peer.index(), me, *index));
            assert_eq!(wrong, None, "rank {me} of {size}: call {number}, {} bytes from {peer}", part.len);
        }
    }
    // What goes waits for the device, which in a world of threads is everybody's.
    others.barrier();
    Ok(())
}

#[test]
fn messages_of_threads_are_right() {
    let settings: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];
    alone("rings::messages_of_threads_are_right", &[settings], || {
        for size in 1..=8 {
            let width = if size % 2 == 0 { Width::Bits64 } else { Width::Bits32 };
            of_threads(size, |me, words, others| {
                let result = rank(me, size, width, words, others, &calls(me, size));
                assert_eq!(result, Ok(()), "rank {me} of {size}");
            });
        }
    });
}

const PROCESS: &str = "rings::a_rank_as_a_process";

/// Not a test of its own: what a process of a world does.
#[test]
fn a_rank_as_a_process() {
    if !is_alone(PROCESS) {
        return;
    }
    let Process { me, size, words, mut others } = Process::new(PROCESS);
    let result = rank(me, size, Width::Bits64, words, &mut others, &calls(me, size));
    assert_eq!(result, Ok(()), "rank {me} of {size}");
}

#[test]
fn messages_of_processes_are_right_on_few_queues() {
    if context().is_none() {
        return;
    }
    for queues in ["1", "2", "8"] {
        for size in [2, 3, 8] {
            let delays = [("SOFTCUDA_DELAY_US", "100"), ("SOFTCUDA_GAP_US", "20"), ("SOFTCUDA_WEAK", "1")];
            of_processes(PROCESS, size, &[&[("SOFTCUDA_QUEUES", queues)][..], &delays].concat());
        }
    }
}

/// Rank 0 has posted a receive from rank 1, which sends only after it has heard of what rank 0 received from rank 2.
#[test]
fn a_receive_posted_early_holds_up_no_other_stream() {
    alone("rings::a_receive_posted_early_holds_up_no_other_stream", &[&[("SOFTCUDA_DELAY_US", "50")]], || {
        let len = 5 * CELL;
        let calls = [
            vec![call(1, &[(RECEIVE, 1, len)]), call(0, &[(RECEIVE, 2, len)]), call(0, &[(SEND, 1, 4)])],
            vec![call(0, &[(RECEIVE, 0, 4)]), call(0, &[(SEND, 0, len)])],
            vec![call(0, &[(SEND, 0, len)])],
        ];
        of_threads(3, |me, words, others| {
            let result = rank(me, 3, Width::Bits64, words, others, &calls[me]);
            assert_eq!(result, Ok(()), "rank {me}");
        });
    });
}

#[test]
fn a_batch_takes_no_more_calls_of_the_driver_than_it_must() {
    const NAME: &str = "rings::a_batch_takes_no_more_calls_of_the_driver_than_it_must";
    alone(NAME, &[&[]], || {
        let Some(software) = Software::new() else { return };
        of_threads(1, |_, words, others| {
            let measure = || -> Result<(u64, u64), CudaError> {
                let context = Context::primary(Device::new(0)?)?;
                let mut lane = lane(&context, 0, 1, Width::Bits64, words, others)?;
                let stream = Stream::new(&context, 0)?;
                let memory = DeviceMemory::new(&context, CELL)?;
                let counts = || (software.uses("cuStreamBatchMemOp_v2"), software.uses("cuMemcpyDtoDAsync_v2"));
                let before = counts();
                // Outside a batch through its own ring: a head each, then a wait and a tail each.
                for direction in [SEND, RECEIVE] {
                    let rounds = lane.plan(&call(0, &[(direction, 0, CELL)]).messages).expect("one chunk");
                    lane.submit(&context.enter()?, &stream, &rounds, &[&[memory.bytes()]], Edges::default())?;
                }
                stream.synchronize()?;
                let after = counts();
                Ok((after.0 - before.0, after.1 - before.1))
            };
            assert_eq!(measure(), Ok((3, 2)));
        });
    });
}
