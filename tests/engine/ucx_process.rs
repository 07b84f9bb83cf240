//! Processes of this program in which tests run over UCX, the real library. Their environment says what it goes through.

use std::process::Command;

#[path = "ucx_library.rs"]
mod ucx_library;

use crate::lacking::lacks;
use ucx_library::library;

/// Says in a process of this program that it is one of those.
const UNDER_TEST: &str = "NCCLX_RS_TEST_UCX_UNDER_TEST";

pub(crate) fn is_under_test() -> bool {
    std::env::var_os(UNDER_TEST).is_some()
}

/// What UCX may go through in this process.
pub(crate) fn allowed() -> String {
    std::env::var("UCX_TLS").expect("set by the test")
}

/// Runs the tests whose names contain one of these, `count` or more, in a process where UCX may go through these transports alone.
pub(crate) fn run_through(transports: &str, names: &[&str], count: usize) {
    let Some(library) = library() else {
        return lacks("UCX: the file that NCCLX_RS_TEST_UCX names, or the Python package libucx-cu12");
    };
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
