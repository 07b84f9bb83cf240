//! Streams over imitated rails that are slow, take and give bytes in pieces of any length, and break at any byte.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::{Arc, Mutex, MutexGuard};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::link::{Link, Lost, window};
use super::piece::{HEADER_BYTES, PIECE_MAX, PieceHeader};
use super::receiver::Receiver;
use super::sender::Sender;
use crate::error::LinkDown;

/// One direction of an imitated connection.
#[derive(Default)]
struct Way {
    /// Bytes that the reader's system has.
    there: VecDeque<u8>,
    /// Bytes that are under way: they are lost if it breaks.
    between: VecDeque<u8>,
}

/// An imitated connection.
struct Wire {
    forth: Way,
    back: Way,
    is_broken: bool,
    room: usize,
    rng: StdRng,
    /// The bytes that have been written.
    written: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Sender,
    Receiver,
}

#[derive(Clone)]
struct Simulated {
    wire: Arc<Mutex<Wire>>,
    end: End,
}

impl Simulated {
    fn pair(room: usize, seed: u64) -> (Simulated, Simulated) {
        let rng = StdRng::seed_from_u64(seed);
        let wire = Wire { forth: Way::default(), back: Way::default(), is_broken: false, room, rng, written: 0 };
        let wire = Arc::new(Mutex::new(wire));
        (Simulated { wire: wire.clone(), end: End::Sender }, Simulated { wire, end: End::Receiver })
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap()
    }

    /// Lets some bytes arrive each way.
    fn carry(&self, most: usize) {
        let wire = &mut *self.wire();
        for way in [&mut wire.forth, &mut wire.back] {
            let count = wire.rng.random_range(0..=most).min(way.between.len());
            way.there.extend(way.between.drain(..count));
        }
    }

    /// Breaks it: what is under way never comes.
    fn cut(&self) {
        let wire = &mut *self.wire();
        wire.is_broken = true;
        wire.forth.between.clear();
        wire.back.between.clear();
    }
}

impl Link for Simulated {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, LinkDown> {
        let wire = &mut *self.wire();
        if wire.is_broken {
            return Err(LinkDown::new("it was cut"));
        }
        let way = if self.end == End::Sender { &mut wire.forth } else { &mut wire.back };
        let room = wire.room.saturating_sub(way.between.len() + way.there.len()).min(bytes.len());
        let count = if room == 0 { 0 } else { wire.rng.random_range(1..=room) };
        way.between.extend(&bytes[..count]);
        wire.written += count;
        Ok(count)
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let wire = &mut *self.wire();
        let way = if self.end == End::Sender { &mut wire.back } else { &mut wire.forth };
        let most = way.there.len().min(into.len());
        if most == 0 {
            return if wire.is_broken { Err(LinkDown::new("it was cut")) } else { Ok(0) };
        }
        let count = wire.rng.random_range(1..=most);
        way.there.drain(..count).zip(into).for_each(|(byte, place)| *place = byte);
        Ok(count)
    }
}

type Ends = (Sender<Simulated>, Receiver<Simulated>);

/// The ends of a stream that is to have rails with so much room each, and the rails.
fn unconnected(rooms: &[usize], seed: u64) -> (Ends, Vec<(Simulated, Simulated)>) {
    let wire = |(rail, room): (usize, &usize)| Simulated::pair(*room, seed * 100 + rail as u64);
    let wires = rooms.iter().enumerate().map(wire).collect();
    ((Sender::new(rooms.len()), Receiver::new(rooms.len())), wires)
}

fn add(
    (sender, receiver): (&mut Sender<Simulated>, &mut Receiver<Simulated>),
    rail: usize,
    wire: &(Simulated, Simulated),
) {
    sender.add(rail, wire.0.clone());
    assert!(receiver.add(rail, 0, wire.1.clone()));
}

/// The ends of a stream over rails with so much room each, and the rails.
fn stream_of(rooms: &[usize], seed: u64) -> (Sender<Simulated>, Receiver<Simulated>, Vec<Simulated>) {
    let ((mut sender, mut receiver), wires) = unconnected(rooms, seed);
    wires.iter().enumerate().for_each(|(rail, wire)| add((&mut sender, &mut receiver), rail, wire));
    (sender, receiver, wires.into_iter().map(|(near, _)| near).collect())
}

/// The same of so many rails that are alike.
fn stream(rails: usize, room: usize, seed: u64) -> (Sender<Simulated>, Receiver<Simulated>, Vec<Simulated>) {
    stream_of(&vec![room; rails], seed)
}

/// The byte that belongs at this place of a stream.
fn byte(place: usize) -> u8 {
    (place.wrapping_mul(2_654_435_761) >> 13) as u8
}

/// The attempts to open rails again: what the sender has lost, and what is under way.
#[derive(Default)]
struct Attempts {
    lost: Vec<usize>,
    /// The rail, its generation and its ends, and whether the receiver has it.
    under_way: Vec<(usize, u32, (Simulated, Simulated), bool)>,
    /// Connections that the sender has given up, and that come to the receiver all the same.
    late: Vec<(usize, u32, Simulated)>,
}

impl Attempts {
    /// Goes on at random. Returns the rails that work again, with the sender's end.
    fn go_on(
        &mut self,
        (sender, receiver): (&mut Sender<Simulated>, &mut Receiver<Simulated>),
        room: usize,
        rng: &mut StdRng,
    ) -> Vec<(usize, Simulated)> {
        self.lost.extend(sender.take_lost().into_iter().map(|lost| lost.number));
        if !self.lost.is_empty() && rng.random_range(0..10) == 0 {
            let rail = self.lost.swap_remove(rng.random_range(0..self.lost.len()));
            let pair = Simulated::pair(room, rng.random());
            self.under_way.push((rail, sender.reopen(rail), pair, false));
        }
        let mut back = Vec::new();
        for (rail, generation, (near, far), is_known) in std::mem::take(&mut self.under_way) {
            match rng.random_range(0..10) {
                0 => {
                    sender.miss(rail);
                    self.lost.push(rail);
                    if !is_known && rng.random_range(0..2) == 0 {
                        self.late.push((rail, generation, far));
                    }
                }
                1 if !is_known => {
                    assert!(receiver.add(rail, generation, far.clone()), "nobody has given it up");
                    self.under_way.push((rail, generation, (near, far), true));
                }
                1 => {
                    sender.add(rail, near.clone());
                    back.push((rail, near));
                }
                _ => self.under_way.push((rail, generation, (near, far), is_known)),
            }
        }
        if !self.late.is_empty() && rng.random_range(0..10) == 0 {
            let (rail, generation, far) = self.late.swap_remove(rng.random_range(0..self.late.len()));
            receiver.add(rail, generation, far);
        }
        back
    }

    /// Gives up what is under way.
    fn end(&mut self, sender: &mut Sender<Simulated>) {
        self.under_way.drain(..).for_each(|(rail, ..)| sender.miss(rail));
    }
}

/// Sends messages of random lengths over rails of random speeds, and checks every byte. The rails come at some time or never, and
/// all but one break at some time. Those are opened again.
fn run(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let rails = rng.random_range(1..=5);
    let room = [200, 5_000, 300_000][rng.random_range(0..3)];
    let total = rng.random_range(1..=3 * room.max(50_000));
    let ((mut sender, mut receiver), pairs) = unconnected(&vec![room; rails], seed);
    let mut wires: Vec<Simulated> = pairs.iter().map(|(near, _)| near.clone()).collect();
    let mut coming: Vec<_> = pairs.iter().enumerate().collect();
    let speeds: Vec<usize> = wires.iter().map(|_| [50, 3_000, 200_000][rng.random_range(0..3)]).collect();
    let survivor = rng.random_range(0..rails);
    let mut breaks: Vec<usize> = wires.iter().map(|_| rng.random_range(0..=2 * total / rails)).collect();
    let content: Vec<u8> = (0..total).map(byte).collect();
    let (mut sent, mut received, mut into, mut attempts) = (0, Vec::new(), vec![0; 100_000], Attempts::default());
    while received.len() < total {
        for (rail, near) in attempts.go_on((&mut sender, &mut receiver), room, &mut rng) {
            (wires[rail], breaks[rail]) = (near, rng.random_range(0..=2 * total / rails));
        }
        if !coming.is_empty() && (sender.working() == 0 || rng.random_range(0..20) == 0) {
            let (rail, pair) = coming.remove(rng.random_range(0..coming.len()));
            match rng.random_range(0..4) {
                0 if rail != survivor => {
                    sender.miss(rail);
                    attempts.lost.push(rail);
                }
                _ => add((&mut sender, &mut receiver), rail, pair),
            }
        }
        let head = rng.random_range(0..=64).min(total - sent);
        let body = rng.random_range(0..=300_000).min(total - sent - head);
        let (first, rest) = content[sent..sent + head + body].split_at(head);
        let (left, right) = rest.split_at(body / 3);
        match first.len() + rest.len() {
            0 => sender.advance(),
            _ => sent += sender.write(first, &[IoSlice::new(left), IoSlice::new(right)]),
        }
        if rng.random_range(0..20) == 0 {
            sender.ask();
        }
        for (rail, wire) in wires.iter().enumerate() {
            if rng.random_range(0..4) > 0 {
                wire.carry(speeds[rail]);
            }
            if rail != survivor && wire.wire().written >= breaks[rail] {
                wire.cut();
            }
        }
        // Each time with another room, as the engine's reads have.
        let room = rng.random_range(1..=into.len());
        let count = receiver.read(&mut into[..room]).expect("one rail never breaks");
        received.extend_from_slice(&into[..count]);
        assert!(received == content[..received.len()], "seed {seed}: the bytes are those that were sent");
    }
    assert_eq!(receiver.read(&mut into).expect("the survivor"), 0, "seed {seed}: nothing comes twice");
    attempts.end(&mut sender);
    // Everything is acknowledged in the end, so nothing is kept, and both ends have the same rails.
    for _ in 0..10_000 {
        sender.ask();
        sender.advance();
        wires.iter().for_each(|wire| wire.carry(1 << 20));
        assert_eq!(receiver.read(&mut into).expect("the survivor"), 0, "seed {seed}: nothing comes twice");
        if sender.unacknowledged() == 0 && !sender.holds_bytes() && sender.working() == receiver.working() {
            return;
        }
    }
    let rails = [sender.working(), receiver.working()];
    panic!("seed {seed}: {} bytes are never acknowledged, or the rails differ: {rails:?}", sender.unacknowledged());
}

#[test]
fn every_byte_comes_once_and_in_order_whatever_breaks() {
    (0..150).for_each(run);
}

#[test]
fn a_faster_rail_carries_more() {
    let (mut sender, mut receiver, wires) = stream(2, 300_000, 1);
    let (payload, mut into, mut received) = (vec![5; 1 << 20], vec![0; 1 << 20], 0);
    while received < 30 << 20 {
        sender.write(&[], &[IoSlice::new(&payload)]);
        wires[0].carry(10_000);
        wires[1].carry(100_000);
        while let Ok(count @ 1..) = receiver.read(&mut into) {
            received += count;
        }
    }
    let [slow, fast] = [0, 1].map(|rail: usize| wires[rail].wire().written);
    assert!(fast > 5 * slow && slow > 1 << 20, "{slow} and {fast} bytes");
}

#[test]
fn a_short_message_takes_one_rail_at_once() {
    let (mut sender, _receiver, wires) = stream(3, 300_000, 1);
    wires.iter().for_each(|wire| wire.wire().rng = StdRng::seed_from_u64(7));
    assert_eq!(sender.write(b"head", &[IoSlice::new(b"body")]), 8);
    (0..100).for_each(|_| sender.advance());
    let written: Vec<usize> = wires.iter().map(|wire| wire.wire().written).collect();
    assert_eq!(written, [HEADER_BYTES + 8, 0, 0]);
}

#[test]
fn a_rail_that_brings_nothing_holds_the_others_up_at_the_window_and_not_before() {
    let (mut sender, mut receiver, wires) = stream(2, 300_000, 3);
    let (payload, mut into) = (vec![5; 1 << 20], vec![0; 1 << 20]);
    let mut taken = 0;
    for _ in 0..5_000 {
        taken += sender.write(&[], &[IoSlice::new(&payload)]);
        wires[1].carry(1 << 20);
        assert_eq!(receiver.read(&mut into), Ok(0), "the first piece is on the other rail");
    }
    let window = window(2) as usize;
    assert!(taken > window - PIECE_MAX && taken <= window, "{taken} of {window}");
    wires[0].cut();
    let mut received = 0;
    for _ in 0..50_000 {
        sender.advance();
        wires[1].carry(1 << 20);
        received += receiver.read(&mut into).unwrap();
    }
    assert_eq!((received, sender.take_lost().len()), (taken, 1));
}

/// A stream with a full window, whose first rail has delivered nothing and breaks then; how many bytes were taken.
fn full_with_a_broken_rail(
    rooms: &[usize],
    len: usize,
) -> (Sender<Simulated>, Receiver<Simulated>, Vec<Simulated>, usize) {
    let (mut sender, mut receiver, wires) = stream_of(rooms, 3);
    let (payload, mut into) = (vec![5; len], vec![0; 1 << 20]);
    let mut taken = sender.write(&payload[..100], &[]);
    // It is full once no more is taken although the other rail carries everything.
    let mut vain = 0;
    while vain < 100 {
        let count = sender.write(&[], &[IoSlice::new(&payload)]);
        taken += count;
        vain = if count == 0 { vain + 1 } else { 0 };
        wires[1].carry(1 << 20);
        assert_eq!(receiver.read(&mut into), Ok(0), "the first piece is on the other rail");
    }
    wires[0].cut();
    (sender, receiver, wires, taken)
}

#[test]
fn what_a_broken_rail_had_is_sent_again_where_the_window_is_full_too() {
    // Whoever has something to write does nothing else, and whoever waits for room looks for that.
    for is_writing in [true, false] {
        let (mut sender, mut receiver, wires, taken) = full_with_a_broken_rail(&[300_000; 2], 1 << 20);
        let (payload, mut into, mut received) = (vec![5; 1 << 20], vec![0; 1 << 20], 0);
        for _ in 0..5_000 {
            if !is_writing {
                sender.has_room();
            } else if received < taken {
                sender.write(&[], &[IoSlice::new(&payload)]);
            }
            wires[1].carry(1 << 20);
            received += receiver.read(&mut into).unwrap();
        }
        assert!(received >= taken, "{received} of {taken}, writing: {is_writing}");
    }
}

#[test]
fn the_rest_of_a_piece_is_sent_where_the_window_is_full_and_another_rail_has_room() {
    for is_writing in [true, false] {
        let (mut sender, mut receiver, wires) = stream_of(&[300_000, 200], 3);
        let (payload, mut into, mut taken, mut received) = (vec![5; 1 << 20], vec![0; 1 << 20], 0, 0);
        // The second rail stops within a piece that asks for an acknowledgement.
        while wires[1].wire().written < HEADER_BYTES + PIECE_MAX + 100 {
            taken += sender.write(&[], &[IoSlice::new(&payload)]);
            wires[1].carry(1 << 20);
            received += receiver.read(&mut into).unwrap();
        }
        let mut vain = 0;
        while vain < 100 {
            let count = sender.write(&[], &[IoSlice::new(&payload)]);
            taken += count;
            vain = if count == 0 { vain + 1 } else { 0 };
            wires[0].carry(1 << 20);
            received += receiver.read(&mut into).unwrap();
        }
        assert!(received < taken);
        for _ in 0..10_000 {
            if !is_writing {
                sender.has_room();
            } else if received < taken {
                sender.write(&[], &[IoSlice::new(&payload)]);
            }
            wires.iter().for_each(|wire| wire.carry(1 << 20));
            received += receiver.read(&mut into).unwrap();
        }
        assert!(received >= taken, "{received} of {taken}, writing: {is_writing}");
    }
}

#[test]
fn a_short_piece_that_is_sent_again_opens_the_window() {
    // The rail that breaks has room for the short piece alone, and the other asks for no acknowledgement after it by itself.
    let (mut sender, mut receiver, wires, taken) = full_with_a_broken_rail(&[200, 300_000], 50_000);
    let (payload, mut into, mut more) = (vec![5; 50_000], vec![0; 1 << 20], 0);
    for _ in 0..5_000 {
        more += sender.write(&[], &[IoSlice::new(&payload)]);
        wires[1].carry(1 << 20);
        receiver.read(&mut into).unwrap();
    }
    assert!(more > taken, "{more} after {taken}");
}

#[test]
fn a_stream_whose_only_rail_breaks_goes_on_with_one_that_comes_later() {
    let ((mut sender, mut receiver), wires) = unconnected(&[300_000; 3], 1);
    let mut into = [0; 100];
    add((&mut sender, &mut receiver), 1, &wires[1]);
    assert_eq!(sender.write(b"some bytes", &[]), 10);
    wires[1].0.cut();
    sender.advance();
    assert_eq!((receiver.read(&mut into), receiver.working(), sender.working()), (Ok(0), 0, 0));
    // One of the others does not come, which the receiver hears by the last.
    sender.miss(0);
    add((&mut sender, &mut receiver), 2, &wires[2]);
    let mut received = 0;
    for _ in 0..100 {
        sender.advance();
        wires[2].0.carry(100);
        received += receiver.read(&mut into[received..]).unwrap();
    }
    assert_eq!(
        (&into[..received], receiver.take_missing(), receiver.take_missing()),
        (&b"some bytes"[..], vec![0], vec![])
    );
    wires[2].0.cut();
    assert_eq!(receiver.read(&mut into).unwrap_err().cause, "it was cut");
}

#[test]
fn a_rail_that_one_end_gives_up_is_given_up_by_the_other() {
    let (mut sender, mut receiver, wires) = stream(3, 300_000, 1);
    assert_eq!(sender.write(b"some bytes", &[]), 10);
    let (mut received, mut into) = (0, [0; 100]);
    // One has something to deliver, and one has not.
    for silent in [0, 2] {
        sender.give_up(|rail| Arc::ptr_eq(&rail.wire, &wires[silent].wire).then(|| LinkDown::new("it is silent")));
        for _ in 0..100 {
            sender.advance();
            wires[1].carry(100);
            received += receiver.read(&mut into).unwrap();
        }
    }
    assert_eq!(causes(sender.take_lost()), [0, 2].map(|rail| (rail, "it is silent".to_owned())));
    assert_eq!(causes(receiver.take_lost()), [0, 2].map(|rail| (rail, "the other end has given it up".to_owned())));
    assert_eq!((received, receiver.working(), sender.working()), (10, 1, 1));
}

/// Which rails were lost, and why.
fn causes(lost: Vec<Lost<Simulated>>) -> Vec<(usize, String)> {
    lost.into_iter().map(|lost| (lost.number, lost.down.cause)).collect()
}

#[test]
fn a_rail_that_is_opened_again_is_not_taken_for_the_one_that_was_given_up() {
    let (mut sender, mut receiver, wires) = stream(3, 300_000, 1);
    let mut into = [0; 100];
    wires[0].cut();
    // Both of the others tell, but the second is slow.
    (0..100).for_each(|_| sender.advance());
    (0..100).for_each(|_| wires[1].carry(100));
    assert_eq!(receiver.read(&mut into), Ok(0));
    assert_eq!((causes(receiver.take_lost()).len(), receiver.working()), (1, 2));
    let (near, far) = Simulated::pair(300_000, 7);
    let generation = sender.reopen(0);
    assert!(receiver.add(0, generation, far));
    (0..100).for_each(|_| wires[2].carry(100));
    assert_eq!((receiver.read(&mut into), receiver.working()), (Ok(0), 3), "that was said of the one before");
    sender.add(0, near.clone());
    assert_eq!(sender.write(b"some bytes", &[]), 10);
    let mut received = 0;
    for _ in 0..100 {
        sender.advance();
        [&wires[1], &wires[2], &near].iter().for_each(|wire| wire.carry(100));
        received += receiver.read(&mut into[received..]).unwrap();
    }
    assert_eq!((&into[..received], sender.working(), receiver.working()), (b"some bytes".as_slice(), 3, 3));
    assert!(near.wire().written > 0);
    // What it means by the next time is this one.
    sender.give_up(|rail| Arc::ptr_eq(&rail.wire, &near.wire).then(|| LinkDown::new("it is silent")));
    for _ in 0..100 {
        sender.advance();
        wires[1].carry(100);
        assert_eq!(receiver.read(&mut into), Ok(0));
    }
    assert_eq!(causes(receiver.take_lost()), [(0, "the other end has given it up".to_owned())]);
}

#[test]
fn the_next_connection_of_a_rail_takes_the_place_of_the_one_before_within_a_piece() {
    let (mut sender, mut receiver, wires) = stream(2, 300_000, 1);
    let (content, mut into): (Vec<u8>, _) = ((0..10_000).map(byte).collect(), [0; 100_000]);
    // The second rail is silent, so that nobody hears that the first is given up.
    assert_eq!(sender.write(&content, &[]), content.len());
    (0..100).for_each(|_| sender.advance());
    let mut received = 0;
    while received == 0 {
        wires[0].carry(1_000);
        received = receiver.read(&mut into).unwrap();
    }
    assert!(received < content.len());
    sender.give_up(|rail| Arc::ptr_eq(&rail.wire, &wires[0].wire).then(|| LinkDown::new("it is silent")));
    assert_eq!(causes(sender.take_lost()).len(), 1);
    let (near, far) = Simulated::pair(300_000, 7);
    let generations = [sender.reopen(0), sender.reopen(0)];
    assert!(receiver.add(0, generations[1], far));
    assert_eq!(causes(receiver.take_lost()), [(0, "the other end has opened it again".to_owned())]);
    for late in [0, generations[0], generations[1]] {
        assert!(!receiver.add(0, late, Simulated::pair(1, 1).1), "another has come");
    }
    sender.add(0, near.clone());
    for _ in 0..1_000 {
        sender.advance();
        wires[1].carry(100_000);
        near.carry(100_000);
        let count = receiver.read(&mut into[received..]).unwrap();
        received += count;
    }
    assert!(into[..received] == content, "{received} bytes");
    assert_eq!((receiver.working(), causes(receiver.take_lost())), (2, vec![]));
}

#[test]
fn an_attempt_that_failed_after_the_receiver_had_taken_it_is_told() {
    let (mut sender, mut receiver, wires) = stream(2, 300_000, 1);
    let mut into = [0; 100];
    let hear = |sender: &mut Sender<Simulated>, receiver: &mut Receiver<Simulated>| {
        for _ in 0..100 {
            sender.advance();
            wires[1].carry(100);
            assert_eq!(receiver.read(&mut [0; 100]), Ok(0));
        }
        (receiver.working(), causes(receiver.take_lost()).len())
    };
    wires[0].cut();
    assert_eq!(hear(&mut sender, &mut receiver), (1, 1));
    let (_near, far) = Simulated::pair(300_000, 7);
    let generation = sender.reopen(0);
    assert!(receiver.add(0, generation, far));
    assert_eq!(hear(&mut sender, &mut receiver), (2, 0));
    sender.miss(0);
    assert_eq!(hear(&mut sender, &mut receiver), (1, 1));
    assert!(!receiver.add(0, generation, Simulated::pair(1, 1).1), "it is given up");
    // It is none that the stream waits for.
    wires[1].cut();
    assert_eq!(receiver.read(&mut into).unwrap_err().cause, "it was cut");
}

#[test]
fn a_rail_that_never_came_may_come_later() {
    let ((mut sender, mut receiver), wires) = unconnected(&[300_000; 2], 1);
    add((&mut sender, &mut receiver), 1, &wires[1]);
    sender.miss(0);
    for _ in 0..100 {
        sender.advance();
        wires[1].0.carry(100);
        assert_eq!(receiver.read(&mut [0; 100]), Ok(0));
    }
    assert_eq!((receiver.take_missing(), receiver.take_missing()), (vec![0], vec![]));
    let vain = sender.reopen(0);
    sender.miss(0);
    for _ in 0..100 {
        sender.advance();
        wires[1].0.carry(100);
        assert_eq!(receiver.read(&mut [0; 100]), Ok(0));
    }
    assert!(!receiver.add(0, vain, Simulated::pair(1, 1).1), "it was given up before it came");
    assert!(receiver.add(0, sender.reopen(0), wires[0].1.clone()));
    assert_eq!((receiver.working(), receiver.take_missing()), (2, vec![]));
}

#[test]
fn when_the_last_rail_breaks_what_has_come_is_read_and_then_the_end() {
    let (mut sender, mut receiver, wires) = stream(2, 300_000, 1);
    assert_eq!(sender.write(b"some bytes", &[]), 10);
    (0..100).for_each(|_| sender.advance());
    while !wires[0].wire().forth.between.is_empty() {
        wires[0].carry(100);
    }
    wires.iter().for_each(Simulated::cut);
    let (mut received, mut into) = (Vec::new(), [0; 3]);
    let end = loop {
        match receiver.read(&mut into) {
            Ok(count) => received.extend_from_slice(&into[..count]),
            Err(down) => break down,
        }
    };
    assert_eq!((received.as_slice(), end.cause.as_str()), (b"some bytes".as_slice(), "it was cut"));
    assert!(receiver.read(&mut into).is_err() && !receiver.has_more());
    sender.advance();
    assert_eq!((sender.working(), sender.take_lost().len()), (0, 2));
}

/// What a receiver says of a piece with this header.
fn refused(header: PieceHeader) -> String {
    let (mut near, far) = Simulated::pair(1 << 20, 1);
    let mut receiver = Receiver::new(1);
    assert!(receiver.add(0, 0, far));
    let bytes = [header.encode().as_slice(), &[1; 64]].concat();
    let mut written = 0;
    while written < bytes.len() {
        written += near.write(&bytes[written..]).unwrap();
    }
    (0..1000).for_each(|_| near.carry(1 << 20));
    (0..1000).find_map(|_| receiver.read(&mut [0; 100]).err()).map_or_else(String::new, |down| down.cause)
}

#[test]
fn pieces_that_cannot_be_are_refused() {
    let fits = PieceHeader { offset: 0, len: 64, asks: false, given_up: 0, generation: 0 };
    assert_eq!(refused(fits), "");
    for wrong in [
        PieceHeader { len: PIECE_MAX + 1, ..fits },
        PieceHeader { offset: window(1), ..fits },
        PieceHeader { offset: u64::MAX - 3, ..fits },
    ] {
        assert!(refused(wrong).contains("it sent a piece of"), "{wrong:?}");
    }
    let unknown = PieceHeader { given_up: 2, ..fits };
    assert_eq!(refused(unknown), "it sent a piece with the marks 0 and 0x2 over 1 rails");
}

#[test]
fn an_acknowledgement_of_what_was_not_sent_ends_the_rail() {
    // Some read all at once.
    for seed in 0..100 {
        let (mut sender, _receiver, wires) = stream(1, 1000, seed);
        assert_eq!(sender.write(b"some bytes", &[]), 10);
        (0..100).for_each(|_| sender.advance());
        let mut far = Simulated { wire: wires[0].wire.clone(), end: End::Receiver };
        let (acknowledgements, mut written) = ([1u64.to_le_bytes(), 7u64.to_le_bytes()].concat(), 0);
        while written < acknowledgements.len() {
            written += far.write(&acknowledgements[written..]).unwrap();
        }
        (0..100).for_each(|_| wires[0].carry(100));
        (0..100).for_each(|_| sender.advance());
        let lost = sender.take_lost();
        assert!(lost[0].down.cause.contains("it acknowledged 7 pieces: expected 1 to 1"), "{}", lost[0].down);
        assert_eq!((sender.unacknowledged(), sender.holds_bytes()), (0, false), "what it acknowledged before counts");
    }
}
