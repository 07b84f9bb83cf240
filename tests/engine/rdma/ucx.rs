//! The same tests over UCX, the real library, in processes whose environment says what it goes through; and those of UCX alone.

use ncclx_rs::rdma::{MemoryRegion, RdmaError, Transport};

use crate::ucx_process::{allowed, is_under_test, run_through};

use super::{LONG, arrived, lent, numbers, pair, read, transport, write};

#[test]
fn all_tests_pass_through_ucx() {
    for transports in ["posix", "sysv", "posix,cma"] {
        run_through(transports, &["rdma::"], 17);
    }
}

#[test]
fn a_way_on_which_a_peer_could_end_this_process_is_refused() {
    if !is_under_test() {
        run_through("tcp", &["rdma::ucx::a_way_on_which"], 1);
    } else if allowed() == "tcp" {
        let (one, other) = (transport(&[("transport", "ucx")]), transport(&[("transport", "ucx")]));
        let error = one.connect(&other.bind().expect("bind"), LONG).expect_err("it reads nothing by itself");
        assert!(matches!(error, RdmaError::Unreachable { .. }), "{error}");
        let said = error.to_string();
        assert!(said.contains("the peer has no UCX: UCX would go through tcp/"), "{said}");
        assert!(said.contains(", where a peer that goes away can end this process"), "{said}");
    }
}

#[test]
fn bytes_go_through_what_the_environment_says() {
    if !is_under_test() {
        return;
    }
    let (one, other) = pair(&[("transport", "ucx")]);
    for devices in [one.devices(), other.devices()] {
        let through: Vec<&str> = devices.iter().map(|device| device.split('/').next().expect("a name")).collect();
        assert_eq!(through, allowed().split(',').collect::<Vec<_>>(), "{devices:?}");
    }
    // Of more pieces than one.
    let len = (9 << 20) + 3;
    let (memory, sent, local) = (MemoryRegion::new(lent(vec![0; len])), numbers(3, len), lent(vec![0; len]));
    let remote = memory.remote_buffer(0, len).expect("inside");
    write(&one, &lent(sent.clone()), remote).expect("written");
    assert!(arrived(memory.bytes()) == sent);
    read(&other, &local, remote).expect("read");
    assert!(arrived(&local) == sent);
}

#[test]
fn a_peer_without_ucx_is_named_and_not_reached_otherwise() {
    if !is_under_test() {
        return;
    }
    for (theirs, reason) in [
        (&[("transport", "shm")][..], "the peer has no UCX: its setting `transport` is another"),
        (&[("transport", "tcp")], "the peer has no UCX: its setting `transport` is another"),
        (&[("ucx", "off")], "the peer has no UCX: its setting `ucx` is off"),
    ] {
        let (one, other) = (transport(&[("transport", "ucx")]), transport(theirs));
        let error = one.connect(&other.bind().expect("bind"), LONG).expect_err("no UCX there");
        assert!(matches!(error, RdmaError::Unreachable { .. }) && error.to_string().contains(reason), "{error}");
        assert!(!one.is_connected());
    }
    let unused = transport(&[("transport", "ucx"), ("ucx", "off")]);
    let error = unused.bind().expect_err("contradictory").to_string();
    assert_eq!(error, "bind: UCX cannot be used: its setting `ucx` is off");
}

#[test]
fn auto_takes_what_it_took_before_where_no_device_is_better() {
    if !is_under_test() || ncclx_rs::sys::net::has_rdma_devices() {
        return;
    }
    let both: [Transport; 2] = [transport(&[]), transport(&[])];
    let addresses = both.each_ref().map(|each| each.bind().expect("bind"));
    both[0].connect(&addresses[1], LONG).expect("connect");
    assert_eq!((both[0].wire(), both[0].devices()), (Some("shared memory"), Vec::new()));
}
