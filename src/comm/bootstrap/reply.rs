//! The answer to a rank that has joined, the last message of the bootstrap: the outcome as JSON with its length in front, and
//! then the [table](super::table) of ranks if it is in there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::context::JoinFailure;
use super::groups::Groups;
use super::protocol::{Place, TABLE_BYTES_MAX, frame, frame_length, framed};
use super::rank_info::{RankInfo, rank_number};
use super::table;
use super::tree::Tree;
use crate::algo::Tuning;
use crate::types::Rank;

/// What all ranks know once all have joined.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct World {
    /// Every rank, in order.
    #[serde(skip)]
    pub(super) ranks: Vec<RankInfo>,
    /// Rank 0's tuning file, so that all ranks choose the same algorithms.
    pub(super) tuning: Tuning,
    /// Rank 0's setting, so that all ranks cut collectives alike.
    pub(super) scratch_bytes: usize,
}

impl World {
    /// From whom each rank gets the table of these ranks.
    pub(super) fn tree(&self, groups: Groups) -> Tree {
        Tree::over(self.ranks.iter().map(|info| &*info.host_id), groups)
    }
}

/// What a rank that has joined is told.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum JoinReply {
    /// All ranks have joined.
    Complete(World),
    /// All ranks have joined, and this rank tells which they are.
    Ask {
        #[serde(with = "rank_number")]
        rank: Rank,
        place: Place,
    },
    /// The communicator has not come about.
    Failed(JoinFailure),
    /// To a leader, before its own answer: those of the ranks that join through it. None has the table, since the tree has rank 0
    /// send that to nobody that it has no connection to.
    Members(BTreeMap<u32, JoinReply>),
}

impl JoinReply {
    /// The message. The error says that it is too long.
    pub(super) fn message(&self) -> Result<Vec<u8>, String> {
        let mut body = frame(self, TABLE_BYTES_MAX)?;
        if let JoinReply::Complete(World { ranks, .. }) = self {
            body.extend(table::encode(ranks)?);
        }
        framed(&body, TABLE_BYTES_MAX)
    }

    /// The answer in a message without its length, to a rank of a world of `size`.
    pub(super) fn parse(body: &[u8], size: usize) -> Result<JoinReply, String> {
        let (length, rest) = body.split_first_chunk::<{ size_of::<u32>() }>().ok_or("its answer has no length")?;
        let outcome = rest.split_at_checked(frame_length(length, TABLE_BYTES_MAX)?);
        let (outcome, table) = outcome.ok_or("its answer ends too early")?;
        let mut reply = serde_json::from_slice(outcome).map_err(|error| error.to_string())?;
        if let JoinReply::Complete(world) = &mut reply {
            world.ranks =
                table::decode(table, size).map_err(|cause| format!("its table of ranks is wrong: {cause}"))?;
        }
        Ok(reply)
    }
}
