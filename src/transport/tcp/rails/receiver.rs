//! The receiving end: puts pieces in order.
//!
//! A piece whose turn it is goes from its rail right to where the reader wants it. One that is ahead is kept until then.

use std::collections::BTreeMap;

use crate::error::LinkDown;
use crate::transport::tcp::rails::link::{Link, Lost, mark, window};
use crate::transport::tcp::rails::piece::{HEADER_BYTES, PieceHeader};

/// A piece that is being read.
struct Incoming {
    header: PieceHeader,
    /// How many of its bytes have been read.
    done: usize,
    /// Those, while it was ahead.
    held: Vec<u8>,
}

/// A rail with what comes on it.
struct Rail<L> {
    number: usize,
    /// Which of the stream's connections it is: those that its opener has begun later have greater numbers.
    generation: u32,
    link: L,
    /// Bytes that were read with a header.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    piece: Option<Incoming>,
    /// How many pieces have been read.
    pieces: u64,
    /// Acknowledgements for which there was no room.
    outgoing: Vec<u8>,
}

/// What is in order, and what is ahead.
struct Order {
    /// Where the byte belongs that the reader gets next.
    next: u64,
    /// Pieces that are ahead, by where they belong.
    ahead: BTreeMap<u64, Vec<u8>>,
    ahead_bytes: u64,
    window: u64,
    /// For each rail that the stream is to have: up to which generation its connections are given up, if any are.
    given_up: Vec<Option<u32>>,
}

impl Order {
    /// Takes down what a header says of rails.
    fn note_given_up(&mut self, header: PieceHeader) {
        if header.given_up == 0 {
            return;
        }
        for (number, given_up) in self.given_up.iter_mut().enumerate() {
            if header.given_up & mark(number) != 0 {
                *given_up = (*given_up).max(Some(header.generation));
            }
        }
    }

    fn is_given_up(&self, number: usize, generation: u32) -> bool {
        self.given_up[number] >= Some(generation)
    }

    /// Copies bytes whose turn it is out of what was ahead.
    fn take(&mut self, into: &mut [u8]) -> usize {
        while let Some(first) = self.ahead.first_entry() {
            let (offset, len) = (*first.key(), first.get().len() as u64);
            if offset > self.next {
                break;
            }
            if offset + len <= self.next {
                self.ahead_bytes -= len;
                first.remove();
                continue;
            }
            let bytes = &first.get()[(self.next - offset) as usize..];
            let count = bytes.len().min(into.len());
            into[..count].copy_from_slice(&bytes[..count]);
            self.next += count as u64;
            return count;
        }
        0
    }

    fn has_next(&self) -> bool {
        self.ahead.iter().any(|(offset, bytes)| *offset <= self.next && offset + bytes.len() as u64 > self.next)
    }
}

/// Which pieces to read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// The one whose turn it is.
    Next,
    /// Those that are ahead, too.
    All,
}

impl<L: Link> Rail<L> {
    /// Reads bytes that follow: those in the buffer, then the link's.
    fn take(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let buffered = (self.end - self.start).min(into.len());
        if buffered == 0 {
            return self.link.read(into);
        }
        into[..buffered].copy_from_slice(&self.buffer[self.start..self.start + buffered]);
        self.start += buffered;
        Ok(buffered)
    }

    /// Reads the header of the next piece. False: it has not come.
    fn begin(&mut self, order: &mut Order) -> Result<bool, Failure> {
        if self.end - self.start < HEADER_BYTES {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            self.end += self.link.read(&mut self.buffer[self.end..]).map_err(Failure::Rail)?;
        }
        let Some((header, _)) = self.buffer[self.start..self.end].split_first_chunk::<HEADER_BYTES>() else {
            return Ok(false);
        };
        let limit = order.next.saturating_add(order.window);
        let header = PieceHeader::decode(header, limit, order.given_up.len()).map_err(Failure::Stream)?;
        order.note_given_up(header);
        self.start += HEADER_BYTES;
        self.piece = Some(Incoming { header, done: 0, held: Vec::new() });
        Ok(true)
    }

    /// Reads pieces until bytes whose turn it is are in `into`. Returns how many; 0 if nothing more can be read here now.
    fn step(&mut self, order: &mut Order, wanted: Wanted, into: &mut [u8]) -> Result<usize, Failure> {
        loop {
            let Some(mut piece) = self.piece.take() else {
                if self.begin(order)? {
                    continue;
                }
                return Ok(0);
            };
            let outcome = self.go_on(&mut piece, order, wanted, into);
            if piece.done < piece.header.len {
                self.piece = Some(piece);
            } else {
                self.finish(piece, order)?;
            }
            match outcome.map_err(Failure::Rail)? {
                Some(count) => return Ok(count),
                None if self.piece.is_some() => {}
                None => self.acknowledge(),
            }
        }
    }

    /// Reads of a piece. Some: what `step` returns. None: it is to be called again.
    fn go_on(
        &mut self,
        piece: &mut Incoming,
        order: &mut Order,
        wanted: Wanted,
        into: &mut [u8],
    ) -> Result<Option<usize>, LinkDown> {
        let PieceHeader { offset, len, .. } = piece.header;
        let (at, end) = (offset + piece.done as u64, offset + len as u64);
        let left = len - piece.done;
        if left == 0 {
            return Ok(None);
        }
        if offset > order.next && !order.ahead.contains_key(&offset) {
            if wanted == Wanted::Next {
                return Ok(Some(0));
            }
            piece.held.resize(len, 0);
            let count = self.take(&mut piece.held[piece.done..])?;
            piece.done += count;
            return Ok((count == 0).then_some(0));
        }
        if order.next >= end || offset > order.next || at < order.next {
            // It has come on another rail, as a whole or up to here.
            let known = if offset > order.next { left } else { (order.next - at).min(left as u64) as usize };
            let mut unwanted = [0; 4096];
            let count = self.take(&mut unwanted[..known.min(4096)])?;
            piece.done += count;
            return Ok((count == 0).then_some(0));
        }
        if at > order.next {
            let from = (order.next - offset) as usize;
            let count = into.len().min(piece.done - from);
            into[..count].copy_from_slice(&piece.held[from..from + count]);
            order.next += count as u64;
            return Ok(Some(count));
        }
        let room = into.len().min(left);
        let count = self.take(&mut into[..room])?;
        piece.done += count;
        order.next += count as u64;
        Ok(Some(count))
    }

    /// A piece has been read to its end.
    fn finish(&mut self, piece: Incoming, order: &mut Order) -> Result<(), Failure> {
        let PieceHeader { offset, len, asks, .. } = piece.header;
        let is_new = offset + len as u64 > order.next && !order.ahead.contains_key(&offset);
        if len > 0 && is_new {
            order.ahead_bytes += len as u64;
            if order.ahead_bytes > order.window {
                return Err(Failure::Stream(LinkDown::new("it sent more pieces ahead than it may")));
            }
            order.ahead.insert(offset, piece.held);
        }
        self.pieces += 1;
        if asks {
            self.outgoing.extend(self.pieces.to_le_bytes());
        }
        Ok(())
    }

    /// Sends acknowledgements, as far as there is room. That the rail has broken is for a read to tell.
    fn acknowledge(&mut self) {
        while !self.outgoing.is_empty()
            && let Ok(count @ 1..) = self.link.write(&self.outgoing)
        {
            self.outgoing.drain(..count);
        }
    }

    /// Whether `step` would go on with bytes that the poller does not see.
    fn has_more(&mut self) -> bool {
        let buffered = self.end - self.start;
        buffered >= HEADER_BYTES || (buffered > 0 && self.piece.is_some()) || self.link.has_more()
    }
}

/// What ends.
enum Failure {
    /// A rail.
    Rail(LinkDown),
    /// The stream, since what came cannot be right.
    Stream(LinkDown),
}

/// The receiving end of a stream over several rails.
pub(crate) struct Receiver<L> {
    rails: Vec<Rail<L>>,
    order: Order,
    /// For each rail, the generation of the connection that has come last.
    joined: Vec<Option<u32>>,
    /// The rails that were told to be missing, a bit for each.
    missing: u16,
    is_closed: bool,
    lost: Vec<Lost<L>>,
    /// Why the last rail that ended did.
    last: Option<LinkDown>,
}

impl<L: Link> Receiver<L> {
    /// A stream that is to have so many rails, of which it has none yet.
    pub(crate) fn new(rails: usize) -> Self {
        let (next, ahead, ahead_bytes, given_up) = (0, BTreeMap::new(), 0, vec![None; rails]);
        let order = Order { next, ahead, ahead_bytes, window: window(rails), given_up };
        let (joined, missing, is_closed, lost, last) = (vec![None; rails], 0, false, Vec::new(), None);
        Receiver { rails: Vec::with_capacity(rails), order, joined, missing, is_closed, lost, last }
    }

    /// Adds a rail, or the next connection of one, which replaces the one before. False: it is none any more, since its opener has
    /// given it up meanwhile, or the stream has ended.
    pub(crate) fn add(&mut self, number: usize, generation: u32, link: L) -> bool {
        if self.is_closed || self.order.is_given_up(number, generation) || self.joined[number] >= Some(generation) {
            return false;
        }
        // Its opener sends what this one has brought, and nobody has acknowledged, by other rails.
        if let Some(place) = self.rails.iter().position(|rail| rail.number == number) {
            self.lose(place, LinkDown::new("the other end has opened it again"));
        }
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        let (piece, outgoing) = (None, Vec::new());
        self.rails.push(Rail { number, generation, link, buffer, start: 0, end: 0, piece, pieces: 0, outgoing });
        self.joined[number] = Some(generation);
        true
    }

    /// How many rails work.
    pub(crate) fn working(&self) -> usize {
        self.rails.len()
    }

    /// The rails that have ended since this was asked last.
    pub(crate) fn take_lost(&mut self) -> Vec<Lost<L>> {
        std::mem::take(&mut self.lost)
    }

    /// The rails of which it is known since this was asked last that they do not come: their opener has given them up.
    pub(crate) fn take_missing(&mut self) -> Vec<usize> {
        let known = self.missing;
        let is_missing = |number: &usize| self.joined[*number].is_none() && self.order.given_up[*number].is_some();
        let is_news = |number: &usize| !self.is_closed && known & mark(*number) == 0 && is_missing(number);
        let news: Vec<usize> = (0..self.joined.len()).filter(is_news).collect();
        self.missing = news.iter().fold(known, |missing, number| missing | mark(*number));
        news
    }

    /// Why the stream has ended, once no rail works and none is to come.
    fn end(&self) -> Option<LinkDown> {
        let is_known = |(joined, given_up): (&Option<u32>, &Option<u32>)| joined.is_some() || given_up.is_some();
        let are_known = || self.joined.iter().zip(&self.order.given_up).all(is_known);
        if !self.rails.is_empty() || !(self.is_closed || are_known()) {
            return None;
        }
        Some(self.last.clone().unwrap_or_else(|| LinkDown::new("it closed the connection")))
    }

    /// Ends the stream.
    pub(crate) fn close(&mut self, down: LinkDown) {
        self.rails.clear();
        self.order.ahead.clear();
        self.is_closed = true;
        self.last = Some(down);
    }

    /// Reads the stream's next bytes, none if they have not come. An error: no rail brings more.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let mut count = self.order.take(into);
        // What is ahead needs a copy, so what is not comes first.
        for wanted in [Wanted::Next, Wanted::All] {
            let mut place = 0;
            while count == 0 && !into.is_empty() && place < self.rails.len() {
                match self.rails[place].step(&mut self.order, wanted, into) {
                    Ok(read) => {
                        count = read;
                        // What could not be said before is said with the rest.
                        self.rails[place].acknowledge();
                        place += 1;
                    }
                    Err(Failure::Rail(down)) => self.lose(place, down),
                    Err(Failure::Stream(down)) => self.close(down),
                }
            }
        }
        self.drop_given_up();
        if count == 0 {
            // A piece may have turned out to be complete when its rail ended.
            count = self.order.take(into);
        }
        if count == 0 && !into.is_empty() { self.end().map_or(Ok(0), Err) } else { Ok(count) }
    }

    /// Takes the rails out that the sender has given up: it sends what they had by others.
    fn drop_given_up(&mut self) {
        for place in (0..self.rails.len()).rev() {
            let Rail { number, generation, .. } = self.rails[place];
            if self.order.is_given_up(number, generation) {
                self.lose(place, LinkDown::new("the other end has given it up"));
            }
        }
    }

    /// Takes a rail out that has ended.
    fn lose(&mut self, place: usize, down: LinkDown) {
        let Rail { number, link, .. } = self.rails.remove(place);
        self.last = Some(down.clone());
        self.lost.push(Lost { number, link, down });
    }

    /// Whether bytes have been read from the rails that the reader has not got and may get, or that are to be looked at.
    pub(crate) fn has_more(&mut self) -> bool {
        self.order.has_next() || self.rails.iter_mut().any(Rail::has_more)
    }
}

/// How much is read with a header: all of a short piece.
const BUFFER_BYTES: usize = 4096;
