//! The programs that schedules become on streams, for every algorithm, against a sequential reference.
//!
//! All ranks' programs run in one thread: each rank has one queue, in the order of submission. Ranks get their turn in
//! orders that let each of them run as far ahead of the others as words allow, so that memory used too early shows as a
//! wrong result. Messages to other hosts are carried one by one, as late as their receivers may ask for them.

use std::collections::HashMap;

use ncclx_rs::algo::{self, Collective, Scaling};
use ncclx_rs::device::counters::{Counters, Numbering, Word, WordAccess};
use ncclx_rs::device::halves::{Phase, skewed};
use ncclx_rs::device::lower::{DriverCall, Kernel, Location, Program, Staged};
use ncclx_rs::device::network::{Ledger, Turn};
use ncclx_rs::device::segment::{Cut, Segment};
use ncclx_rs::device::tokens::{Step, Tokens};
use ncclx_rs::schedule::{Action, Builder, Slice, Space};
use ncclx_rs::{Counts, Rank, Topology};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::cases::{Case, ELEMENT, SCALINGS, cases, division, factor};

/// Bytes of an element and of half the staging memory: a few elements fit.
const HALF: usize = 40 * ELEMENT;

/// The program of a segment, or of a part of one, on one rank, with what its numbers mean, and what is done to words before and
/// after it.
struct Submitted<'a> {
    program: &'a Program,
    /// The segment's number among all of all operations.
    number: usize,
    numbering: Numbering,
    segment: &'a Segment,
    before: Vec<Step>,
    after: Vec<Step>,
}

/// How operations tell their messages from those of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Telling {
    /// They count for ever.
    Counting,
    /// They are replays of one operation of a graph.
    Tokens,
    /// As these, but nobody waits for tokens.
    WithoutWaits,
    /// As these, but heads are not made zero.
    WithoutZeros,
}

/// One rank: its memory, and how far its queue has come.
struct Stream<'a> {
    me: usize,
    /// Its host.
    host: usize,
    queue: Vec<Submitted<'a>>,
    /// Operations taken: of which program, and how many of it, credits included.
    at: (usize, usize),
    /// Words taken of the batch that it is in.
    word: usize,
    input: Vec<u64>,
    output: Vec<u64>,
    /// By half.
    scratch: [Vec<u64>; 2],
    sums: [Vec<u64>; 2],
}

/// What all ranks see.
struct Shared {
    topo: Topology,
    /// By host, and tokens by the tail of their pair; those that have never been touched are there.
    words: HashMap<(usize, Word), u64>,
    tokens: HashMap<Word, u64>,
    telling: Telling,
    /// By rank and half, the elements in staging memory, by their byte, and of which segment they are.
    staging: Vec<[Cells; 2]>,
    /// The same of the memory for messages to other hosts, and of that for messages from there.
    outbound: Vec<[Cells; 2]>,
    inbound: Vec<[Cells; 2]>,
    scaling: Scaling,
}

type Cells = HashMap<usize, (u64, usize)>;

/// A message between hosts, as one of its ends counts it.
struct Letter {
    peer: usize,
    /// Its number among all of the rank in this direction, from 1.
    number: u64,
    turn: Turn,
    segment: usize,
    offset: usize,
    bytes: usize,
    /// Whether it is sent in a lead.
    is_led: bool,
    is_done: bool,
}

/// What the CPU engines of all ranks carry, by rank.
struct Network {
    outbound: Vec<Vec<Letter>>,
    inbound: Vec<Vec<Letter>>,
}

impl Network {
    fn new(streams: &[Stream<'_>]) -> Network {
        let mut network = Network { outbound: vec![], inbound: vec![] };
        for stream in streams {
            let (mut ledger, mut outbound, mut inbound) = (Ledger::default(), vec![], vec![]);
            for submitted in &stream.queue {
                let traffic = &submitted.program.traffic;
                let turn = ledger.take_up(traffic);
                if traffic.outbound.is_empty() && traffic.inbound.is_empty() {
                    continue;
                }
                assert_eq!(turn.half, submitted.numbering.half());
                for (parcels, letters, before) in
                    [(&traffic.outbound, &mut outbound, turn.sent), (&traffic.inbound, &mut inbound, turn.received)]
                {
                    letters.extend(parcels.iter().zip(before + 1..).map(|(parcel, number)| {
                        let (peer, offset, bytes) = (parcel.peer.index(), parcel.offset, parcel.bytes);
                        let (segment, is_led) = (submitted.number, parcel.is_led);
                        Letter { peer, number, turn, segment, offset, bytes, is_led, is_done: false }
                    }));
                }
            }
            network.outbound.push(outbound);
            network.inbound.push(inbound);
        }
        network
    }

    /// Carries one message that is ready at both ends from this rank. Whether there was one.
    fn turn(&mut self, from: usize, shared: &mut Shared) -> bool {
        let ready = shared.word(from, |of| Word::Outbound { of });
        for index in 0..self.outbound[from].len() {
            let letter = &self.outbound[from][index];
            let to = letter.peer;
            if letter.is_done || letter.number > ready {
                continue;
            }
            // The k-th message to a peer meets the peer's k-th from this rank, of those in leads and of the others.
            let is_led = letter.is_led;
            let alike = |other: &Letter, peer| (other.peer, other.is_led) == (peer, is_led);
            let nth = self.outbound[from][..index].iter().filter(|earlier| alike(earlier, to)).count();
            let mut its = self.inbound[to].iter_mut().filter(|other| alike(other, from));
            let other = its.nth(nth).expect("a receive for every send");
            if shared.word(to, |of| Word::Taken { of }) < other.turn.taken {
                continue;
            }
            assert_eq!(letter.bytes, other.bytes, "rank {from} to rank {to}");
            let cells: Vec<_> = shared.outbound[from][letter.turn.half]
                .iter()
                .filter(|(at, _)| (letter.offset..letter.offset + letter.bytes).contains(at))
                .map(|(at, (value, segment))| (at - letter.offset, *value, *segment))
                .collect();
            assert_eq!(cells.is_empty(), letter.bytes == 0);
            for (at, value, segment) in cells {
                assert_eq!(segment, letter.segment, "rank {from} sends what is of another segment");
                shared.inbound[to][other.turn.half].insert(other.offset + at, (value, segment));
            }
            other.is_done = true;
            self.outbound[from][index].is_done = true;
            let prefix = |letters: &[Letter]| letters.iter().take_while(|letter| letter.is_done).count() as u64;
            shared.set(from, |of| Word::Sent { of }, prefix(&self.outbound[from]));
            shared.set(to, |of| Word::Inbound { of }, prefix(&self.inbound[to]));
            return true;
        }
        false
    }
}

impl Shared {
    fn new(topo: &Topology, telling: Telling, scaling: Scaling) -> Shared {
        let memory = || vec![Default::default(); topo.size()];
        let (staging, outbound, inbound) = (memory(), memory(), memory());
        let (topo, words, tokens) = (topo.clone(), HashMap::new(), HashMap::new());
        Shared { topo, words, tokens, telling, staging, outbound, inbound, scaling }
    }

    fn of_rank(&self, rank: usize, word: fn(Rank) -> Word) -> (usize, Word) {
        let rank = Rank::from(rank);
        (self.topo.host_of(rank), word(self.topo.seat(rank)))
    }

    fn word(&self, rank: usize, word: fn(Rank) -> Word) -> u64 {
        self.words.get(&self.of_rank(rank, word)).copied().unwrap_or(0)
    }

    fn set(&mut self, rank: usize, word: fn(Rank) -> Word, value: u64) {
        self.words.insert(self.of_rank(rank, word), value);
    }

    fn rank(&self, host: usize, seat: Rank) -> usize {
        self.topo.hosts()[host][seat.index()].index()
    }

    fn element(&self, space: Space) -> usize {
        match (space, self.scaling) {
            (Space::Sums, Scaling::Sum { bytes }) => bytes,
            _ => ELEMENT,
        }
    }

    /// Whether the step can be made; makes it.
    fn step(&mut self, host: usize, step: Step) -> bool {
        match step {
            Step::Count(WordAccess::Wait(word, value)) => {
                self.words.get(&(host, word)).is_some_and(|now| *now >= value)
            }
            Step::Count(WordAccess::Write(word, value)) => {
                let before = self.words.insert((host, word), value).unwrap_or(0);
                let is_zeroed = self.telling != Telling::Counting && value == 0;
                assert!(before < value || is_zeroed, "{word:?} goes from {before} to {value}");
                true
            }
            Step::Token(WordAccess::Wait(word, value)) => *self.tokens.entry(word).or_insert(1) >= value,
            Step::Token(WordAccess::Write(word, value)) => {
                let before = self.tokens.insert(word, value).unwrap_or(1);
                assert_eq!(before + value, 1, "the token of {word:?} is taken or put back twice");
                true
            }
        }
    }
}

impl Stream<'_> {
    /// Takes one operation. Whether it could.
    fn turn(&mut self, shared: &mut Shared) -> bool {
        let Some(submitted) = self.queue.get(self.at.0) else { return false };
        let count = |access: &WordAccess| Step::Count(*access);
        let steps: Vec<Step> = match self.at.1.checked_sub(1) {
            None => submitted.before.iter().copied().chain(submitted.numbering.credits().iter().map(count)).collect(),
            Some(index) => match submitted.program.operations.get(index) {
                Some(DriverCall::Words(words)) => {
                    words.iter().map(|word| Step::Count(submitted.numbering.access(*word))).collect()
                }
                Some(_) => vec![],
                None => submitted.after.clone(),
            },
        };
        if let Some(step) = steps.get(self.word) {
            let is_done = shared.step(self.host, *step);
            self.word += usize::from(is_done);
            return is_done;
        }
        self.word = 0;
        let operation = self.at.1.checked_sub(1).map(|index| submitted.program.operations.get(index));
        match operation {
            None => self.at.1 += 1,
            Some(None) => self.at = (self.at.0 + 1, 0),
            Some(Some(operation)) => {
                let operation = operation.clone();
                self.at.1 += 1;
                self.run(&operation, shared);
            }
        }
        true
    }

    fn run(&mut self, operation: &DriverCall, shared: &mut Shared) {
        match operation {
            DriverCall::Words(_) => {}
            DriverCall::Copy { from, into } => {
                let values = self.read(*from, self.type_of(*from, *into), shared);
                self.write(*into, self.type_of(*into, *from), &values, shared);
            }
            DriverCall::Kernel(kernel) => self.compute(kernel, shared),
        }
    }

    /// The space whose elements a memory has: staging memory has those of the other end of the copy.
    fn type_of(&self, memory: Location, other: Location) -> Space {
        match (memory, other) {
            (Location::Own(slice), _) | (_, Location::Own(slice)) => slice.space,
            _ => unreachable!("no copy goes from staging memory to staging memory"),
        }
    }

    fn compute(&mut self, kernel: &Kernel, shared: &mut Shared) {
        match kernel {
            Kernel::Widen { from, into } => {
                assert!(from.space != Space::Sums && into.space == Space::Sums);
                let values = self.read(Location::Own(*from), from.space, shared);
                self.write(Location::Own(*into), into.space, &values, shared);
            }
            Kernel::Fold { into, others, .. } => {
                let mut result = self.read(Location::Own(*into), into.space, shared);
                for other in others {
                    let values = self.read(*other, into.space, shared);
                    assert_eq!(values.len(), into.len);
                    result.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_add(value));
                }
                self.write(Location::Own(*into), into.space, &result, shared);
            }
            Kernel::Scale { slice } => {
                let mut values = self.read(Location::Own(*slice), slice.space, shared);
                let factor = factor(self.me);
                values.iter_mut().for_each(|value| *value = value.wrapping_mul(factor));
                self.write(Location::Own(*slice), slice.space, &values, shared);
            }
            Kernel::Average { into, blocks } => {
                let division = division(shared.staging.len());
                let mut result = vec![0u64; into.len];
                for block in blocks {
                    let space = match block {
                        Location::Own(slice) => slice.space,
                        Location::Staging { bytes, .. } | Location::Inbound { bytes, .. }
                            if bytes / into.len == ELEMENT =>
                        {
                            Space::Scratch
                        }
                        Location::Staging { .. } | Location::Inbound { .. } => Space::Sums,
                        Location::Outbound { .. } => unreachable!("what goes away is not read"),
                    };
                    for (sum, value) in result.iter_mut().zip(self.read(*block, space, shared)) {
                        *sum = sum.wrapping_add(value.wrapping_mul(division));
                    }
                }
                self.write(Location::Own(*into), into.space, &result, shared);
            }
        }
    }

    /// Elements of a space's type.
    fn read(&mut self, memory: Location, space: Space, shared: &Shared) -> Vec<u64> {
        let (half, number) = (self.half(), self.queue[self.at.0].number);
        match memory {
            Location::Outbound { .. } => unreachable!("what goes away is not read"),
            Location::Staging { offset, bytes, .. } | Location::Inbound { offset, bytes } => {
                let element = shared.element(space);
                let cells = match memory {
                    Location::Staging { of, .. } => &shared.staging[shared.rank(self.host, of)][half],
                    _ => &shared.inbound[self.me][half],
                };
                let value = |at| {
                    let (value, segment) =
                        *cells.get(&at).unwrap_or_else(|| panic!("nothing at byte {at} of {memory:?}"));
                    assert_eq!(segment, number, "what {memory:?} has at byte {at} is of another segment");
                    value
                };
                (offset..offset + bytes).step_by(element).map(value).collect()
            }
            Location::Own(slice) => self.places(slice).into_iter().map(|at| self.memory(slice.space)[at]).collect(),
        }
    }

    fn write(&mut self, memory: Location, space: Space, values: &[u64], shared: &mut Shared) {
        let (half, number) = (self.half(), self.queue[self.at.0].number);
        match memory {
            Location::Inbound { .. } => unreachable!("a stream writes where messages come"),
            Location::Staging { offset, bytes, .. } | Location::Outbound { offset, bytes } => {
                let element = shared.element(space);
                assert!(offset + bytes <= HALF && bytes == values.len() * element);
                let cells = match memory {
                    Location::Staging { of, .. } => {
                        let of = shared.rank(self.host, of);
                        assert_eq!(of, self.me, "a rank writes to another one's staging memory");
                        &mut shared.staging[of][half]
                    }
                    _ => &mut shared.outbound[self.me][half],
                };
                // Elements that were longer or shorter began elsewhere.
                cells.retain(|at, _| !(offset..offset + bytes).contains(at));
                for (index, value) in values.iter().enumerate() {
                    cells.insert(offset + index * element, (*value, number));
                }
            }
            Location::Own(slice) => {
                assert_eq!(slice.len, values.len());
                for (at, value) in self.places(slice).into_iter().zip(values) {
                    self.memory(slice.space)[at] = *value;
                }
            }
        }
    }

    fn half(&self) -> usize {
        self.queue[self.at.0].numbering.half()
    }

    fn memory(&mut self, space: Space) -> &mut Vec<u64> {
        let half = self.half();
        match space {
            Space::Input => &mut self.input,
            Space::Output => &mut self.output,
            Space::Scratch => &mut self.scratch[half],
            Space::Sums => &mut self.sums[half],
            Space::Parts => unreachable!("no collective here is of a window"),
        }
    }

    /// Where a slice's elements lie in the whole operation's memory.
    fn places(&self, slice: Slice) -> Vec<usize> {
        let segment = self.queue[self.at.0].segment;
        let extent = match slice.space {
            Space::Input => &segment.input,
            Space::Output => &segment.output,
            Space::Parts => unreachable!("no collective here is of a window"),
            Space::Scratch | Space::Sums => return (slice.offset..slice.offset + slice.len).collect(),
        };
        let places: Vec<usize> = extent.parts(slice).flat_map(|run| run.offset..run.offset + run.len).collect();
        assert_eq!(places.len(), slice.len, "{slice:?} lies in {extent:?}");
        places
    }
}

/// The order in which ranks get their turns.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// One rank runs as far as it can before any other one does.
    Ahead(usize),
    Random(u64),
}

/// What all ranks submit.
struct Job {
    /// In the order of submission: the segment, and the program of each rank.
    programs: Vec<(usize, Vec<Program>)>,
    /// By segment and rank.
    segments: Vec<Vec<Segment>>,
    scratch: usize,
    sums: usize,
}

/// The segments of a case by one algorithm; nothing if it does not do this case.
fn job(name: &str, case: &Case, topo: &Topology, scaling: Scaling) -> Option<Job> {
    let (whole, size) = (case.of(0), topo.size());
    let blocks = Cut::new(name, &whole, size);
    let cut = |rank, from, len| blocks.segment(Rank::from(rank), from, len).expect("no all_to_all");
    let stage = |from, len| Staged::plan(name, &cut(0, from, len).collective, topo, ELEMENT, scaling);
    stage(0, 1)?;
    let bytes = |staged: Staged| staged.bytes().max(staged.network_bytes());
    let longest = blocks.longest(HALF, |len| bytes(stage(0, len).expect("as with one element")));
    let longest = longest.unwrap_or_else(|error| panic!("{name} for {whole:?}: {error}"));
    let mut job = Job { programs: vec![], segments: vec![], scratch: 0, sums: 0 };
    let mut all = vec![];
    for from in (0..blocks.longest_block().max(1)).step_by(longest) {
        let staged = stage(from, longest).expect("as the first segment");
        assert!(staged.bytes() <= HALF && staged.network_bytes() <= HALF);
        job.segments.push((0..size).map(|rank| cut(rank, from, longest)).collect());
        for rank in 0..size {
            let scratch = staged.schedule(Rank::from(rank));
            (job.scratch, job.sums) = (job.scratch.max(scratch.scratch), job.sums.max(scratch.sums));
        }
        all.push(staged);
    }
    let programs = |index: usize, phase| {
        let of_rank = |rank| match phase {
            Phase::Whole => all[index].program(rank, None),
            Phase::Lead => all[index].parts(rank, None)[0].clone(),
            Phase::Rest => all[index].parts(rank, None)[1].clone(),
        };
        (index, (0..size).map(Rank::from).map(of_rank).collect())
    };
    let whole = (0..all.len()).map(|index| (index, Phase::Whole));
    // As `Plans` does it, and one segment alone as well.
    let order: Vec<_> = if topo.hosts().len() > 1 { skewed(all.len()).collect() } else { whole.collect() };
    job.programs = order.into_iter().map(|(index, phase)| programs(index, phase)).collect();
    Some(job)
}

/// What is done to words before and after an operation of a graph.
fn edges(telling: Telling, me: Rank, programs: &[&Program]) -> (Vec<Step>, Vec<Step>) {
    let tokens = Tokens::of_programs(me, programs.iter().copied());
    let waits = tokens.waits().filter(|_| telling != Telling::WithoutWaits);
    let is_zero = |step: &Step| telling == Telling::WithoutZeros && matches!(step, Step::Count(_));
    let returns = tokens.returns().filter(|step| !is_zero(step));
    (waits.chain(tokens.takes()).collect(), returns.collect())
}

/// The streams of all ranks, which have the input and the output of `data`, with a job submitted to them several times over.
fn streams<'a>(
    job: &'a Job,
    data: impl Iterator<Item = (&'a [u64], usize)>,
    topo: &Topology,
    telling: Telling,
) -> Vec<Stream<'a>> {
    data.enumerate()
        .map(|(me, (input, output))| {
            let (host, seat) = (topo.host_of(Rank::from(me)), topo.seat(Rank::from(me)));
            let here = topo.hosts()[host].len();
            let mut counters = Counters::new(here);
            let programs: Vec<&Program> = job.programs.iter().map(|(_, programs)| &programs[me]).collect();
            let (begin, end) = match telling {
                Telling::Counting => (vec![], vec![]),
                _ => edges(telling, seat, &programs),
            };
            let (count, last) = (programs.len(), programs.len() - 1);
            let submit = (0..3 * count).map(|number| {
                let index = number % count;
                if index == 0 && telling != Telling::Counting {
                    counters = Counters::new(here);
                }
                Submitted {
                    program: programs[index],
                    numbering: counters.take_up(seat, programs[index]),
                    number: number / count * job.segments.len() + job.programs[index].0,
                    segment: &job.segments[job.programs[index].0][me],
                    before: if index == 0 { begin.clone() } else { vec![] },
                    after: if index == last { end.clone() } else { vec![] },
                }
            });
            Stream {
                me,
                host,
                queue: submit.collect(),
                at: (0, 0),
                word: 0,
                input: input.to_vec(),
                output: vec![0xbeef; output],
                scratch: [0; 2].map(|_| vec![0xdead; job.scratch]),
                sums: [0; 2].map(|_| vec![0xfade; job.sums]),
            }
        })
        .collect()
}

/// Runs a job several times over on one lane and compares the results.
fn run(job: &Job, case: &Case, topo: &Topology, scaling: Scaling, (telling, order): (Telling, Order), context: &str) {
    let size = topo.size();
    let data: Vec<_> = (0..size).map(|rank| case.data(rank, size, scaling)).collect();
    let mut shared = Shared::new(topo, telling, scaling);
    let mut streams = streams(job, data.iter().map(|(input, output, _)| (&**input, *output)), topo, telling);
    let mut network = Network::new(&streams);
    let mut random = StdRng::seed_from_u64(if let Order::Random(seed) = order { seed } else { 0 });
    loop {
        let moved = match order {
            Order::Ahead(first) => {
                let ranks = || (0..size).map(|index| (first + index) % size);
                ranks().any(|rank| streams[rank].turn(&mut shared))
                    || ranks().any(|rank| network.turn(rank, &mut shared))
            }
            Order::Random(_) => {
                let first = random.random_range(0..2 * size);
                (0..2 * size).map(|index| (first + index) % (2 * size)).any(|turn| match turn.checked_sub(size) {
                    None => streams[turn].turn(&mut shared),
                    Some(rank) => network.turn(rank, &mut shared),
                })
            }
        };
        if !moved {
            break;
        }
    }
    let mut letters = network.outbound.iter().chain(&network.inbound).flatten();
    assert!(letters.all(|letter| letter.is_done), "a message has not gone: {context}, {order:?}");
    for (rank, (stream, (_, _, expected))) in streams.iter().zip(&data).enumerate() {
        assert_eq!(stream.at.0, stream.queue.len(), "rank {rank} waits for ever: {context}, {telling:?}, {order:?}");
        if let Some(expected) = expected {
            assert!(stream.output == *expected, "rank {rank} is wrong: {context}, {telling:?}, {order:?}");
        }
    }
}

#[test]
fn programs_of_every_algorithm_run_to_their_end_and_are_right() {
    for size in 1..=9 {
        run_all(&Topology::single_host(size), &[Telling::Counting, Telling::Tokens]);
    }
}

#[test]
fn programs_of_ranks_on_several_hosts_run_to_their_end_and_are_right() {
    for hosts in ["ab", "aabb", "aaab", "aabbcc", "abab", "abc", "aaabb"] {
        let hosts: Vec<&str> = hosts.split("").filter(|host| !host.is_empty()).collect();
        run_all(&Topology::new(&hosts), &[Telling::Counting]);
    }
}

#[test]
fn the_lead_of_a_segment_is_sent_while_the_one_before_waits_for_other_hosts() {
    let topo = Topology::new(&["a", "a", "b", "b"]);
    let (count, equal) = (100, Counts::equal(100, 4));
    for whole in [
        Collective::AllReduce { count },
        Collective::ReduceScatter { counts: equal.clone() },
        Collective::AllGather { counts: equal },
    ] {
        let (case, scaling) = (Case::Same(whole), Scaling::Nothing);
        let job = job("hierarchical", &case, &topo, scaling).expect("it does this collective");
        assert!(job.segments.len() > 2, "{case:?} in {} segments", job.segments.len());
        let data: Vec<_> = (0..4).map(|rank| case.data(rank, 4, scaling)).collect();
        let mut shared = Shared::new(&topo, Telling::Counting, scaling);
        let mut streams =
            streams(&job, data.iter().map(|(input, output, _)| (&**input, *output)), &topo, Telling::Counting);
        // Nothing is carried between hosts.
        while streams.iter_mut().any(|stream| stream.turn(&mut shared)) {}
        for (rank, stream) in streams.iter().enumerate() {
            let ready = shared.word(rank, |of| Word::Outbound { of });
            let of_two: usize = stream.queue[..2].iter().map(|lead| lead.program.traffic.outbound.len()).sum();
            assert!(of_two >= 2 && ready == of_two as u64, "{case:?}: rank {rank} has {ready} of {of_two} ready");
        }
    }
}

/// Runs every collective by every algorithm among these ranks.
fn run_all(topo: &Topology, tellings: &[Telling]) {
    let size = topo.size();
    let mut random = StdRng::seed_from_u64(size as u64);
    for case in cases(size, &mut random) {
        let whole = case.of(0);
        if matches!(whole, Collective::AllToAll { .. }) {
            continue;
        }
        let reduces = matches!(
            whole,
            Collective::AllReduce { .. } | Collective::Reduce { .. } | Collective::ReduceScatter { .. }
        );
        for scaling in if reduces { &SCALINGS[..] } else { &[Scaling::Nothing] } {
            for name in algo::names() {
                let Some(job) = job(name, &case, topo, *scaling) else { continue };
                let context = format!("{name} for {whole:?} on {:?}, {scaling:?}", topo.hosts());
                for telling in tellings {
                    for order in (0..size).map(Order::Ahead).chain([Order::Random(1), Order::Random(2)]) {
                        run(&job, &case, topo, *scaling, (*telling, order), &context);
                    }
                }
            }
        }
    }
}

/// Whether it shows for some collective and some order of ranks that a graph's operations tell their messages so.
fn shows(telling: Telling) -> bool {
    let (topo, mut random) = (Topology::single_host(3), StdRng::seed_from_u64(3));
    cases(3, &mut random).iter().filter(|case| !matches!(case.of(0), Collective::AllToAll { .. })).any(|case| {
        let Some(job) = job("direct", case, &topo, Scaling::Nothing) else { return false };
        let mut orders = (0..3).map(Order::Ahead).chain((0..20).map(Order::Random));
        orders.any(|order| {
            let run = || run(&job, case, &topo, Scaling::Nothing, (telling, order), "a mutation");
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
        })
    })
}

#[test]
fn in_a_graph_memory_is_written_when_no_rank_reads_it_any_more() {
    let data = Slice::new(Space::Input, 0, 5);
    let send = |to| Action::Send { to: Rank(to), from: data };
    let receive = |from| Action::Recv { from: Rank(from), into: Slice::new(Space::Output, 0, 5) };
    let of_rank_0 = |ranks: [&[Action]; 3]| {
        let schedules = ranks.map(|actions| {
            let mut builder = Builder::new("example");
            actions.iter().for_each(|action| _ = builder.push(*action));
            builder.finish()
        });
        Staged::new(schedules.into(), 4, Scaling::Nothing).program(Rank(0), None)
    };
    let sends = of_rank_0([&[send(1), send(2)], &[receive(0)], &[receive(0)]]);
    let receives = of_rank_0([&[receive(1)], &[send(0)], &[]]);
    let steps = |program, steps: fn(&Tokens) -> Vec<Step>| steps(&Tokens::of_programs(Rank(0), [program]));
    let tail = |sender, receiver| Word::Tail { sender: Rank(sender), receiver: Rank(receiver) };
    let token = |access| Step::Token(access);
    assert_eq!(
        steps(&sends, |tokens| tokens.waits().collect()),
        [token(WordAccess::Wait(tail(0, 1), 1)), token(WordAccess::Wait(tail(0, 2), 1))]
    );
    assert_eq!(steps(&sends, |tokens| tokens.returns().collect()), []);
    assert_eq!(steps(&receives, |tokens| tokens.waits().collect()), [], "it writes nothing there");
    let head = Word::Head { sender: Rank(1), receiver: Rank(0) };
    assert_eq!(
        steps(&receives, |tokens| tokens.returns().collect()),
        [Step::Count(WordAccess::Write(head, 0)), token(WordAccess::Write(tail(1, 0), 1))]
    );
    // More ranks may read than those it sends something to.
    let one = of_rank_0([&[send(1)], &[receive(0)], &[]]);
    assert_eq!(steps(&one, |tokens| tokens.waits().collect()).len(), 2);
    assert_eq!(
        steps(&one, |tokens| tokens.takes().collect()),
        [token(WordAccess::Write(tail(0, 1), 0)), Step::Count(WordAccess::Write(tail(0, 1), 0))]
    );
}

#[test]
fn replays_need_tokens_and_zeros() {
    assert!(!shows(Telling::Tokens));
    assert!(shows(Telling::WithoutWaits), "a replay used memory that the one before was using");
    assert!(shows(Telling::WithoutZeros), "a replay took messages of the one before for its own");
}
