//! Fuzz target of what comes from a peer through UCX, and through the connection beside it while a stream is opened.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};

use crate::fuzz_input::Input;
use crate::transport::handshake::Exchange;
use crate::transport::ucx::handover::{Introduction, Reading};
use crate::transport::ucx::header::Header;
use crate::transport::ucx::ordered::Ordered;

/// One of these: a message, an introduction, or the numbers of pieces.
pub(crate) fn ucx(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 3 {
        0 => message(input.rest()),
        1 => {
            let step = usize::from(input.byte()) + 1;
            let bytes = input.rest();
            assert_eq!(introduction(bytes, step), introduction(bytes, usize::MAX), "in steps of {step}");
        }
        _ => pieces(input.rest()),
    }
}

fn message(bytes: &[u8]) {
    let Some(header) = Header::decode(bytes) else { return };
    assert_eq!(header.encode(), bytes[..Header::BYTES]);
}

/// A connection on which so many bytes come at a time.
struct Trickle<'a> {
    left: &'a [u8],
    step: usize,
    is_due: bool,
}

impl Read for Trickle<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.is_due = !self.is_due;
        if !self.is_due {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = self.left.len().min(self.step).min(into.len());
        into[..count].copy_from_slice(&self.left[..count]);
        self.left = &self.left[count..];
        Ok(count)
    }
}

/// What is read from these bytes, and how many of them were taken; none if the connection ends before, or is refused.
fn introduction(bytes: &[u8], step: usize) -> Option<(Introduction, usize)> {
    let mut connection = Trickle { left: bytes, step, is_due: false };
    let (mut exchange, mut reading) = (Exchange::default(), Reading::default());
    let introduction = loop {
        match reading.drive(&mut exchange, &mut connection) {
            Ok(Some(introduction)) => break introduction,
            Ok(None) => {}
            Err(_) => return None,
        }
    };
    let taken = bytes.len() - connection.left.len();
    if introduction.address.is_ok() {
        assert_eq!(introduction.encode(), bytes[..taken]);
    }
    Some((introduction, taken))
}

/// Whatever the numbers, no piece is taken twice, nor before one with a lower number.
fn pieces(numbers: &[u8]) {
    const LIMIT: u64 = 16;
    let (mut ordered, mut taken) = (Ordered::new(LIMIT), VecDeque::new());
    for &number in numbers {
        // The highest bit has what is there taken.
        if number & 0x80 == 0 {
            ordered.keep(u64::from(number), number);
        } else {
            ordered.take(&mut taken);
        }
    }
    ordered.take(&mut taken);
    assert!(taken.iter().copied().eq(0..ordered.taken() as u8), "{taken:?}");
}
