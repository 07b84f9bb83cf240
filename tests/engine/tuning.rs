//! A tuning file or a setting changes which algorithm runs, on all ranks; what is wrong, or differs, is an error on all.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ncclx_rs::algo;
use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::config::Config;
use ncclx_rs::{CommOptions, Communicator, Error, InitError, Rank, ReduceOp};
use tempfile::NamedTempFile;

use crate::log_capture;

fn file(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("room");
    file
}

/// Three ranks, of which rank 0 reads the file; each makes an all_reduce of so many elements.
fn reduce_tuned(file: &Path, count: usize) -> Vec<Result<(), Error>> {
    let other = Path::new("/nowhere");
    world([file, other, other].map(|file| ("tuning_file", file.display().to_string())), move |comm| reduce(comm, count))
}

/// Ranks with one setting each, which do the same.
fn world<const SIZE: usize>(
    settings: [(&'static str, String); SIZE],
    act: impl Fn(&Communicator) -> Result<(), Error> + Clone + Send + 'static,
) -> Vec<Result<(), Error>> {
    let store = Arc::new(MemoryStore::default());
    let rank = |(rank, (name, value)): (usize, (&str, String))| {
        let options = CommOptions {
            name: "tuned".to_owned(),
            rank: Rank::from(rank),
            size: SIZE,
            store: store.clone(),
            timeout: Some(Duration::from_secs(60)),
            hints: vec![(name.to_owned(), value)],
        };
        let act = act.clone();
        std::thread::spawn(move || {
            let comm = Communicator::new(options)?;
            act(&comm)?;
            comm.shutdown()
        })
    };
    let ranks: Vec<_> = settings.into_iter().enumerate().map(rank).collect();
    ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
}

/// An average of so many elements, which comes out wrong where ranks run different algorithms.
fn reduce(comm: &Communicator, count: usize) -> Result<(), Error> {
    let mut data = vec![4f32; count];
    comm.all_reduce(&mut data, ReduceOp::Avg)?;
    assert_eq!(data, vec![4.0; count]);
    Ok(())
}

/// By which algorithms all_reduces of so many floats have run in this process.
fn algorithms_of(count: usize) -> Vec<String> {
    let start = format!("AllReduce {{ count: {count} }} of elements of 4 bytes runs by ");
    log_capture::lines().iter().filter_map(|(_, line)| line.strip_prefix(&start)).map(str::to_owned).collect()
}

#[test]
fn rank_0s_file_decides_on_all_ranks() {
    log_capture::start();
    // Sizes that no other test has, so that none of its lines counts.
    for (count, algorithm) in [(1237, "rabenseifner"), (1301, "ring"), (1303, "recursive_doubling")] {
        let text = r#"{"version": 1, "rows": [
            {"collective": "all_reduce", "ranks": 3, "max_bytes": 5000, "algorithm": "rabenseifner"},
            {"collective": "all_reduce", "ranks": 3, "max_bytes": 5204, "algorithm": "ring"},
            {"collective": "all_reduce", "ranks": 4, "algorithm": "direct"}
        ]}"#;
        let file = file(text);
        for outcome in reduce_tuned(file.path(), count) {
            outcome.expect("an all_reduce");
        }
        assert_eq!(algorithms_of(count), [algorithm; 3]);
    }
}

#[test]
fn a_wrong_file_is_an_error_on_all_ranks() {
    let file = file(r#"{"version": 1, "rows": [{"collective": "all_reduce", "ranks": "3"}]}"#);
    for outcome in reduce_tuned(file.path(), 1) {
        let text = outcome.expect_err("a string is no number").to_string();
        assert!(text.contains(&format!("tuning_file `{}`", file.path().display())), "{text}");
        assert!(text.contains("invalid type: string \"3\", expected usize at line 1 column"), "{text}");
    }
}

#[test]
fn a_missing_file_is_an_error_on_all_ranks() {
    for (rank, outcome) in reduce_tuned(Path::new("/nowhere/at.all"), 1).into_iter().enumerate() {
        let error = outcome.expect_err("there is no file");
        assert!(rank > 0 || matches!(error, Error::Init(InitError::Config(_))), "{error:?}");
        assert!(error.to_string().contains("tuning_file `/nowhere/at.all`: No such file"), "{error}");
    }
}

#[test]
fn rank_0s_algorithm_holds_for_all_ranks_and_where_they_split_off() {
    log_capture::start();
    let settings = ["ring", "auto", ""].map(|value| ("algorithm", value.to_owned()));
    let outcomes = world(settings, |comm| {
        reduce(comm, 1409)?;
        let turned = comm.split(&[Rank(2), Rank(0), Rank(1)], "turned")?;
        reduce(&turned, 1423)?;
        turned.shutdown()
    });
    outcomes.into_iter().for_each(|outcome| outcome.expect("an average"));
    assert_eq!((algorithms_of(1409), algorithms_of(1423)), (vec!["ring".to_owned(); 3], vec!["ring".to_owned(); 3]));
}

#[test]
fn the_setting_knows_every_algorithm_and_refuses_other_names() {
    let setting = Config::describe().into_iter().find(|row| row.name == "algorithm").expect("a setting");
    let names: Vec<&str> = algo::names().collect();
    assert_eq!(setting.kind, format!("one of auto, {}", names.join(", ")));
    let outcome = world([("algorithm", "rign".to_owned())], |comm| reduce(comm, 9)).remove(0);
    let expected = format!("the hint algorithm is `rign`: expected {}", setting.kind);
    assert!(matches!(&outcome, Err(Error::Init(InitError::Config(text))) if *text == expected), "{outcome:?}");
}

#[test]
fn another_algorithm_than_rank_0s_is_an_error_on_all_ranks() {
    for (root, other) in [("auto", "ring"), ("", "ring"), ("direct", "ring")] {
        for outcome in world([root, other].map(|value| ("algorithm", value.to_owned())), |comm| reduce(comm, 9)) {
            let text = outcome.expect_err("they differ").to_string();
            let root = if root.is_empty() { "auto" } else { root };
            assert!(text.contains("rank 1 on host `"), "{text}");
            assert!(text.contains(&format!("has algorithm `{other}`, rank 0 has `{root}`")), "{text}");
        }
    }
    // One rank of four, which is named to the others too.
    let four = ["direct", "direct", "ring", "direct"].map(|value| ("algorithm", value.to_owned()));
    for outcome in world(four, |comm| reduce(comm, 9)) {
        let text = outcome.expect_err("they differ").to_string();
        assert!(text.contains("rank 2 on host `"), "{text}");
        assert!(text.contains("has algorithm `ring`, rank 0 has `direct`"), "{text}");
    }
}
