//! All_to_all between hosts: the blocks to and from ranks of other hosts, as programs.
//!
//! Blocks between ranks of one host go through [rings](crate::device::rings). Blocks between hosts are cut into pieces of one
//! length, which lie in pinned memory side by side, and are [`network`](crate::device::network) traffic like that of other
//! collectives. No rank needs to know other ranks' blocks, since both ends of a block cut it alike. The last piece of a block
//! is shorter than a whole one, perhaps empty. So every rank hears from every other one what that rank calls, and two ranks
//! that disagree on a block's length find a piece of another length.
//!
//! # Order
//! Program t sends the t-th piece of every block, and then receives the pieces t − 1. Its sends wait until the network is done
//! with the pieces of program t − 2, its receives for what other ranks send in their programs t − 1. So, by induction over t,
//! programs run to their end on a single queue a rank, and the next pieces are copied while others travel.

use crate::counts::Counts;
use crate::device::layout::ALIGNMENT;
use crate::device::lower::{DriverCall, Location, Program, WordOperation};
use crate::device::network::Parcel;
use crate::device::segment::StagingTooSmall;
use crate::schedule::{Slice, Space};
use crate::topo::Topology;
use crate::types::Rank;

/// The blocks of one rank of an all_to_all, by rank, in elements of so many bytes.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// What it sends.
    pub sent: &'a Counts,
    /// What it receives.
    pub received: &'a Counts,
    /// The bytes of an element.
    pub element: usize,
}

/// What rank `me` does for its blocks to and from other hosts, with `half` bytes of pinned memory each way for a program.
///
/// The first program sends and waits for nothing else, so that what is done within the host can follow it at once. There is an
/// even number of programs, so that the next operation finds all ranks at the same half of their memory.
///
/// ```
/// use ncclx_rs::device::all_to_all::{Blocks, programs};
/// use ncclx_rs::{Counts, Rank, Topology};
/// let counts = Counts::equal(100, 3);
/// let blocks = Blocks { sent: &counts, received: &counts, element: 4 };
/// // Pieces of 64 elements: of each block one of 64 and one of 36.
/// let programs = programs(&Topology::new(&["a", "a", "b"]), Rank(0), blocks, 3 * 256).unwrap();
/// let bytes: Vec<usize> = programs.iter().flat_map(|program| &program.traffic.outbound).map(|piece| piece.bytes).collect();
/// assert_eq!((programs.len(), bytes), (4, vec![256, 144]));
/// ```
///
/// # Errors
/// Pinned memory does not hold an element for every rank.
pub fn programs(topo: &Topology, me: Rank, blocks: Blocks<'_>, half: usize) -> Result<Vec<Program>, StagingTooSmall> {
    let Blocks { sent, received, element } = blocks;
    // The same for all ranks, however many ranks of other hosts each has.
    let room = half / topo.size();
    let room = if room > ALIGNMENT { room - room % ALIGNMENT } else { room };
    let piece = room / element;
    if piece == 0 {
        return Err(StagingTooSmall { needed: element * topo.size(), half });
    }
    let seats = topo.hosts()[topo.host_of(me)].len();
    let far = |counts: &Counts| -> Vec<Block> {
        let mut offset = 0;
        let block = |(peer, len): (usize, usize)| {
            let block = Block { peer: Rank::from(peer), offset, len, piece };
            offset += len;
            block
        };
        counts.iter().enumerate().map(block).filter(|block| !topo.same_host(me, block.peer)).collect()
    };
    let (sent, received) = (far(sent), far(received));
    let pieces = sent.iter().chain(&received).map(Block::pieces).max().unwrap_or(0);
    // One more program, which receives the last pieces.
    let count = (pieces + usize::from(pieces > 0)).next_multiple_of(2);
    let program = |number: usize| {
        let mut lowering = Lowering { element, room, program: Program::nothing(seats) };
        lowering.send(&sent, number);
        if let Some(before) = number.checked_sub(1) {
            lowering.receive(&received, before);
        }
        lowering.program
    };
    Ok((0..count).map(program).collect())
}

/// A block to or from a rank of another host.
#[derive(Clone, Copy, Debug)]
struct Block {
    peer: Rank,
    /// Its first element in the tensor, and how many it has.
    offset: usize,
    len: usize,
    /// The elements of a whole piece.
    piece: usize,
}

impl Block {
    /// The whole pieces, and a shorter one.
    fn pieces(&self) -> usize {
        self.len / self.piece + 1
    }

    /// The elements of piece `number`, perhaps none, if the block has that piece.
    fn piece(&self, number: usize, space: Space) -> Option<Slice> {
        let before = number * self.piece;
        (number < self.pieces()).then(|| Slice::new(space, self.offset + before, self.piece.min(self.len - before)))
    }
}

/// A program being written.
struct Lowering {
    element: usize,
    /// The bytes from one rank's piece to the next one's.
    room: usize,
    program: Program,
}

impl Lowering {
    /// Copies all, and counts them with one word.
    fn send(&mut self, blocks: &[Block], number: usize) {
        for (place, block) in blocks.iter().enumerate() {
            let Some(slice) = block.piece(number, Space::Input) else { continue };
            let (offset, bytes) = (place * self.room, slice.len * self.element);
            self.program.traffic.outbound.push(Parcel { peer: block.peer, offset, bytes, is_led: false });
            if bytes > 0 {
                let into = Location::Outbound { offset, bytes };
                self.program.operations.push(DriverCall::Copy { from: Location::Own(slice), into });
            }
        }
        let number = self.program.traffic.outbound.len() as u32;
        if number > 0 {
            self.program.operations.push(DriverCall::Words(vec![WordOperation::PublishOutbound { number }]));
        }
    }

    /// Copies each when it is there, and counts all with one word.
    fn receive(&mut self, blocks: &[Block], number: usize) {
        for (place, block) in blocks.iter().enumerate() {
            let Some(slice) = block.piece(number, Space::Output) else { continue };
            let (offset, bytes) = (place * self.room, slice.len * self.element);
            self.program.traffic.inbound.push(Parcel { peer: block.peer, offset, bytes, is_led: false });
            let number = self.program.traffic.inbound.len() as u32;
            self.program.operations.push(DriverCall::Words(vec![WordOperation::AwaitInbound { number }]));
            if bytes > 0 {
                let from = Location::Inbound { offset, bytes };
                self.program.operations.push(DriverCall::Copy { from, into: Location::Own(slice) });
            }
        }
        let number = self.program.traffic.inbound.len() as u32;
        if number > 0 {
            self.program.operations.push(DriverCall::Words(vec![WordOperation::ReleaseInbound { number }]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_ends_of_a_block_cut_it_alike(
            hosts in prop::collection::vec(0..3u8, 2..7), lengths in prop::collection::vec(0..200usize, 36), half in 96..2000usize,
        ) {
            let names: Vec<String> = hosts.iter().map(u8::to_string).collect();
            let (topo, size) = (Topology::new(&names), hosts.len());
            let length = |from: usize, to: usize| lengths[from * 6 + to];
            let of = |me: usize| {
                let sent: Counts = (0..size).map(|to| length(me, to)).collect();
                let received: Counts = (0..size).map(|from| length(from, me)).collect();
                programs(&topo, Rank::from(me), Blocks { sent: &sent, received: &received, element: 8 }, half).expect("room")
            };
            let all: Vec<Vec<Program>> = (0..size).map(of).collect();
            let pieces = |parcels: &[Parcel], peer: usize| -> Vec<usize> {
                parcels.iter().filter(|parcel| parcel.peer.index() == peer).map(|parcel| parcel.bytes).collect()
            };
            for (from, to) in (0..size).flat_map(|from| (0..size).map(move |to| (from, to))) {
                let sent = all[from].iter().map(|program| pieces(&program.traffic.outbound, to));
                let received = all[to].iter().map(|program| pieces(&program.traffic.inbound, from));
                // Pieces are received one program later than they are sent.
                let (sent, received): (Vec<_>, Vec<_>) = (sent.collect(), received.skip(1).collect());
                let together = sent.len().min(received.len());
                prop_assert_eq!(&sent[..together], &received[..together]);
                prop_assert!(sent[together..].iter().chain(&received[together..]).all(Vec::is_empty));
                let far = !topo.same_host(Rank::from(from), Rank::from(to));
                let bytes: usize = sent.iter().flatten().sum();
                prop_assert_eq!(bytes, if far { length(from, to) * 8 } else { 0 });
                prop_assert_eq!(sent.iter().all(Vec::is_empty), !far, "who has nothing to send tells what it calls");
            }
            for program in all.iter().flatten() {
                let parcels = program.traffic.outbound.iter().chain(&program.traffic.inbound);
                prop_assert!(parcels.clone().all(|parcel| parcel.offset + parcel.bytes <= half));
            }
            prop_assert!(all.iter().all(|programs| programs.len().is_multiple_of(2)));
        }
    }

    #[test]
    fn memory_for_less_than_an_element_a_rank_is_an_error() {
        let counts = Counts::equal(1, 2);
        let blocks = Blocks { sent: &counts, received: &counts, element: 8 };
        let error = programs(&Topology::new(&["a", "b"]), Rank(0), blocks, 15).expect_err("too little");
        assert_eq!(error, StagingTooSmall { needed: 16, half: 15 });
    }
}
