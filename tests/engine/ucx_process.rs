//! Processes of this program in which tests run over UCX, the real library. Their environment says what it goes through.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::lacking::lacks;

/// Says in a process of this program that it is one of those.
const UNDER_TEST: &str = "NCCLX_RS_TEST_UCX_UNDER_TEST";

pub(crate) fn is_under_test() -> bool {
    std::env::var_os(UNDER_TEST).is_some()
}

/// What UCX may go through in this process.
pub(crate) fn allowed() -> String {
    std::env::var("UCX_TLS").expect("set by the test")
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

/// Runs the tests whose names contain one of these, `count` or more, in a process where UCX may go through these transports alone.
pub(crate) fn run_through(transports: &str, names: &[&str], count: usize) {
    let Some(library) = library() else { return };
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(names).args(["--skip", "through_ucx", "--test-threads", "2"]);
    child.env(UNDER_TEST, "1").env("NCCLX_RS_UCX", library).env("UCX_TLS", transports);
    let output = child.output().expect("this program");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    let passed = text.split("test result: ok. ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    assert!(passed >= Some(count), "{text}");
}
