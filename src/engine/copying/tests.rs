use std::time::Duration;

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::sample::{IN_FLIGHT_MAX, TRIAL_MIN};
use super::*;
use crate::engine::completion::Completion;
use crate::engine::reduce::Operands;
use crate::engine::region::{Region, Words};
use crate::types::{DType, ReduceOp};

const SUM: RecvAction = RecvAction::Reduce(Operands::Elements(ReduceOp::Sum, DType::U64));

fn message(id: u64) -> Completion {
    Completion { op: OpId::Message(id), step: 0 }
}

fn buffer(words: &mut Words, action: RecvAction) -> RecvBuffer {
    RecvBuffer::new(Region::of(&[words.buffer()]), action, message(0))
}

#[test]
fn what_is_combined_is_expected_to_be_read_where_ranks_share_cores() {
    let mut words = Words::new(vec![0; 20_000]);
    let buffer = buffer(&mut words, SUM);
    for (oversubscribed, copying) in [(false, Copying::Ring), (true, Copying::Single)] {
        assert_eq!(Copying::expected(&buffer, true, oversubscribed, Team::ALONE), copying);
        assert_eq!(Copying::expected(&buffer, false, oversubscribed, Team::of(1)), Copying::Single, "several threads");
    }
}

/// What a byte of a message costs through the ring, and by a single copy.
#[derive(Clone, Copy, Debug)]
struct Link([Cost; 2]);

/// An Intel Xeon, 256 KiB that have lain in memory for a while, and that were just written (measured, 2026-11-27).
const CLEAN: Link = Link([140, 85]);
const HOT: Link = Link([120, 250]);
/// Two cores far apart.
const FAR: Link = Link([600, 310]);
const EQUAL: Link = Link([100, 100]);

/// The messages of one rank.
struct Messages {
    choices: Choices,
    buffer: RecvBuffer,
    now: Instant,
    random: StdRng,
    /// Of 16 messages each way, so many are held up.
    held_up: [u32; 2],
}

impl Messages {
    fn new(words: &mut Words, seed: u64) -> Messages {
        let (buffer, now) = (buffer(words, RecvAction::Store), Instant::now());
        Messages { choices: Choices::default(), buffer, now, random: StdRng::seed_from_u64(seed), held_up: [1, 1] }
    }

    /// How a message of the next operation is to come.
    fn next(&mut self) -> Copying {
        if let OpId::Message(id) = &mut self.buffer.completion.op {
            *id += 1;
        }
        let bytes = self.buffer.region.len();
        self.choices.choose(Rank(1), &mut self.buffer, bytes, Copying::Ring, self.now)
    }

    /// So many messages come, each over one of `links`. Measures vary by a tenth, and one in 16 is of a message during which a thread
    /// was off its core. Returns how much longer than the better way it took.
    fn come(&mut self, links: &[Link], count: u32) -> f64 {
        let (mut took, mut ways) = (0.0, [0.0; 2]);
        for _ in 0..count {
            let Link(costs) = links[self.random.random_range(0..links.len())];
            let copying = self.next();
            let cost = f64::from(costs[copying as usize]);
            took += cost;
            ways = [0, 1].map(|way| ways[way] + f64::from(costs[way]));
            let is_held_up = self.random.random_ratio(self.held_up[copying as usize], 16);
            let pause = if is_held_up { 20.0 } else { 1.0 };
            let seen = cost * self.random.random_range(0.95..1.05) * pause * self.buffer.region.len() as f64;
            self.now += Duration::from_nanos((seen / 1000.0) as u64);
            self.choices.came(Rank(1), &self.buffer, self.now);
        }
        took / ways[0].min(ways[1])
    }
}

fn words() -> Words {
    Words::new(vec![0; 32_768])
}

#[test]
fn the_faster_way_is_found_in_8_messages() {
    let mut words = words();
    for (link, best) in [(CLEAN, Copying::Single), (HOT, Copying::Ring), (FAR, Copying::Single)] {
        let found = (0..64).filter(|seed| {
            let mut messages = Messages::new(&mut words, *seed);
            messages.come(&[link], 8);
            messages.next() == best
        });
        assert!(found.count() >= 63, "{link:?}");
    }
}

#[test]
fn a_way_that_is_often_held_up_is_not_taken_for_the_faster_one() {
    let mut words = words();
    for seed in 0..64 {
        let mut messages = Messages::new(&mut words, seed);
        // As where ranks share cores: the ring waits for its sender's turn.
        messages.held_up = [9, 0];
        let singles = (0..4096).filter(|_| messages.come(&[Link([50, 70])], 1) > 1.2);
        assert!(singles.count() > 2048, "seed {seed}");
    }
}

proptest! {
    #[test]
    fn no_link_costs_a_tenth_more_than_the_faster_way(seed in any::<u64>(), any in (20u32..200, 20u32..200)) {
        let mut words = words();
        for link in [CLEAN, HOT, FAR, EQUAL, Link([any.0, any.1])] {
            let mut messages = Messages::new(&mut words, seed);
            messages.come(&[link], 8);
            let ratio = messages.come(&[link], 20_000);
            prop_assert!(ratio < 1.10, "{link:?} with seed {seed}: {ratio:.3}");
        }
    }

    #[test]
    fn cores_that_move_and_messages_of_two_kinds_cost_a_tenth_more_at_most(seed in any::<u64>()) {
        let mut words = words();
        let mut messages = Messages::new(&mut words, seed);
        let mut ratios = Vec::new();
        for _ in 0..4 {
            for links in [&[CLEAN][..], &[HOT], &[CLEAN, HOT], &[FAR], &[EQUAL], &[HOT, HOT, CLEAN], &[FAR, CLEAN]] {
                ratios.push(messages.come(links, 4096));
            }
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        prop_assert!(mean < 1.10, "seed {seed}: {ratios:.3?}");
    }
}

/// Each operation's messages are told of by the test: when they can come, and when they have come.
#[derive(Default)]
struct Told {
    choices: Choices,
    start: Option<Instant>,
}

impl Told {
    fn at(&mut self, micros: u64) -> Instant {
        *self.start.get_or_insert_with(Instant::now) + Duration::from_micros(micros)
    }

    fn choose(&mut self, from: Rank, buffer: &mut RecvBuffer, op: u64, bytes: usize, micros: u64) -> Copying {
        buffer.completion = message(op);
        let now = self.at(micros);
        self.choices.choose(from, buffer, bytes, Copying::Single, now)
    }

    fn came(&mut self, from: Rank, buffer: &RecvBuffer, micros: u64) {
        let now = self.at(micros);
        self.choices.came(from, buffer, now);
    }
}

#[test]
fn each_kind_of_messages_is_measured_by_itself() {
    let mut words = [words(), words(), words(), words(), words()];
    let [mut long, mut part, mut sum, mut other, _] = words.each_mut().map(|words| buffer(words, RecvAction::Store));
    sum.action = SUM;
    let (whole, all, mut told) = (1 << 18, 1 << 20, Told::default());
    for (from, buffer, bytes, micros) in [
        (Rank(1), &mut long, whole, 7),
        (Rank(1), &mut part, all, 9),
        (Rank(1), &mut sum, whole, 5),
        (Rank(2), &mut other, whole, 3),
    ] {
        let mut now = 0;
        for op in 0..TRIAL_MIN as u64 {
            for (copying, micros) in [(Copying::Single, micros), (Copying::Ring, 2 * micros)] {
                assert_eq!(told.choose(from, buffer, 2 * op + copying as u64, bytes, now), copying);
                now += micros;
                told.came(from, buffer, now);
            }
        }
        assert_eq!(told.choose(from, buffer, 100, bytes, now), Copying::Single);
    }
    let known = |bytes: usize, reduced: bool, micros: u64| {
        let [ring, single] = [2, 1].map(|times| Some((times * micros * 1_000_000 / whole as u64) as u32));
        CopyStats { bytes: bytes as u64, reduced, exchanged: false, copying: "single", ring, single }
    };
    assert_eq!(told.choices.stats(Rank(1)), [known(whole, false, 7), known(whole, true, 5), known(all, false, 9)]);
    told.choices.lose(Rank(1));
    assert_eq!((told.choices.stats(Rank(1)), told.choices.stats(Rank(2))), (vec![], vec![known(whole, false, 3)]));
}

#[test]
fn an_operation_s_messages_come_one_way_and_wait_for_each_other() {
    let mut words = [words(), words(), words(), words()];
    let [mut first, mut second, mut late, mut other] = words.each_mut().map(|words| buffer(words, RecvAction::Store));
    let (bytes, mut told) = (3 << 18, Told::default());
    // Both could come at once, and a third one after a pause.
    assert_eq!(told.choose(Rank(1), &mut first, 0, bytes, 0), Copying::Single);
    assert_eq!(told.choose(Rank(1), &mut second, 0, bytes, 0), Copying::Single);
    told.came(Rank(1), &first, 10);
    told.came(Rank(1), &second, 30);
    assert_eq!(told.choose(Rank(1), &mut late, 0, bytes, 100), Copying::Single, "the same operation");
    told.came(Rank(1), &late, 115);
    assert_eq!(told.choose(Rank(1), &mut first, 1, bytes, 200), Copying::Ring);
    let sample = told.choices.by_class.values().next().expect("one kind").state_of_trial();
    assert_eq!(sample[Copying::Single as usize].mean(), (45 * 1_000_000 / bytes) as Cost);
    // Messages of several operations that are in flight come one way too, until all have come.
    assert_eq!(told.choose(Rank(1), &mut second, 2, bytes, 200), Copying::Ring);
    told.came(Rank(1), &first, 220);
    assert_eq!(told.choose(Rank(1), &mut other, 5, bytes, 230), Copying::Ring);
    told.came(Rank(1), &second, 240);
    told.came(Rank(1), &other, 240);
    assert_eq!(told.choose(Rank(1), &mut late, 3, bytes, 240), Copying::Single);
    let sample = told.choices.by_class.values().next().expect("one kind").state_of_trial();
    assert_eq!(sample[Copying::Ring as usize].mean(), (40 * 1_000_000 / (3 << 18)) as Cost);
    // One that began while the other way was tried says nothing.
    told.came(Rank(1), &second, 250);
    told.came(Rank(1), &late, 260);
    assert_eq!(told.choose(Rank(1), &mut late, 4, bytes, 260), Copying::Ring);
    let sample = told.choices.by_class.values().next().expect("one kind").state_of_trial();
    assert_eq!(
        sample[Copying::Single as usize].0[..],
        [(10 * 1_000_000 / (1 << 18)) as Cost, (45 * 1_000_000 / bytes) as Cost]
    );
}

#[test]
fn messages_that_never_come_hold_a_sample_open_for_a_while_only() {
    let mut words = words();
    let (mut buffer, mut told) = (buffer(&mut words, RecvAction::Store), Told::default());
    for op in 0..u64::from(IN_FLIGHT_MAX) {
        assert_eq!(told.choose(Rank(1), &mut buffer, op, 1 << 18, op), Copying::Single);
    }
    told.came(Rank(1), &buffer, 100);
    assert_eq!(told.choose(Rank(1), &mut buffer, 100, 1 << 18, 100), Copying::Ring);
}

impl Choice {
    fn state_of_trial(&self) -> &[Costs; 2] {
        match &self.state {
            State::Trial(seen) => seen,
            State::Kept { .. } => panic!("the trial is over: {self:?}"),
        }
    }
}

/// Two ranks that exchange messages in collectives.
struct Exchange<'a> {
    ranks: [(Choices, RecvBuffer); 2],
    now: Instant,
    op: u64,
    memory: std::marker::PhantomData<&'a mut Words>,
}

impl<'a> Exchange<'a> {
    fn new([one, other]: [&'a mut Words; 2]) -> Exchange<'a> {
        let ranks = [one, other].map(|words| (Choices::default(), buffer(words, RecvAction::Store)));
        Exchange { ranks, now: Instant::now(), op: 0, memory: std::marker::PhantomData }
    }

    /// How the messages of the next operation are to come.
    fn next(&mut self) -> [Copying; 2] {
        self.op += 1;
        let (op, now) = (self.op, self.now);
        self.ranks.each_mut().map(|(choices, buffer)| {
            buffer.completion = Completion { op: OpId::Collective(op), step: 0 };
            let bytes = buffer.region.len();
            choices.choose_in_step(Rank(1), buffer, bytes, Copying::Single, now)
        })
    }

    /// So many operations. Through the ring a message takes `link`'s first time if the other rank takes its own so too. Where that
    /// reads, it reads before it sends, and is not held up by what it sends. Returns the picoseconds a byte that an operation took.
    fn run(&mut self, Link([ring, single]): Link, operations: u32) -> f64 {
        let mut took = 0;
        for _ in 0..operations {
            let ways = self.next();
            let costs = match ways {
                [Copying::Ring, Copying::Ring] => [ring; 2],
                [Copying::Single, Copying::Single] => [single; 2],
                _ => ways.map(|way| if way == Copying::Ring { ring + single } else { single / 2 }),
            };
            let slowest = costs[0].max(costs[1]);
            for ((choices, buffer), cost) in self.ranks.iter_mut().zip(costs) {
                let nanos = u64::from(cost) * buffer.region.len() as u64 / 1000;
                choices.came(Rank(1), buffer, self.now + Duration::from_nanos(nanos));
            }
            self.now += Duration::from_nanos(u64::from(slowest) * self.ranks[0].1.region.len() as u64 / 1000);
            took += slowest;
        }
        f64::from(took) / f64::from(operations)
    }
}

#[test]
fn ranks_that_exchange_messages_find_what_is_faster_for_all() {
    for (link, best) in [(Link([100, 150]), Copying::Ring), (Link([150, 100]), Copying::Single)] {
        let mut words = [words(), words()];
        let mut exchange = Exchange::new(words.each_mut());
        let ways: Vec<_> = (0..16)
            .map(|_| {
                let took = exchange.run(link, 1);
                (took * 10.0) as u64
            })
            .collect();
        assert_eq!(ways, [1000, 1500].map(|cost| if best == Copying::Ring { cost } else { 2500 - cost }).repeat(8));
        let took = exchange.run(link, 20_000);
        assert!(took < 101.0, "{link:?}: {took}");
        assert_eq!(exchange.next(), [best; 2]);
        let [stats, _] = exchange.ranks.each_ref().map(|(choices, _)| choices.stats(Rank(1)));
        let [CopyStats { exchanged: true, copying, ring: Some(_), single: Some(_), .. }] = stats[..] else {
            panic!("{stats:?}")
        };
        assert_eq!(copying, if best == Copying::Ring { "ring" } else { "single" });
    }
}

#[test]
fn ranks_that_exchange_messages_count_anew_after_a_collective_that_has_failed() {
    let (mut words, link) = ([words(), words()], Link([100, 150]));
    let mut exchange = Exchange::new(words.each_mut());
    exchange.run(link, 3);
    // It has begun on one of them alone.
    let (choices, buffer) = &mut exchange.ranks[0];
    buffer.completion = Completion { op: OpId::Collective(100), step: 0 };
    choices.choose_in_step(Rank(1), buffer, buffer.region.len(), Copying::Single, exchange.now);
    assert_eq!(exchange.next(), [Copying::Ring, Copying::Single]);
    exchange.ranks.iter_mut().for_each(|(choices, _)| choices.count_anew());
    exchange.run(link, 16);
    assert_eq!(exchange.next(), [Copying::Ring; 2]);
}

#[test]
fn where_there_is_little_between_them_ranks_that_exchange_messages_go_on_as_they_are() {
    let mut words = [words(), words()];
    let mut exchange = Exchange::new(words.each_mut());
    exchange.run(Link([95, 100]), 16);
    assert_eq!(exchange.next(), [Copying::Single; 2]);
    // What changes later is found by the next trial.
    exchange.run(Link([50, 100]), 5000);
    assert_eq!(exchange.next(), [Copying::Ring; 2]);
}
