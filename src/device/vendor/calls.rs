//! A collective as calls of a vendor's library: of one function if the library has it, else of several.
//!
//! All ranks turn one call into the same calls of the library. What depends on a rank's own tensors is in [`Calls::pieces`],
//! which ranks compare before they put anything on a stream.

use half::{bf16, f16};

use crate::algo::Collective;
use crate::counts::Counts;
use crate::device::lane::{Stretches, cut};
use crate::sys::cuda::DeviceBytes;
use crate::sys::nccl::{DataType, Factor, NcclCall, Reduction};
use crate::types::{Arithmetic, DType, Rank, ReduceOp};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Called<'a> {
    pub(crate) collective: &'a Collective,
    pub(crate) reduce: Option<ReduceOp>,
    /// A factor in the device's memory, and its type.
    pub(crate) factor: Option<(DeviceBytes<'a>, DType)>,
    pub(crate) dtype: DType,
    /// Tensors, end to end.
    pub(crate) input: &'a [DeviceBytes<'a>],
    pub(crate) output: &'a [DeviceBytes<'a>],
    /// A few bytes that the operation may use.
    pub(crate) spare: DeviceBytes<'a>,
    pub(crate) me: Rank,
    pub(crate) world: usize,
}

/// Calls that go on together.
#[derive(Debug)]
pub(crate) struct Calls<'a> {
    pub(crate) calls: Vec<NcclCall<'a>>,
    /// Into how many parts tensors cut the collective; 2 stands for one call a rank.
    pub(crate) pieces: u32,
}

/// Why a library cannot take a rank's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unfit {
    /// A block lies in several tensors.
    #[error("the block of rank {0} lies in several tensors, and a vendor's library takes it in one")]
    Block(Rank),
    /// Input and output tensors are of other lengths.
    #[error("input and output are tensors of other lengths, and a vendor's library takes them alike")]
    Lengths,
    /// The factor is not of the tensors' type.
    #[error("its factor in the device's memory is {0}, and a vendor's library takes one of the tensors' type")]
    Factor(DType),
}

/// Whether a library has a reduction of a type, with the bits that this engine promises for whole numbers.
pub(crate) fn has(dtype: DType, reduce: Option<ReduceOp>) -> bool {
    let Some(reduce) = reduce else { return true };
    let is_float = dtype.arithmetic() == Arithmetic::Float;
    element(dtype).is_some()
        && match reduce {
            ReduceOp::Sum | ReduceOp::Product | ReduceOp::Min | ReduceOp::Max => true,
            // A library's sum of whole numbers may overflow.
            ReduceOp::Avg | ReduceOp::PreMulSum(_) => is_float,
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => false,
        }
}

/// The calls of a collective on elements that a library [has](has).
pub(crate) fn calls<'a>(called: &Called<'a>) -> Result<Calls<'a>, Unfit> {
    let mut made = Making { called, calls: Vec::new(), pieces: 1 };
    made.collective()?;
    let Making { calls, pieces, .. } = made;
    Ok(Calls { calls, pieces })
}

struct Making<'a, 'c> {
    called: &'c Called<'a>,
    calls: Vec<NcclCall<'a>>,
    pieces: u32,
}

impl<'a> Making<'a, '_> {
    fn collective(&mut self) -> Result<(), Unfit> {
        let Called { collective, me, world, spare, .. } = *self.called;
        let ranks = || (0..world).map(Rank::from);
        match collective {
            Collective::AllReduce { .. } => {
                let (element, reduction) = self.reduction()?;
                for (from, into) in self.pairs()? {
                    self.calls.push(NcclCall::AllReduce { from, into, element, reduction });
                }
            }
            Collective::Reduce { root, .. } => {
                let (element, reduction) = self.reduction()?;
                let pairs = if *root == me { self.pairs()? } else { self.sources() };
                for (from, into) in pairs {
                    self.calls.push(NcclCall::Reduce { from, into, element, reduction, root: root.0 });
                }
            }
            Collective::Broadcast { root, .. } => {
                let pairs = if *root == me { self.pairs()? } else { self.targets() };
                for (from, into) in pairs {
                    self.calls.push(NcclCall::Broadcast { from, into, root: root.0 });
                }
            }
            Collective::AllGather { counts } => self.all_gather(counts)?,
            Collective::AllGatherIntoParts { .. } => unreachable!("only programs write to other ranks' memory"),
            Collective::ByIslands { .. } => unreachable!("a library is called of one island"),
            Collective::EqualAllToAll { .. } => unreachable!("only ranks that move data themselves ask before"),
            Collective::ReduceScatter { counts } => self.reduce_scatter(counts)?,
            Collective::AllToAll { send, recv } => {
                for peer in ranks() {
                    self.send(self.of(self.called.input, send, peer)?, peer);
                    self.receive(self.of(self.called.output, recv, peer)?, peer);
                }
            }
            Collective::Gather { count, root } => {
                let one = Counts::equal(*count, world);
                let own = self.block(self.called.input, 0, *count, me)?;
                if *root != me {
                    self.send(own, *root);
                    return Ok(());
                }
                for peer in ranks() {
                    let into = self.of(self.called.output, &one, peer)?;
                    self.exchange(own, into, peer);
                }
            }
            Collective::Scatter { count, root } => {
                let one = Counts::equal(*count, world);
                let own = self.block(self.called.output, 0, *count, me)?;
                if *root != me {
                    self.receive(own, *root);
                    return Ok(());
                }
                for peer in ranks() {
                    let from = self.of(self.called.input, &one, peer)?;
                    match (peer == me, from, own) {
                        (true, from, own) => self.exchange(from, own, me),
                        (false, from, _) => self.send(from, peer),
                    }
                }
            }
            Collective::Barrier => {
                let (from, element) = (spare.part(0, 1), DataType::U8);
                self.calls.push(NcclCall::AllReduce { from, into: from, element, reduction: Reduction::Max });
            }
        }
        Ok(())
    }

    /// One call where all blocks have one length and each side is one tensor, else a broadcast by each rank.
    fn all_gather(&mut self, counts: &Counts) -> Result<(), Unfit> {
        let Called { me, world, input, output, .. } = *self.called;
        if let (true, [from], [into]) = (counts.are_equal(), &whole(input)[..], &whole(output)[..]) {
            self.calls.push(NcclCall::AllGather { from: *from, into: *into });
            return Ok(());
        }
        self.pieces = 2;
        let own = self.block(input, 0, counts[me.index()], me)?;
        for root in (0..world).map(Rank::from) {
            let Some(into) = self.of(output, counts, root)? else { continue };
            let from = own.filter(|_| root == me).unwrap_or(into);
            self.calls.push(NcclCall::Broadcast { from, into, root: root.0 });
        }
        Ok(())
    }

    /// One call in the cases of `all_gather`, else a reduction to each rank.
    fn reduce_scatter(&mut self, counts: &Counts) -> Result<(), Unfit> {
        let Called { me, world, input, output, .. } = *self.called;
        let (element, reduction) = self.reduction()?;
        if let (true, [from], [into]) = (counts.are_equal(), &whole(input)[..], &whole(output)[..]) {
            self.calls.push(NcclCall::ReduceScatter { from: *from, into: *into, element, reduction });
            return Ok(());
        }
        self.pieces = 2;
        let own = self.block(output, 0, counts[me.index()], me)?;
        for root in (0..world).map(Rank::from) {
            let Some(from) = self.of(input, counts, root)? else { continue };
            let into = own.filter(|_| root == me).unwrap_or(from);
            self.calls.push(NcclCall::Reduce { from, into, element, reduction, root: root.0 });
        }
        Ok(())
    }

    /// The root's own block needs no call where it lies in place already.
    fn exchange(&mut self, from: Option<DeviceBytes<'a>>, into: Option<DeviceBytes<'a>>, peer: Rank) {
        if peer != self.called.me {
            return self.receive(into, peer);
        }
        if from != into {
            self.send(from, peer);
            self.receive(into, peer);
        }
    }

    fn send(&mut self, from: Option<DeviceBytes<'a>>, peer: Rank) {
        self.calls.extend(from.map(|from| NcclCall::Send { from, peer: peer.0 }));
    }

    fn receive(&mut self, into: Option<DeviceBytes<'a>>, peer: Rank) {
        self.calls.extend(into.map(|into| NcclCall::Receive { into, peer: peer.0 }));
    }

    /// Each input tensor with the output tensor of its place.
    fn pairs(&mut self) -> Result<Vec<(DeviceBytes<'a>, DeviceBytes<'a>)>, Unfit> {
        let (input, output) = (whole(self.called.input), whole(self.called.output));
        let is_alike = input.len() == output.len() && input.iter().zip(&output).all(|(a, b)| a.len() == b.len());
        if !is_alike {
            return Err(Unfit::Lengths);
        }
        self.pieces = input.len() as u32;
        Ok(input.into_iter().zip(output).collect())
    }

    /// The input tensors of a rank that gets nothing.
    fn sources(&mut self) -> Vec<(DeviceBytes<'a>, DeviceBytes<'a>)> {
        self.alone(self.called.input)
    }

    fn targets(&mut self) -> Vec<(DeviceBytes<'a>, DeviceBytes<'a>)> {
        self.alone(self.called.output)
    }

    fn alone(&mut self, tensors: &[DeviceBytes<'a>]) -> Vec<(DeviceBytes<'a>, DeviceBytes<'a>)> {
        let whole = whole(tensors);
        self.pieces = whole.len() as u32;
        whole.into_iter().map(|tensor| (tensor, tensor)).collect()
    }

    /// A rank's block of tensors that have one of each rank.
    fn of(&self, tensors: &[DeviceBytes<'a>], counts: &Counts, rank: Rank) -> Result<Option<DeviceBytes<'a>>, Unfit> {
        let before: usize = counts.iter().take(rank.index()).sum();
        self.block(tensors, before, counts[rank.index()], rank)
    }

    /// `count` elements from the `offset`-th on; `None` if `count` is zero.
    fn block(
        &self,
        tensors: &[DeviceBytes<'a>],
        offset: usize,
        count: usize,
        rank: Rank,
    ) -> Result<Option<DeviceBytes<'a>>, Unfit> {
        let size = self.called.dtype.size();
        let mut stretches = Stretches::new();
        cut(tensors, offset * size, count * size, &mut stretches);
        match &stretches[..] {
            [] => Ok(None),
            [one] => Ok(Some(*one)),
            _ => Err(Unfit::Block(rank)),
        }
    }

    fn reduction(&self) -> Result<(DataType, Reduction<'a>), Unfit> {
        let Called { dtype, reduce, factor, .. } = *self.called;
        let reduction = match reduce.expect("a reduction has an operation") {
            ReduceOp::Sum => Reduction::Sum,
            ReduceOp::Product => Reduction::Product,
            ReduceOp::Min => Reduction::Min,
            ReduceOp::Max => Reduction::Max,
            ReduceOp::Avg => Reduction::Avg,
            ReduceOp::PreMulSum(by) => Reduction::PreMulSum(match factor {
                None => Factor::Value(number(dtype, by)),
                Some((at, known)) if known == dtype => Factor::Device(at),
                Some((_, other)) => return Err(Unfit::Factor(other)),
            }),
            other => unreachable!("no library has {}", other.name()),
        };
        Ok((element(dtype).expect("a type that a library has"), reduction))
    }
}

/// Tensors that are not empty.
fn whole<'a>(tensors: &[DeviceBytes<'a>]) -> Stretches<'a> {
    tensors.iter().copied().filter(|tensor| !tensor.is_empty()).collect()
}

/// A number as an element of a type of real numbers.
fn number(dtype: DType, value: f64) -> [u8; 8] {
    let mut bytes = [0; 8];
    match dtype {
        DType::F16 => bytes[..2].copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
        DType::BF16 => bytes[..2].copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
        DType::F32 => bytes[..4].copy_from_slice(&(value as f32).to_ne_bytes()),
        DType::F64 => bytes = value.to_ne_bytes(),
        other => unreachable!("no library multiplies {other} by a factor here"),
    }
    bytes
}

fn element(dtype: DType) -> Option<DataType> {
    Some(match dtype {
        DType::I8 => DataType::I8,
        DType::U8 => DataType::U8,
        DType::I32 => DataType::I32,
        DType::U32 => DataType::U32,
        DType::I64 => DataType::I64,
        DType::U64 => DataType::U64,
        DType::F16 => DataType::F16,
        DType::F32 => DataType::F32,
        DType::F64 => DataType::F64,
        DType::BF16 => DataType::BF16,
        _ => return None,
    })
}
