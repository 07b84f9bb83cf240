//! Fuzz target of what a transport takes from others: addresses, keys, requests and the headers of answers.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::fuzz_input::Input;
use crate::rdma::memory::{Key, MemoryRegion};
use crate::rdma::protocol::{ANSWER_BYTES, Answer, PIECE_BYTES, REQUEST_BYTES};
use crate::rdma::server;
use crate::rdma::ucx::Introduction;
use crate::rdma::wire::{Address, VERSION, Wire};
use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;

/// One of these, or the requests of a connection whose sides have proved themselves.
pub(crate) fn rdma(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 4 {
        0 => address(input.rest()),
        1 => key(input.rest()),
        2 => answer(&input.array()),
        _ => requests(&mut input),
    }
}

fn address(bytes: &[u8]) {
    let _ = Introduction::decode(bytes);
    let Ok(address) = Address::parse(bytes) else { return };
    assert_eq!(address.version, VERSION);
    let written = serde_json::to_vec(&address).expect("an address is plain data");
    let again = Address::parse(&written).expect("an address that was read");
    assert_eq!(again.name(), address.name());
}

fn key(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let is_key = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parsed = text.parse::<Key>();
    assert_eq!(parsed.is_ok(), is_key, "{text:?}");
    if let Ok(key) = parsed {
        assert_eq!(key.reveal(), text.to_ascii_lowercase());
    }
}

fn answer(head: &[u8; ANSWER_BYTES]) {
    if let Ok(answer) = Answer::decode(head) {
        assert!(answer.len <= PIECE_BYTES);
        assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
    }
}

/// Requests of a peer that has the key to a part of some memory. It changes what the key opens and nothing else.
fn requests(input: &mut Input<'_>) {
    let memory = MemoryRegion::new(Arc::new(LentBytes::owned(vec![UNTOUCHED; BEFORE + GRANTED + AFTER])));
    let granted = memory.remote_buffer(BEFORE, GRANTED).expect("inside");
    let mut sent = Vec::new();
    while !input.is_empty() {
        let mut head: [u8; REQUEST_BYTES] = input.array();
        // Zeros stand for the key and the address, which the fuzzer cannot know.
        head[8..24].iter_mut().zip(granted.key.to_bytes()).for_each(|(byte, own)| *byte ^= own);
        let ahead = u64::from_le_bytes(std::array::from_fn(|at| head[24 + at]));
        head[24..32].copy_from_slice(&granted.address.wrapping_add(ahead).to_le_bytes());
        sent.extend_from_slice(&head);
        let payload = usize::from(input.byte());
        sent.extend_from_slice(input.take(payload));
    }
    let (mut peer, served) = UnixStream::pair().expect("a pair of sockets");
    // Its buffers hold all requests and all answers, so nobody waits for anybody.
    peer.write_all(&sent).expect("room");
    peer.shutdown(Shutdown::Write).expect("an end");
    // Its end, for whatever reason, is what a peer may cause.
    let _ = server::serve_proved(Wire::unix(served).expect("a connection"), &Err("none in a fuzzer".to_owned()));
    let mut answers = Vec::new();
    match peer.read_to_end(&mut answers) {
        // What had been sent behind a request that was refused was not read.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        read => _ = read.expect("the answers"),
    }
    let mut rest = answers.as_slice();
    while let Some((head, behind)) = rest.split_first_chunk::<ANSWER_BYTES>() {
        let answer = Answer::decode(head).expect("an answer of this version");
        rest = &behind[answer.len..];
    }
    assert!(rest.is_empty(), "a part of an answer: {rest:?}");
    let mut after = vec![0; BEFORE + GRANTED + AFTER];
    memory.bytes().copy_out(0, &mut after);
    let mut outside = after[..BEFORE].iter().chain(&after[BEFORE + GRANTED..]);
    assert!(outside.all(|byte| *byte == UNTOUCHED), "bytes were written that the key does not open");
}

const UNTOUCHED: u8 = 0xee;
/// Bytes around those that the key opens.
const BEFORE: usize = 40;
const GRANTED: usize = 64;
const AFTER: usize = 300;
