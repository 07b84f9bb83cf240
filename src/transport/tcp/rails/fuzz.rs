//! Fuzz target of what comes over the rails of a stream: pieces to its receiver, acknowledgements to its sender.

use std::io::IoSlice;

use crate::error::LinkDown;
use crate::fuzz_input::Input;
use crate::transport::tcp::rails::link::Link;
use crate::transport::tcp::rails::piece::PieceHeader;
use crate::transport::tcp::rails::receiver::Receiver;
use crate::transport::tcp::rails::sender::Sender;

/// One of these: a header, pieces, or acknowledgements.
pub(crate) fn rails(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 3 {
        0 => header(input.rest()),
        1 => pieces(input),
        _ => acknowledgements(input),
    }
}

fn header(bytes: &[u8]) {
    let Some((header, _)) = bytes.split_first_chunk() else { return };
    if let Ok(read) = PieceHeader::decode(header, u64::MAX, 16) {
        assert_eq!(read.encode(), *header);
    }
}

/// A connection that brings these bytes, so many at a time, and then ends.
#[derive(Clone, Default)]
struct Trickle {
    bytes: Vec<u8>,
    read: usize,
    step: usize,
}

impl Link for Trickle {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, LinkDown> {
        Ok(bytes.len())
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let left = &self.bytes[self.read..];
        if left.is_empty() {
            return Err(LinkDown::new("it has ended"));
        }
        let count = left.len().min(self.step).min(into.len());
        into[..count].copy_from_slice(&left[..count]);
        self.read += count;
        Ok(count)
    }
}

/// The byte that belongs at this place of a stream.
fn byte(place: u64) -> u8 {
    (place.wrapping_mul(2_654_435_761) >> 9) as u8
}

/// A later connection for a rail.
struct Later {
    number: usize,
    generation: u32,
    link: Trickle,
    /// After how many reads it comes.
    after: usize,
}

/// Whatever pieces come on whichever rails, of which some come again, each byte is read at its place, and the stream ends.
fn pieces(mut input: Input<'_>) {
    let (rails, room) = (usize::from(input.byte() % 3) + 1, usize::from(input.byte()) + 1);
    let mut links: Vec<Trickle> =
        (0..rails).map(|_| Trickle { step: usize::from(input.byte()) + 1, ..Trickle::default() }).collect();
    let (mut is_garbled, mut later): (bool, Vec<Later>) = Default::default();
    while !input.is_empty() {
        let kind = input.byte();
        let number = usize::from(kind) % rails;
        if (0xe0..0xf0).contains(&kind) {
            let link = Trickle { step: usize::from(input.byte()) + 1, ..Trickle::default() };
            later.push(Later { number, generation: input.byte().into(), link, after: input.byte().into() });
            continue;
        }
        let newest = later.iter_mut().rev().find(|later| later.number == number);
        let link = newest.map_or(&mut links[number], |later| &mut later.link);
        if kind >= 0xf0 {
            is_garbled = true;
            link.bytes.extend_from_slice(input.take(20));
            continue;
        }
        let (offset, len, asks) = (input.number(), usize::from(input.byte()), kind & 0x40 != 0);
        let given_up = if kind & 0x80 != 0 { input.byte().into() } else { 0 };
        let generation = if kind & 0x20 != 0 { input.byte().into() } else { 0 };
        link.bytes.extend_from_slice(&PieceHeader { offset, len, asks, given_up, generation }.encode());
        link.bytes.extend((0..len as u64).map(|place| byte(offset.wrapping_add(place))));
    }
    let most: usize = links.iter().chain(later.iter().map(|later| &later.link)).map(|link| link.bytes.len()).sum();
    let mut receiver = Receiver::new(rails);
    links.into_iter().enumerate().for_each(|(number, link)| assert!(receiver.add(number, 0, link)));
    let (mut into, mut place) = (vec![0; room], 0);
    for reads in 0..=2 * most + 2 + usize::from(u8::MAX) {
        for Later { number, generation, link, .. } in later.extract_if(.., |later| later.after <= reads) {
            receiver.add(number, generation, link);
        }
        match receiver.read(&mut into) {
            Ok(count) => {
                let is_right = into[..count].iter().zip(place..).all(|(read, place)| *read == byte(place));
                assert!(is_right || is_garbled, "{count} bytes at {place}");
                place += count as u64;
            }
            Err(_) => return assert!(place as usize <= most && !receiver.has_more()),
        }
    }
    panic!("all rails have ended, and the stream has not");
}

/// Whatever is acknowledged, no more than what was sent is taken to be.
fn acknowledgements(mut input: Input<'_>) {
    let rails = usize::from(input.byte() % 3) + 1;
    let mut sender = Sender::new(rails);
    for number in 0..rails {
        let (step, count) = (usize::from(input.byte()) + 1, usize::from(input.byte()));
        sender.add(number, Trickle { bytes: input.take(count).to_vec(), read: 0, step });
    }
    let mut sent = 0;
    while !input.is_empty() {
        let message = vec![7; usize::from(input.byte()) << (input.byte() % 10)];
        sent += sender.write(&message[..message.len().min(3)], &[IoSlice::new(&message[message.len().min(3)..])]);
        sender.advance();
        assert!(sender.unacknowledged() <= sent);
    }
    for _ in 0..=usize::from(u8::MAX) {
        sender.advance();
    }
    let lost = sender.take_lost();
    assert_eq!((sender.working(), lost.len()), (0, rails), "each rail has ended");
    assert!(sender.holds_bytes() == (sender.unacknowledged() > 0));
}
