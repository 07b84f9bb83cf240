//! Operations for Rust programs: safe, because each call returns only when the engine no longer uses the memory.
//!
//! Each is [`Communicator::submit`] with a wait. They take [`Data`]: slices, arrays and vectors of elements, and with the
//! feature `tch` tensors. Every rank calls the same collectives in the same order, with the numbers of elements that each
//! method states. A number that cannot be right on this rank is an [`Error::Usage`], before anything is sent. A number that
//! differs between ranks is an error on all of them that names both calls.
//!
//! ```
//! # use std::sync::Arc;
//! # use ncclx_rs::comm::store::MemoryStore;
//! # use ncclx_rs::{CommOptions, Communicator, Rank, ReduceOp, Tag};
//! # let store = Arc::new(MemoryStore::default());
//! # let run = |rank: u32| {
//! #     let options = CommOptions {
//! #         name: "example".into(), rank: Rank(rank), size: 2, store: store.clone(), timeout: None, hints: vec![],
//! #     };
//! #     let comm = Communicator::new(options)?;
//! // On ranks 0 and 1 of two:
//! let mut sum = [rank as f32, 1.0];
//! comm.all_reduce(&mut sum, ReduceOp::Sum)?;
//! assert_eq!(sum, [1.0, 2.0]);
//!
//! let mut all = [0; 4];
//! comm.all_gather(&mut all, &[rank, rank + 10])?;
//! assert_eq!(all, [0, 10, 1, 11]);
//!
//! let mut word = *b"....";
//! match rank {
//!     0 => comm.send(b"ping", Rank(1), Tag(0))?,
//!     _ => assert_eq!(comm.recv(&mut word, Rank(0), Tag(0))?, Rank(0)),
//! }
//! #     assert_eq!(&word, if rank == 0 { b"...." } else { b"ping" });
//! #     comm.shutdown()
//! # };
//! # std::thread::scope(|scope| {
//! #     let other = scope.spawn(|| run(1));
//! #     run(0)?;
//! #     other.join().expect("no panic")
//! # })?;
//! # Ok::<(), ncclx_rs::Error>(())
//! ```

use std::marker::PhantomData;
use std::time::Duration;

use smallvec::smallvec;

use super::check;
use super::communicator::Communicator;
use super::data::{Data, Lent};
use crate::buffer::{Buffer, Buffers};
use crate::counts::Counts;
use crate::error::{Error, UsageError};
use crate::op::{Mode, Op, OpKind};
use crate::sync::NoUnwinding;
use crate::types::{DType, Rank, ReduceOp, Source, Tag};
use crate::work::Submitted;

impl Communicator {
    /// Replaces `data` by the reduction of all ranks' `data`, which is of one length everywhere.
    pub fn all_reduce<D: Data + ?Sized>(&self, data: &mut D, op: ReduceOp) -> Result<(), Error> {
        self.in_place(OpKind::AllReduce(op), data)
    }

    /// As [`all_reduce`](Communicator::all_reduce), but only the root's `data` changes.
    pub fn reduce<D: Data + ?Sized>(&self, data: &mut D, op: ReduceOp, root: Rank) -> Result<(), Error> {
        self.in_place(OpKind::Reduce { op, root }, data)
    }

    /// Replaces every rank's `data` by the root's, which has the same length.
    pub fn broadcast<D: Data + ?Sized>(&self, data: &mut D, root: Rank) -> Result<(), Error> {
        self.in_place(OpKind::Broadcast { root }, data)
    }

    /// Puts all ranks' `input`, each of one length, in rank order into every rank's `output`, which is `size` times as long.
    pub fn all_gather<O, I>(&self, output: &mut O, input: &I) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        self.run(OpKind::AllGather, &[Lent::of(input)], &[Lent::of_mut(output)])
    }

    /// As [`all_gather`](Communicator::all_gather), of unequal lengths: one output for each rank, as long as its input.
    pub fn all_gather_v<O, I>(&self, outputs: &mut [&mut O], input: &I) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        let outputs: Vec<Lent<'_>> = outputs.iter_mut().map(|output| Lent::of_mut(*output)).collect();
        self.run(OpKind::AllGather, &[Lent::of(input)], &outputs)
    }

    /// Reduces all ranks' `input`, of `size` equal parts, and gives rank r the r-th part, which is as long as `output`.
    pub fn reduce_scatter<O, I>(&self, output: &mut O, input: &I, op: ReduceOp) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        self.run(OpKind::ReduceScatter(op), &[Lent::of(input)], &[Lent::of_mut(output)])
    }

    /// As [`reduce_scatter`](Communicator::reduce_scatter) of unequal parts: one input for each rank, as long as its
    /// output.
    pub fn reduce_scatter_v<O, I>(&self, output: &mut O, inputs: &[&I], op: ReduceOp) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        let inputs: Vec<Lent<'_>> = inputs.iter().map(|input| Lent::of(*input)).collect();
        self.run(OpKind::ReduceScatter(op), &inputs, &[Lent::of_mut(output)])
    }

    /// Sends rank i the i-th of `size` equal parts of `input`, and puts the part from rank i into the i-th part of `output`,
    /// which is as long.
    pub fn all_to_all<O, I>(&self, output: &mut O, input: &I) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        let size = self.size();
        let share = |argument, length: usize| match length % size {
            0 => Ok(Counts::equal(length / size, size)),
            _ => Err(UsageError {
                operation: "all_to_all".to_owned(),
                argument,
                expected: format!("a number of elements that {size} ranks can share equally"),
                got: length.to_string(),
            }),
        };
        let (input, output) = (Lent::of(input), Lent::of_mut(output));
        let (send, recv) = (share("input", input.len())?, share("output", output.len())?);
        self.run(OpKind::AllToAll { send, recv }, &[input], &[output])
    }

    /// As [`all_to_all`](Communicator::all_to_all), of unequal parts: one length for each rank.
    pub fn all_to_all_v<O, I>(
        &self,
        output: &mut O,
        input: &I,
        output_lengths: &[usize],
        input_lengths: &[usize],
    ) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        let kind = OpKind::AllToAll {
            send: input_lengths.iter().copied().collect(),
            recv: output_lengths.iter().copied().collect(),
        };
        self.run(kind, &[Lent::of(input)], &[Lent::of_mut(output)])
    }

    /// Puts all ranks' `input`, each of one length, end to end into the root's `output`, which is `size` times as long.
    /// The other ranks' `output` is not used.
    pub fn gather<O, I>(&self, output: &mut O, input: &I, root: Rank) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        let outputs = [Lent::of_mut(output)];
        let used = if self.rank() == root { outputs.as_slice() } else { &[] };
        self.run(OpKind::Gather { root }, &[Lent::of(input)], used)
    }

    /// Gives rank r the r-th of `size` equal parts of the root's `input`, which is as long as `output`. The other ranks'
    /// `input` is not used.
    pub fn scatter<O, I>(&self, output: &mut O, input: &I, root: Rank) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        let inputs = [Lent::of(input)];
        let used = if self.rank() == root { inputs.as_slice() } else { &[] };
        self.run(OpKind::Scatter { root }, used, &[Lent::of_mut(output)])
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<(), Error> {
        self.run(OpKind::Barrier, &[], &[])
    }

    /// Sends `data` to a rank, which receives it with an equal tag. Returns when `data` may change again, possibly before the
    /// receiver has it.
    pub fn send<D: Data + ?Sized>(&self, data: &D, to: Rank, tag: Tag) -> Result<(), Error> {
        self.run(OpKind::Send { to, tag }, &[Lent::of(data)], &[])
    }

    /// Receives a message of exactly the length of `data` and with an equal tag from a rank, or from [`Source::Any`]. Returns
    /// the sender.
    pub fn recv<D: Data + ?Sized>(&self, data: &mut D, from: impl Into<Source>, tag: Tag) -> Result<Rank, Error> {
        self.recv_within(data, from.into(), tag, None)
    }

    pub(super) fn recv_within<D: Data + ?Sized>(
        &self,
        data: &mut D,
        from: Source,
        tag: Tag,
        timeout: Option<Duration>,
    ) -> Result<Rank, Error> {
        let mut recv = LentOp::new(OpKind::Recv { from, tag }, &[], &[Lent::of_mut(data)])?;
        recv.op.timeout = timeout;
        let [source] = self.complete(&[recv]);
        Ok(source?.expect("a receive that ended well has a source"))
    }

    /// Sends `input` to one rank and receives `output` from one, at the same time. In a ring, ranks that all send first would
    /// wait for each other.
    pub fn send_recv<O, I>(&self, output: &mut O, from: Rank, input: &I, to: Rank, tag: Tag) -> Result<(), Error>
    where
        O: Data + ?Sized,
        I: Data<Element = O::Element> + ?Sized,
    {
        let recv = OpKind::Recv { from: Source::Rank(from), tag };
        let recv = LentOp::new(recv, &[], &[Lent::of_mut(output)])?;
        let send = LentOp::new(OpKind::Send { to, tag }, &[Lent::of(input)], &[])?;
        check::peer(&recv.op, "src", from, self.size())?;
        check::peer(&send.op, "dst", to, self.size())?;
        // The send is submitted before the receive is waited for.
        self.complete(&[send, recv]).into_iter().try_for_each(|ended| ended.map(|_| ()))
    }

    /// Sends `data` in the background and drops the outcome.
    #[allow(unsafe_code, reason = "the engine's buffer is memory that its completion frees")]
    pub(super) fn send_away(&self, mut data: Vec<u8>, to: Rank, tag: Tag) -> Result<(), Error> {
        let guard = NoUnwinding;
        // SAFETY: the vector's memory stays where it is until the callback drops it, after the operation; a failed
        // submission may have begun, so it leaves the memory alone for ever.
        let buffer = unsafe { Buffer::from_raw(data.as_mut_ptr(), data.len(), DType::U8) };
        let kind = OpKind::Send { to, tag };
        let submitted =
            self.submit(Op { kind, inputs: smallvec![buffer], outputs: smallvec![], timeout: None, mode: Mode::Async });
        let outcome = match submitted {
            Ok(work) => {
                work.on_complete(move |_| drop(data));
                Ok(())
            }
            Err(error) => {
                std::mem::forget(data);
                Err(error)
            }
        };
        std::mem::forget(guard);
        outcome
    }

    fn in_place<D: Data + ?Sized>(&self, kind: OpKind, data: &mut D) -> Result<(), Error> {
        let data = [Lent::of_mut(data)];
        self.run(kind, &data, &data)
    }

    fn run(&self, kind: OpKind, inputs: &[Lent<'_>], outputs: &[Lent<'_>]) -> Result<(), Error> {
        let [ended] = self.complete(&[LentOp::new(kind, inputs, outputs)?]);
        ended.map(|_| ())
    }

    /// Submits all operations and returns their results once all have ended, with the sender of each received message. No
    /// other function gives lent memory to the engine.
    fn complete<const N: usize>(&self, operations: &[LentOp<'_>; N]) -> [Result<Option<Rank>, Error>; N] {
        let guard = NoUnwinding;
        let begun = operations.each_ref().map(|lent| self.begin(&lent.op));
        let ended = begun.map(|begun| begun.and_then(Submitted::wait));
        std::mem::forget(guard);
        ended
    }
}

/// An operation on data that the engine may use for as long as `'a`.
struct LentOp<'a> {
    op: Op,
    memory: PhantomData<&'a mut ()>,
}

impl<'a> LentOp<'a> {
    fn new(kind: OpKind, inputs: &[Lent<'a>], outputs: &[Lent<'a>]) -> Result<Self, UsageError> {
        let (inputs, outputs) = (buffers(inputs, &kind, "input")?, buffers(outputs, &kind, "output")?);
        Ok(LentOp { op: Op { kind, inputs, outputs, timeout: None, mode: Mode::Blocking }, memory: PhantomData })
    }
}

fn buffers(lent: &[Lent<'_>], kind: &OpKind, argument: &'static str) -> Result<Buffers, UsageError> {
    // The usual case, and faster than a list that grows.
    if let [one] = lent {
        return Ok(Buffers::from_buf([one.buffer(kind, argument)?]));
    }
    let mut buffers = Buffers::new();
    for one in lent {
        buffers.push(one.buffer(kind, argument)?);
    }
    Ok(buffers)
}
