//! So many connections of the same host that none of a rank's listeners has room for another: an operation that needs one
//! waits until its timeout, and can be aborted.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ncclx_rs::{Communicator, Error, Mode, Op, OpKind, Rank, Source, Tag};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::alone;
use crate::unauthenticated::{Listener, listeners};
use crate::world::{Wire, buffer, op, run, world};

const SHORT: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(250);

/// Calls every Unix socket that this process listens on until it has no room for more.
fn fill() -> Vec<OwnedFd> {
    let mut callers = Vec::new();
    for listener in listeners() {
        let Listener::Unix(name) = listener else { continue };
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
        loop {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let caller = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            let caller = caller.expect("a descriptor");
            if rustix::net::connect(&caller, &address).is_err() {
                break;
            }
            callers.push(caller);
        }
    }
    assert!(!callers.is_empty());
    callers
}

fn send(comm: &Communicator, timeout: Duration) -> Result<(), Error> {
    let mut data = [7];
    let kind = OpKind::Send { to: Rank(1), tag: Tag(0) };
    comm.submit(Op { timeout: Some(timeout), ..op(kind, vec![buffer(&mut data)], vec![]) })?.wait(None)
}

#[test]
fn a_caller_that_finds_no_room_in_a_queue_times_out_and_gets_through_when_there_is() {
    let _alone = alone();
    // Rank 1 looks at nothing until it is told to.
    let (tell, told) = std::sync::mpsc::channel::<()>();
    let (tell, told) = (std::sync::Mutex::new(tell), std::sync::Mutex::new(told));
    world(Wire::Shm, 2, move |comm| {
        if comm.rank() == Rank(1) {
            told.lock().expect("no panic").recv().expect("rank 0 tells");
            let mut data = [0];
            let kind = OpKind::Recv { from: Source::Rank(Rank(0)), tag: Tag(0) };
            run(comm, kind, vec![], vec![buffer(&mut data)]).expect("rank 0 gets through");
            assert_eq!(data, [7]);
            return;
        }
        let callers = fill();
        let text = send(comm, SHORT).expect_err("there is no room").to_string();
        assert!(text.contains("timed out after") && text.contains("no connection to rank 1 yet"), "{text}");
        assert_eq!(comm.loss(), None);
        tell.lock().expect("no panic").send(()).expect("rank 1 listens");
        drop(callers);
        send(comm, LONG).expect("there is room again");
    });
}

#[test]
fn a_caller_that_waits_for_room_in_a_queue_can_be_stopped() {
    let _alone = alone();
    let (tell, told) = std::sync::mpsc::channel::<()>();
    let (tell, told) = (std::sync::Mutex::new(tell), std::sync::Mutex::new(told));
    world(Wire::Shm, 2, move |comm| {
        if comm.rank() == Rank(1) {
            return told.lock().expect("no panic").recv().expect("rank 0 tells");
        }
        let _callers = fill();
        std::thread::scope(|scope| {
            let mut data = [7];
            let memory = vec![buffer(&mut data)];
            let kind = OpKind::Send { to: Rank(1), tag: Tag(0) };
            let send = Op { timeout: Some(LONG), mode: Mode::Async, ..op(kind, memory, vec![]) };
            let work = comm.submit(send).expect("submitted");
            let blocked = scope.spawn(move || work.wait(None));
            let begun = Instant::now();
            comm.abort("enough");
            let text = blocked.join().expect("no panic").expect_err("aborted").to_string();
            assert!(text.contains("enough"), "{text}");
            assert!(begun.elapsed() < LONG, "it did not wait for the time limit");
        });
        tell.lock().expect("no panic").send(()).expect("rank 1 listens");
    });
}
