//! Batches of messages as operations of streams: that they end, and that nothing is overwritten.
//!
//! All ranks' batches run in one thread. Each rank has queues in the order of submission, which get their turn in orders that
//! let each rank run as far ahead of the others as words allow. What moves are not bytes but where they come from, so that
//! messages may have their real lengths.

use std::collections::{BTreeMap, HashMap};

use ncclx_rs::device::counters::{Word, WordAccess};
use ncclx_rs::device::rings::{RingNumbering, Rings};
use ncclx_rs::device::rounds::{
    CELLS, CopyEnd, Direction, Message, RingWord, Rounds, StreamOperation, TensorPart, ToSelfError, all_to_all,
};
use ncclx_rs::{Counts, Rank};
use proptest::prelude::any;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// The bytes of a cell.
const CELL: usize = 1 << 20;

/// What a rank submits at once, and to which of its queues.
#[derive(Clone, Debug)]
struct Call {
    queue: usize,
    messages: Vec<Message>,
}

/// Where bytes were when they were sent: of which rank, in which of its calls, in which tensor, from which byte on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Origin {
    rank: usize,
    call: usize,
    tensor: usize,
    offset: usize,
}

/// A call on its queue, and how far it has come.
struct Running {
    call: usize,
    rounds: Rounds,
    numbering: RingNumbering,
    at: usize,
}

struct Queue {
    rank: usize,
    calls: Vec<Running>,
    at: usize,
}

/// What all ranks see, and what they have received.
#[derive(Default)]
struct Shared {
    words: HashMap<Word, u64>,
    /// By sender, receiver and number.
    cells: HashMap<(Rank, Rank, usize), (Origin, usize)>,
    /// By rank, call and tensor.
    written: HashMap<(usize, usize, usize), Written>,
}

/// By the first byte: how many bytes have been received there, and where they come from.
type Written = BTreeMap<usize, (usize, Origin)>;

impl Queue {
    /// Takes one operation. Whether it could.
    fn turn(&mut self, shared: &mut Shared) -> bool {
        let Some(running) = self.calls.get_mut(self.at) else { return false };
        match running.rounds.operations.get(running.at) {
            None => {
                self.at += 1;
                return true;
            }
            Some(StreamOperation::Word(word)) => match running.numbering.access(*word) {
                Some(WordAccess::Wait(word, value)) if shared.words.get(&word).is_none_or(|now| *now < value) => {
                    return false;
                }
                Some(WordAccess::Write(word, value)) => {
                    let before = shared.words.insert(word, value).unwrap_or(0);
                    assert_eq!(before + 1, value, "{word:?}");
                }
                Some(WordAccess::Wait(..)) | None => {}
            },
            Some(StreamOperation::Copy { from, into }) => {
                let me = self.rank;
                let (origin, len) = match *from {
                    CopyEnd::Tensor(TensorPart { tensor, offset, len }) => {
                        (Origin { rank: me, call: running.call, tensor, offset }, len)
                    }
                    CopyEnd::Cell { peer, direction, chunk, len } => {
                        assert_eq!(direction, Direction::Receive, "a rank reads what it sends");
                        let cell = (peer, Rank::from(me), running.numbering.cell(peer, direction, chunk));
                        let (origin, there) = shared.cells[&cell];
                        assert_eq!(len, there);
                        (origin, len)
                    }
                };
                assert!(len > 0);
                match *into {
                    CopyEnd::Tensor(part) => {
                        assert_eq!(part.len, len);
                        let written = shared.written.entry((me, running.call, part.tensor)).or_default();
                        assert!(written.insert(part.offset, (len, origin)).is_none(), "{part:?} is written twice");
                    }
                    CopyEnd::Cell { peer, direction, chunk, len: there } => {
                        assert!(direction == Direction::Send && there == len && len <= CELL);
                        let cell = (Rank::from(me), peer, running.numbering.cell(peer, direction, chunk));
                        shared.cells.insert(cell, (origin, len));
                    }
                }
            }
        }
        running.at += 1;
        true
    }
}

/// The order in which queues get their turns.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// One rank runs as far as it can before any other one does.
    Ahead(usize),
    Random(u64),
}

/// What a message is by its place in the order of its pair: in which call, and where there.
fn of_pair(calls: &[Call], peer: usize, wanted: Direction) -> Vec<(usize, TensorPart)> {
    let of_call = |(call, messages): (usize, &Call)| {
        let is_wanted = |message: &&Message| (message.peer.index(), message.direction) == (peer, wanted);
        messages.messages.iter().filter(is_wanted).map(|message| (call, message.part)).collect::<Vec<_>>()
    };
    calls.iter().enumerate().flat_map(of_call).collect()
}

/// Runs what ranks submit. The ranks that wait for ever, or nothing and what has been received is right.
fn run(world: &[Vec<Call>], order: Order) -> Result<(), Vec<usize>> {
    let (size, mut shared) = (world.len(), Shared::default());
    let mut queues: Vec<Queue> = Vec::new();
    for (me, calls) in world.iter().enumerate() {
        let (rank, mut rings) = (Rank::from(me), Rings::new(Rank::from(me), size));
        let count = calls.iter().map(|call| call.queue + 1).max().unwrap_or(0);
        let first = queues.len();
        queues.extend((0..count).map(|_| Queue { rank: me, calls: vec![], at: 0 }));
        for (number, call) in calls.iter().enumerate() {
            let rounds = Rounds::new(rank, &call.messages, CELL, rings.ahead()).expect("a batch that can end");
            let numbering = rings.take_up(&rounds);
            queues[first + call.queue].calls.push(Running { call: number, rounds, numbering, at: 0 });
        }
    }
    let mut random = StdRng::seed_from_u64(if let Order::Random(seed) = order { seed } else { 0 });
    while !queues.is_empty() {
        let first = match order {
            Order::Ahead(rank) => queues.iter().position(|queue| queue.rank >= rank).unwrap_or(0),
            Order::Random(_) => random.random_range(0..queues.len()),
        };
        let count = queues.len();
        if !(0..count).any(|index| queues[(first + index) % count].turn(&mut shared)) {
            break;
        }
    }
    let waiting: Vec<usize> =
        queues.iter().filter(|queue| queue.at < queue.calls.len()).map(|queue| queue.rank).collect();
    if !waiting.is_empty() {
        return Err(waiting);
    }
    for (sender, receiver) in (0..size).flat_map(|sender| (0..size).map(move |receiver| (sender, receiver))) {
        let sent = of_pair(&world[sender], receiver, Direction::Send);
        let received = of_pair(&world[receiver], sender, Direction::Receive);
        assert_eq!(sent.len(), received.len(), "a test whose messages do not match");
        for ((call, from), (receiving, into)) in sent.into_iter().zip(received) {
            assert_eq!(from.len, into.len, "a test whose messages do not match");
            let mut done = 0;
            while done < into.len {
                let written = &shared.written[&(receiver, receiving, into.tensor)];
                let (len, origin) = written[&(into.offset + done)];
                let expected = Origin { rank: sender, call, tensor: from.tensor, offset: from.offset + done };
                assert_eq!(origin, expected, "at byte {done} of what {sender} has sent to {receiver}, {order:?}");
                done += len;
            }
            assert_eq!(done, into.len, "more was written than received");
        }
    }
    Ok(())
}

/// Runs what ranks submit in many orders; it ends in all of them.
fn complete(world: &[Vec<Call>]) {
    for order in (0..world.len()).map(Order::Ahead).chain((0..3).map(Order::Random)) {
        assert_eq!(run(world, order), Ok(()), "ranks wait for ever, {order:?}: {world:?}");
    }
}

fn message(direction: Direction, peer: usize, len: usize) -> Message {
    Message { peer: Rank::from(peer), direction, part: TensorPart { tensor: 0, offset: 0, len } }
}

fn send(to: usize, len: usize) -> Message {
    message(Direction::Send, to, len)
}

fn receive(from: usize, len: usize) -> Message {
    message(Direction::Receive, from, len)
}

/// One batch, each message with a tensor of its own.
fn batch(messages: impl IntoIterator<Item = Message>) -> Call {
    on_queue(0, messages)
}

fn on_queue(queue: usize, messages: impl IntoIterator<Item = Message>) -> Call {
    let with_tensor = |(tensor, message): (usize, Message)| Message {
        part: TensorPart { tensor, offset: 100 * tensor, len: message.part.len },
        ..message
    };
    Call { queue, messages: messages.into_iter().enumerate().map(with_tensor).collect() }
}

#[test]
fn a_ring_of_ranks_passes_more_than_rings_hold() {
    let (size, len) = (8, 64 << 20);
    let rank = |me: usize| {
        let (next, previous) = ((me + 1) % size, (me + size - 1) % size);
        vec![batch([send(next, len), receive(previous, len), send(previous, len + 1), receive(next, len + 1)]); 2]
    };
    complete(&(0..size).map(rank).collect::<Vec<_>>());
}

#[test]
fn messages_of_one_batch_are_received_in_two() {
    for (first, second) in [(3, 5), (0, 9 * CELL), (7 * CELL + 1, 4 * CELL), (CELL, 0)] {
        let sender = vec![batch([send(1, first), send(1, second)])];
        complete(&[sender.clone(), vec![batch([receive(0, first)]), batch([receive(0, second)])]]);
        complete(&[
            vec![batch([receive(1, first), receive(1, second)])],
            vec![batch([send(0, first)]), batch([send(0, second)])],
        ]);
    }
}

#[test]
fn crossing_batches_of_unequal_lists_end() {
    // Rank 0 has in one batch what rank 1 has in two; the others send and receive in another order.
    let (a, b, c) = (5 * CELL + 1, 6 * CELL, 9);
    let rank_0 = vec![batch([send(1, a), send(2, b), send(1, c), receive(1, a), receive(2, c), receive(1, c)])];
    let rank_1 = vec![batch([receive(0, a), send(0, a)]), batch([send(0, c), receive(0, c), send(2, b)])];
    let rank_2 = vec![batch([send(0, c), receive(0, b)]), batch([receive(1, b)])];
    complete(&[rank_0, rank_1, rank_2]);
}

#[test]
fn a_receive_posted_early_holds_up_nothing_on_other_queues() {
    let len = 7 * CELL;
    let early = |queue| {
        let rank_0 = vec![on_queue(queue, [receive(1, len)]), on_queue(0, [receive(2, len)]), batch([send(1, 4)])];
        [rank_0, vec![batch([receive(0, 4)]), batch([send(0, len)])], vec![batch([send(0, len)])]]
    };
    complete(&early(1));
    // What it waits for is never sent if it is in front of what has to be done before.
    assert_eq!(run(&early(0), Order::Random(0)), Err(vec![0, 1, 2]));
}

#[test]
fn what_a_ring_holds_is_sent_without_its_receiver() {
    // Both send before they receive.
    let rank = |peer: usize, lens: &[usize]| {
        let sends = lens.iter().map(|len| batch([send(peer, *len)]));
        sends.chain(lens.iter().map(|len| batch([receive(peer, *len)]))).collect::<Vec<_>>()
    };
    let world = |lens: &[usize]| [[rank(1, lens), rank(1, lens)].concat(), [rank(0, lens), rank(0, lens)].concat()];
    complete(&world(&[9, 0, CELL, 0]));
    complete(&world(&[CELL + 1]));
    // One chunk more waits for its receiver.
    assert_eq!(run(&world(&[9, 0, CELL, 1]), Order::Random(0)), Err(vec![0, 1]));
    assert_eq!(run(&world(&[2 * CELL + 1]), Order::Random(0)), Err(vec![0, 1]));
}

/// What every rank submits for an all_to_all in which rank `from` has so many elements for rank `to`.
fn exchange(size: usize, count: impl Fn(usize, usize) -> usize) -> Vec<Call> {
    let rank = |me: usize| {
        let sent: Counts = (0..size).map(|to| count(me, to)).collect();
        let received: Counts = (0..size).map(|from| count(from, me)).collect();
        Call { queue: 0, messages: all_to_all(&sent, &received, 4) }
    };
    (0..size).map(rank).collect()
}

#[test]
fn every_all_to_all_ends_and_is_right() {
    for size in 1..=9 {
        let uneven = |from: usize, to: usize| match (from * 7 + to * 3) % 5 {
            0 => 0,
            1 => 5,
            more => more * CELL / 3 + from,
        };
        let kinds: [Vec<Call>; 4] = [
            exchange(size, |_, _| 1000),
            exchange(size, |_, _| 3 * CELL / 4),
            exchange(size, uneven),
            exchange(size, |from, to| if to == 0 { 4 * CELL * (from % 3) } else { 0 }),
        ];
        let rank = |me: usize| kinds.iter().chain(&kinds).map(|calls| calls[me].clone()).collect();
        complete(&(0..size).map(rank).collect::<Vec<_>>());
    }
}

/// Batches in which the messages of every pair are in one batch at both ends.
fn matching_batches(seed: u64) -> Vec<Vec<Call>> {
    let mut random = StdRng::seed_from_u64(seed);
    let size = random.random_range(1..6);
    let mut world: Vec<Vec<Call>> = vec![vec![]; size];
    for _ in 0..random.random_range(1..5) {
        let mut lists: Vec<Vec<Message>> = vec![vec![]; size];
        for (sender, receiver) in (0..size).flat_map(|sender| (0..size).map(move |receiver| (sender, receiver))) {
            for _ in 0..random.random_range(0..4) {
                let len = match random.random_range(0..5) {
                    0 => 0,
                    1 => random.random_range(1..200),
                    2 => CELL * random.random_range(1..4),
                    _ => random.random_range(0..5 * CELL),
                };
                lists[sender].push(send(receiver, len));
                lists[receiver].push(receive(sender, len));
            }
        }
        for (calls, list) in world.iter_mut().zip(lists) {
            calls.push(batch(interleaved(list, &mut random)));
        }
    }
    world
}

/// The messages in another order that keeps that of each pair.
fn interleaved(messages: Vec<Message>, random: &mut StdRng) -> Vec<Message> {
    let key = |message: &Message| (message.peer, message.direction);
    let mut keys: Vec<_> = messages.iter().map(key).collect();
    keys.shuffle(random);
    let mut by_pair: HashMap<_, std::collections::VecDeque<Message>> = HashMap::new();
    messages.into_iter().for_each(|message| by_pair.entry(key(&message)).or_default().push_back(message));
    keys.iter().filter_map(|key| by_pair.get_mut(key)?.pop_front()).collect()
}

/// Batches in which a pair has no more than a ring holds, and which ranks cut as they like, sends first.
fn short_batches(seed: u64) -> Vec<Vec<Call>> {
    let mut random = StdRng::seed_from_u64(seed);
    let size = random.random_range(2..6);
    let mut world: Vec<Vec<Call>> = vec![vec![]; size];
    for _ in 0..random.random_range(1..5) {
        let mut lists: Vec<[Vec<Message>; 2]> = vec![Default::default(); size];
        for (sender, receiver) in (0..size).flat_map(|sender| (0..size).map(move |receiver| (sender, receiver))) {
            for _ in 0..random.random_range(0..=CELLS) {
                let len = random.random_range(0..=CELL);
                lists[sender][0].push(send(receiver, len));
                lists[receiver][1].push(receive(sender, len));
            }
        }
        for (calls, [sends, receives]) in world.iter_mut().zip(lists) {
            let mut list = [interleaved(sends, &mut random), interleaved(receives, &mut random)].concat();
            while !list.is_empty() {
                let rest = list.split_off(random.random_range(1..=list.len()));
                calls.push(batch(list));
                list = rest;
            }
        }
    }
    world
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(60))]

    #[test]
    fn random_batches_end_and_are_right(seed in any::<u64>()) {
        complete(&matching_batches(seed));
    }

    #[test]
    fn what_rings_hold_may_be_cut_into_batches_at_will(seed in any::<u64>()) {
        complete(&short_batches(seed));
    }
}

/// The calls of the driver that a batch takes: one for words that follow each other, one a copy.
fn calls(rounds: &Rounds) -> (usize, usize) {
    let is_word = |operation: &StreamOperation| matches!(operation, StreamOperation::Word(_));
    let batches = rounds.operations.chunk_by(|one, next| is_word(one) && is_word(next));
    let words = batches.filter(|batch| is_word(&batch[0])).count();
    (words, rounds.operations.iter().filter(|operation| !is_word(operation)).count())
}

#[test]
fn ranks_that_submit_nothing_are_done() {
    complete(&short_batches(587_982_936_760_854_214));
    complete(&[vec![], vec![]]);
}

#[test]
fn a_batch_takes_no_more_calls_than_it_must() {
    let rounds = |len: usize| {
        let others = (0..8).filter(|rank| *rank != 3).flat_map(|rank| [send(rank, len), receive(rank, len)]);
        Rounds::new(Rank(3), &others.collect::<Vec<_>>(), CELL, 0).expect("nothing to itself")
    };
    // Credits, heads with waits, tails; where messages are long, each has its own wait and its own tail.
    assert_eq!(calls(&rounds(100)), (3, 14));
    assert_eq!(calls(&rounds(CELL)), (9, 14));
    // The tails of a round go with the credits of the next.
    assert_eq!(calls(&rounds(3 * CELL)), (3 * 8 + 1, 3 * 14));
    assert_eq!(calls(&rounds(0)), (1, 0));
}

#[test]
fn every_rank_begins_with_another_one() {
    let all = (0..5).flat_map(|rank| [send(rank, 1), receive(rank, 1)]).collect::<Vec<_>>();
    let rounds = Rounds::new(Rank(2), &all, CELL, 0).expect("a receive for what it sends itself");
    let words = |wanted: fn(RingWord) -> Option<Rank>| {
        let word = |operation: &StreamOperation| match operation {
            StreamOperation::Word(word) => wanted(*word).map(|rank| rank.0),
            StreamOperation::Copy { .. } => None,
        };
        rounds.operations.iter().filter_map(word).collect::<Vec<_>>()
    };
    let heads = words(|word| if let RingWord::Publish { to, .. } = word { Some(to) } else { None });
    let waits = words(|word| if let RingWord::Await { from, .. } = word { Some(from) } else { None });
    assert_eq!((heads, waits), (vec![3, 4, 0, 1], vec![1, 0, 4, 3]));
}

#[test]
fn what_a_rank_sends_itself_is_one_copy_in_a_batch() {
    let list = [send(0, 9 * CELL), receive(0, 9 * CELL), send(0, 0), receive(0, 0)];
    let rounds = Rounds::new(Rank(0), &list, CELL, 0).expect("a receive for each");
    assert_eq!(calls(&rounds), (0, 1));
    complete(&[vec![batch(list)]]);
    // Outside a batch it goes through a cell, whichever is called first.
    complete(&[vec![batch([send(0, 5)]), batch([send(0, 0)]), batch([receive(0, 5)]), batch([receive(0, 0)])]; 1]);
    complete(&[vec![on_queue(1, [receive(0, 5)]), batch([send(0, 5), receive(0, 7), send(0, 7)])]]);
    complete(&[vec![batch([send(0, 5)]), batch([send(0, 7), receive(0, 5), receive(0, 7)])]]);
}

#[test]
fn what_a_rank_cannot_send_itself_is_an_error() {
    let own = |messages: &[Message], ahead| Rounds::new(Rank(0), messages, CELL, ahead).map(|_| ());
    let long = CELL + 1;
    assert_eq!(own(&[send(0, 4), receive(0, 5)], 0), Err(ToSelfError::Lengths { sent: 4, received: 5 }));
    assert_eq!(own(&[send(0, long)], 0), Err(ToSelfError::TooLong { bytes: long, cell: CELL }));
    assert_eq!(own(&[receive(0, long)], 0), Err(ToSelfError::TooLong { bytes: long, cell: CELL }));
    assert_eq!(
        own(&[send(0, 1), receive(0, long), send(0, long)], -1),
        Ok(()),
        "the first is met by an earlier receive"
    );
    assert_eq!(own(&[send(0, 1)], CELLS as i64), Err(ToSelfError::TooMany { messages: CELLS as i64 + 1 }));
    assert_eq!(own(&[receive(0, 1)], CELLS as i64 + 1), Ok(()));
    assert_eq!(own(&[send(0, 1), receive(0, 1)], -1), Ok(()));
}

#[test]
fn a_long_batch_takes_operations_in_proportion() {
    let count = |chunks: usize| {
        let list: Vec<Message> =
            (1..5).flat_map(|rank| [send(rank, chunks * CELL), receive(rank, chunks * CELL)]).collect();
        Rounds::new(Rank(0), &list, CELL, 0).expect("nothing to itself").operations.len()
    };
    assert_eq!(count(1000), 1000 * count(1));
}
