//! A collective as one rank calls it, and what its plan or its calls of a vendor's library depend on.

use std::time::Duration;

use crate::algo::{Collective, Scaling};
use crate::buffer::Buffer;
use crate::device::call_log::{Blocks, LoggedCall};
use crate::device::lane::Stretches;
use crate::device::lower::InPlace;
use crate::device::plans::{self, Shape};
use crate::device::vendor::VendorComm;
use crate::device::vendor::calls::{self, Called, Calls, Unfit};
use crate::signature::Signature;
use crate::sync::Arc;
use crate::sys::cuda::{DeviceMemory, StreamHandle};
use crate::sys::nccl::NcclCall;
use crate::types::{DType, Rank, ReduceOp};
use crate::window::WindowId;

/// A collective as one rank calls it.
pub(crate) struct CollectiveRequest<'a> {
    pub(crate) collective: Collective,
    pub(crate) signature: Signature,
    pub(crate) reduce: Option<ReduceOp>,
    /// The factor of a premultiplied sum, if it lies in the device's memory.
    pub(crate) factor: Option<Buffer>,
    pub(crate) dtype: DType,
    pub(crate) scaling: Scaling,
    pub(crate) inputs: &'a [Buffer],
    pub(crate) outputs: &'a [Buffer],
    /// The window whose part the output is, for an all_gather into one.
    pub(crate) window: Option<WindowId>,
    pub(crate) stream: StreamHandle,
    pub(crate) timeout: Duration,
}

/// A collective in a capture that a vendor's library runs.
pub(super) struct LibraryCall<'a> {
    pub(super) number: u64,
    pub(super) call: LoggedCall,
    pub(super) blocks: Option<Blocks<'a>>,
    pub(super) comm: &'a Arc<VendorComm>,
    /// Memory that the calls may use.
    pub(super) spare: &'a Arc<DeviceMemory>,
    pub(super) calls: &'a [NcclCall<'a>],
}

impl<'a> CollectiveRequest<'a> {
    /// The device memory of its inputs and its outputs.
    pub(super) fn stretches(&self) -> [Stretches<'a>; 2] {
        [self.inputs, self.outputs].map(|buffers| buffers.iter().filter_map(Buffer::device_bytes).collect())
    }

    /// The collective as calls of a vendor's library by rank `me`.
    pub(super) fn calls<'c>(
        &'c self,
        [input, output]: &'c [Stretches<'a>; 2],
        spare: &'c DeviceMemory,
        (me, world): (Rank, usize),
    ) -> Result<Calls<'c>, Unfit> {
        let factor = self.factor.as_ref().and_then(|factor| Some((factor.device_bytes()?, factor.dtype())));
        calls::calls(&Called {
            collective: &self.collective,
            reduce: self.reduce,
            factor,
            dtype: self.dtype,
            input,
            output,
            spare: spare.bytes(),
            me,
            world,
        })
    }

    /// What a plan depends on that runs it as `collective`.
    pub(super) fn shape(&self, collective: &Collective, me: Rank) -> Shape {
        let (element, is_in_place) = (self.dtype.size(), self.shares_own_part(me));
        Shape { collective: collective.clone(), element, scaling: self.scaling, is_in_place }
    }

    /// Whether this rank's part of the data lies in the same memory in input and output.
    fn shares_own_part(&self, me: Rank) -> bool {
        let Some((InPlace { input, output }, len)) = plans::own_part(&self.collective, me) else { return false };
        let element = self.dtype.size();
        same_runs(self.inputs, input * element, self.outputs, output * element, len * element)
    }
}

/// Whether `len` bytes at these offsets are the same memory.
fn same_runs(left: &[Buffer], left_offset: usize, right: &[Buffer], right_offset: usize, len: usize) -> bool {
    len > 0 && runs(left, left_offset, len).eq(runs(right, right_offset, len))
}

/// The runs of memory in which `len` bytes lie, from `offset` on, of buffers that are counted end to end.
fn runs(buffers: &[Buffer], offset: usize, len: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
    let mut begin = 0;
    buffers.iter().filter_map(move |buffer| {
        let (from, until) = (begin.max(offset), (begin + buffer.bytes()).min(offset + len));
        let run = (from < until).then(|| (buffer.ptr().addr() + (from - begin), until - from));
        begin += buffer.bytes();
        run
    })
}
