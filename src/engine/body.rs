//! The payload of a message on its way out: memory of its operation, or a copy that the engine has.

use std::io::IoSlice;

use smallvec::SmallVec;

use crate::engine::region::Region;

/// The payload of a message.
#[derive(Debug)]
pub(crate) enum Body {
    Empty,
    /// The operation's memory, read when it is written out.
    Memory(Region),
    /// Bytes of the engine, given back as they are written. Boxed, since nearly all bodies are others.
    Copied(Box<Copied>),
}

impl Body {
    pub(crate) fn len(&self) -> usize {
        match self {
            Body::Empty => 0,
            Body::Memory(region) => region.len(),
            Body::Copied(copied) => copied.len(),
        }
    }

    /// Bytes of the engine.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Body {
        Body::Copied(Box::new(Copied::from(bytes)))
    }

    /// A copy of the bytes from `from` to `end`.
    pub(crate) fn copy(&self, from: usize, end: usize) -> Body {
        let mut slices = Slices::new();
        self.io_slices(from, end, &mut slices);
        Body::of_bytes(&slices.iter().map(|slice| &**slice).collect::<Vec<_>>().concat())
    }

    /// The bytes of the engine that it has.
    pub(crate) fn held(&self) -> usize {
        match self {
            Body::Copied(copied) => copied.held(),
            Body::Empty | Body::Memory(_) => 0,
        }
    }

    /// Gives back what lies before `end`, if it is the engine's and can be.
    pub(crate) fn give_back(&mut self, end: usize) {
        if let Body::Copied(copied) = self {
            copied.give_back(end);
        }
    }

    /// An operation's memory, if there is any.
    pub(crate) fn of(region: Region) -> Body {
        if region.len() == 0 { Body::Empty } else { Body::Memory(region) }
    }

    /// The bytes from `from` to `end`.
    pub(crate) fn io_slices<'a>(&'a self, from: usize, end: usize, slices: &mut Slices<'a>) {
        match self {
            Body::Empty => {}
            Body::Memory(region) => region.io_slices(from, end, slices),
            Body::Copied(copied) => copied.io_slices(from, end, slices),
        }
    }
}

/// Bytes of a message, copied in pieces, which are given back one by one.
#[derive(Debug, Default)]
pub(crate) struct Copied {
    /// All but the last of `PIECE_BYTES`; those given back are empty.
    pieces: Vec<Vec<u8>>,
    len: usize,
    given_back: usize,
}

impl From<&[u8]> for Copied {
    fn from(bytes: &[u8]) -> Copied {
        Copied { pieces: bytes.chunks(PIECE_BYTES).map(<[u8]>::to_vec).collect(), len: bytes.len(), given_back: 0 }
    }
}

impl Copied {
    /// Copies one more piece of `all`.
    pub(crate) fn copy_on(&mut self, all: &Region) {
        let end = all.len().min(self.len + PIECE_BYTES);
        self.pieces.push(all.to_vec(self.len, end));
        self.len = end;
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes from `from` to `end`, none of which has been given back.
    pub(crate) fn io_slices<'a>(&'a self, from: usize, end: usize, slices: &mut Slices<'a>) {
        let mut at = from;
        while at < end {
            let (index, begin) = (at / PIECE_BYTES, at % PIECE_BYTES);
            let stop = PIECE_BYTES.min(begin + end - at);
            slices.push(IoSlice::new(&self.pieces[index][begin..stop]));
            at += stop - begin;
        }
    }

    /// Gives back what lies before `end`, as far as it is whole pieces.
    pub(crate) fn give_back(&mut self, end: usize) {
        while self.given_back < end / PIECE_BYTES {
            self.pieces[self.given_back] = Vec::new();
            self.given_back += 1;
        }
    }

    /// The bytes that it takes.
    pub(crate) fn held(&self) -> usize {
        self.pieces.iter().map(Vec::capacity).sum()
    }
}

/// What is written in one go.
pub(crate) type Slices<'a> = SmallVec<[IoSlice<'a>; 4]>;

/// How much is copied before other messages get their turn.
pub(crate) const PIECE_BYTES: usize = 1 << 20;
