//! Checks of operations' arguments, and the collective that an operation describes.

use crate::algo::Collective;
use crate::buffer::{self, BYTES_MAX, Buffer, Memory};
use crate::counts::Counts;
use crate::error::UsageError;
use crate::op::{CollectiveKind, Mode, Op, OpKind};
use crate::signature::Signature;
use crate::types::{DType, Rank, ReduceOp};
use crate::window::{Window, WindowId};

/// A collective whose arguments fit together.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    pub(crate) signature: Signature,
}

/// This rank and the communicator's size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankAndSize {
    pub(crate) me: Rank,
    pub(crate) size: usize,
}

/// Checks a collective on this rank alone; what ranks must agree on is compared when messages arrive. `called`: the kind that
/// ranks must agree on and errors name, where it is not that of `op`.
pub(crate) fn collective(op: &Op, called: Option<CollectiveKind>, place: RankAndSize) -> Result<Checked, UsageError> {
    let checker = Checker { op, place };
    memory(op)?;
    let dtype = checker.dtype()?;
    checker.reduction(dtype)?;
    let collective = match &op.kind {
        OpKind::AllReduce(_) => Collective::AllReduce { count: checker.in_place()? },
        OpKind::Reduce { root, .. } => {
            Collective::Reduce { root: checker.rank("root", *root)?, count: checker.in_place()? }
        }
        OpKind::Broadcast { root } => {
            Collective::Broadcast { root: checker.rank("root", *root)?, count: checker.in_place()? }
        }
        OpKind::AllGather | OpKind::AllGatherPersistent { .. } => {
            Collective::AllGather { counts: checker.blocks("output", &op.outputs, "input", &op.inputs)? }
        }
        OpKind::ReduceScatter(_) => {
            Collective::ReduceScatter { counts: checker.blocks("input", &op.inputs, "output", &op.outputs)? }
        }
        OpKind::AllToAll { send, recv } => {
            checker.splits("input_split_sizes", send, &op.inputs)?;
            checker.splits("output_split_sizes", recv, &op.outputs)?;
            let (sent, received) = (send[place.me.index()], recv[place.me.index()]);
            if sent != received {
                return Err(checker.error(
                    "output_split_sizes",
                    format!("{sent} elements from this rank itself, as the input split has"),
                    received.to_string(),
                ));
            }
            Collective::AllToAll { send: send.clone(), recv: recv.clone() }
        }
        OpKind::Gather { root } => {
            let root = checker.rank("root", *root)?;
            Collective::Gather { root, count: checker.rooted(root, "gather_list", &op.outputs, &op.inputs)? }
        }
        OpKind::Scatter { root } => {
            let root = checker.rank("root", *root)?;
            Collective::Scatter { root, count: checker.rooted(root, "scatter_list", &op.inputs, &op.outputs)? }
        }
        OpKind::Barrier => Collective::Barrier,
        OpKind::Send { .. } | OpKind::Recv { .. } => unreachable!("messages are not collectives"),
        OpKind::Put { .. }
        | OpKind::Get { .. }
        | OpKind::Accumulate { .. }
        | OpKind::Flush { .. }
        | OpKind::Signal { .. }
        | OpKind::WaitSignal { .. } => unreachable!("accesses to windows are not collectives"),
    };
    let signature = signature(op, called, &collective, dtype, place);
    Ok(Checked { collective, dtype, signature })
}

struct Checker<'a> {
    op: &'a Op,
    place: RankAndSize,
}

impl Checker<'_> {
    fn error(&self, argument: &'static str, expected: impl Into<String>, got: impl Into<String>) -> UsageError {
        let operation = self.op.kind.name().to_owned();
        UsageError { operation, argument, expected: expected.into(), got: got.into() }
    }

    /// The one element type of all buffers; bytes if there are no buffers.
    fn dtype(&self) -> Result<DType, UsageError> {
        let mut all = self.op.inputs.iter().chain(&self.op.outputs).map(|buffer| buffer.dtype());
        let first = all.next().unwrap_or(DType::U8);
        match all.find(|dtype| *dtype != first) {
            None => Ok(first),
            Some(other) => Err(self.error("tensors", format!("all of one dtype, {first}"), format!("also {other}"))),
        }
    }

    fn reduction(&self, dtype: DType) -> Result<(), UsageError> {
        match self.op.kind.reduce_op() {
            Some(op) if !op.supports(dtype) => {
                Err(self.error("op", format!("a reduce operation that {dtype} supports"), op.name()))
            }
            _ => Ok(()),
        }
    }

    fn rank(&self, argument: &'static str, rank: Rank) -> Result<Rank, UsageError> {
        peer(self.op, argument, rank, self.place.size)?;
        Ok(rank)
    }

    /// The number of elements, which must be that of inputs and of outputs.
    fn in_place(&self) -> Result<usize, UsageError> {
        let (input, output) = (total(&self.op.inputs), total(&self.op.outputs));
        if input == output {
            return Ok(output);
        }
        Err(self.error("output", format!("{input} elements, as the input has"), output.to_string()))
    }

    /// The elements of every rank's block. `all` has all blocks: one buffer a rank, or one buffer of equal blocks. `own` is
    /// this rank's block.
    fn blocks(
        &self,
        argument: &'static str,
        all: &[Buffer],
        own_argument: &'static str,
        own: &[Buffer],
    ) -> Result<Counts, UsageError> {
        let size = self.place.size;
        let counts = match all {
            [one] if one.len() % size == 0 => Counts::equal(one.len() / size, size),
            [one] => {
                let expected = format!("a number of elements that {size} ranks can share equally");
                return Err(self.error(argument, expected, one.len().to_string()));
            }
            many if many.len() == size => many.iter().map(|buffer| buffer.len()).collect(),
            many => return Err(self.error(argument, format!("a list of {size} tensors"), many.len().to_string())),
        };
        let expected = counts[self.place.me.index()];
        if total(own) != expected {
            let what = format!("{expected} elements, as this rank's block of the {argument} has");
            return Err(self.error(own_argument, what, total(own).to_string()));
        }
        Ok(counts)
    }

    fn splits(&self, argument: &'static str, counts: &Counts, buffers: &[Buffer]) -> Result<(), UsageError> {
        let size = self.place.size;
        if counts.len() != size {
            return Err(self.error(argument, format!("{size} sizes, one a rank"), counts.len().to_string()));
        }
        let sum = counts.checked_total();
        if sum != Some(total(buffers)) {
            let expected = format!("sizes that add up to the tensor's {} elements", total(buffers));
            let got = sum.map_or(format!("a sum beyond {} bits", usize::BITS), |sum| format!("a sum of {sum}"));
            return Err(self.error(argument, expected, got));
        }
        Ok(())
    }

    /// The elements of a rank's own block in gather and scatter. `list` has all blocks, on the root alone.
    fn rooted(&self, root: Rank, argument: &'static str, list: &[Buffer], own: &[Buffer]) -> Result<usize, UsageError> {
        let count = total(own);
        let size = self.place.size;
        let element = own.first().map_or(1, |buffer| buffer.dtype().size());
        let all = count.checked_mul(size).filter(|all| all.checked_mul(element).is_some_and(|all| all <= BYTES_MAX));
        let Some(all) = all else {
            let expected = format!("a tensor of which {size} ranks can have as many elements");
            return Err(self.error("tensor", expected, count.to_string()));
        };
        if self.place.me != root {
            return match list {
                [] => Ok(count),
                _ => Err(self.error(argument, "no tensors on a rank that is not the root", list.len().to_string())),
            };
        }
        match list {
            [one] if one.len() == all => Ok(count),
            many if many.len() == size => match many.iter().find(|buffer| buffer.len() != count) {
                None => Ok(count),
                Some(other) => {
                    Err(self.error(argument, format!("tensors of {count} elements each"), other.len().to_string()))
                }
            },
            [one] => {
                Err(self.error(argument, format!("{count} elements for each of {size} ranks"), one.len().to_string()))
            }
            many => Err(self.error(argument, format!("a list of {size} tensors"), many.len().to_string())),
        }
    }
}

/// Refuses a peer that is no rank of the communicator.
#[inline]
pub(crate) fn peer(op: &Op, argument: &'static str, rank: Rank, size: usize) -> Result<(), UsageError> {
    if rank.index() < size { Ok(()) } else { Err(no_rank(op.kind.name(), argument, rank, size)) }
}

/// As [`peer`], for a call that is no operation.
#[inline]
pub(crate) fn one_of(operation: &str, argument: &'static str, rank: Rank, size: usize) -> Result<(), UsageError> {
    if rank.index() < size { Ok(()) } else { Err(no_rank(operation, argument, rank, size)) }
}

#[cold]
fn no_rank(operation: &str, argument: &'static str, rank: Rank, size: usize) -> UsageError {
    let expected = format!("a rank in [0, {size})");
    UsageError { operation: operation.to_owned(), argument, expected, got: rank.to_string() }
}

/// Refuses buffers that do not lie in the memory where the operation runs.
#[inline]
pub(crate) fn placement(op: &Op, expected: Memory) -> Result<(), UsageError> {
    let fits = |buffers: &[Buffer]| buffers.iter().all(|buffer| buffer.memory() == expected);
    if fits(&op.inputs) && fits(&op.outputs) { Ok(()) } else { Err(misplaced(op, expected)) }
}

#[cold]
fn misplaced(op: &Op, expected: Memory) -> UsageError {
    let elsewhere =
        |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.memory()).find(|memory| *memory != expected);
    let input = elsewhere(&op.inputs);
    let (argument, got) = if input.is_some() { ("input", input) } else { ("output", elsewhere(&op.outputs)) };
    let expected = match expected {
        Memory::Host => "memory of the cpu, as there is no stream".to_owned(),
        device => format!("memory of {device}, as the stream is"),
    };
    let got = got.map_or(String::new(), |memory| memory.to_string());
    UsageError { operation: op.kind.name().to_owned(), argument, expected, got }
}

/// The first operation of a batch on a device, all of whose operations are messages on one stream.
pub(crate) fn batch(ops: &[Op]) -> Result<&Op, UsageError> {
    let error = |argument, expected: &str, got: String| UsageError {
        operation: "a batch".to_owned(),
        argument,
        expected: expected.to_owned(),
        got,
    };
    let Some(first) = ops.first() else {
        return Err(error("ops", "at least one message", "none".to_owned()));
    };
    if let Some(op) = ops.iter().find(|op| !matches!(op.kind, OpKind::Send { .. } | OpKind::Recv { .. })) {
        return Err(error("ops", "sends and receives", op.kind.name().to_owned()));
    }
    let Mode::Stream(stream) = first.mode else {
        return Err(error("stream", "a stream of a CUDA device", "none".to_owned()));
    };
    if ops.iter().any(|op| op.mode != first.mode) {
        return Err(error("stream", "one stream for all messages", "several".to_owned()));
    }
    ops.iter().try_for_each(|op| placement(op, Memory::Device(stream.device())))?;
    Ok(first)
}

/// The error of a receive on a device from whatever rank sends first: the receiver's stream has to know whom it waits for.
pub(crate) fn any_source_on_device(op: &Op) -> UsageError {
    UsageError {
        operation: op.kind.name().to_owned(),
        argument: "src",
        expected: "the source's rank, on a CUDA device; name the source, or move the tensor to the CPU".to_owned(),
        got: "any source".to_owned(),
    }
}

/// The error of an operation on a window that is not registered.
pub(crate) fn unknown_window(operation: &str, window: WindowId) -> UsageError {
    UsageError {
        operation: operation.to_owned(),
        argument: "window",
        expected: "a registered window".to_owned(),
        got: window.to_string(),
    }
}

/// Refuses an access to what a window does not have, or one that does not run where the window's memory is.
pub(crate) fn access(
    operation: &'static str,
    known: &Window,
    expected: Memory,
    peer: Rank,
    range: Option<(usize, usize)>,
) -> Result<(), UsageError> {
    let error = |argument, expected, got| UsageError { operation: operation.to_owned(), argument, expected, got };
    if known.memory() != expected {
        let (expected, got) = (format!("a window in memory of {expected}"), format!("one of {}", known.memory()));
        return Err(error("window", expected, got));
    }
    let Some((offset, len)) = range else { return Ok(()) };
    let checked = known.check(peer, offset, len);
    checked.map_err(|got| error("offset", format!("a range inside the window of rank {peer}"), got))
}

/// As [`collective`], of an all_gather into a window, whose number the ranks must agree on too.
pub(crate) fn into_window(op: &Op, window: WindowId, place: RankAndSize) -> Result<Checked, UsageError> {
    let mut checked = collective(op, Some(CollectiveKind::AllGatherPersistent), place)?;
    // In place of what tells blocks of several lengths apart: these are of one.
    checked.signature.root = window.0 as u32;
    Ok(checked)
}

/// Refuses an all_gather into something else than this rank's part of a window, of which `own` is the address, or into one whose
/// parts have different lengths.
pub(crate) fn persistent(op: &Op, known: &Window, own: u64, place: RankAndSize) -> Result<(), UsageError> {
    let checker = Checker { op, place };
    let [output] = op.outputs[..] else {
        return Err(checker.error("output", "this rank's part of the window", format!("{} tensors", op.outputs.len())));
    };
    if output.memory() != known.memory() {
        let expected = format!("memory of {}, as the window's", known.memory());
        return Err(checker.error("output", expected, format!("memory of {}", output.memory())));
    }
    let bytes = known.bytes(place.me);
    if output.bytes() != bytes || (bytes > 0 && output.ptr() as u64 != own) {
        let got = format!("{} bytes elsewhere, or a part of it", output.bytes());
        return Err(checker.error("output", format!("this rank's part of the window, of {bytes} bytes"), got));
    }
    match (0..place.size).map(Rank::from).find(|rank| known.bytes(*rank) != bytes) {
        None => Ok(()),
        Some(rank) => {
            let got = format!("a part of {} bytes on rank {rank}", known.bytes(rank));
            Err(checker.error("window", format!("parts of {bytes} bytes on all ranks"), got))
        }
    }
}

/// Refuses what cannot be done to a window in the memory of a device.
pub(crate) fn access_on_device(op: &Op) -> Result<(), UsageError> {
    match op.kind {
        OpKind::Accumulate { .. } | OpKind::Flush { .. } => Err(UsageError {
            operation: op.kind.name().to_owned(),
            argument: "window",
            expected: format!("a window in memory of {}", Memory::Host),
            got: "one of a CUDA device, to which only put, get, signal and wait_signal apply".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// The element type of what is added to a window. Refuses elements that have no sum, or are of several types.
pub(crate) fn addends(op: &Op) -> Result<DType, UsageError> {
    let checker = Checker { op, place: RankAndSize { me: Rank(0), size: 1 } };
    let dtype = checker.dtype()?;
    if ReduceOp::Sum.supports(dtype) {
        Ok(dtype)
    } else {
        Err(checker.error("tensor", "elements of a type that can be added", dtype.name()))
    }
}

/// Refuses memory of more than [`BYTES_MAX`] bytes, so that computations with its lengths do not overflow.
#[inline]
pub(crate) fn memory(op: &Op) -> Result<(), UsageError> {
    let fits = |buffers: &[Buffer]| buffer::bytes(buffers).is_some();
    if fits(&op.inputs) && fits(&op.outputs) { Ok(()) } else { Err(too_long(op)) }
}

#[cold]
fn too_long(op: &Op) -> UsageError {
    let name = op.kind.name();
    let checked = lengths(name, "input", &op.inputs).and_then(|()| lengths(name, "output", &op.outputs));
    checked.expect_err("one of the two is too long")
}

/// As [`memory`], of the buffers of one argument.
pub(crate) fn lengths(operation: &str, argument: &'static str, buffers: &[Buffer]) -> Result<(), UsageError> {
    if buffer::bytes(buffers).is_some() {
        return Ok(());
    }
    let lengths: Vec<String> = buffers.iter().map(|buffer| buffer.len().to_string()).collect();
    let dtype = buffers.first().map_or("", |buffer| buffer.dtype().name());
    Err(UsageError {
        operation: operation.to_owned(),
        argument,
        expected: format!("at most {BYTES_MAX} bytes"),
        got: format!("{} × {dtype}", lengths.join(" + ")),
    })
}

/// The elements of all buffers together, which [`memory`] has checked.
fn total(buffers: &[Buffer]) -> usize {
    buffers.iter().map(|buffer| buffer.len()).sum()
}

fn signature(
    op: &Op,
    called: Option<CollectiveKind>,
    collective: &Collective,
    dtype: DType,
    place: RankAndSize,
) -> Signature {
    let (root, count) = match collective {
        Collective::AllGatherIntoParts { .. } | Collective::ByIslands { .. } | Collective::EqualAllToAll { .. } => {
            unreachable!("how it runs is chosen later")
        }
        Collective::AllReduce { count } => (0, *count),
        Collective::Reduce { count, root }
        | Collective::Broadcast { count, root }
        | Collective::Gather { count, root }
        | Collective::Scatter { count, root } => (root.0, *count),
        Collective::AllGather { counts } | Collective::ReduceScatter { counts } => {
            (counts.fingerprint(), counts.total())
        }
        // What two ranks exchange both know. Of two that count the same and do not agree, each expects what does not come.
        Collective::AllToAll { send, recv } if place.size == 2 => {
            let other = 1 - place.me.index();
            (0, send[other] + recv[other])
        }
        Collective::AllToAll { .. } | Collective::Barrier => (0, 0),
    };
    Signature {
        operation: called.unwrap_or_else(|| collective.kind()) as u8,
        dtype: dtype as u8,
        reduction: op.kind.reduce_op().map_or(0, |op| op.index() as u8 + 1),
        algorithm: 0,
        root,
        count: count as u64,
    }
}
