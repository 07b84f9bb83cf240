//! Bytes that a transport has taken and the system has not: they leave, though no thread waits for anything.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ncclx_rs::{Rank, Tag};
use rustix::net::sockopt;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::alone;
use crate::world::{Wire, world_with};

/// Less than the system takes at first.
const LEN: usize = 60_000;

const LIMIT: Duration = Duration::from_secs(10);

/// Leaves each socket of this process as little room for what it sends as the system allows.
fn shrink_sockets() {
    let this = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process");
    for entry in fs::read_dir("/proc/self/fd").expect("/proc").flatten() {
        let number = entry.file_name().to_str().expect("digits").parse().expect("a number");
        // Some have been closed meanwhile, and some are no sockets.
        if let Ok(copy) = pidfd_getfd(&this, number, PidfdGetfdFlags::empty()) {
            let _ = sockopt::set_socket_send_buffer_size(copy, 1);
        }
    }
}

#[test]
fn what_tls_holds_of_messages_that_have_ended_in_their_call_leaves_though_nobody_waits() {
    let _alone = alone();
    for wire in [Wire::Tls, Wire::Tcp] {
        let received = Arc::new(AtomicUsize::new(0));
        world_with(wire, 2, LIMIT, move |comm| {
            (0..3).for_each(|_| comm.barrier().expect("barrier"));
            if comm.rank() == Rank(0) {
                shrink_sockets();
            }
            let mut data = vec![7u8; LEN];
            for count in 1..8 {
                comm.barrier().expect("barrier");
                received.store(0, Ordering::SeqCst);
                comm.barrier().expect("barrier");
                if comm.rank() == Rank(0) {
                    (0..count).for_each(|_| comm.send(&data[..], Rank(1), Tag(1)).expect("send"));
                    // No call of this rank helps.
                    let began = Instant::now();
                    while received.load(Ordering::SeqCst) < count && began.elapsed() < LIMIT {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                } else {
                    // Until the other rank has sent all that it can.
                    std::thread::sleep(Duration::from_millis(100));
                    for _ in 0..count {
                        comm.recv(&mut data[..], Rank(0), Tag(1)).expect("recv");
                        received.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        });
    }
}
