use std::collections::VecDeque;

use proptest::prelude::*;

use super::piece::{HEADER_BYTES, Kind, OPEN_BYTES, PIECE_BYTES_MAX, PieceHeader, encode_open};
use super::reader::{Part, Reader};
use super::window::{RecvWindow, SendWindow, WINDOW_BYTES};
use crate::transport::auth::{Membership, PROOF_BYTES};
use crate::types::Rank;

fn piece(lane: u32, kind: Kind, body: &[u8]) -> Vec<u8> {
    [&PieceHeader { lane, kind, len: body.len() }.encode(), body].concat()
}

/// What a reader tells of bytes that come in parts of so many.
fn read(bytes: &[u8], parts: usize) -> Result<Vec<(u32, String, Vec<u8>)>, String> {
    let (mut reader, mut seen) = (Reader::default(), Vec::<(u32, String, Vec<u8>)>::new());
    for part in bytes.chunks(parts) {
        let fed = reader.feed(part, |lane, part| {
            let (name, data) = match part {
                Part::Data(data) => ("data".to_owned(), data.to_vec()),
                other => (format!("{other:?}"), Vec::new()),
            };
            match seen.last_mut() {
                Some((last, kind, kept)) if *last == lane && *kind == name && name == "data" => kept.extend(data),
                _ => seen.push((lane, name, data)),
            }
            Ok(())
        });
        fed.map_err(|down| down.cause)?;
    }
    Ok(seen)
}

#[test]
fn pieces_survive_the_wire_wherever_their_bytes_are_cut() {
    let membership = Membership { comm: [7; 16], from: Rank(1), to: Rank(258) };
    let proof: [u8; PROOF_BYTES] = std::array::from_fn(|i| i as u8);
    let bytes = [
        piece(1, Kind::Open, &encode_open(&membership, &proof)),
        piece(2, Kind::Accepted, &[]),
        piece(1, Kind::Data, b"hello"),
        piece(u32::MAX, Kind::Data, &[9; 1000]),
        piece(2, Kind::Credit, &70_000u32.to_le_bytes()),
        piece(3, Kind::Closed, &[]),
        piece(1, Kind::End, &[]),
    ]
    .concat();
    let expected = [
        (1, format!("{:?}", Part::Open(membership, proof)), vec![]),
        (2, "Accepted".to_owned(), vec![]),
        (1, "data".to_owned(), b"hello".to_vec()),
        (u32::MAX, "data".to_owned(), vec![9; 1000]),
        (2, "Credit(70000)".to_owned(), vec![]),
        (3, "Closed".to_owned(), vec![]),
        (1, "End".to_owned(), vec![]),
    ];
    for parts in [1, 2, 3, 7, 8, 9, 63, 64, bytes.len()] {
        assert_eq!(read(&bytes, parts).as_deref(), Ok(&expected[..]), "in parts of {parts}");
    }
}

#[test]
fn pieces_of_unknown_kinds_and_of_other_lengths_are_refused() {
    let [open, data] = [OPEN_BYTES, PIECE_BYTES_MAX].map(|len| len as u32);
    for (kind, len) in [(0, open - 1), (1, 0), (1, data + 1), (2, 1), (3, 1), (4, 5), (5, 1), (6, 0), (255, 0)] {
        let mut header = [0; HEADER_BYTES];
        header[4..7].copy_from_slice(&len.to_le_bytes()[..3]);
        header[7] = kind;
        let refused = read(&header, 8).expect_err("it is refused before it has come");
        assert!(refused.contains(&format!("of {len} bytes and of kind {kind}")), "{refused}");
    }
}

#[test]
fn a_writer_that_exceeds_its_window_and_a_reader_that_takes_what_was_not_sent_are_found_out() {
    let mut recv = RecvWindow::default();
    recv.arrive(&vec![1; WINDOW_BYTES]).expect("it may be sent");
    let refused = recv.arrive(&[1]).expect_err("it may not").cause;
    assert_eq!(
        refused,
        format!("it sent {} bytes of a lane that were not taken: expected at most {WINDOW_BYTES}", WINDOW_BYTES + 1)
    );
    // Also what was taken counts until the writer is told.
    assert_eq!((recv.take(&mut [0; 10]), recv.credit()), (10, None));
    assert!(recv.arrive(&[1]).is_err());
    let mut send = SendWindow::new();
    send.sent(100);
    let refused = send.credit(101).expect_err("it was not sent").cause;
    assert_eq!(refused, "it took 101 bytes of a lane: expected at most 100, which it was sent");
    assert_eq!((send.credit(100).is_ok(), send.room()), (true, WINDOW_BYTES));
}

#[test]
fn credit_comes_back_in_time_for_a_writer_that_waits() {
    let (mut send, mut recv) = (SendWindow::new(), RecvWindow::default());
    recv.arrive(&vec![1; WINDOW_BYTES]).expect("it may be sent");
    send.sent(WINDOW_BYTES);
    let mut buffer = vec![0; 1000];
    while !recv.is_empty() {
        recv.take(&mut buffer);
        if let Some(credit) = recv.credit() {
            send.credit(credit).expect("it was sent");
        }
    }
    assert!(send.room() > WINDOW_BYTES / 2, "{}", send.room());
}

proptest! {
    /// Lanes over one connection, of which each is read when it is its turn: all bytes come, in order, and no lane waits for another.
    #[test]
    fn lanes_deliver_everything_in_order_and_do_not_stop_each_other(
        steps in prop::collection::vec((0..4usize, 0..4usize, 1..100_000usize), 1..200),
    ) {
        const LANES: usize = 3;
        let mut sends: [SendWindow; LANES] = std::array::from_fn(|_| SendWindow::new());
        let mut recvs: [RecvWindow; LANES] = std::array::from_fn(|_| RecvWindow::default());
        let (mut sent, mut taken) = ([0usize; LANES], [0usize; LANES]);
        let (mut there, mut back) = (VecDeque::<u8>::new(), VecDeque::<u8>::new());
        let (mut near, mut far) = (Reader::default(), Reader::default());
        let byte = |lane: usize, at: usize| (at.wrapping_mul(31) + lane) as u8;
        for (action, lane, size) in steps {
            let lane = lane % LANES;
            match action {
                0 => {
                    let count = size.min(sends[lane].room()).min(PIECE_BYTES_MAX);
                    if count > 0 {
                        let body: Vec<u8> = (0..count).map(|i| byte(lane, sent[lane] + i)).collect();
                        there.extend(piece(lane as u32, Kind::Data, &body));
                        sends[lane].sent(count);
                        sent[lane] += count;
                    }
                }
                1 => {
                    let bytes: Vec<u8> = there.drain(..size.min(there.len())).collect();
                    far.feed(&bytes, |lane, part| match part {
                        Part::Data(data) => recvs[lane as usize].arrive(data),
                        other => panic!("{other:?}"),
                    }).unwrap();
                }
                2 => {
                    let mut into = vec![0; size];
                    let count = recvs[lane].take(&mut into);
                    for (i, value) in into[..count].iter().enumerate() {
                        prop_assert_eq!(*value, byte(lane, taken[lane] + i));
                    }
                    taken[lane] += count;
                    if let Some(credit) = recvs[lane].credit() {
                        back.extend(piece(lane as u32, Kind::Credit, &credit.to_le_bytes()));
                    }
                }
                _ => {
                    let bytes: Vec<u8> = back.drain(..size.min(back.len())).collect();
                    near.feed(&bytes, |lane, part| match part {
                        Part::Credit(count) => sends[lane as usize].credit(count),
                        other => panic!("{other:?}"),
                    }).unwrap();
                }
            }
        }
        // Whatever waits in the connection can be taken out of it, though no lane is read.
        let bytes: Vec<u8> = there.drain(..).collect();
        far.feed(&bytes, |lane, part| match part {
            Part::Data(data) => recvs[lane as usize].arrive(data),
            other => panic!("{other:?}"),
        }).unwrap();
        for lane in 0..LANES {
            let mut rest = vec![0; WINDOW_BYTES];
            taken[lane] += recvs[lane].take(&mut rest);
        }
        prop_assert_eq!(sent, taken);
    }

    #[test]
    fn arbitrary_bytes_are_pieces_or_refused(bytes: Vec<u8>, parts in 1..20usize) {
        let whole = read(&bytes, bytes.len().max(1));
        prop_assert_eq!(read(&bytes, parts), whole);
    }
}
