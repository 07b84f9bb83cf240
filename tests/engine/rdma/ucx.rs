//! The same tests over UCX, the real library, in processes whose environment says what it goes through; and those of UCX alone.

use std::path::{Path, PathBuf};
use std::process::Command;

use ncclx_rs::rdma::{MemoryRegion, RdmaError, Transport};

use crate::lacking::lacks;

use super::{LONG, arrived, lent, numbers, pair, read, transport, write};

/// Says in a process of this program that it is one of those.
const UNDER_TEST: &str = "NCCLX_RS_TEST_UCX_UNDER_TEST";

pub(super) fn is_under_test() -> bool {
    std::env::var_os(UNDER_TEST).is_some()
}

/// The library: the one that `NCCLX_RS_TEST_UCX` names, or that of the Python package in the environment of the tests.
fn library() -> Option<PathBuf> {
    let environment = std::env::var("VIRTUAL_ENV")
        .map_or_else(|_| Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv"), PathBuf::from);
    let named = std::env::var_os("NCCLX_RS_TEST_UCX").map(PathBuf::from);
    let folders = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    let installed = folders.map(|python| python.path().join("site-packages/libucx/lib/libucp.so.0"));
    let found = named.into_iter().chain(installed).find(|file| file.exists());
    if found.is_none() {
        lacks("UCX: the file that NCCLX_RS_TEST_UCX names, or the Python package libucx-cu12");
    }
    found
}

/// Runs the tests whose names begin like this, `count` or more, in a process where UCX may go through these transports alone.
fn run_through(transports: &str, names: &str, count: usize) {
    let Some(library) = library() else { return };
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args([names, "--skip", "pass_through_ucx", "--test-threads", "2"]);
    child.env(UNDER_TEST, "1").env("NCCLX_RS_UCX", library).env("UCX_TLS", transports);
    let output = child.output().expect("this program");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    let passed = text.split("test result: ok. ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    assert!(passed >= Some(count), "{text}");
}

#[test]
fn all_tests_pass_through_ucx() {
    for transports in ["posix", "sysv"] {
        run_through(transports, "rdma::", 17);
    }
}

#[test]
fn a_way_on_which_a_peer_could_end_this_process_is_refused() {
    if !is_under_test() {
        run_through("tcp", "rdma::ucx::a_way_on_which", 1);
    } else if allowed() == "tcp" {
        let (one, other) = (transport(&[("transport", "ucx")]), transport(&[("transport", "ucx")]));
        let error = one.connect(&other.bind().expect("bind"), LONG).expect_err("it reads nothing by itself");
        assert!(matches!(error, RdmaError::Unreachable { .. }), "{error}");
        let said = error.to_string();
        assert!(said.contains("the peer has no UCX: UCX would go through tcp/"), "{said}");
        assert!(said.contains(", where a peer that goes away can end this process"), "{said}");
    }
}

/// What UCX may go through in this process.
fn allowed() -> String {
    std::env::var("UCX_TLS").expect("set by the test")
}

#[test]
fn bytes_go_through_what_the_environment_says() {
    if !is_under_test() {
        return;
    }
    let (one, other) = pair(&[("transport", "ucx")]);
    for devices in [one.devices(), other.devices()] {
        let through: Vec<&str> = devices.iter().map(|device| device.split('/').next().expect("a name")).collect();
        assert_eq!(through, [allowed()], "{devices:?}");
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
