//! Worlds whose ranks are processes.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use ncclx_rs::device::words::WordLayout;
use ncclx_rs::sys::socket;
use ncclx_rs::sys::words::SharedWords;

use crate::harness::{can_have, program, watch};
use crate::world::{Others, words};

/// Which rank a process is, of how many, and where its parent listens.
const RANK: &str = "NCCLX_RS_TEST_RANK";

/// Waits for what comes through a socket.
fn take(stream: &UnixStream) -> (OwnedFd, u8) {
    loop {
        match socket::look_at_fd(stream) {
            Ok(taken) => {
                socket::drop_fd(stream).expect("it is there");
                return taken;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1))
            }
            Err(error) => panic!("a rank or its parent is gone: {error}"),
        }
    }
}

/// The other ranks as processes: their parent passes on what each of them sends.
pub(crate) struct Processes {
    parent: UnixStream,
    size: usize,
}

impl Others for Processes {
    fn exchange(&mut self, own: OwnedFd) -> Vec<OwnedFd> {
        socket::send_fd(&self.parent, own.as_fd(), 0).expect("room");
        (0..self.size).map(|_| take(&self.parent).0).collect()
    }

    fn barrier(&mut self) {
        socket::send_fd(&self.parent, std::io::stderr().as_fd(), 0).expect("room");
        take(&self.parent);
    }
}

/// A rank that is a process.
pub(crate) struct Process {
    pub(crate) me: usize,
    pub(crate) size: usize,
    pub(crate) words: SharedWords,
    pub(crate) others: Processes,
}

impl Process {
    /// This process, which [`of_processes`] has begun for the test of this name.
    pub(crate) fn new(test: &str) -> Process {
        watch(test);
        let text = std::env::var(RANK).expect("set by the parent");
        let mut parts = text.splitn(3, ' ');
        let mut number = || parts.next().expect("three parts").parse::<usize>().expect("a number");
        let (me, size) = (number(), number());
        let parent = socket::connect_unix(parts.next().expect("a name").as_bytes()).expect("it listens");
        socket::send_fd(&parent, std::io::stderr().as_fd(), me as u8).expect("room");
        let (segment, _) = take(&parent);
        let words = SharedWords::open(segment, WordLayout::new(size, 2).count()).expect("the words");
        Process { me, size, words, others: Processes { parent, size } }
    }
}

/// Runs the test of this name in a process for each of so many ranks, with these settings of the software CUDA.
pub(crate) fn of_processes(test: &str, size: usize, settings: &[(&str, &str)]) {
    if !can_have(settings) {
        return;
    }
    let name = format!("ncclx_rs {test} {} {size} {}", std::process::id(), settings[0].1);
    let listener = socket::listen_unix(name.as_bytes()).expect("a socket");
    let start = |me: usize| -> Child {
        let mut program = program(test);
        program.env(RANK, format!("{me} {size} {name}")).env("RANK", me.to_string()).envs(settings.iter().copied());
        program.stdout(Stdio::null()).spawn().expect("a process")
    };
    let children: Vec<Child> = (0..size).map(start).collect();
    let mut ranks: Vec<Option<UnixStream>> = (0..size).map(|_| None).collect();
    while ranks.iter().any(Option::is_none) {
        match listener.accept() {
            Ok((stream, _)) => {
                let (_, me) = take(&stream);
                ranks[usize::from(me)] = Some(stream);
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    let ranks: Vec<UnixStream> = ranks.into_iter().flatten().collect();
    let words = words(size);
    ranks.iter().for_each(|rank| socket::send_fd(rank, words.as_fd(), 0).expect("room"));
    let staging: Vec<OwnedFd> = ranks.iter().map(|rank| take(rank).0).collect();
    for rank in &ranks {
        staging.iter().for_each(|fd| socket::send_fd(rank, fd.as_fd(), 0).expect("room"));
    }
    ranks.iter().for_each(|rank| _ = take(rank));
    ranks.iter().for_each(|rank| socket::send_fd(rank, words.as_fd(), 0).expect("room"));
    for (me, mut child) in children.into_iter().enumerate() {
        assert!(child.wait().expect("an end").success(), "rank {me} of {size} with {settings:?}");
    }
}
