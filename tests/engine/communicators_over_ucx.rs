//! Communicators over UCX: the tests of the other wires in processes that go through it, and those of UCX alone.

use std::sync::Arc;
use std::time::Duration;

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::{CommOptions, Communicator, Rank, ReduceOp, Tag};

use crate::ucx_process::{allowed, is_under_test, run_through};
use crate::world::{Wire, world};

/// What UCX goes through: the system's network, and memory that the processes of a host share.
const WAYS: [&str; 2] = ["tcp", "posix,cma"];

#[test]
fn messages_pass_their_tests_through_ucx() {
    for way in WAYS {
        run_through(way, &["messages::", "communicators_over_ucx::", "memory::"], 15);
    }
}

#[test]
fn collectives_pass_their_tests_through_ucx() {
    for way in WAYS {
        run_through(way, &["collectives::", "disagreements::"], 8);
    }
}

#[test]
fn windows_pass_their_tests_through_ucx() {
    for way in WAYS {
        run_through(way, &["windows::"], 15);
    }
}

#[test]
fn gets_are_read_in_their_targets_memory_through_ucx() {
    for way in WAYS {
        run_through(way, &["remote_reads::"], 5);
    }
}

#[test]
fn failures_pass_their_tests_through_ucx() {
    for way in WAYS {
        run_through(way, &["failures::", "peer_loss::"], 14);
    }
}

#[test]
fn every_algorithm_passes_its_test_through_ucx() {
    for way in WAYS {
        run_through(way, &["matrix::every_algorithm_is_right_over_ucx"], 1);
    }
}

/// For each other rank, the transport and the devices, as the flight recorder tells.
fn told(comm: &Communicator) -> Vec<(String, Vec<String>)> {
    let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
    let told = |peer: &serde_json::Value| {
        let devices = peer["devices"].as_array().expect("a list");
        let devices = devices.iter().map(|device| device.as_str().expect("a name").to_owned());
        (peer["transport"].as_str().unwrap_or_default().to_owned(), devices.collect())
    };
    dump["peers"].as_array().expect("the others").iter().map(told).collect()
}

#[test]
fn bytes_go_through_what_the_environment_says() {
    if !is_under_test() {
        return;
    }
    for peers in world(Wire::Ucx, 3, |comm| {
        let mut data = vec![comm.rank().0 as f32; 100_000];
        comm.all_reduce(&mut data, ReduceOp::Sum).expect("all_reduce");
        assert!(data.iter().all(|value| *value == 3.0));
        // Each to each.
        comm.all_to_all(&mut [0; 3], &[1; 3]).expect("all_to_all");
        let told = told(comm);
        // A stream to a rank that has left is open no more.
        comm.barrier().expect("barrier");
        told
    }) {
        for (transport, devices) in peers {
            assert_eq!(transport, "ucx");
            let ways: Vec<&str> = devices.iter().map(|device| device.split('/').next().expect("a name")).collect();
            assert!(
                !ways.is_empty() && ways.iter().all(|way| allowed().split(',').any(|may| may == *way)),
                "{devices:?}"
            );
        }
    }
}

#[test]
fn long_messages_both_ways_at_once_wait_for_no_credit_that_cannot_come() {
    if !is_under_test() {
        return;
    }
    world(Wire::Ucx, 4, |comm| {
        // Many times what may be unread.
        let (me, len) = (comm.rank().index(), 6 << 20);
        for round in 0..6 {
            let (to, from) = (Rank::from((me + 1 + round % 3) % 4), Rank::from((me + 3 - round % 3) % 4));
            let byte = |rank: usize| (rank * 16 + round) as u8;
            let (sent, mut received) = (vec![byte(me); len], vec![255; len]);
            comm.send_recv(&mut received, from, &sent, to, Tag(1)).expect("send_recv");
            assert!(received.iter().all(|value| *value == byte(from.index())));
        }
    });
}

/// The errors of two ranks with these settings, of which none forms a world.
fn refused(settings: [&[(&str, &str)]; 2]) -> [String; 2] {
    let store = Arc::new(MemoryStore::default());
    let join = |rank: usize| {
        let hints = settings[rank].iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let options = CommOptions {
            name: "refused".to_owned(),
            rank: Rank::from(rank),
            size: 2,
            store: store.clone(),
            timeout: Some(Duration::from_secs(60)),
            hints,
        };
        Communicator::new(options).map(drop).expect_err("they do not fit together").to_string()
    };
    std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || join(rank))).map(|thread| thread.join().expect("no panic"))
    })
}

#[test]
fn a_rank_that_takes_another_transport_is_named_on_all() {
    if !is_under_test() {
        return;
    }
    for other in [&[("transport", "tcp")][..], &[("transport", "shm")], &[("ucx", "off")]] {
        for errors in [refused([&[("transport", "ucx")], other]), refused([other, &[("transport", "ucx")]])] {
            assert_eq!(errors[0], errors[1]);
            let said = "does not take UCX: rank";
            assert!(errors[0].contains(said) && errors[0].contains("has transport=ucx alone"), "{}", errors[0]);
        }
    }
    let [error, _] = refused([&[("transport", "ucx")], &[("transport", "tcp")]]);
    assert!(error.contains("rank 1 does not take UCX: rank 0 has transport=ucx alone"), "{error}");
}

#[test]
fn a_rank_that_must_and_cannot_take_ucx_is_named_with_the_cause_on_all() {
    if is_under_test() {
        // The library that the process has is taken, whatever is named later.
        return;
    }
    for (settings, cause) in [
        (&[("transport", "ucx"), ("ucx", "/nowhere/libucp.so.0")][..], "/nowhere/libucp.so.0 cannot be loaded"),
        (&[("transport", "ucx"), ("ucx", "off")], "its setting `ucx` is off"),
        (&[("transport", "ucx"), ("tls", "on")], "its setting `tls` forbids what travels in the clear"),
    ] {
        // TLS is the same on all ranks, or they do not even meet.
        let tls = if settings.contains(&("tls", "on")) { &[("tls", "on")][..] } else { &[] };
        for error in refused([tls, settings]) {
            assert!(error.contains(&format!("rank 1 does not take UCX: {cause}")), "{error}");
        }
    }
}
