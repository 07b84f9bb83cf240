//! The sending end: cuts pieces, chooses rails, keeps what is not acknowledged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::IoSlice;

use crate::error::LinkDown;
use crate::transport::tcp::rails::link::{Link, Lost, mark, window};
use crate::transport::tcp::rails::piece::{ACK_BYTES, HEADER_BYTES, PIECE_MAX, PieceHeader};

/// A piece with its header, as it is written.
struct Piece {
    header: PieceHeader,
    bytes: Vec<u8>,
}

impl Piece {
    fn set_marks(&mut self, asks: bool, GivenUp { rails, generation, .. }: GivenUp) {
        (self.header.asks, self.header.given_up, self.header.generation) = (asks, rails, generation);
        self.bytes[..HEADER_BYTES].copy_from_slice(&self.header.encode());
    }
}

/// Pieces of a rail for which no acknowledgement has been asked.
#[derive(Clone, Copy)]
struct Unasked {
    bytes: usize,
    pieces: usize,
    /// Where the first of them in the stream belongs.
    first: u64,
}

/// Which rails carry nothing, and do not come.
#[derive(Clone, Copy, Default)]
struct GivenUp {
    /// A bit for each.
    rails: u16,
    /// How often it was begun to open a rail again.
    generation: u32,
    /// How often a rail was given up.
    changes: u64,
}

impl GivenUp {
    fn give_up(&mut self, number: usize) {
        self.rails |= mark(number);
        self.changes += 1;
    }
}

/// A rail with what it carries.
struct Rail<L> {
    number: usize,
    link: L,
    /// Its pieces that are not acknowledged, in the order in which it carries them. All but the last are written.
    pieces: VecDeque<Piece>,
    /// How many bytes of the last are.
    written: usize,
    /// How many pieces it had before these.
    acknowledged: u64,
    /// What was carried since an acknowledgement was asked for last.
    unasked: Option<Unasked>,
    /// Up to which change of the rails that are given up it has told the receiver.
    told: u64,
    /// The bytes of `pieces`.
    bytes: usize,
    /// The beginning of an acknowledgement.
    incoming: Vec<u8>,
}

impl<L: Link> Rail<L> {
    /// Whether a part of a piece waits in this process.
    fn has_rest(&self) -> bool {
        self.pieces.back().is_some_and(|piece| self.written < piece.bytes.len())
    }

    /// Writes what is left of the last piece. True: nothing is.
    fn push(&mut self) -> Result<bool, LinkDown> {
        while let Some(piece) = self.pieces.back()
            && self.written < piece.bytes.len()
        {
            match self.link.write(&piece.bytes[self.written..])? {
                0 => return Ok(false),
                count => self.written += count,
            }
        }
        self.link.flush()
    }

    /// Takes a piece to carry, once nothing is left of the one before.
    fn load(&mut self, mut piece: Piece, given_up: GivenUp) {
        let PieceHeader { offset, len, .. } = piece.header;
        let mut unasked = self.unasked.unwrap_or(Unasked { bytes: 0, pieces: 0, first: offset });
        unasked.bytes += len;
        unasked.pieces += 1;
        // One that is sent again belongs before those that are here.
        unasked.first = unasked.first.min(offset);
        let asks = len == 0 || unasked.bytes >= ACKNOWLEDGED_BYTES || unasked.pieces >= ACKNOWLEDGED_PIECES;
        self.unasked = (!asks).then_some(unasked);
        piece.set_marks(asks, given_up);
        self.told = given_up.changes;
        self.bytes += piece.header.len;
        self.written = 0;
        self.pieces.push_back(piece);
    }

    /// Reads acknowledgements, and moves the pieces that they are for to `done`, also before the rail turns out to be broken.
    fn read_acknowledgements(&mut self, done: &mut Vec<Piece>) -> Result<(), LinkDown> {
        let mut space = [0; 32 * ACK_BYTES];
        loop {
            let count = self.link.read(&mut space)?;
            self.incoming.extend_from_slice(&space[..count]);
            while let Some((ack, _)) = self.incoming.split_first_chunk::<ACK_BYTES>() {
                let acknowledged = u64::from_le_bytes(*ack);
                self.incoming.drain(..ACK_BYTES);
                let unfinished = u64::from(self.has_rest());
                let most = self.acknowledged + self.pieces.len() as u64 - unfinished;
                if acknowledged < self.acknowledged || acknowledged > most {
                    return Err(LinkDown::new(format!(
                        "it acknowledged {acknowledged} pieces: expected {} to {most}",
                        self.acknowledged
                    )));
                }
                let pieces = (acknowledged - self.acknowledged) as usize;
                self.acknowledged = acknowledged;
                self.bytes -= self.pieces.iter().take(pieces).map(|piece| piece.header.len).sum::<usize>();
                done.extend(self.pieces.drain(..pieces));
            }
            if count < space.len() {
                return Ok(());
            }
        }
    }
}

/// The sending end of a stream over several rails.
pub(crate) struct Sender<L> {
    rails: Vec<Rail<L>>,
    /// Where the next byte belongs.
    next: u64,
    /// Pieces of rails that have broken, to be sent again, by where they belong.
    again: BTreeMap<u64, Piece>,
    /// Where the pieces belong that are not acknowledged.
    unacknowledged: BTreeSet<u64>,
    unacknowledged_bytes: usize,
    window: u64,
    given_up: GivenUp,
    lost: Vec<Lost<L>>,
    /// Memory of long pieces, to be used again.
    spare: Vec<Vec<u8>>,
}

impl<L: Link> Sender<L> {
    /// A stream that is to have so many rails, of which it has none yet.
    pub(crate) fn new(rails: usize) -> Self {
        Sender {
            rails: Vec::with_capacity(rails),
            next: 0,
            again: BTreeMap::new(),
            unacknowledged: BTreeSet::new(),
            unacknowledged_bytes: 0,
            window: window(rails),
            given_up: GivenUp::default(),
            lost: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Adds a rail.
    pub(crate) fn add(&mut self, number: usize, link: L) {
        self.rails.push(Rail {
            number,
            link,
            pieces: VecDeque::new(),
            written: 0,
            acknowledged: 0,
            unasked: None,
            told: 0,
            bytes: 0,
            incoming: Vec::new(),
        });
    }

    /// Does without a rail that was to be added, of which the receiver is told.
    pub(crate) fn miss(&mut self, number: usize) {
        self.given_up.give_up(number);
    }

    /// Begins to open a rail again that has broken or was missed, which is then to be added, or missed. The generation of its
    /// connection, which the receiver has to know before that is added.
    pub(crate) fn reopen(&mut self, number: usize) -> u32 {
        self.given_up.rails &= !mark(number);
        self.given_up.generation += 1;
        self.given_up.generation
    }

    /// The rails that work, each with whether a part of a piece waits for room on it.
    pub(crate) fn rails(&mut self) -> impl Iterator<Item = (&mut L, bool)> {
        self.rails.iter_mut().map(|rail| {
            let has_rest = rail.has_rest();
            (&mut rail.link, has_rest)
        })
    }

    /// The same, to look at.
    pub(crate) fn links(&self) -> impl Iterator<Item = &L> {
        self.rails.iter().map(|rail| &rail.link)
    }

    /// How many rails work.
    pub(crate) fn working(&self) -> usize {
        self.rails.len()
    }

    /// The rails that have broken since this was asked last.
    pub(crate) fn take_lost(&mut self) -> Vec<Lost<L>> {
        std::mem::take(&mut self.lost)
    }

    /// Whether any byte has been taken.
    pub(crate) fn has_begun(&self) -> bool {
        self.next > 0
    }

    /// The bytes that are kept because nobody has acknowledged them.
    pub(crate) fn unacknowledged(&self) -> usize {
        self.unacknowledged_bytes
    }

    /// Whether bytes that were taken wait in this process for room.
    pub(crate) fn holds_bytes(&self) -> bool {
        !self.again.is_empty() || self.rails.iter().any(Rail::has_rest)
    }

    /// Takes as many leading bytes of `head` and then `body` as rails and window have room for.
    pub(crate) fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> usize {
        let total = head.len() + body.iter().map(|slice| slice.len()).sum::<usize>();
        let mut taken = 0;
        self.take_due_acknowledgements();
        self.push();
        // A rail that carries little would otherwise hold the window up.
        self.ask_for(self.window / 4);
        while taken < total {
            let len = (total - taken).min(PIECE_MAX);
            if !self.is_in_window(len) {
                self.take_acknowledgements();
            }
            // To look for a rail sends again what is to be, also where the window is full: its first piece may be among that.
            let Some(rail) = self.idle_rail() else { break };
            if !self.is_in_window(len) {
                break;
            }
            let piece = self.cut(head, body, taken, len);
            self.load(rail, piece);
            taken += len;
        }
        taken
    }

    /// Moves what has been taken as far as it goes, and takes acknowledgements.
    pub(crate) fn advance(&mut self) {
        self.take_acknowledgements();
        // Looking for a rail gives it what is to be sent again.
        let _ = self.idle_rail();
        self.ask_for(self.window / 4);
        self.push();
    }

    /// Whether the next bytes would be taken now.
    pub(crate) fn has_room(&mut self) -> bool {
        self.push();
        self.idle_rail().is_some() && self.is_in_window(PIECE_MAX)
    }

    /// Writes what is left of pieces, on every rail: the receiver may wait for that, where another rail has room.
    fn push(&mut self) {
        self.each(|rail| rail.push().map(|_| ()));
    }

    /// Asks for acknowledgements of everything that is written.
    pub(crate) fn ask(&mut self) {
        self.ask_for(0);
    }

    /// The same of what lies `behind` so far or more. Each rail also tells which ones are given up, if that is news.
    fn ask_for(&mut self, behind: u64) {
        let (next, given_up) = (self.next, self.given_up);
        self.each(|rail| {
            let is_due =
                rail.unasked.is_some_and(|unasked| unasked.first + behind <= next) || rail.told != given_up.changes;
            if is_due && rail.push()? {
                let GivenUp { rails, generation, .. } = given_up;
                let header = PieceHeader { offset: next, len: 0, asks: true, given_up: rails, generation };
                rail.load(Piece { header, bytes: header.encode().to_vec() }, given_up);
                rail.push()?;
            }
            Ok(())
        });
    }

    /// Gives the rails up of which `is_dead` tells why.
    pub(crate) fn give_up(&mut self, mut is_dead: impl FnMut(&mut L) -> Option<LinkDown>) {
        self.each(|rail| is_dead(&mut rail.link).map_or(Ok(()), Err));
    }

    /// Whether the byte behind the next `len` may be sent.
    fn is_in_window(&self, len: usize) -> bool {
        let first = self.unacknowledged.first().copied().unwrap_or(self.next);
        self.next + len as u64 <= first + self.window
    }

    /// The first rail that takes another piece now, once none waits to be sent again.
    fn idle_rail(&mut self) -> Option<usize> {
        let mut place = 0;
        while place < self.rails.len() {
            match self.rails[place].push() {
                Ok(true) if self.rails[place].pieces.len() < PIECES_MAX => match self.again.pop_first() {
                    Some((_, piece)) => self.load(place, piece),
                    None => return Some(place),
                },
                Ok(_) => place += 1,
                Err(down) => self.lose(place, down),
            }
        }
        None
    }

    /// Gives a rail a piece, and writes what there is room for.
    fn load(&mut self, place: usize, piece: Piece) {
        self.rails[place].load(piece, self.given_up);
        if let Err(down) = self.rails[place].push() {
            self.lose(place, down);
        }
    }

    /// The next `len` bytes behind the first `taken` of `head` and `body`, as a piece.
    fn cut(&mut self, head: &[u8], body: &[IoSlice<'_>], taken: usize, len: usize) -> Piece {
        let header = PieceHeader { offset: self.next, len, asks: false, given_up: 0, generation: 0 };
        let mut bytes = match len {
            0..SPARE_MIN => Vec::with_capacity(HEADER_BYTES + len),
            _ => self.spare.pop().unwrap_or_else(|| Vec::with_capacity(HEADER_BYTES + PIECE_MAX)),
        };
        bytes.extend_from_slice(&header.encode());
        let (mut skip, mut left) = (taken, len);
        for slice in std::iter::once(head).chain(body.iter().map(|slice| &**slice)) {
            let part = slice.get(skip..).unwrap_or_default();
            let part = &part[..part.len().min(left)];
            skip = skip.saturating_sub(slice.len());
            left -= part.len();
            bytes.extend_from_slice(part);
        }
        self.unacknowledged.insert(self.next);
        self.unacknowledged_bytes += len;
        self.next += len as u64;
        Piece { header, bytes }
    }

    /// Looks for acknowledgements where some must have been asked for.
    fn take_due_acknowledgements(&mut self) {
        if self.rails.iter().any(|rail| rail.bytes >= ACKNOWLEDGED_BYTES || rail.pieces.len() >= ACKNOWLEDGED_PIECES) {
            self.take_acknowledgements();
        }
    }

    fn take_acknowledgements(&mut self) {
        let mut done = Vec::new();
        self.each(|rail| rail.read_acknowledgements(&mut done));
        for Piece { header, mut bytes } in done {
            if header.len > 0 && self.unacknowledged.remove(&header.offset) {
                self.unacknowledged_bytes -= header.len;
            }
            if header.len >= SPARE_MIN && self.spare.len() < SPARES_MAX {
                bytes.clear();
                self.spare.push(bytes);
            }
        }
    }

    /// Does something with each rail, of which those are lost where it fails.
    fn each(&mut self, mut act: impl FnMut(&mut Rail<L>) -> Result<(), LinkDown>) {
        let mut place = 0;
        while place < self.rails.len() {
            match act(&mut self.rails[place]) {
                Ok(()) => place += 1,
                Err(down) => self.lose(place, down),
            }
        }
    }

    /// Takes a broken rail out. What it has not delivered is sent again.
    fn lose(&mut self, place: usize, down: LinkDown) {
        let Rail { number, link, pieces, .. } = self.rails.remove(place);
        let pieces = pieces.into_iter().filter(|piece| piece.header.len > 0);
        self.again.extend(pieces.map(|piece| (piece.header.offset, piece)));
        self.given_up.give_up(number);
        self.lost.push(Lost { number, link, down });
    }
}

/// After how many bytes on a rail, or pieces, to ask for an acknowledgement.
const ACKNOWLEDGED_BYTES: usize = 256 * 1024;
const ACKNOWLEDGED_PIECES: usize = 256;

/// How many pieces a rail carries at most.
const PIECES_MAX: usize = 4096;

/// From which size on the memory of pieces is used again, and how many of them are kept for that.
const SPARE_MIN: usize = PIECE_MAX / 2;
const SPARES_MAX: usize = 8;
