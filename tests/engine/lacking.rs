//! What a test does where the machine lacks something that it needs.

use std::fmt::Display;

/// Says that a test is not run, for want of this. In CI that is a failure.
#[allow(clippy::print_stdout, reason = "says what a test lacks")]
pub(crate) fn lacks(needed: impl Display) {
    assert!(std::env::var("NCCLX_RS_CI").is_err(), "CI lacks what the test needs: {needed}");
    println!("skipped: it takes {needed}");
}
