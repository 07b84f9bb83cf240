//! Unauthenticated peers at every listener of a job: they are refused whatever they send, and the job goes on with right
//! results and without an additional file descriptor.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not count as tests")]

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ncclx_rs::comm::bootstrap::{Keys, ROOT_KEY, Secret};
use ncclx_rs::comm::store::{Store, TcpStore};
use ncclx_rs::transport::auth::{ANSWER_BYTES, CHALLENGE_BYTES, Identity, Opener};
use ncclx_rs::{CommOptions, Communicator, Rank, ReduceOp};

use crate::{Random, alone, entries};

const SIZE: usize = 4;
const WATCHDOG: Duration = Duration::from_secs(60);

/// An address that this process listens on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Listener {
    Tcp(u16),
    /// In the abstract namespace.
    Unix(String),
}

impl Listener {
    fn connect(&self) -> File {
        match self {
            Listener::Tcp(port) => {
                let stream = TcpStream::connect(("127.0.0.1", *port)).unwrap();
                stream.set_read_timeout(Some(WATCHDOG)).unwrap();
                File::from(OwnedFd::from(stream))
            }
            Listener::Unix(name) => {
                let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
                stream.set_read_timeout(Some(WATCHDOG)).unwrap();
                File::from(OwnedFd::from(stream))
            }
        }
    }
}

/// Everything that this process listens on.
pub(crate) fn listeners() -> HashSet<Listener> {
    let mine: HashSet<String> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| fs::read_link(fd.unwrap().path()).ok())
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = |name: &str| fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
    let mut found = HashSet::new();
    for line in [table("tcp"), table("tcp6")].iter().flat_map(|table| table.lines().skip(1)) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (fields[1], fields[3], fields[9]);
        if state == "0A" && mine.contains(inode) {
            let port = local.rsplit_once(':').unwrap().1;
            found.insert(Listener::Tcp(u16::from_str_radix(port, 16).unwrap()));
        }
    }
    for line in table("unix").lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if fields[3] == "00010000" && mine.contains(fields[6]) {
            found.insert(Listener::Unix(fields[7].strip_prefix('@').unwrap().to_owned()));
        }
    }
    found
}

/// Waits until `done`.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not come true within {WATCHDOG:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Writes to a connection that the other side may have closed already.
fn say(line: &mut File, bytes: &[u8]) {
    if let Err(error) = line.write_all(bytes) {
        assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
    }
}

/// Whether the other side has closed the connection. False: it did nothing within the watchdog's time.
fn is_refused(line: &mut File) -> bool {
    let mut bytes = [0; 256];
    loop {
        match line.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

/// The first messages of ranks and clients, with wrong proofs.
fn forgeries() -> Vec<Vec<u8>> {
    let answer = [b"ncclx_rs".as_slice(), &1u32.to_le_bytes(), &[7; ANSWER_BYTES - 12]].concat();
    let hello = [b"ncclx_rs".as_slice(), &1u32.to_le_bytes(), &[7; 32], &[7; 32]].concat();
    let request = |key: u32, value: u32| {
        [b"ncclxkv1\x02".as_slice(), &key.to_le_bytes(), &value.to_le_bytes(), &[0; 8], &[7; 100]].concat()
    };
    vec![answer, hello, request(u32::MAX, 1), request(1, u32::MAX)]
}

/// Connects to `listener` and sends garbage, in ways that end at once: no connection is left when this returns.
fn send_garbage(listener: &Listener, random: &mut Random) {
    drop(listener.connect());
    for forgery in forgeries() {
        let cut = random.below(forgery.len());
        say(&mut listener.connect(), &forgery[..cut]);
        say(&mut listener.connect(), &[forgery.as_slice(), &[7; 4096]].concat());
    }
    let garbage: Vec<u8> = (0..random.below(10_000)).map(|_| random.next() as u8).collect();
    say(&mut listener.connect(), &garbage);
    say(&mut listener.connect(), b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
    say(&mut listener.connect(), &[b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".as_slice(), &[7; 506]].concat());
}

/// Answers a challenge with a proof for an earlier one, and with a proof of a wrong secret. Tries each rank as the acceptor,
/// since the listener does not show which rank it belongs to.
fn send_forged_proofs(listener: &Listener, keys: &Keys) {
    let guessed = Secret::new([7; 32]);
    for (acceptor, secret) in (0..SIZE).flat_map(|acceptor| [(acceptor, keys.secret), (acceptor, guessed)]) {
        let me = Rank::from((acceptor + 1) % SIZE);
        let identity = Identity { comm: keys.comm_id, me, size: SIZE, secret };
        let (mut first, mut second) = (listener.connect(), listener.connect());
        let [earlier, now] = [&mut first, &mut second].map(|line| {
            let mut challenge = [0; CHALLENGE_BYTES];
            line.read_exact(&mut challenge).unwrap();
            challenge
        });
        let challenge = if secret == guessed { now } else { earlier };
        say(&mut second, &Opener::new(identity, Rank::from(acceptor)).answer(&challenge, &[0; 32]).unwrap());
        let mut reply = Vec::new();
        assert!(second.read_to_end(&mut reply).is_ok() && reply.is_empty(), "{listener:?} took a forged proof");
    }
}

/// Operations on every rank of two pretended hosts until rank 0 is told to stop.
struct Job {
    store: Arc<TcpStore>,
    turns: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    ranks: Vec<JoinHandle<()>>,
}

impl Job {
    fn begin() -> Job {
        let store = Arc::new(TcpStore::serve("127.0.0.1:0").unwrap());
        let mut job = Job { store, turns: Arc::default(), stop: Arc::default(), ranks: Vec::new() };
        job.start(0);
        job
    }

    fn start(&mut self, rank: usize) {
        let (store, turns, stop) = (self.store.clone(), self.turns.clone(), self.stop.clone());
        let hint = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let hints = vec![hint("host_id", ["left", "right"][rank * 2 / SIZE]), hint("flight_recorder_size", "0")];
        let name = "besieged".to_owned();
        let options = CommOptions { name, rank: Rank::from(rank), size: SIZE, store, timeout: Some(WATCHDOG), hints };
        self.ranks.push(std::thread::spawn(move || {
            let comm = Communicator::new(options).expect("the job begins");
            let mut turn = 0;
            while operate(&comm, turn, stop.load(Ordering::Relaxed)) {
                turn += 1;
                turns.fetch_add(1, Ordering::Relaxed);
            }
            comm.shutdown().expect("shutdown");
        }));
    }

    /// Waits until the job has made progress.
    fn assert_progress(&self) {
        let begun = self.turns.load(Ordering::Relaxed);
        until("progress of the job", || self.turns.load(Ordering::Relaxed) > begun + 10 * SIZE);
    }

    /// The store's listener, which asks for no proof.
    fn store_listener(&self) -> Listener {
        Listener::Tcp(self.store.address().rsplit_once(':').unwrap().1.parse().unwrap())
    }

    /// The keys that rank 0 has published.
    fn keys(&self) -> Keys {
        let record: serde_json::Value = serde_json::from_slice(&self.store.get(ROOT_KEY, WATCHDOG).unwrap()).unwrap();
        serde_json::from_value(record["root"]["Listening"]["keys"].clone()).unwrap()
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.ranks.into_iter().for_each(|rank| rank.join().expect("no rank fails"));
    }
}

/// Exchanges with every other rank, and checks all numbers. False: rank 0 wants to stop.
fn operate(comm: &Communicator, turn: usize, stop: bool) -> bool {
    let (me, count) = (comm.rank().index(), [1, 3000, 30_000][turn % 3]);
    let input: Vec<u32> = (0..SIZE * count).map(|index| (me * SIZE + index / count + turn) as u32).collect();
    let mut output = vec![0; SIZE * count];
    comm.all_to_all(&mut output, &input).expect("all_to_all");
    let expected = (0..SIZE * count).map(|index| (index / count * SIZE + me + turn) as u32);
    assert!(output.into_iter().eq(expected), "wrong numbers in turn {turn}");
    let mut sum = vec![u32::from(stop && me == 0); count];
    comm.all_reduce(&mut sum, ReduceOp::Sum).expect("all_reduce");
    assert!(sum.iter().all(|value| *value == sum[0]), "wrong numbers in turn {turn}");
    sum[0] == 0
}

/// How many file descriptors a job of the same shape takes without unauthenticated peers.
fn undisturbed() -> usize {
    let mut job = Job::begin();
    (1..SIZE).for_each(|rank| job.start(rank));
    job.assert_progress();
    let count = entries("fd");
    job.end();
    count
}

#[test]
fn unauthenticated_peers_at_every_listener_do_not_disturb_a_job() {
    let _alone = alone();
    let mut random = Random(1);
    let before = entries("fd");
    let quiet = undisturbed();

    // Rank 0 has started and waits for the other ranks.
    let mut job = Job::begin();
    let keys = job.keys();
    let first = listeners();
    assert!(first.len() >= 4, "the store, the rendezvous, and rank 0's own for each transport: {first:?}");
    let silent: Vec<File> = first.iter().flat_map(|listener| (0..CROWD).map(|_| listener.connect())).collect();
    let mut slow: Vec<(File, Vec<u8>)> = first
        .iter()
        .flat_map(|listener| forgeries().into_iter().map(|forgery| (listener.connect(), forgery)))
        .collect();
    let lie = |listener: &Listener, forgery: Vec<u8>| {
        let mut line = listener.connect();
        say(&mut line, &[forgery, vec![7; ANSWER_BYTES]].concat());
        line
    };
    let liars: Vec<File> =
        first.iter().flat_map(|listener| forgeries().into_iter().map(|forgery| lie(listener, forgery))).collect();
    (1..SIZE).for_each(|rank| job.start(rank));

    // The slow peers send a byte now and then, while the ranks join, work and refuse the lying peers.
    for turn in 0..40 {
        slow.iter_mut().for_each(|(line, forgery)| say(line, &forgery[turn..=turn]));
        std::thread::sleep(Duration::from_millis(5));
    }
    job.assert_progress();
    for mut liar in liars {
        assert!(is_refused(&mut liar), "a connection with a wrong proof is closed");
    }
    // Those of the failure detectors are closed once all neighbours have connected.
    until("the store's listener and each rank's for each transport", || listeners().len() == 1 + 2 * SIZE);
    let listeners = listeners();
    listeners.iter().for_each(|listener| send_garbage(listener, &mut random));
    listeners
        .iter()
        .filter(|listener| **listener != job.store_listener())
        .for_each(|listener| send_forged_proofs(listener, &keys));
    drop((silent, slow));
    until("no more file descriptors than without unauthenticated peers", || entries("fd") <= quiet);
    job.assert_progress();
    job.end();
    until("no file descriptor left", || entries("fd") <= before);
}

/// More silent connections than a rank accepts at a time.
const CROWD: usize = 150;
