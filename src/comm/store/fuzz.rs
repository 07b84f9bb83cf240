//! A client of the store's server that says what the fuzzer likes, and a server that answers so.

use std::time::Instant;

use super::VALUE_LIMIT;
use super::protocol::{REPLY_HEADER_BYTES, Reply};
use super::server::{Client, SHELF_LIMIT, Shelf};
use crate::fuzz_input::{Input, Wire};

/// Requests of one connection, or a reply.
pub(crate) fn store(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    if input.byte().is_multiple_of(4) {
        return reply(input);
    }
    let mut shelf = Shelf::new(SHELF_LIMIT);
    shelf.set("known", b"value");
    let mut client = Client::new(Wire::new(input), ([127, 0, 0, 1], 1).into(), None);
    while !client.gone {
        client.step(|client| client.advance(&mut shelf));
        // No time passes for a client that waits: nobody else will set its key.
        client.step(|client| client.look(&shelf, Instant::now()));
    }
    assert!(shelf.get("known").is_some(), "a client took away what another had set");
}

fn reply(mut input: Input<'_>) {
    let header: [u8; REPLY_HEADER_BYTES] = input.array();
    if let Ok(length) = Reply::length(&header) {
        assert!(length <= VALUE_LIMIT);
        if let Ok(reply) = Reply::parse(&header, input.take(length).to_vec()) {
            assert_eq!(reply.encode()[0], header[0]);
        }
    }
}
