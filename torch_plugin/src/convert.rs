//! Converts the C boundary's numbers to the engine's types. Safe code only: `abi` handles raw memory.

use ncclx_rs::{Counts, DType, ErrorClass, OpKind, Rank, ReduceOp, Source, Tag, UsageError, WindowId};

/// The status of a call, with the shim's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
    Ok = 0,
    Usage = 1,
    Failure = 2,
    Network = 3,
    Pending = 4,
    Timeout = 5,
    Remote = 6,
    Lost = 7,
}

impl Status {
    pub(crate) fn of(class: ErrorClass) -> Status {
        match class {
            ErrorClass::Usage => Status::Usage,
            ErrorClass::Failure => Status::Failure,
            ErrorClass::Network => Status::Network,
            ErrorClass::Timeout => Status::Timeout,
            ErrorClass::Remote => Status::Remote,
            ErrorClass::Lost => Status::Lost,
        }
    }
}

/// The numbers of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers<'a> {
    pub(crate) kind: u32,
    pub(crate) reduce: u32,
    pub(crate) factor: f64,
    pub(crate) peer: i32,
    pub(crate) tag: u32,
    pub(crate) in_counts: &'a [u64],
    pub(crate) out_counts: &'a [u64],
    pub(crate) window: u64,
    pub(crate) offset: u64,
}

fn misuse(argument: &'static str, expected: &str, got: impl ToString) -> UsageError {
    UsageError { operation: "submit".to_owned(), argument, expected: expected.to_owned(), got: got.to_string() }
}

/// A communicator's rank and size. Whether the one is below the other is for the engine to check.
pub(crate) fn place(comm: &str, rank: i32, size: i32) -> Result<(Rank, usize), UsageError> {
    let misuse = |argument, expected: String, got: i32| UsageError {
        operation: format!("communicator `{comm}`"),
        argument,
        expected,
        got: got.to_string(),
    };
    let length = usize::try_from(size).map_err(|_| misuse("size", "a number of at least 1".to_owned(), size))?;
    let rank = u32::try_from(rank).map_err(|_| misuse("rank", format!("a rank in [0, {size})"), rank))?;
    Ok((Rank(rank), length))
}

/// The element type at `code` in the engine's list.
pub(crate) fn dtype(code: i32) -> Result<DType, UsageError> {
    let found = usize::try_from(code).ok().and_then(|code| DType::ALL.get(code));
    found.copied().ok_or_else(|| misuse("dtype", "a known element type", code))
}

/// A number of elements or bytes.
pub(crate) fn length(argument: &'static str, number: u64) -> Result<usize, UsageError> {
    usize::try_from(number).map_err(|_| misuse(argument, &format!("at most {}", usize::MAX), number))
}

/// c10d's reduce operations, in the order of its `ReduceOp::RedOpType`.
fn reduce_op(code: u32, factor: f64) -> Result<ReduceOp, UsageError> {
    Ok(match code {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Avg,
        2 => ReduceOp::Product,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::BitAnd,
        6 => ReduceOp::BitOr,
        7 => ReduceOp::BitXor,
        8 => ReduceOp::PreMulSum(factor),
        _ => return Err(misuse("op", "SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM", code)),
    })
}

/// The kind of an operation, from its numbers.
pub(crate) fn kind(numbers: Numbers<'_>) -> Result<OpKind, UsageError> {
    let rank = |argument| match u32::try_from(numbers.peer) {
        Ok(rank) => Ok(Rank(rank)),
        Err(_) => Err(misuse(argument, "a rank of the group", numbers.peer)),
    };
    let reduction = || reduce_op(numbers.reduce, numbers.factor);
    let counts = |argument, counts: &[u64]| -> Result<Counts, UsageError> {
        counts.iter().map(|count| length(argument, *count)).collect::<Result<Vec<_>, _>>().map(Counts::from)
    };
    let tag = Tag(numbers.tag);
    let (window, offset) = (WindowId(numbers.window), length("offset", numbers.offset)?);
    Ok(match numbers.kind {
        0 => OpKind::AllReduce(reduction()?),
        1 => OpKind::Reduce { op: reduction()?, root: rank("root")? },
        2 => OpKind::Broadcast { root: rank("root")? },
        3 => OpKind::AllGather,
        4 => OpKind::ReduceScatter(reduction()?),
        5 => OpKind::AllToAll {
            send: counts("input_split_sizes", numbers.in_counts)?,
            recv: counts("output_split_sizes", numbers.out_counts)?,
        },
        6 => OpKind::Gather { root: rank("root")? },
        7 => OpKind::Scatter { root: rank("root")? },
        8 => OpKind::Barrier,
        9 => OpKind::Send { to: rank("dst")?, tag },
        10 if numbers.peer < 0 => OpKind::Recv { from: Source::Any, tag },
        10 => OpKind::Recv { from: Source::Rank(rank("src")?), tag },
        11 => OpKind::Put { window, to: rank("dst")?, offset },
        12 => OpKind::Get { window, from: rank("src")?, offset },
        13 => OpKind::Signal { window, to: rank("dst")? },
        14 => OpKind::WaitSignal { window, from: rank("src")? },
        15 => OpKind::Accumulate { window, to: rank("dst")?, offset },
        16 => OpKind::Flush { window, to: rank("dst")? },
        17 => OpKind::AllGatherPersistent { window },
        other => return Err(misuse("kind", "a known operation", other)),
    })
}
