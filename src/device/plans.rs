//! Plans: a collective's segments with the programs that run them, made once for each shape.

use std::collections::HashMap;

use crate::algo::{self, Chunking, Collective, Scaling, ScratchLimit, Setting, select};
use crate::counts::Counts;
use crate::device::halves::{Phase, skewed};
use crate::device::lower::{InPlace, Program, Staged};
use crate::device::segment::{Cut, Segment, StagingTooSmall};
use crate::schedule::Space;
use crate::sync::Arc;
use crate::topo::Topology;
use crate::types::Rank;

/// What a plan depends on, beside the communicator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) collective: Collective,
    /// Bytes of an element.
    pub(crate) element: usize,
    pub(crate) scaling: Scaling,
    /// Whether this rank's part of the data lies in the same memory in input and output.
    pub(crate) is_in_place: bool,
}

/// How one rank runs a collective.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The number of the algorithm.
    pub(crate) algorithm: u8,
    pub(crate) segments: usize,
    /// The programs of the segments or of their parts, in the order in which they are put on a stream.
    pub(crate) programs: Vec<(Arc<Segment>, Arc<Program>)>,
    /// The bytes of half of the staging memory that it uses.
    pub(crate) staging: usize,
    bytes: usize,
}

/// What runs a segment.
#[derive(Clone, Debug)]
enum Programs {
    Whole(Arc<Program>),
    /// Its lead and its rest.
    Parts([Arc<Program>; 2]),
}

impl Programs {
    fn of(staged: &Staged, me: Rank, in_place: Option<InPlace>, is_skewed: bool) -> Programs {
        match is_skewed {
            true => Programs::Parts(staged.parts(me, in_place).map(Arc::new)),
            false => Programs::Whole(Arc::new(staged.program(me, in_place))),
        }
    }

    fn of_phase(&self, phase: Phase) -> Arc<Program> {
        match (self, phase) {
            (Programs::Whole(program), Phase::Whole)
            | (Programs::Parts([program, _]), Phase::Lead)
            | (Programs::Parts([_, program]), Phase::Rest) => program.clone(),
            _ => unreachable!("all segments of a plan are cut alike"),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Programs::Whole(program) => program.bytes(),
            Programs::Parts(parts) => parts.iter().map(|program| program.bytes()).sum(),
        }
    }
}

/// The segments of a plan.
#[derive(Debug, Default)]
struct Segments {
    all: Vec<(Arc<Segment>, Programs)>,
    /// The bytes of half of the staging memory that the largest takes.
    staging: usize,
    /// The memory that they take themselves.
    bytes: usize,
}

/// The memory that plans may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Bytes of half of the staging memory.
    pub(crate) half: usize,
    /// Bytes of scratch memory that a segment may use, and as many for sums.
    pub(crate) scratch: usize,
    /// Bytes of half of the memory for messages to other hosts, and as many for messages from there.
    pub(crate) network: usize,
}

/// The plans of one communicator.
#[derive(Debug)]
pub(crate) struct Plans {
    me: Rank,
    topo: Topology,
    /// The algorithm that is set, if any, for every collective that it can do.
    algorithm: Option<String>,
    room: Room,
    cached: HashMap<Shape, Arc<Plan>>,
    /// The bytes that the cached plans take.
    bytes: usize,
}

/// The bytes that cached plans may take together.
const CACHE_BYTES: usize = 8 << 20;

impl Plans {
    pub(crate) fn new(me: Rank, topo: Topology, algorithm: Option<String>, room: Room) -> Plans {
        Plans { me, topo, algorithm, room, cached: HashMap::new(), bytes: 0 }
    }

    /// The algorithm that is set.
    pub(crate) fn named(&self) -> Option<&str> {
        self.algorithm.as_deref()
    }

    /// The plan for a shape, made now if it is new.
    ///
    /// # Errors
    /// One element of every block does not fit into staging memory.
    pub(crate) fn plan(&mut self, shape: &Shape) -> Result<Arc<Plan>, StagingTooSmall> {
        if let Some(plan) = self.cached.get(shape) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(self.make(shape)?);
        let bytes = plan.bytes + size_of::<Shape>() + shape.collective.bytes();
        if self.bytes + bytes > CACHE_BYTES {
            self.cached.clear();
            self.bytes = 0;
        }
        if bytes <= CACHE_BYTES {
            self.cached.insert(shape.clone(), plan.clone());
            self.bytes += bytes;
        }
        Ok(plan)
    }

    fn make(&self, shape: &Shape) -> Result<Plan, StagingTooSmall> {
        let name = self.choose(shape);
        let cut = Cut::new(name, &shape.collective, self.topo.size());
        let mut made = Segments::default();
        cut.longest(self.room.half, |len| {
            made = self.segments(name, shape, &cut, len);
            made.staging
        })?;
        let Segments { all, staging, bytes } = made;
        let count = all.len();
        let whole = (0..count).map(|segment| (segment, Phase::Whole));
        let order: Vec<(usize, Phase)> = if self.is_skewed(count) { skewed(count).collect() } else { whole.collect() };
        let bytes = bytes + order.len() * size_of::<(Arc<Segment>, Arc<Program>)>();
        let program = |(index, phase): (usize, Phase)| (all[index].0.clone(), all[index].1.of_phase(phase));
        let programs = order.into_iter().map(program).collect();
        Ok(Plan { algorithm: select::number(name), segments: count, programs, staging, bytes })
    }

    /// One segment alone has nothing to go before, and within a host nothing is worth it.
    fn is_skewed(&self, segments: usize) -> bool {
        segments > 1 && self.topo.hosts().len() > 1
    }

    /// The segments of so many elements of every block, up to the first that takes more staging memory than there is. That may be a
    /// later one, in which blocks have ended: by how much is left of them, an algorithm may go in another way.
    fn segments(&self, name: &str, shape: &Shape, cut: &Cut<'_>, len: usize) -> Segments {
        let begins = (0..cut.longest_block().max(1)).step_by(len);
        let is_skewed = self.is_skewed(begins.len());
        let mut made = Segments::default();
        for from in begins {
            let segment = cut.segment(self.me, from, len).expect("no all_to_all has segments");
            let programs = match made.all.last() {
                // Segments are alike, but for those in which blocks end.
                Some((last, programs)) if last.collective == segment.collective => programs.clone(),
                _ => {
                    let staged = Staged::plan(name, &segment.collective, &self.topo, shape.element, shape.scaling);
                    let staged = staged.expect("chosen since it can do this collective");
                    made.staging = made.staging.max(self.needed(&staged, shape));
                    if made.staging > self.room.half {
                        return made;
                    }
                    let own = own_part(&segment.collective, self.me).filter(|_| shape.is_in_place);
                    let programs = Programs::of(&staged, self.me, own.map(|(in_place, _)| in_place), is_skewed);
                    made.bytes += programs.bytes();
                    programs
                }
            };
            made.bytes += size_of::<Segment>() + segment.bytes();
            made.all.push((Arc::new(segment), programs));
        }
        made
    }

    /// The name of the algorithm.
    fn choose(&self, shape: &Shape) -> &'static str {
        let Shape { ref collective, element, scaling, .. } = *shape;
        let setting = Setting {
            me: self.me,
            topo: &self.topo,
            element,
            scaling,
            chunking: Chunking::Whole,
            scratch: ScratchLimit::UNBOUNDED,
        };
        let set = self.algorithm.as_deref().and_then(|name| algo::plan_with(name, collective, setting));
        set.unwrap_or_else(|| algo::plan(collective, setting)).name
    }

    /// The bytes of staging memory that a segment takes; more than half of it has, if other memory is too small.
    fn needed(&self, staged: &Staged, shape: &Shape) -> usize {
        let ranks = (0..self.topo.size()).map(|rank| staged.schedule(Rank::from(rank)));
        let bytes = |space, count: usize| count.saturating_mul(shape.scaling.bytes_in(space, shape.element));
        let scratch = ranks
            .map(|schedule| bytes(Space::Scratch, schedule.scratch).max(bytes(Space::Sums, schedule.sums)))
            .max()
            .unwrap_or(0);
        let network = staged.network_bytes();
        match () {
            () if scratch > self.room.scratch => self.room.half.saturating_add(scratch),
            () if network > self.room.network => self.room.half.saturating_add(network),
            () => staged.bytes(),
        }
    }
}

/// Where this rank's part of a collective's data lies in input and output, and how many elements that has.
pub(crate) fn own_part(collective: &Collective, me: Rank) -> Option<(InPlace, usize)> {
    let before = |counts: &Counts| counts.iter().take(me.index()).sum();
    let (input, output, len) = match collective {
        Collective::AllReduce { count } | Collective::Reduce { count, .. } | Collective::Broadcast { count, .. } => {
            (0, 0, *count)
        }
        Collective::AllGather { counts } => (0, before(counts), counts[me.index()]),
        Collective::AllGatherIntoParts { count } => (0, me.index() * count, *count),
        Collective::ReduceScatter { counts } => (before(counts), 0, counts[me.index()]),
        Collective::Gather { count, root } if *root == me => (0, me.index() * count, *count),
        Collective::Scatter { count, root } if *root == me => (me.index() * count, 0, *count),
        _ => return None,
    };
    Some((InPlace { input, output }, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::lower::{DriverCall, Location};

    #[test]
    fn segments_are_skewed_where_there_are_other_hosts() {
        let phases = |hosts: &[&str], count| {
            let room = Room { half: 4096, scratch: 4096, network: 4096 };
            let mut plans = Plans::new(Rank(0), Topology::new(hosts), None, room);
            let collective = Collective::AllReduce { count };
            let shape = Shape { collective, element: 4, scaling: Scaling::Nothing, is_in_place: true };
            let plan = plans.plan(&shape).expect("it fits");
            let phases: Vec<Phase> = plan.programs.iter().map(|(_, program)| program.traffic.phase).collect();
            (plan.segments, phases)
        };
        let (segments, skewed) = phases(&["a", "a", "b", "b"], 10_000);
        assert!(segments > 2 && skewed.len() == 2 * segments, "{segments}, {skewed:?}");
        assert_eq!(skewed[..4], [Phase::Lead, Phase::Lead, Phase::Rest, Phase::Lead]);
        assert_eq!(phases(&["a", "a", "b", "b"], 10), (1, vec![Phase::Whole]));
        let (segments, whole) = phases(&["a", "a", "a", "a"], 10_000);
        assert_eq!(whole, vec![Phase::Whole; segments]);
    }

    #[test]
    fn every_segment_fits_also_where_a_later_one_goes_in_another_way() {
        let room = Room { half: 65_536, scratch: 65_536, network: 65_536 };
        let hosts: Vec<&str> = ["a", "b", "c", "d"].iter().flat_map(|host| [*host; 4]).collect();
        let topo = Topology::new(&hosts);
        let counts = (0..16).map(|rank| if rank < 3 { 20_480 } else { 256 }).collect();
        let all_gather = Collective::AllGather { counts };
        // Of 10,240 elements a block, the first segment goes by blocks, which fit. The second has three blocks of one host, and goes
        // by hosts: one rank sends all three.
        let sent = |from| {
            let segment = Cut::new("hierarchical", &all_gather, 16).segment(Rank(0), from, 10_240).expect("a segment");
            let staged = Staged::plan("hierarchical", &segment.collective, &topo, 4, Scaling::Nothing);
            staged.expect("it can").network_bytes()
        };
        assert!(sent(0) <= room.network && sent(10_240) > room.network);
        let shape = Shape { collective: all_gather, element: 4, scaling: Scaling::Nothing, is_in_place: false };
        for rank in 0..16 {
            let plan = Plans::new(Rank(rank), topo.clone(), None, room).plan(&shape).expect("it fits");
            assert_eq!(plan.segments, 4);
            assert!(plan.staging <= room.half);
            for (_, program) in &plan.programs {
                let traffic = &program.traffic;
                for parcel in traffic.outbound.iter().chain(&traffic.inbound) {
                    assert!(parcel.offset + parcel.bytes <= room.network, "rank {rank}: {parcel:?}");
                }
                for operation in &program.operations {
                    if let DriverCall::Copy { into: Location::Staging { offset, bytes, .. }, .. } = operation {
                        assert!(offset + bytes <= room.half, "rank {rank}: {operation:?}");
                    }
                }
            }
        }
    }
}
