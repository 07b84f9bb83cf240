//! Hubs and peers that err, are gone, or are who they say they are not.

use super::*;
use crate::sys::fork::testing::holds_in_a_child;
use crate::sys::ucx::fake::{Fake, calls};
use crate::sys::ucx::{Context, Version};
use crate::transport::ucx::link::WINDOW;
use crate::transport::ucx::mock_peer::MockPeer;

const PEER: Rank = MockPeer::RANK;

/// The hub of rank 0, and a peer that has its address.
fn hub() -> (Fake, Arc<Hub>, MockPeer) {
    let (context, fake) = Fake::context();
    let hub = Hub::new(Rank(0), Allowed::given(&context), Need::Any, Poller::new().unwrap());
    let mut peer = MockPeer::new(&context);
    peer.connect(&hub.address().unwrap());
    (fake, hub, peer)
}

/// The stream to the peer, which has answered.
fn outflow(hub: &Arc<Hub>, peer: &mut MockPeer, session: u64) -> Outflow {
    let outflow = hub.open_to(PEER, session, &peer.address()).unwrap();
    assert!(peer.received().contains(&(Kind::Probe, session, 0)));
    peer.send(Kind::Credit, session, 0, &[]);
    assert_eq!(outflow.is_granted(), Ok(true));
    outflow
}

/// The streams that the hub names.
fn named(hub: &Hub) -> Vec<StreamName> {
    let mut named = Vec::new();
    hub.look(&mut named);
    named
}

/// The bytes of the pieces that the stream has now.
fn received(inflow: &Inflow) -> Vec<Vec<u8>> {
    let mut pieces = VecDeque::new();
    inflow.receive(&mut pieces);
    pieces.iter().map(|piece| piece[Header::BYTES..].to_vec()).collect()
}

#[test]
fn what_comes_for_another_session_or_from_another_rank_is_dropped() {
    let (_fake, hub, mut peer) = hub();
    let inflow = hub.open_from(PEER, &peer.address()).unwrap();
    let session = inflow.session();

    peer.send(Kind::Probe, session ^ 1, 0, &[]);
    assert!(!hub.look(&mut Vec::new()), "no caller goes on");
    assert_eq!(inflow.answer_probe(), Ok(false));
    peer.send(Kind::Probe, session, 0, &[]);
    assert!(hub.look(&mut Vec::new()));
    assert_eq!(inflow.answer_probe(), Ok(true));
    assert_eq!(peer.received(), [(Kind::Credit, session, 0)]);

    assert!(!inflow.arm());
    peer.send(Kind::Piece, session ^ 1, 0, b"of another session");
    peer.pose_as(Rank(2));
    peer.send(Kind::Piece, session, 0, b"of another rank");
    peer.pose_as(PEER);
    peer.send(Kind::Piece, session, WINDOW, b"without credit");
    assert_eq!((named(&hub), received(&inflow)), (vec![], vec![]));
    peer.send(Kind::Piece, session, 0, b"a");
    assert_eq!((named(&hub), received(&inflow)), (vec![StreamName::From(PEER)], vec![b"a".to_vec()]));
}

#[test]
fn a_credit_of_another_session_opens_no_stream_and_makes_no_room() {
    let (_fake, hub, mut peer) = hub();
    let outflow = hub.open_to(PEER, 7, &peer.address()).unwrap();
    assert_eq!(peer.received(), [(Kind::Probe, 7, 0)]);
    assert_eq!((outflow.is_granted(), outflow.write(b"early", &[])), (Ok(false), Ok(0)));
    peer.send(Kind::Credit, 8, 0, &[]);
    assert_eq!((outflow.is_granted(), named(&hub)), (Ok(false), vec![]));
    peer.send(Kind::Credit, 7, 0, &[]);
    assert_eq!((outflow.is_granted(), named(&hub)), (Ok(true), vec![StreamName::To(PEER)]));

    while outflow.write(b"short", &[]) == Ok(5) {}
    let spent = outflow.sent();
    peer.send(Kind::Credit, 8, spent, &[]);
    assert!(!outflow.arm() && outflow.write(b"short", &[]) == Ok(0));
}

#[test]
fn credits_count_up_to_what_was_spent() {
    let (_fake, hub, mut peer) = hub();
    let outflow = outflow(&hub, &mut peer, 7);
    let fill = || {
        while outflow.write(b"short", &[]) == Ok(5) {}
        outflow.sent()
    };
    // Each costs one.
    let spent = fill();
    named(&hub);
    assert!(spent > WINDOW / 2 && spent <= WINDOW, "{spent}");
    for number in [spent + 1, u64::MAX] {
        peer.send(Kind::Credit, 7, number, &[]);
        assert_eq!(fill(), spent, "a credit of {number}");
    }
    assert!(!outflow.arm());
    peer.send(Kind::Credit, 7, spent, &[]);
    assert_eq!(named(&hub), [StreamName::To(PEER)]);
    // One that is late takes nothing back.
    peer.send(Kind::Credit, 7, 1, &[]);
    assert_eq!(fill(), 2 * spent);
}

#[test]
fn a_link_ends_with_the_last_of_its_streams() {
    for outflow_is_first in [true, false] {
        let (fake, hub, mut peer) = hub();
        let outflow = outflow(&hub, &mut peer, 7);
        let inflow = hub.open_from(PEER, &peer.address()).unwrap();
        let session = inflow.session();
        // The peer's own is the other.
        assert_eq!(fake.endpoints(), 2);
        if outflow_is_first {
            drop(outflow);
            peer.send(Kind::Piece, session, 0, b"a");
            assert_eq!((received(&inflow), fake.endpoints()), (vec![b"a".to_vec()], 2));
            drop(inflow);
        } else {
            drop(inflow);
            assert_eq!((outflow.write(b"a", &[]), fake.endpoints()), (Ok(1), 2));
            drop(outflow);
        }
        assert_eq!(fake.endpoints(), 1);
        assert_eq!(hub.open_from(PEER, &peer.address()).map(drop), Ok(()), "it can come back");
    }
}

#[test]
fn the_end_of_a_stream_that_was_replaced_leaves_the_new_one_alone() {
    let (_fake, hub, mut peer) = hub();
    let old = outflow(&hub, &mut peer, 7);
    let new = outflow(&hub, &mut peer, 8);
    drop(old);
    assert_eq!((new.write(b"a", &[]), new.sent()), (Ok(1), 1));

    let old = hub.open_from(PEER, &peer.address()).unwrap();
    let new = hub.open_from(PEER, &peer.address()).unwrap();
    drop(old);
    peer.send(Kind::Piece, new.session(), 0, b"a");
    assert_eq!(received(&new), [b"a"]);
}

#[test]
fn a_rank_that_has_a_stream_gets_no_second_one() {
    let (_fake, hub, peer) = hub();
    let inflow = hub.open_from(PEER, &peer.address()).unwrap();
    inflow.opened();
    let refusal = hub.open_from(PEER, &peer.address()).map(drop);
    assert_eq!(refusal, Err("it has a stream from this rank already".to_owned()));
    drop(inflow);
    assert_eq!(hub.open_from(PEER, &peer.address()).map(drop), Ok(()));
}

#[test]
fn the_streams_of_a_link_that_fails_are_named_once_and_of_no_use() {
    let (fake, hub, mut peer) = hub();
    let outflow = outflow(&hub, &mut peer, 7);
    let inflow = hub.open_from(PEER, &peer.address()).unwrap();
    hub.progress();
    named(&hub);
    assert!(!inflow.arm() && outflow.check().is_ok());
    fake.fail_endpoints();
    assert!(hub.arm(), "streams are ready");
    let mut names = named(&hub);
    names.sort_by_key(|name| *name == StreamName::To(PEER));
    assert_eq!(names, [StreamName::From(PEER), StreamName::To(PEER)]);
    assert_eq!(named(&hub), []);
    for down in [outflow.check().err(), outflow.write(b"a", &[]).err(), inflow.receive(&mut VecDeque::new()).1] {
        assert!(down.is_some_and(|down| down.cause == "UCX: the connection: it fails"));
    }
    assert!(outflow.arm() && inflow.arm());
}

#[test]
fn a_link_that_fails_before_the_answer_has_hung_up() {
    let (fake, hub, peer) = hub();
    let outflow = hub.open_to(PEER, 7, &peer.address()).unwrap();
    let inflow = hub.open_from(PEER, &peer.address()).unwrap();
    fake.fail_endpoints();
    assert_eq!(outflow.is_granted().expect_err("it has failed").kind, crate::error::Down::HungUp);
    assert!(inflow.answer_probe().is_err());
}

#[test]
fn bytes_are_held_until_software_has_sent_them() {
    let (fake, hub, mut peer) = hub();
    let outflow = outflow(&hub, &mut peer, 7);
    assert!(!hub.holds_bytes());
    fake.flushes_take(3);
    assert_eq!(outflow.write(b"a", &[]), Ok(1));
    let turns = (0..9).take_while(|_| hub.holds_bytes()).count();
    assert!((1..9).contains(&turns), "{turns} turns");
    assert_eq!((fake.flushes(), fake.requests()), (2, 0));
}

#[test]
fn a_forked_child_drops_its_parents_streams_without_the_lock_and_without_a_call() {
    let (fake, hub, mut peer) = hub();
    let mut flows = Some((outflow(&hub, &mut peer, 7), hub.open_from(PEER, &peer.address()).unwrap()));
    // As while another thread is in the hub.
    let held = hub.state();
    assert!(holds_in_a_child(|| {
        let before = calls();
        drop(flows.take());
        calls() == before
    }));
    drop(held);
    assert_eq!(fake.endpoints(), 2);
    drop(flows);
    assert_eq!(fake.endpoints(), 1);
}

/// A hub whose UCX goes through `way`, its stream to the peer, and what the peer has exposed.
fn reader(way: &'static std::ffi::CStr, version: Version) -> (Fake, Arc<Hub>, Outflow, Arc<LentBytes>, Exposure) {
    let (context, fake) = Fake::of_version(version);
    fake.go_through(way);
    let (hub, theirs) = (hub_of(&context, 0), hub_of(&context, 1));
    let mut peer = MockPeer::new(&context);
    peer.connect(&hub.address().unwrap());
    let outflow = outflow(&hub, &mut peer, 7);
    let bytes = Arc::new(LentBytes::owned((0..100).collect()));
    let exposure = theirs.expose(&bytes).expect("it can");
    named(&hub);
    (fake, hub, outflow, bytes, exposure)
}

fn hub_of(context: &Arc<Context>, me: u32) -> Arc<Hub> {
    Hub::new(Rank(me), Allowed::given(context), Need::Any, Poller::new().unwrap())
}

fn begin(outflow: &Outflow, token: u64, bytes: &LentBytes, exposure: &Exposure) -> Read {
    outflow.begin_read(token, RemoteMemory { address: bytes.address() + token, len: 3, key: exposure.key() })
}

/// The tokens of reads that have ended, and what they have brought.
fn taken(hub: &Hub) -> Vec<(u64, Option<[u8; 3]>)> {
    let mut taken = Vec::new();
    hub.take_reads(&mut |token, result| {
        let bytes = result.ok().map(|bytes| {
            let mut first = [0; 3];
            bytes.copy_out(0, &mut first);
            first
        });
        taken.push((token, bytes));
    });
    taken.sort_unstable();
    taken
}

#[test]
fn as_many_reads_as_have_room_are_under_way_and_nobody_sleeps_over_them() {
    let (fake, hub, outflow, bytes, exposure) = reader(c"cma", Version::READS_BY_CMA);
    fake.gets_take(3);
    hub.progress();
    assert!(!hub.arm(), "nothing is under way");
    let begun: Vec<Read> = (0..5).map(|token| begin(&outflow, token, &bytes, &exposure)).collect();
    assert_eq!(begun, [Read::Begun, Read::Begun, Read::Begun, Read::Begun, Read::Busy]);
    assert!(hub.arm(), "only calls bring them forward");
    let mut ended = Vec::new();
    for _ in 0..3 {
        ended.extend(taken(&hub));
    }
    let expected: Vec<_> = (0..4).map(|token| (token, Some([0, 1, 2].map(|at| at + token as u8)))).collect();
    assert_eq!((ended, fake.requests(), fake.keys()), (expected, 0, 0));
    assert!(!hub.arm());
    assert_eq!(begin(&outflow, 9, &bytes, &exposure), Read::Begun);
}

#[test]
fn a_devices_reads_are_waited_for_asleep_until_one_has_ended() {
    let (fake, hub, outflow, bytes, exposure) = reader(c"rc_mlx5", Version::OLDEST);
    fake.gets_take(4);
    assert_eq!(begin(&outflow, 1, &bytes, &exposure), Read::Begun);
    assert!(!hub.arm());
    (0..4).for_each(|_| hub.progress());
    assert!(hub.arm(), "one is to be taken");
    assert_eq!(taken(&hub), [(1, Some([1, 2, 3]))]);
    assert!(!hub.arm());
}

#[test]
fn what_would_ask_the_peers_process_reads_nothing() {
    for (way, version) in
        [(c"tcp", Version::READS_BY_CMA), (c"posix", Version::READS_BY_CMA), (c"cma", Version::OLDEST)]
    {
        let (_fake, _hub, outflow, bytes, exposure) = reader(way, version);
        assert_eq!(begin(&outflow, 1, &bytes, &exposure), Read::Unable, "{way:?} of {version}");
    }
}

#[test]
fn a_way_on_which_a_read_has_failed_reads_no_more_and_its_streams_go_on() {
    for at_once in [true, false] {
        let (fake, hub, outflow, bytes, exposure) = reader(c"cma", Version::READS_BY_CMA);
        fake.gets_take(1);
        fake.gets_fail(at_once);
        let begun = begin(&outflow, 1, &bytes, &exposure);
        assert_eq!(begun, if at_once { Read::Unable } else { Read::Begun });
        assert_eq!(taken(&hub), if at_once { vec![] } else { vec![(1, None)] });
        assert_eq!(begin(&outflow, 2, &bytes, &exposure), Read::Unable);
        assert_eq!((outflow.write(b"a", &[]), fake.requests(), fake.keys()), (Ok(1), 0, 0));
    }
}

#[test]
fn nothing_is_read_by_a_key_whose_memory_is_taken_back() {
    let (fake, hub, outflow, bytes, exposure) = reader(c"cma", Version::READS_BY_CMA);
    let key = exposure.key().to_vec();
    fake.gets_take(2);
    assert_eq!(begin(&outflow, 1, &bytes, &exposure), Read::Begun);
    let address = bytes.address();
    drop((bytes, exposure));
    assert_eq!((taken(&hub), taken(&hub)), (vec![], vec![(1, None)]));
    assert_eq!(outflow.begin_read(2, RemoteMemory { address, len: 3, key: &key }), Read::Unable);
}

#[test]
fn a_link_that_fails_or_ends_amid_reads_leaves_nothing_of_them() {
    for fails in [true, false] {
        let (fake, hub, outflow, bytes, exposure) = reader(c"cma", Version::READS_BY_CMA);
        fake.gets_take(u32::MAX);
        assert_eq!(begin(&outflow, 1, &bytes, &exposure), Read::Begun);
        if fails {
            fake.fail_endpoints();
            hub.progress();
            assert_eq!(begin(&outflow, 2, &bytes, &exposure), Read::Unable);
        }
        drop(outflow);
        assert_eq!((taken(&hub), fake.requests(), fake.keys()), (vec![], 0, 0));
        named(&hub);
        assert!(!hub.arm());
    }
}

#[test]
fn a_rank_that_may_do_without_ucx_exposes_nothing_before_it_has_a_stream() {
    let (context, fake) = Fake::context();
    let bytes = Arc::new(LentBytes::owned(vec![0; 3]));
    let hub = Hub::new(Rank(0), Allowed::given(&context), Need::Better, Poller::new().unwrap());
    assert!(hub.expose(&bytes).is_none());
    hub.address().unwrap();
    assert_eq!((hub.expose(&bytes).is_some(), fake.registered()), (true, 1));
    drop(bytes);
    fake.refuse_memory();
    assert!(hub.expose(&Arc::new(LentBytes::owned(vec![0; 3]))).is_none());
}
