//! The examples of the Rust interface run and come to the right end.

use std::process::Command;

#[test]
fn ranks_of_the_example_fit_one_line() {
    // The profile in which this test is built, so that nothing has to be built again.
    let run = ["run", "--quiet", "--locked", "--profile", "test", "--example", "all_reduce"];
    let output = Command::new(env!("CARGO")).args(run).current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo");
    let mut lines: Vec<_> = str::from_utf8(&output.stdout).expect("text").lines().collect();
    lines.sort_unstable();
    let expected = ["rank 0 of 2: y = 3.000 x + 1.000", "rank 1 of 2: y = 3.000 x + 1.000"];
    assert_eq!(lines, expected, "{}", String::from_utf8_lossy(&output.stderr));
}
