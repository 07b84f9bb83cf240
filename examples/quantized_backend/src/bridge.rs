//! Converts between the types of the backend's interface and those of the engine.

use std::time::Duration;

use ncclx_rs::comm::store;
use ncclx_rs::{Buffer, DType, ErrorClass, Mode, Op, OpKind, Rank, ReduceOp, Source, Tag};
use ncclx_rs_backend as api;
use ncclx_rs_backend::{Error, ErrorKind, Operation, Store, Work};

/// The store of the interface, as the engine uses one.
pub(crate) struct EngineStore(pub(crate) Store);

impl store::Store for EngineStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.0.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        self.0.get(key, timeout)
    }

    fn rendezvous_host(&self) -> Option<String> {
        self.0.host().map(str::to_owned)
    }
}

/// The engine's work.
pub(crate) struct InFlight(pub(crate) ncclx_rs::Work);

impl Work for InFlight {
    fn wait(&self, timeout: Duration) -> Option<Result<(), Error>> {
        let outcome = self.0.wait(Some(timeout));
        self.0.is_done().then(|| self.0.result().unwrap_or(outcome).map_err(|error| api_error(&error)))
    }
}

/// The engine's error.
pub(crate) fn api_error(error: &ncclx_rs::Error) -> Error {
    let kind = match error.class() {
        ErrorClass::Usage => ErrorKind::Usage,
        ErrorClass::Failure | ErrorClass::Network => ErrorKind::Failure,
        ErrorClass::Timeout => ErrorKind::Timeout,
        ErrorClass::Remote | ErrorClass::Lost => ErrorKind::Lost,
    };
    Error::new(kind, error.to_string())
}

/// The engine's operation on the same memory.
pub(crate) fn op(operation: Operation) -> Result<Op, Error> {
    let Operation { kind, inputs, outputs, timeout, mode, .. } = operation;
    Ok(Op {
        kind: op_kind(kind),
        inputs: inputs.into_iter().map(buffer).collect::<Result<_, _>>()?,
        outputs: outputs.into_iter().map(buffer).collect::<Result<_, _>>()?,
        timeout: Some(timeout),
        mode: match mode {
            api::Mode::Async => Mode::Async,
            api::Mode::Blocking => Mode::Blocking,
        },
    })
}

#[allow(unsafe_code, reason = "hands lent memory on")]
fn buffer(buffer: api::Buffer) -> Result<Buffer, Error> {
    let name = buffer.dtype().name();
    let dtype = DType::ALL.iter().copied().find(|dtype| dtype.name() == name);
    let dtype = dtype.ok_or_else(|| Error::usage(format!("the engine has no element type {name}")))?;
    // SAFETY: the memory is valid until the work of this submission has ended, or until the backend is dropped, which
    // closes the communicator: both interfaces have the same contract.
    Ok(unsafe { Buffer::from_raw(buffer.ptr(), buffer.len(), dtype) })
}

fn op_kind(kind: api::OpKind) -> OpKind {
    match kind {
        api::OpKind::Send { to } => OpKind::Send { to: Rank(to), tag: Tag(0) },
        api::OpKind::Recv { from } => OpKind::Recv { from: Source::Rank(Rank(from)), tag: Tag(0) },
        api::OpKind::Broadcast { root } => OpKind::Broadcast { root: Rank(root) },
        api::OpKind::AllReduce(op) => OpKind::AllReduce(reduce_op(op)),
        api::OpKind::Reduce { op, root } => OpKind::Reduce { op: reduce_op(op), root: Rank(root) },
        api::OpKind::AllGather => OpKind::AllGather,
        api::OpKind::ReduceScatter(op) => OpKind::ReduceScatter(reduce_op(op)),
        api::OpKind::AllToAll { send, recv } => OpKind::AllToAll { send: send.into(), recv: recv.into() },
        api::OpKind::Gather { root } => OpKind::Gather { root: Rank(root) },
        api::OpKind::Scatter { root } => OpKind::Scatter { root: Rank(root) },
        api::OpKind::Barrier => OpKind::Barrier,
    }
}

fn reduce_op(op: api::ReduceOp) -> ReduceOp {
    match op {
        api::ReduceOp::Sum => ReduceOp::Sum,
        api::ReduceOp::Avg => ReduceOp::Avg,
        api::ReduceOp::Product => ReduceOp::Product,
        api::ReduceOp::Min => ReduceOp::Min,
        api::ReduceOp::Max => ReduceOp::Max,
        api::ReduceOp::BitAnd => ReduceOp::BitAnd,
        api::ReduceOp::BitOr => ReduceOp::BitOr,
        api::ReduceOp::BitXor => ReduceOp::BitXor,
        api::ReduceOp::PreMulSum(factor) => ReduceOp::PreMulSum(factor),
    }
}
