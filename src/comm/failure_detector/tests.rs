//! Two processes, as this one imagines them: each has a watch of its own, and nothing moves but when a test says so.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use super::envelope::{self, Content};
use super::incoming::{Heard, Incoming, Listener, Listeners, READ_BYTES, READS_MAX};
use super::links::Cut;
use super::manner::{Manner, Way};
use super::monitor::PeerMonitor;
use super::notice::Notice;
use super::outgoing::{Member, Place};
use super::state::DetectorState;
use super::watch::Watch;
use crate::config::{Config, Switch};
use crate::engine::connector::{Connector, Route};
use crate::engine::failures::{Departed, Departure};
use crate::engine::heartbeat::{Heartbeat, RankState};
use crate::error::LinkDown;
use crate::signature::Signature;
use crate::sync::{Arc, Mutex, lock};
use crate::sys::poller::Poller;
use crate::sys::process::ProcessId;
use crate::transport::auth::{Identity, Membership, Secret};
use crate::transport::shm::{RingSettings, ShmTransport};
use crate::transport::{Accepted, Detour, RecvStream, SendStream, Transport};
use crate::types::Rank;

/// A process. Its number is its rank in all communicators.
struct Process {
    number: u32,
    poller: Poller,
    watch: Watch,
    /// When its thread would check again although nothing happens.
    next: Option<Instant>,
    /// Whom the last check has told something, and when each of them wants to be told again.
    told: Vec<Member>,
    again: Arc<Mutex<Option<Instant>>>,
}

/// What a rank has found.
#[derive(Debug, PartialEq)]
enum Found {
    /// Another rank is gone.
    Gone(Departure, String),
    /// The other rank's heartbeat of this round.
    Heartbeat(u32),
}

fn processes() -> [Process; 2] {
    [0, 1].map(|number| {
        let poller = Poller::new().expect("a poller");
        Process { number, watch: Watch::new(poller.clone()), poller, next: None, told: vec![], again: Arc::default() }
    })
}

fn identity(comm: u8, me: u32, secret: u8) -> Identity {
    Identity { comm: [comm; 16], me: Rank(me), size: 2, secret: Secret::new([secret; 32]) }
}

fn manner(change: impl FnOnce(&mut Config)) -> Manner {
    let mut config = Config::default();
    change(&mut config);
    Manner::of(&config, "host").expect("settings")
}

impl Process {
    fn transport(&self, identity: &Identity) -> ShmTransport {
        let bytes = rustix::param::page_size();
        let (line_ownership, node, share_bells) = (Switch::Off, None, false);
        let settings = RingSettings { bytes, peer_can_read: false, line_ownership, node, share_bells };
        ShmTransport::new(identity.clone(), self.poller.clone(), settings).expect("a transport")
    }

    /// Begins to watch the other rank of a communicator, which is at `address`.
    fn add(
        &mut self,
        identity: Identity,
        manner: &Manner,
        transport: impl Transport + 'static,
        address: Vec<u8>,
    ) -> Member {
        let peer = Rank(1 - self.number);
        let process = ProcessId::imagined("nowhere".to_owned(), peer.0 as i32);
        let way = Way { process, host_id: "host".into(), manner: manner.clone() };
        let connector = Connector::new([Route { transport: 0, address }]);
        let monitors = vec![PeerMonitor::new(peer, 2, connector, way)];
        let state = DetectorState::new(identity, manner.protection.clone(), vec![Box::new(transport)], monitors);
        let again = self.again.clone();
        self.watch.add(state, Box::new(move |_| *lock(&again))).member
    }

    /// What a check finds.
    fn check(&mut self) -> Vec<(Member, Found)> {
        let checked = self.watch.check(Instant::now());
        self.next = checked.next;
        self.told = checked.findings.iter().map(|(registration, _)| registration.member).collect();
        checked.findings.iter().for_each(|(registration, findings)| _ = registration.report(findings));
        let found = checked.findings.into_iter().flat_map(|(registration, findings)| {
            let gone = findings.departed.into_iter().map(|gone| Found::Gone(gone.how, gone.cause));
            let alive = findings.heartbeats.into_iter().map(|heartbeat| Found::Heartbeat(heartbeat.round));
            gone.chain(alive).map(|found| (registration.member, found)).collect::<Vec<_>>()
        });
        found.collect()
    }

    /// Whether its thread would wake now.
    fn is_due(&self) -> bool {
        let mut named = Vec::new();
        let is_ready = self.poller.look(&mut named).expect("a look") || !named.is_empty();
        is_ready || self.next.is_some_and(|next| next <= Instant::now())
    }

    fn send_heartbeat(&mut self, member: Member, round: u32) {
        let ranks = vec![Rank(self.number)];
        let state = RankState::Waiting(Signature::default());
        let heartbeat = Heartbeat { on_device: false, sequence: 1, state, round, again_millis: 500, ranks };
        lock(&self.watch.registration(member).expect("it is there").own_heartbeats).push(heartbeat);
    }
}

/// A transport that accepts, and opens as a test wants it.
struct Imagined<F> {
    accepting: ShmTransport,
    opening: F,
}

impl<F: FnMut() -> Result<Box<dyn SendStream>, LinkDown> + Send> Transport for Imagined<F> {
    fn name(&self) -> &'static str {
        self.accepting.name()
    }

    fn address(&self) -> Vec<u8> {
        self.accepting.address()
    }

    fn open(&mut self, _: Rank, _: &[u8], _: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        (self.opening)()
    }

    fn accept(&mut self) -> Vec<Accepted> {
        self.accepting.accept()
    }

    fn accepting_until(&self) -> Option<Instant> {
        self.accepting.accepting_until()
    }
}

/// A connection that opens when it is written to so many times, of which nothing tells, and what it was given then.
struct Slow {
    left: u32,
    said: Arc<Mutex<Vec<u8>>>,
}

impl SendStream for Slow {
    fn write(&mut self, _: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        self.left = self.left.saturating_sub(1);
        body.iter().for_each(|bytes| lock(&self.said).extend_from_slice(bytes));
        Ok(body.iter().map(|bytes| bytes.len()).sum())
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn is_open(&self) -> bool {
        self.left == 0
    }

    fn session(&self) -> Option<Secret> {
        self.is_open().then_some(Secret::new([6; 32]))
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        Ok(true)
    }
}

/// A communicator of both.
fn join(both: &mut [Process; 2], comm: u8, manners: [&Manner; 2], secrets: [u8; 2]) -> [Member; 2] {
    let identities = [0, 1].map(|me| identity(comm, me, secrets[me as usize]));
    let [one, other] = [0, 1].map(|me: usize| both[me].transport(&identities[me]));
    let addresses = [other.address(), one.address()];
    let [first, second] = identities;
    let [to_second, to_first] = addresses;
    [both[0].add(first, manners[0], one, to_second), both[1].add(second, manners[1], other, to_first)]
}

/// Checks both, as they have been woken, and then as often as their threads would, until nothing happens any more.
fn run(both: &mut [Process; 2]) -> [Vec<(Member, Found)>; 2] {
    let mut found = both.each_mut().map(Process::check);
    let (mut checks, mut quiet) = (0, 0);
    while quiet < 20 {
        quiet += 1;
        for (process, found) in both.iter_mut().zip(&mut found) {
            if process.is_due() {
                found.extend(process.check());
                (checks, quiet) = (checks + 1, 0);
            }
        }
        assert!(checks < 1000, "its thread would never sleep");
        std::thread::sleep(Duration::from_micros(100));
    }
    found
}

/// The same, until a sign of an end counts as a loss.
fn run_long(both: &mut [Process; 2]) -> [Vec<(Member, Found)>; 2] {
    let mut found = run(both);
    std::thread::sleep(Duration::from_millis(150));
    for (found, later) in found.iter_mut().zip(run(both)) {
        found.extend(later);
    }
    found
}

fn links(both: &[Process; 2]) -> [(usize, usize); 2] {
    both.each_ref().map(|process| process.watch.links())
}

#[test]
fn communicators_of_two_processes_share_a_connection_each_way() {
    let (mut both, plain) = (processes(), manner(|_| {}));
    let members: Vec<[Member; 2]> = (0..5).map(|comm| join(&mut both, comm, [&plain; 2], [comm; 2])).collect();
    assert_eq!(run(&mut both), [vec![], vec![]]);
    assert_eq!(links(&both), [(1, 1); 2]);
    assert!(both.iter().all(|process| process.watch.transports() == 0), "nobody listens any more");
    for (round, [first, second]) in members.iter().enumerate() {
        let round = round as u32;
        both[0].send_heartbeat(*first, round);
        // Its own comes back to nobody, and the other hears it where it belongs.
        let found = run(&mut both);
        assert_eq!(found[1], [(*second, Found::Heartbeat(round))]);
        assert_eq!(found[0], []);
    }
}

#[test]
fn what_happens_in_one_communicator_does_not_disturb_the_others() {
    let (mut both, plain) = (processes(), manner(|_| {}));
    let members: Vec<[Member; 2]> = (0..3).map(|comm| join(&mut both, comm, [&plain; 2], [comm; 2])).collect();
    run(&mut both);
    both[0].send_heartbeat(members[1][0], 0);
    let found = loop {
        both[0].check();
        let found = both[1].check();
        if !found.is_empty() {
            break found;
        }
    };
    assert_eq!((found, &both[1].told), (vec![(members[1][1], Found::Heartbeat(0))], &vec![members[1][1]]));
    both[1].check();
    assert_eq!(both[1].told, []);
    // It wants to be told again: so it is, until it does not.
    *lock(&both[1].again) = Some(Instant::now());
    both[0].send_heartbeat(members[2][0], 0);
    while both[1].check().is_empty() {
        both[0].check();
    }
    both[1].check();
    assert_eq!(both[1].told, [members[2][1]]);
    *lock(&both[1].again) = None;
    both[1].check();
    assert_eq!(both[1].told, [members[2][1]]);
    both[1].check();
    assert_eq!(both[1].told, []);
}

#[test]
fn one_that_goes_is_missed_by_its_communicator_alone() {
    let (mut both, plain) = (processes(), manner(|_| {}));
    // The first one has opened the connections.
    let members: Vec<[Member; 2]> = (0..4).map(|comm| join(&mut both, comm, [&plain; 2], [comm; 2])).collect();
    run(&mut both);
    both[0].watch.leave(members[0][0], &Notice::Goodbye);
    both[0].watch.remove(members[0][0]);
    assert_eq!(run_long(&mut both), [vec![], vec![]], "a goodbye is no loss");
    let departed = Departed { rank: Rank(0), how: Departure::Left { called: 7 }, cause: "aborted".to_owned() };
    both[0].watch.leave(members[1][0], &Notice::Departed(departed));
    both[0].watch.remove(members[1][0]);
    let left = Found::Gone(Departure::Left { called: 7 }, "aborted".to_owned());
    assert_eq!(run_long(&mut both), [vec![], vec![(members[1][1], left)]]);
    both[0].watch.remove(members[2][0]);
    let lost = Found::Gone(Departure::Lost, "it closed its communicator".to_owned());
    assert_eq!(run_long(&mut both), [vec![], vec![(members[2][1], lost)]]);
    both[1].send_heartbeat(members[3][1], 3);
    assert_eq!(run(&mut both), [vec![(members[3][0], Found::Heartbeat(3))], vec![]], "the others work on");
    assert_eq!(links(&both), [(1, 1); 2]);
    // The last one of both ends the connections, too.
    for process in &mut both {
        process.watch.leave(members[3][process.number as usize], &Notice::Goodbye);
    }
    (0..2).for_each(|number| both[number].watch.remove(members[3][number]));
    assert_eq!(run(&mut both), [vec![], vec![]]);
    assert_eq!(links(&both)[0], (0, 0));
}

#[test]
fn a_process_that_ends_is_lost_in_all_communicators() {
    let (mut both, plain) = (processes(), manner(|_| {}));
    let members: Vec<[Member; 2]> = (0..3).map(|comm| join(&mut both, comm, [&plain; 2], [comm; 2])).collect();
    run(&mut both);
    let [_, fresh] = processes();
    both[1] = fresh;
    let [mut found, _] = run_long(&mut both);
    found.sort_by_key(|(member, _)| *member);
    let lost: Vec<Member> = found.iter().map(|(member, _)| *member).collect();
    assert_eq!(lost, members.iter().map(|[first, _]| *first).collect::<Vec<_>>());
    assert!(found.iter().all(|(_, found)| matches!(found, Found::Gone(Departure::Lost, _))), "{found:?}");
}

#[test]
fn a_rank_may_speak_before_the_other_one_is_there() {
    let (mut both, plain) = (processes(), manner(|_| {}));
    join(&mut both, 1, [&plain; 2], [1; 2]);
    run(&mut both);
    let identities = [0, 1].map(|me| identity(2, me, 2));
    let [one, other] = [0, 1].map(|me: usize| both[me].transport(&identities[me]));
    let (to_second, to_first) = (other.address(), one.address());
    let [first, second] = identities;
    let early = both[0].add(first, &plain, one, to_second);
    both[0].send_heartbeat(early, 9);
    assert_eq!(run(&mut both), [vec![], vec![]]);
    let late = both[1].add(second, &plain, other, to_first);
    assert_eq!(run(&mut both), [vec![], vec![(late, Found::Heartbeat(9))]]);
    // One that has come and gone before this one is there is missed all the same.
    let identities = [0, 1].map(|me| identity(4, me, 4));
    let [one, other] = [0, 1].map(|me: usize| both[me].transport(&identities[me]));
    let (to_second, to_first) = (other.address(), one.address());
    let [first, second] = identities;
    let early = both[0].add(first, &plain, one, to_second);
    both[0].watch.remove(early);
    assert_eq!(run(&mut both), [vec![], vec![]]);
    let late = both[1].add(second, &plain, other, to_first);
    let lost = || Found::Gone(Departure::Lost, "it closed its communicator".to_owned());
    assert_eq!(run_long(&mut both), [vec![], vec![(late, lost())]]);
    // So is one that leaves before it was ever heard.
    let identities = [0, 1].map(|me| identity(3, me, 3));
    let [one, other] = [0, 1].map(|me: usize| both[me].transport(&identities[me]));
    let (to_second, to_first) = (other.address(), one.address());
    let [first, second] = identities;
    let early = both[0].add(first, &plain, one, to_second);
    let late = both[1].add(second, &plain, other, to_first);
    both[0].watch.remove(early);
    assert_eq!(run_long(&mut both), [vec![], vec![(late, lost())]]);
    assert_eq!(links(&both), [(1, 1); 2]);
}

#[test]
fn connections_that_are_made_or_protected_otherwise_are_not_shared() {
    let mut both = processes();
    let manners = [
        manner(|_| {}),
        manner(|config| config.peer_timeout = Duration::from_secs(3)),
        manner(|config| config.tls = Switch::On),
    ];
    for (comm, manner) in (0..).zip(&manners) {
        (0..2).for_each(|more| _ = join(&mut both, 10 * comm + more, [manner; 2], [comm; 2]));
    }
    assert_eq!(run(&mut both), [vec![], vec![]]);
    assert_eq!(links(&both), [(3, 3); 2]);
}

#[test]
fn who_does_not_know_the_secret_is_not_heard() {
    let plain = manner(|_| {});
    let lie = ([2, 3], plain.clone());
    let protected = ([2, 2], manner(|config| config.tls = Switch::On));
    for (is_lie, (secrets, theirs)) in [(true, lie), (false, protected)] {
        let mut both = processes();
        let [_, first] = join(&mut both, 1, [&plain; 2], [1; 2]);
        run(&mut both);
        let [_, listener] = join(&mut both, 2, [&plain, &theirs], secrets);
        both[0].send_heartbeat(Member(1), 5);
        let found = run(&mut both);
        assert!(!found[1].contains(&(listener, Found::Heartbeat(5))), "{found:?}");
        let is_lost = |(member, found): &_| *member == first && matches!(found, Found::Gone(Departure::Lost, _));
        assert_eq!(found[1].iter().any(is_lost), is_lie, "what carries a false proof is dropped: {found:?}");
    }
}

#[test]
fn one_that_cannot_connect_takes_the_connection_of_another_and_sleeps() {
    let (mut both, plain) = (processes(), manner(|_| {}));
    let identities = [0, 1].map(|me| identity(1, me, 1));
    let [one, other] = [0, 1].map(|me: usize| both[me].transport(&identities[me]));
    let (to_second, to_first) = (other.address(), one.address());
    let [first, second] = identities;
    let lacking = Imagined { accepting: one, opening: || Err(LinkDown::lacking("no descriptors")) };
    let turned_away = both[0].add(first, &plain, lacking, to_second);
    assert_eq!(both[0].check(), []);
    assert_eq!(links(&both)[0].0, 0, "it will try again");
    let members = join(&mut both, 2, [&plain; 2], [2; 2]);
    let its = both[1].add(second, &plain, other, to_first);
    assert_eq!(run_long(&mut both), [vec![], vec![]]);
    both[0].send_heartbeat(turned_away, 4);
    both[1].send_heartbeat(members[1], 5);
    let heard = [vec![(members[0], Found::Heartbeat(5))], vec![(its, Found::Heartbeat(4))]];
    assert_eq!(run(&mut both), heard);
}

#[test]
fn a_connection_is_used_as_soon_as_it_is_open() {
    for left in 1..8 {
        let (mut both, plain) = (processes(), manner(|_| {}));
        let (identity, said) = (identity(1, 0, 1), Arc::new(Mutex::new(Vec::new())));
        let its = said.clone();
        let opening =
            move || -> Result<Box<dyn SendStream>, LinkDown> { Ok(Box::new(Slow { left, said: its.clone() })) };
        let transport = Imagined { accepting: both[0].transport(&identity), opening };
        let member = both[0].add(identity, &plain, transport, vec![]);
        both[0].send_heartbeat(member, 1);
        let begun = Instant::now();
        run(&mut both);
        while lock(&said).is_empty() {
            // While it is not open, it is looked after now and then, and never after that.
            assert!(begun.elapsed() < Duration::from_secs(60), "{left} writes: it was slept through");
            if both[0].is_due() {
                both[0].check();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn an_opening_that_fails_is_no_end_of_a_neighbour_that_is_heard() {
    let route = || Route { transport: 0, address: vec![] };
    let process = ProcessId::imagined("nowhere".to_owned(), 1);
    let way = Way { process, host_id: "host".into(), manner: manner(|_| {}) };
    let later = |begin: Instant| begin + Duration::from_secs(1);
    for (has_opened, is_lost) in [(false, false), (true, true)] {
        let mut monitor = PeerMonitor::new(Rank(1), 2, Connector::new([route(), route()]), way.clone());
        assert!(monitor.begin_to_hear());
        let place = (Member(0), Rank(1));
        let cut = Cut { down: LinkDown::unfit("elsewhere"), has_opened, opener: place, users: vec![place] };
        let now = Instant::now();
        monitor.cut(&cut, true, now);
        assert_eq!(monitor.check(later(now)).loss.is_some(), is_lost, "has opened: {has_opened}");
    }
}

#[test]
fn a_goodbye_waits_for_the_neighbour_to_be_there() {
    let (mut both, plain) = (processes(), manner(|_| {}));
    let [_, kept] = join(&mut both, 1, [&plain; 2], [1; 2]);
    run(&mut both);
    let identities = [0, 1].map(|me| identity(2, me, 2));
    let [one, other] = [0, 1].map(|me: usize| both[me].transport(&identities[me]));
    let (to_second, to_first) = (other.address(), one.address());
    let [first, second] = identities;
    let early = both[0].add(first, &plain, one, to_second);
    both[0].watch.leave(early, &Notice::Goodbye);
    assert_eq!(run(&mut both), [vec![], vec![]]);
    assert!(!both[0].watch.flush(early), "who forgets it with the connection has not got it");
    both[1].add(second, &plain, other, to_first);
    assert_eq!(run(&mut both), [vec![], vec![]]);
    assert!(both[0].watch.flush(early));
    both[0].watch.remove(early);
    assert_eq!(run_long(&mut both), [vec![], vec![]]);
    both[0].send_heartbeat(Member(0), 1);
    assert_eq!(run(&mut both)[1], [(kept, Found::Heartbeat(1))]);
}

#[test]
fn one_that_leaves_hears_who_has_not_spoken_yet() {
    let (mut both, plain) = (processes(), manner(|_| {}));
    let identities = [0, 1].map(|me| identity(1, me, 1));
    let [one, other] = [0, 1].map(|me: usize| both[me].transport(&identities[me]));
    let (to_second, to_first) = (other.address(), one.address());
    let (mut caller, is_busy) = (both[0].transport(&identities[0]), Arc::new(Mutex::new(true)));
    let still = is_busy.clone();
    let opening = move || match *lock(&still) {
        true => Err(LinkDown::busy("not yet")),
        false => caller.open(Rank(1), &to_second, Detour::Impossible),
    };
    let [first, second] = identities;
    let late = both[0].add(first, &plain, Imagined { accepting: one, opening }, vec![]);
    let early = both[1].add(second, &plain, other, to_first);
    both[1].watch.leave(early, &Notice::Goodbye);
    assert_eq!(run(&mut both), [vec![], vec![]]);
    assert!(!both[1].watch.flush(early), "it cannot know whether the other one has the communicator");
    both[0].watch.leave(late, &Notice::Goodbye);
    assert!(both[0].watch.flush(late), "it has heard the goodbye, and has nobody to wait for");
    both[0].watch.remove(late);
    *lock(&is_busy) = false;
    assert_eq!(run_long(&mut both), [vec![], vec![]]);
    assert!(both[1].watch.flush(early));
    both[1].watch.remove(early);
    assert_eq!(run(&mut both), [vec![], vec![]]);
    assert_eq!(links(&both), [(0, 0); 2]);
}

#[test]
fn of_what_comes_early_heartbeats_are_the_first_to_be_dropped() {
    let state = RankState::Waiting(Signature::default());
    let heartbeat = Heartbeat { on_device: false, sequence: 1, state, round: 1, again_millis: 9, ranks: vec![] };
    let heartbeat = Content::Notice(Notice::Heartbeat(heartbeat).encode());
    let mut messages = vec![(3, joins(1, 8))];
    messages.extend((0..100).map(|_| (3, heartbeat.clone())));
    messages.push((3, Content::Notice(Notice::Goodbye.encode())));
    messages.push((3, Content::Leave));
    let (heard, result) = hear(&messages);
    assert_eq!((heard.len(), result), (1 + 16 + 2, Ok(())));
    let place = (Member(0), Rank(1));
    assert_eq!(heard[17..], [(place, Heard::Notice(Notice::Goodbye.encode())), (place, Heard::Left)]);
}

/// A connection on which somebody has said these bytes, and who hears it.
struct Said {
    bytes: Vec<u8>,
    session: Secret,
}

impl RecvStream for Said {
    fn peek(&mut self) -> Result<&[u8], LinkDown> {
        Ok(&self.bytes)
    }

    fn session(&self) -> Option<Secret> {
        Some(self.session)
    }

    fn end(&self) -> Option<LinkDown> {
        None
    }

    fn consume(&mut self, count: usize) {
        self.bytes.drain(..count);
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let count = self.bytes.len().min(into.len());
        into[..count].copy_from_slice(&self.bytes[..count]);
        self.consume(count);
        Ok(count)
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}
}

struct Ears {
    identity: Identity,
    manner: Manner,
    heard: Vec<(Place, Heard)>,
}

impl Listeners for Ears {
    fn find(&self, membership: &Membership) -> Option<Listener<'_>> {
        let Membership { comm, from, to } = *membership;
        let is_here = (comm, to) == (self.identity.comm, self.identity.me);
        let place = Some((Member(0), from)).filter(|_| from == Rank(1));
        is_here.then_some(Listener { identity: &self.identity, protection: &self.manner.protection, place })
    }

    fn hear(&mut self, place: Place, heard: Heard) -> Result<(), LinkDown> {
        self.heard.push((place, heard));
        Ok(())
    }
}

/// What is heard of these messages, and how they end.
fn hear(messages: &[(u32, Content)]) -> (Vec<(Place, Heard)>, Result<(), LinkDown>) {
    let (identity, manner, session) = (identity(1, 0, 1), manner(|_| {}), Secret::new([8; 32]));
    let mut bytes = Vec::new();
    messages.iter().for_each(|(number, content)| envelope::encode(&mut bytes, *number, content));
    let protection = manner.protection.clone();
    let incoming = Incoming::new(Box::new(Said { bytes, session }), Some((Member(9), Rank(1))), protection);
    let mut ears = Ears { identity, manner, heard: vec![] };
    let result = incoming.expect("it has a session").read(&mut ears);
    (ears.heard, result)
}

/// Rank 1 of communicator 1 joins, with a proof for this session.
fn joins(from: u32, session: u8) -> Content {
    let (secret, session) = (Secret::new([1; 32]), Secret::new([session; 32]));
    let membership = Membership { comm: [1; 16], from: Rank(from), to: Rank(0) };
    Content::Join(membership, membership.prove(&secret, &session))
}

#[test]
fn what_one_turn_reads_is_heard_in_that_turn() {
    let message = (0, Content::Notice(vec![7; 100]));
    let mut encoded = Vec::new();
    envelope::encode(&mut encoded, message.0, &message.1);
    let count = READS_MAX * READ_BYTES / encoded.len();
    assert!(count * encoded.len() > (READS_MAX - 1) * READ_BYTES, "all reads of a turn are needed");
    let (heard, result) = hear(&vec![message; count]);
    assert_eq!((heard.len(), result), (count, Ok(())));
}

#[test]
fn a_proof_is_good_for_one_connection_and_one_pair_of_ranks() {
    let (place, notice) = ((Member(0), Rank(1)), || Content::Notice(Notice::Goodbye.encode()));
    let (heard, result) = hear(&[(3, joins(1, 8)), (3, notice()), (3, Content::Leave)]);
    let goodbye = || Heard::Notice(Notice::Goodbye.encode());
    let all = [Heard::Begun, goodbye(), Heard::Left].map(|heard| (place, heard));
    assert_eq!((heard, result), (Vec::from(all), Ok(())), "also if it has left before it was introduced");
    let (heard, result) = hear(&[(3, joins(1, 8)), (3, notice())]);
    assert_eq!((heard, result), (vec![(place, Heard::Begun), (place, goodbye())], Ok(())));
    let (heard, result) = hear(&[(3, joins(1, 7)), (3, notice())]);
    assert_eq!(heard, [], "a proof for another connection");
    assert!(result.expect_err("it is dropped").cause.contains("does not know the job's secret"));
    let Content::Join(membership, proof) = joins(1, 8) else { unreachable!() };
    let other = Membership { from: Rank(2), ..membership };
    let (heard, result) = hear(&[(3, Content::Join(other, proof)), (3, notice())]);
    assert_eq!(heard, [], "a proof of another rank");
    result.expect_err("it is dropped");
    let (heard, result) = hear(&[(3, joins(2, 8)), (3, notice())]);
    assert_eq!((heard, result), (vec![], Ok(())), "a rank that nobody here listens to");
}

#[test]
fn what_breaks_the_rules_of_a_connection_ends_it() {
    let notice = || Content::Notice(Notice::Goodbye.encode());
    let strangers: Vec<(u32, Content)> = (1..=1025)
        .map(|number| (number, Content::Join(Membership { comm: [7; 16], from: Rank(1), to: Rank(0) }, [0; 32])))
        .collect();
    assert_eq!(hear(&strangers[..1024]), (vec![], Ok(())));
    let passing = |(number, join): &(u32, Content)| [(*number, join.clone()), (*number, Content::Leave)];
    let many: Vec<(u32, Content)> = strangers.iter().flat_map(passing).collect();
    assert_eq!(hear(&many), (vec![], Ok(())), "those that have left are forgotten");
    let cases: [(&[(u32, Content)], &str); 6] = [
        (&[strangers[0].clone(), (1, Content::Leave), (1, notice())], "news under number 1, which is of nobody"),
        (&[strangers[0].clone(), (1, Content::Leave), (1, Content::Leave)], "took back number 1, which is of nobody"),
        (&[(4, notice())], "news under number 4, which is of nobody"),
        (&[(4, Content::Leave)], "took back number 4, which is of nobody"),
        (&[(4, joins(1, 8)), (4, joins(1, 8))], "gave number 4 to two ranks"),
        (&strangers, "more than 1024 unknown communicators"),
    ];
    for (messages, cause) in cases {
        let (_, result) = hear(messages);
        let down = result.expect_err(cause);
        assert!(down.cause.contains(cause), "{down}");
    }
}
