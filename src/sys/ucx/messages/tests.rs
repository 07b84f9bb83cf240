//! Messages over a library that tells what was not given back.

use super::*;
use crate::sys::fork::testing::holds_in_a_child;
use crate::sys::ucx::RegisteredMemory;
use crate::sys::ucx::fake::{Fake, calls};

/// A worker that sends, its way to one that receives, and that one.
fn pair() -> (Fake, Messenger, Recipient, Messenger) {
    let (context, fake) = Fake::context();
    let [sender, receiver] = [(); 2].map(|()| Messenger::new(&context).unwrap());
    let recipient = sender.recipient(&receiver.address().unwrap()).unwrap();
    (fake, sender, recipient, receiver)
}

fn arrived(messenger: &Messenger) -> Vec<Arrived> {
    let mut arrived = Vec::new();
    messenger.progress(&mut arrived);
    arrived
}

#[test]
fn the_request_of_a_message_is_freed_once_it_has_left() {
    let (fake, sender, mut recipient, _receiver) = pair();
    fake.sends_take(2);
    recipient.send(vec![1; 10]).unwrap();
    recipient.send(vec![2; 10]).unwrap();
    arrived(&sender);
    assert_eq!((recipient.sweep(), fake.requests()), (false, 2));
    arrived(&sender);
    assert_eq!((recipient.sweep(), fake.requests()), (true, 0));
}

#[test]
fn the_request_of_a_flush_is_freed_once_it_has_ended() {
    let (fake, sender, mut recipient, _receiver) = pair();
    assert_eq!((recipient.flush(), fake.requests()), (Ok(true), 0));
    for _ in 0..2 {
        fake.flushes_take(2);
        for expected in [false, false, true] {
            assert_eq!((recipient.flush(), fake.requests()), (Ok(expected), usize::from(!expected)));
            arrived(&sender);
        }
    }
}

#[test]
fn a_connection_that_ends_frees_what_was_under_way() {
    for (sends, flushes) in [(9, 0), (0, 9), (9, 9)] {
        let (fake, _sender, mut recipient, _receiver) = pair();
        fake.sends_take(sends);
        fake.flushes_take(flushes);
        recipient.send(vec![1; 10]).unwrap();
        assert_eq!(recipient.flush(), Ok(flushes == 0));
        assert_eq!(fake.requests(), usize::from(sends > 0) + usize::from(flushes > 0));
        drop(recipient);
        assert_eq!((fake.requests(), fake.endpoints()), (0, 0));
    }
}

#[test]
fn the_librarys_part_of_a_request_begins_as_zeros_and_nothing_else_is_touched() {
    let (fake, _sender, mut recipient, _receiver) = pair();
    fake.sends_take(1);
    recipient.send(vec![1; 10]).unwrap();
    assert_eq!((fake.requests(), fake.clean_requests()), (1, 1));
}

#[test]
fn the_memory_of_long_messages_is_given_back() {
    let (fake, sender, mut recipient, receiver) = pair();
    for len in [COPIED_MAX, COPIED_MAX + 1] {
        recipient.send(vec![3; len]).unwrap();
    }
    let messages = arrived(&receiver);
    assert!(messages.iter().map(|message| message.len()).eq([COPIED_MAX, COPIED_MAX + 1]));
    assert!(messages.iter().all(|message| message.iter().all(|byte| *byte == 3)));
    assert_eq!(fake.kept(), 1);
    drop(messages);
    assert_eq!(fake.kept(), 0);

    let back = receiver.recipient(&sender.address().unwrap()).unwrap();
    recipient.send(vec![4; COPIED_MAX + 1]).unwrap();
    // The end of a connection of this worker takes what has come, which nobody asks for.
    drop(back);
    assert_eq!(fake.kept(), 1);
    drop(receiver);
    assert_eq!(fake.kept(), 0);
}

#[test]
fn that_an_endpoint_has_failed_is_told_once() {
    let (fake, sender, mut recipient, receiver) = pair();
    assert!(!sender.take_failed() && recipient.failure().is_none());
    fake.fail_endpoints();
    arrived(&sender);
    assert!(sender.take_failed() && !sender.take_failed());
    let failure = recipient.failure().expect("it has failed").to_string();
    assert_eq!(failure, "the connection: it fails");
    assert_eq!(recipient.send(vec![1; 10]).expect_err("it has failed").to_string(), "ucp_am_send_nbx: it fails");
    assert!(recipient.flush().is_err());
    assert!(!receiver.take_failed(), "it has no endpoint");
}

#[test]
fn a_connection_that_has_just_failed_is_closed_after_it_was_told() {
    let (fake, _sender, recipient, _receiver) = pair();
    fake.fail_endpoints();
    drop(recipient);
    assert_eq!((fake.endpoints(), fake.crashes()), (0, 0));
}

#[test]
fn a_forked_child_drops_its_parents_messages_and_connections_without_a_call() {
    let (fake, sender, mut recipient, receiver) = pair();
    recipient.send(vec![5; COPIED_MAX + 1]).unwrap();
    let message = arrived(&receiver);
    // What nobody has asked for, as above.
    recipient.send(vec![6; COPIED_MAX + 1]).unwrap();
    drop(receiver.recipient(&sender.address().unwrap()));
    fake.sends_take(9);
    recipient.send(vec![7; 10]).unwrap();
    let mut parents = Some((message, recipient, sender, receiver));
    assert!(holds_in_a_child(|| {
        let before = calls();
        drop(parents.take());
        calls() == before
    }));
    assert_eq!((fake.kept(), fake.requests(), fake.endpoints()), (2, 1, 1));
    drop(parents);
    assert_eq!((fake.kept(), fake.requests(), fake.endpoints()), (0, 0, 0));
}

/// Memory of the peer with such content, its registration, and memory to read it to.
fn exposed(receiver: &Messenger, content: &[u8]) -> (Arc<LentBytes>, Arc<RegisteredMemory>, Arc<LentBytes>) {
    let bytes = Arc::new(LentBytes::owned(content.to_vec()));
    let registered = RegisteredMemory::of(&receiver.context(), &bytes).unwrap();
    (bytes, registered, Arc::new(LentBytes::owned(vec![0; content.len()])))
}

fn content(bytes: &LentBytes) -> Vec<u8> {
    let mut content = vec![0; bytes.len()];
    bytes.copy_out(0, &mut content);
    content
}

#[test]
fn a_read_ends_after_progress_and_gives_back_its_request_and_its_key() {
    let (fake, sender, mut recipient, receiver) = pair();
    let (bytes, registered, into) = exposed(&receiver, &[1, 2, 3, 4, 5]);
    for turns in [0, 2] {
        fake.gets_take(turns);
        recipient.get(7, (bytes.address() + 1, registered.key()), (&into, 2, 3)).unwrap();
        assert_eq!(recipient.has_got(), turns == 0);
        (0..turns).for_each(|_| drop(arrived(&sender)));
        assert_eq!((recipient.has_got(), fake.keys()), (true, 1));
        assert_eq!(recipient.take_got(), [(7, Ok(()))]);
        assert_eq!((fake.requests(), fake.keys(), content(&into)), (0, 0, vec![0, 0, 2, 3, 4]));
        into.copy_in(0, &[0; 5]);
    }
}

#[test]
fn a_read_that_fails_at_once_or_later_gives_back_what_it_had() {
    for at_once in [true, false] {
        let (fake, sender, mut recipient, receiver) = pair();
        let (bytes, registered, into) = exposed(&receiver, &[1, 2, 3]);
        fake.gets_take(1);
        fake.gets_fail(at_once);
        let begun = recipient.get(7, (bytes.address(), registered.key()), (&into, 0, 3));
        arrived(&sender);
        let failed = begun.and_then(|()| recipient.take_got().pop().expect("it has ended").1);
        assert_eq!(failed.expect_err("it fails").to_string(), "ucp_get_nbx: it fails");
        assert_eq!((fake.requests(), fake.keys(), content(&into)), (0, 0, vec![0; 3]));
    }
}

#[test]
fn a_connection_that_ends_ends_its_reads() {
    let (fake, _sender, mut recipient, receiver) = pair();
    let (bytes, registered, into) = exposed(&receiver, &[1, 2, 3]);
    fake.gets_take(u32::MAX);
    recipient.get(7, (bytes.address(), registered.key()), (&into, 0, 3)).unwrap();
    drop(recipient);
    assert_eq!((fake.requests(), fake.keys(), fake.endpoints()), (0, 0, 0));
    drop((bytes, registered, into));
    assert_eq!(fake.registered(), 0);
}

#[test]
fn memory_is_registered_until_it_is_dropped_and_in_a_forked_child_nothing_ends() {
    let (fake, _sender, recipient, receiver) = pair();
    let mut exposed = Some(exposed(&receiver, &[1, 2, 3]));
    assert_eq!(fake.registered(), 1);
    assert!(holds_in_a_child(|| {
        let before = calls();
        drop(exposed.take());
        calls() == before
    }));
    drop(exposed);
    assert_eq!(fake.registered(), 0);
    fake.refuse_memory();
    let refused = RegisteredMemory::of(&receiver.context(), &LentBytes::owned(vec![0; 3])).map(drop);
    assert_eq!(refused.expect_err("it is refused").to_string(), "ucp_mem_map: it fails");
    drop(recipient);
}
