//! Fuzz target of the store: the requests of one connection, and the server's replies.

use std::time::Instant;

use super::protocol::{REPLY_HEADER_BYTES, Reply, VALUE_LIMIT};
use super::server::{Client, VALUES_BYTES_MAX, Values};
use crate::fuzz_input::{Input, Wire};

/// Requests of one connection, or a reply.
pub(crate) fn store(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    if input.byte().is_multiple_of(4) {
        return reply(input);
    }
    let mut values = Values::new(VALUES_BYTES_MAX);
    values.set("known", b"value");
    let mut client = Client::new(Wire::new(input), ([127, 0, 0, 1], 1).into(), None);
    while !client.is_closed {
        client.step(|client| client.advance(&mut values));
        // No time passes for a client that waits: no other client will set its key.
        client.step(|client| client.answer_or_expire(&values, Instant::now()));
    }
    assert!(values.get("known").is_some(), "a client took away what another had set");
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
