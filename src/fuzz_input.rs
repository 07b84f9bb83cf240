//! Decisions and data from the fuzzer's bytes.

use std::io::{self, Read, Write};

/// Bytes from which a target takes decisions and data; zeros once they are used up.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Input(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `count` bytes, or as many as are left.
    pub(crate) fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(crate) fn rest(&mut self) -> &'a [u8] {
        self.take(usize::MAX)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.take(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Mostly a small number, sometimes any.
    pub(crate) fn number(&mut self) -> u64 {
        match self.byte() {
            0xff => u64::from_le_bytes(self.array()),
            0xfe => 1 << 63 | u64::from(self.byte()),
            small => small.into(),
        }
    }
}

/// A connection to the fuzzer that does not block: reads give the input in pieces, writes take a few bytes at a time.
pub(crate) struct Wire<'a> {
    input: Input<'a>,
    pub(crate) sent: Vec<u8>,
}

impl<'a> Wire<'a> {
    pub(crate) fn new(input: Input<'a>) -> Self {
        Wire { input, sent: Vec::new() }
    }

    /// Whether the input is used up: the next read finds the stream's end.
    pub(crate) fn is_over(&self) -> bool {
        self.input.is_empty()
    }
}

impl Read for Wire<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.is_over() {
            return Ok(0);
        }
        let wished = usize::from(self.input.byte());
        let piece = self.input.take(wished.min(into.len()));
        if piece.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        into[..piece.len()].copy_from_slice(piece);
        Ok(piece.len())
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(50);
        self.sent.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
