//! Communicators of a vendor's library that never block, and what is called of them.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::{c_int, c_void};
use std::fmt;

use super::config::Config;
use super::functions::{Address, Code, Functions, RawComm, RawId, RawStream};
use super::library::{Feature, Nccl, NcclError};
use super::registered::Registered;
use crate::config::NcclFields;
use crate::sync::{Arc, AtomicBool, Mutex, MutexGuard, Ordering, lock};
use crate::sys::cuda::{Current, DeviceBytes, Stream};

/// What ranks must know to begin a communicator together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

/// A type of numbers that a library knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "nccl.h has them")]
#[repr(i32)]
pub enum DataType {
    I8 = 0,
    U8 = 1,
    I32 = 2,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    BF16 = 9,
}

impl DataType {
    /// Its bytes.
    pub fn size(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 => 1,
            DataType::F16 | DataType::BF16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }
}

/// How a library reduces.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduction<'a> {
    /// The sum.
    Sum,
    /// The product.
    Product,
    /// The greatest.
    Max,
    /// The least.
    Min,
    /// The sum divided by the number of ranks.
    Avg,
    /// The sum of each rank's elements times its factor.
    PreMulSum(Factor<'a>),
}

/// One number of the type of the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Factor<'a> {
    /// Its bytes, the first so many of these.
    Value([u8; 8]),
    /// In the memory of the device, where it is read when its turn comes.
    Device(DeviceBytes<'a>),
}

/// What is put on a stream. Counts are those of the elements that `from` or `into` has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NcclCall<'a> {
    /// Everyone gets the reduction.
    AllReduce {
        /// What this rank has.
        from: DeviceBytes<'a>,
        /// Where the result goes.
        into: DeviceBytes<'a>,
        /// Of which type.
        element: DataType,
        /// How.
        reduction: Reduction<'a>,
    },
    /// The root gets the reduction; others write nothing.
    Reduce {
        /// What this rank has.
        from: DeviceBytes<'a>,
        /// Where the result goes on the root.
        into: DeviceBytes<'a>,
        /// Of which type.
        element: DataType,
        /// How.
        reduction: Reduction<'a>,
        /// Who gets it.
        root: u32,
    },
    /// Everyone gets the root's data.
    Broadcast {
        /// What the root has.
        from: DeviceBytes<'a>,
        /// Where it goes.
        into: DeviceBytes<'a>,
        /// Whose data.
        root: u32,
    },
    /// Everyone gets everyone's block.
    AllGather {
        /// This rank's block.
        from: DeviceBytes<'a>,
        /// All blocks, which are as long.
        into: DeviceBytes<'a>,
    },
    /// Everyone gets its block of the reduction.
    ReduceScatter {
        /// All blocks, which are as long.
        from: DeviceBytes<'a>,
        /// This rank's.
        into: DeviceBytes<'a>,
        /// Of which type.
        element: DataType,
        /// How.
        reduction: Reduction<'a>,
    },
    /// A message goes.
    Send {
        /// What.
        from: DeviceBytes<'a>,
        /// Where to.
        peer: u32,
    },
    /// A message comes.
    Receive {
        /// Where it goes.
        into: DeviceBytes<'a>,
        /// From where.
        peer: u32,
    },
}

impl NcclCall<'_> {
    /// The memory that it reads and writes; of a root's call on another rank, one that it does neither with.
    pub fn memory(&self) -> [Option<DeviceBytes<'_>>; 2] {
        match *self {
            NcclCall::AllReduce { from, into, .. }
            | NcclCall::Reduce { from, into, .. }
            | NcclCall::Broadcast { from, into, .. }
            | NcclCall::AllGather { from, into }
            | NcclCall::ReduceScatter { from, into, .. } => [Some(from), Some(into)],
            NcclCall::Send { from, .. } => [Some(from), None],
            NcclCall::Receive { into, .. } => [None, Some(into)],
        }
    }

    /// The library's function.
    fn name(&self) -> &'static str {
        match self {
            NcclCall::AllReduce { .. } => "ncclAllReduce",
            NcclCall::Reduce { .. } => "ncclReduce",
            NcclCall::Broadcast { .. } => "ncclBroadcast",
            NcclCall::AllGather { .. } => "ncclAllGather",
            NcclCall::ReduceScatter { .. } => "ncclReduceScatter",
            NcclCall::Send { .. } => "ncclSend",
            NcclCall::Receive { .. } => "ncclRecv",
        }
    }
}

/// How far a communicator is with what it was last told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It still does it.
    Going,
    /// It is done: it has begun, or the calls are on the stream.
    Done,
}

/// A communicator of a library, of which no call blocks: [`NcclComm::progress`] says when it is done.
///
/// Dropped without [aborting](NcclComm::abort) or [destroying](NcclComm::destroy), it stays until the process ends.
pub struct NcclComm {
    library: Arc<Nccl>,
    /// None when it is gone. Held over calls, each of which returns at once.
    raw: Mutex<Option<Raw>>,
    /// What is registered with it. Locked after `raw`.
    pub(super) registered: Mutex<Registered>,
    /// Held from when it is taken out of `raw` until the library is done with it.
    ending: Mutex<()>,
    /// Of each CUDA graph that has calls of it, the mark that is set once the graph is gone.
    graphs: Mutex<Vec<Arc<AtomicBool>>>,
    /// What the library may still refer to.
    _fields: Arc<NcclFields>,
}

struct Raw(RawComm);

// SAFETY: a communicator may be used by any thread; `NcclComm` has one at a time use it.
unsafe impl Send for Raw {}

impl Nccl {
    /// What rank 0 tells the others before they begin a communicator.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = RawId([0; 128]);
        // SAFETY: `id` is a place for the result.
        self.check("ncclGetUniqueId", unsafe { (self.functions().get_unique_id)(&raw mut id) })?;
        Ok(UniqueId(id.0))
    }
}

impl NcclComm {
    /// Begins one on the current context's device. It can be used once it is [done](Progress::Done) on every rank. All ranks
    /// pass the same ids: one, or where the library has [`Feature::Roots`](super::Feature::Roots) several, at each of which a
    /// run of ranks meets.
    pub fn begin(
        library: &Arc<Nccl>,
        _: &Current<'_>,
        ids: &[UniqueId],
        (rank, size): (u32, u32),
        fields: &Arc<NcclFields>,
    ) -> Result<NcclComm, NcclError> {
        let mut raw = std::ptr::null_mut();
        let mut config = Config::non_blocking(library.version().to_code(), fields);
        let (rank, size) = (rank as c_int, size as c_int);
        let mut ids: Vec<RawId> = ids.iter().map(|id| RawId(id.0)).collect();
        let (call, code) = match (&mut ids[..], library.functions().comm_init_scalable) {
            ([id], _) => {
                // SAFETY: `raw` is a place for the result, and `config` as long as it says; the name that it refers to stays
                // with the communicator.
                let code = unsafe { (library.functions().comm_init)(&raw mut raw, size, *id, rank, &raw mut config) };
                ("ncclCommInitRankConfig", code)
            }
            (ids, Some(begin)) => {
                let (count, first) = (ids.len() as c_int, ids.as_mut_ptr());
                // SAFETY: as above; there are as many ids as it is told.
                let code = unsafe { begin(&raw mut raw, size, rank, count, first, &raw mut config) };
                ("ncclCommInitRankScalable", code)
            }
            (_, None) => return Err(library.lacks(Feature::Roots)),
        };
        let comm = NcclComm::of(library.clone(), raw, fields.clone());
        match code {
            SUCCESS | IN_PROGRESS => Ok(comm),
            code => {
                let error = library.failed(call, code);
                comm.abort();
                Err(error)
            }
        }
    }

    /// What the library has begun, and whose configuration refers to these fields.
    pub(super) fn of(library: Arc<Nccl>, raw: RawComm, fields: Arc<NcclFields>) -> NcclComm {
        NcclComm {
            library,
            raw: Mutex::new((!raw.is_null()).then_some(Raw(raw))),
            registered: Mutex::default(),
            ending: Mutex::new(()),
            graphs: Mutex::default(),
            _fields: fields,
        }
    }

    /// Calls something with it, which returns at once.
    pub(super) fn with_raw<T>(&self, call: impl FnOnce(RawComm) -> T) -> Result<T, NcclError> {
        lock(&self.raw).as_ref().map(|raw| call(raw.0)).ok_or(NcclError::Gone)
    }

    /// The library.
    pub fn library(&self) -> &Arc<Nccl> {
        &self.library
    }

    /// How far it is. An error: it has failed, also by what other ranks did; all that is left is to abort it.
    pub fn progress(&self) -> Result<Progress, NcclError> {
        let raw = lock(&self.raw);
        let raw = raw.as_ref().ok_or(NcclError::Gone)?;
        let mut state = SUCCESS;
        // SAFETY: it lives, since it is only taken out under the lock; `state` is a place for the result.
        let code = unsafe { (self.functions().comm_async_error)(raw.0, &raw mut state) };
        self.library.check("ncclCommGetAsyncError", code)?;
        match state {
            SUCCESS => Ok(Progress::Done),
            IN_PROGRESS => Ok(Progress::Going),
            code => Err(self.library.failed("what was put on a stream", code)),
        }
    }

    /// Puts calls of several communicators of one library on streams as one group, of each communicator on one stream. They are
    /// there once each communicator's [progress](NcclComm::progress) is done, and only then may anything be put behind them.
    ///
    /// # Panics
    /// When there are none.
    pub fn submit_together(_: &Current<'_>, group: &[(&NcclComm, &Stream, &[NcclCall<'_>])]) -> Result<(), NcclError> {
        let library = &group.first().expect("a group is of something").0.library;
        let raws: Vec<_> = group.iter().map(|(comm, ..)| lock(&comm.raw)).collect();
        if raws.iter().any(|raw| raw.is_none()) {
            return Err(NcclError::Gone);
        }
        let functions = library.functions();
        // SAFETY: groups are of the thread, which ends it below.
        library.check("ncclGroupStart", unsafe { (functions.group_start)() })?;
        let put = group.iter().zip(&raws).try_for_each(|((comm, stream, calls), raw)| {
            let stream: RawStream = std::ptr::with_exposed_provenance_mut(stream.to_raw() as usize);
            let raw = raw.as_ref().ok_or(NcclError::Gone)?;
            calls.iter().try_for_each(|call| comm.put(raw, stream, call))
        });
        // SAFETY: begun above.
        let code = unsafe { (functions.group_end)() };
        put?;
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(library.failed("ncclGroupEnd", code)),
        }
    }

    fn put(&self, raw: &Raw, stream: RawStream, call: &NcclCall<'_>) -> Result<(), NcclError> {
        let (f, comm) = (self.functions(), raw.0);
        let code = match *call {
            NcclCall::AllReduce { from, into, element, reduction } => {
                assert_eq!(from.len(), into.len());
                self.with_op(comm, element, reduction, |op| {
                    let count = from.len() / element.size();
                    // SAFETY: both are device memory of so many elements, which stay until the stream has passed this; that is
                    // what whoever made the bytes answers for.
                    unsafe { (f.all_reduce)(address(from), address(into), count, element as c_int, op, comm, stream) }
                })?
            }
            NcclCall::Reduce { from, into, element, reduction, root } => {
                self.with_op(comm, element, reduction, |op| {
                    let (count, root) = (from.len() / element.size(), root as c_int);
                    // SAFETY: as above; on ranks that are not the root nothing is written.
                    unsafe { (f.reduce)(address(from), address(into), count, element as c_int, op, root, comm, stream) }
                })?
            }
            NcclCall::Broadcast { from, into, root } => {
                let root = root as c_int;
                // SAFETY: as above; what is read is the root's.
                unsafe { (f.broadcast)(address(from), address(into), into.len(), BYTE, root, comm, stream) }
            }
            NcclCall::AllGather { from, into } => {
                // SAFETY: as above; the caller has as many blocks as there are ranks.
                unsafe { (f.all_gather)(address(from), address(into), from.len(), BYTE, comm, stream) }
            }
            NcclCall::ReduceScatter { from, into, element, reduction } => {
                self.with_op(comm, element, reduction, |op| {
                    let count = into.len() / element.size();
                    // SAFETY: as above.
                    unsafe {
                        (f.reduce_scatter)(address(from), address(into), count, element as c_int, op, comm, stream)
                    }
                })?
            }
            // SAFETY: as above.
            NcclCall::Send { from, peer } => unsafe {
                (f.send)(address(from), from.len(), BYTE, peer as c_int, comm, stream)
            },
            // SAFETY: as above.
            NcclCall::Receive { into, peer } => unsafe {
                (f.recv)(address(into), into.len(), BYTE, peer as c_int, comm, stream)
            },
        };
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.library.failed(call.name(), code)),
        }
    }

    /// Calls something with the library's number for a reduction.
    fn with_op(
        &self,
        comm: RawComm,
        element: DataType,
        reduction: Reduction<'_>,
        call: impl FnOnce(c_int) -> Code,
    ) -> Result<Code, NcclError> {
        let factor = match reduction {
            Reduction::Sum => return Ok(call(0)),
            Reduction::Product => return Ok(call(1)),
            Reduction::Max => return Ok(call(2)),
            Reduction::Min => return Ok(call(3)),
            Reduction::Avg => return Ok(call(4)),
            Reduction::PreMulSum(factor) => factor,
        };
        let f = self.functions();
        let (Some(create), Some(destroy)) = (f.pre_mul_sum, f.red_op_destroy) else {
            return Err(self.library.lacks(Feature::Factors));
        };
        // Aligned for any element.
        let mut value = u64::from_ne_bytes(if let Factor::Value(bytes) = factor { bytes } else { [0; 8] });
        let (scalar, residence): (*mut c_void, c_int) = match factor {
            Factor::Value(_) => ((&raw mut value).cast(), 1),
            Factor::Device(bytes) => (address(bytes), 0),
        };
        let mut op = 0;
        // SAFETY: `op` is a place for the result; a factor on the host is read here, and is as long as any element.
        let created = unsafe { create(&raw mut op, scalar, element as c_int, residence, comm) };
        self.library.check("ncclRedOpCreatePreMulSum", created)?;
        let code = call(op);
        // SAFETY: created above; it may go once the call has returned.
        self.library.check("ncclRedOpDestroy", unsafe { destroy(op, comm) })?;
        Ok(code)
    }

    /// Notes that a CUDA graph has calls of it, until `mark` is set.
    pub(crate) fn hold(&self, mark: Arc<AtomicBool>) {
        let mut graphs = lock(&self.graphs);
        // Partner: the driver's thread that sets the mark.
        graphs.retain(|known| !known.load(Ordering::Acquire) && !Arc::ptr_eq(known, &mark));
        graphs.push(mark);
    }

    /// Whether a CUDA graph has calls of it. The library is not done with the communicator before that is gone.
    pub fn is_held(&self) -> bool {
        lock(&self.graphs).iter().any(|mark| !mark.load(Ordering::Acquire))
    }

    /// Whether it is gone.
    pub fn is_gone(&self) -> bool {
        lock(&self.raw).is_none()
    }

    /// Has what it has on streams end, whatever the other ranks do, and gives it back. It waits for the device, and for graphs
    /// that calls were captured in: to be called on a thread of its own.
    pub fn abort(&self) {
        if let Some((Raw(raw), _ending)) = self.take_out() {
            // SAFETY: it has just been taken out, so nobody else has it.
            let code = unsafe { (self.functions().comm_abort)(raw) };
            self.log_failure("ncclCommAbort", code);
        }
    }

    /// What is to be given back, unless somebody else does that, and the lock that is held until it is.
    fn take_out(&self) -> Option<(Raw, MutexGuard<'_, ()>)> {
        let mut raw = lock(&self.raw);
        // Before `raw` is free: who finds nothing there can wait for the end.
        raw.take().map(|raw| (raw, lock(&self.ending)))
    }

    /// Waits until the library is done with one that [is gone](NcclComm::is_gone).
    pub(super) fn wait_for_the_end(&self) {
        drop(lock(&self.ending));
    }

    /// Gives it back once what others are sent has left. It may wait for them, and as [`abort`](NcclComm::abort) does: to be called on
    /// a thread of its own.
    pub fn destroy(&self) {
        if let Some((Raw(raw), _ending)) = self.take_out() {
            // SAFETY: as in `abort`.
            let code = unsafe { (self.functions().comm_destroy)(raw) };
            self.log_failure("ncclCommDestroy", code);
        }
    }

    fn log_failure(&self, call: &'static str, code: Code) {
        if !matches!(code, SUCCESS | IN_PROGRESS) {
            log::warn!("{}", self.library.failed(call, code));
        }
    }

    fn functions(&self) -> &Functions {
        self.library.functions()
    }
}

impl fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclComm").field("library", &self.library).finish_non_exhaustive()
    }
}

fn address(bytes: DeviceBytes<'_>) -> Address {
    std::ptr::without_provenance_mut(bytes.ptr().to_bits() as usize)
}

/// `ncclSuccess`.
pub(super) const SUCCESS: Code = 0;
/// `ncclInProgress`.
pub(super) const IN_PROGRESS: Code = 7;

/// `ncclUint8`: what is only moved goes as bytes.
const BYTE: c_int = DataType::U8 as c_int;
