//! The examples of the Rust interface run and come to the right end.

use std::process::Command;

fn lines_of(example: &str, arguments: &[&str]) -> Vec<String> {
    // The profile in which this test is built, so that nothing has to be built again.
    let run = ["run", "--quiet", "--locked", "--profile", "test", "--example", example, "--"];
    let mut cargo = Command::new(env!("CARGO"));
    // Cargo tells tests of their package, and builds ring anew, and all that needs it, whenever it is told another one.
    let is_of_package = |name: &str| {
        name == "OUT_DIR" || ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| name.starts_with(prefix))
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_package)) {
        cargo.env_remove(name);
    }
    let output = cargo.args(run).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    str::from_utf8(&output.stdout).expect("text").lines().map(str::to_owned).collect()
}

#[test]
fn ranks_of_the_example_fit_one_line() {
    let mut lines = lines_of("all_reduce", &[]);
    lines.sort_unstable();
    assert_eq!(lines, ["rank 0 of 2: y = 3.000 x + 1.000", "rank 1 of 2: y = 3.000 x + 1.000"]);
}

#[test]
fn the_benchmark_has_a_row_for_each_size() {
    let lines = lines_of("bench", &["--ranks", "3", "--min", "4", "--max", "16"]);
    let tables = lines.iter().filter(|line| line.starts_with("# Benchmarking ")).count();
    assert_eq!(tables, 12);
    let rows: Vec<Vec<f64>> = lines
        .iter()
        .filter(|line| !line.is_empty() && !line.contains('#'))
        .map(|line| line.split_whitespace().map(|number| number.parse().expect("a number")).collect())
        .collect();
    assert_eq!(rows.len(), 11 * 3 + 1, "three sizes of each, and the barrier");
    for row in rows {
        let [_bytes, calls, least, most, mean, _rate] = row[..] else { panic!("six columns, not {row:?}") };
        // To copy four bytes may take less than what is printed.
        assert!(calls == 1000.0 && 0.0 <= least && least <= mean && mean <= most, "{row:?}");
    }
}

#[test]
fn the_benchmark_measures_one_sided_operations() {
    let lines = lines_of("bench", &["--ops", "PutPingPong,Uniput,Write,Read", "--min", "8", "--max", "16"]);
    let rows = lines.iter().filter(|line| !line.is_empty() && !line.contains('#'));
    let calls: Vec<_> = rows.map(|line| line.split_whitespace().nth(1).expect("six columns").to_owned()).collect();
    assert_eq!(calls, ["1000"; 8]);
}
