//! A collective as it is submitted: its steps that need no other rank, and its messages.

use std::time::Duration;

use crate::algo::Collective;
use crate::engine::completion::Completion;
use crate::engine::frame::{FrameKind, Header, MatchSpace};
use crate::engine::recv_buffer::{RecvAction, RecvBuffer};
use crate::engine::reduce::{self, Operands};
use crate::engine::region::Spaces;
use crate::schedule::{Action, Slice, Space};
use crate::signature::Signature;
use crate::sys::team::Team;
use crate::types::{DType, ReduceOp};

/// A collective as it is submitted.
pub(crate) struct Request {
    pub(crate) collective: Collective,
    pub(crate) signature: Signature,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) dtype: DType,
    pub(crate) spaces: Spaces,
    pub(crate) timeout: Duration,
}

impl Request {
    /// Takes a step that needs no other rank, of as many as `world`.
    pub(crate) fn compute(&self, action: Action, world: usize, team: Team) {
        let (dtype, spaces) = (self.dtype, &self.spaces);
        let region = |slice| spaces.region(slice);
        let size = |slice| spaces.element_bytes(slice);
        match action {
            Action::Send { .. } | Action::Recv { .. } | Action::RecvReduce { .. } | Action::Await { .. } => {}
            // In place. `copy_from` would find that out run by run.
            Action::Copy { from, into } if self.spaces.begin_alike(from, into) => {}
            Action::Copy { from, into } if into.space == Space::Sums && from.space != Space::Sums => {
                spaces.each_block(into, from, |run, blocks| {
                    team.spread((run, size(into)), (blocks, size(from)), |run, blocks| {
                        reduce::widen(dtype, run, blocks[0])
                    });
                });
            }
            Action::Copy { from, into } => region(into).copy_from(&region(from), team),
            Action::CopyBlocks { .. } => {
                action.copies().for_each(|(from, into)| self.compute(Action::Copy { from, into }, world, team));
            }
            Action::Reduce { from, into } => {
                let operands = self.operands(into);
                region(into).zip(&region(from), |run, block| {
                    team.spread((run, size(into)), (&[block], size(from)), |run, blocks| {
                        reduce::combine(operands, run, blocks[0])
                    });
                });
            }
            Action::Fold { from, into, position } => {
                let (operands, position) = (self.operands(into), position as usize);
                spaces.each_block(into, from, |run, blocks| {
                    team.spread((run, size(into)), (blocks, size(from)), |run, blocks| {
                        reduce::fold(operands, run, position, blocks)
                    });
                });
            }
            Action::Scale { slice } => {
                if let Some(ReduceOp::PreMulSum(factor)) = self.reduce {
                    region(slice).each_mut(|run| {
                        team.spread((run, size(slice)), (&[], size(slice)), |run, _| reduce::scale(dtype, factor, run));
                    });
                }
            }
            Action::Average { from, into } if from == into => {
                region(into).each_mut(|run| {
                    team.spread((run, size(into)), (&[], size(into)), |run, _| reduce::divide(dtype, world, run));
                });
            }
            Action::Average { from, into } => {
                let operands = self.operands(from);
                spaces.each_block(into, from, |run, blocks| {
                    team.spread((run, size(into)), (blocks, size(from)), |run, blocks| {
                        reduce::average(operands, world, run, blocks)
                    });
                });
            }
        }
    }

    /// What is combined in the memory of `slice`.
    fn operands(&self, slice: Slice) -> Operands {
        match slice.space {
            Space::Sums => Operands::Sums(self.dtype),
            _ => Operands::Elements(self.reduce.unwrap_or(ReduceOp::Sum), self.dtype),
        }
    }

    /// Whether what it sends was just written, as a rule: intermediate results, of data of so many bytes at most.
    pub(crate) fn sends_results_of(&self, most: usize) -> bool {
        matches!(self.collective, Collective::AllReduce { .. }) && self.spaces.output.len() <= most
    }

    /// The header of a message that is sent at once.
    pub(crate) fn header(&self, sequence: u64, message: u32, len: usize) -> Header {
        Request::header_of(self.signature, sequence, message, len)
    }

    /// The header of such a message of a collective that was called so.
    pub(crate) fn header_of(signature: Signature, sequence: u64, message: u32, len: usize) -> Header {
        Header {
            signature,
            index: message,
            ..Header::control(FrameKind::Eager, MatchSpace::Collective, sequence, 0, len as u64)
        }
    }

    /// The place that a step receives into, if it does.
    pub(crate) fn buffer(&self, action: Action, completion: Completion) -> Option<RecvBuffer> {
        let (into, action) = match action {
            Action::RecvReduce { into, .. } => (into, RecvAction::Reduce(self.operands(into))),
            Action::Recv { into, .. } => (into, RecvAction::Store),
            _ => return None,
        };
        Some(RecvBuffer::new(self.spaces.region(into), action, completion))
    }
}
