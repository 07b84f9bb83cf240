//! Secrets are redacted: they are in no log, of any level, in no dump and in no error.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not count as tests")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ncclx_rs::comm::bootstrap::ROOT_KEY;
use ncclx_rs::comm::store::{MemoryStore, Store};
use ncclx_rs::{CommOptions, Communicator, Rank, Source, Tag};

use crate::log_capture;

/// A store that remembers what rank 0 published first: that it listens.
#[derive(Default)]
struct RememberingStore {
    inner: MemoryStore,
    published: OnceLock<Vec<u8>>,
}

impl Store for RememberingStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        assert_eq!(key, ROOT_KEY);
        self.published.get_or_init(|| value.to_vec());
        self.inner.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        self.inner.get(key, timeout)
    }

    fn rendezvous_host(&self) -> Option<String> {
        None
    }
}

/// The errors, debug output and dump of a rank. Rank 0 waits in vain for a message of rank 1, which leaves.
fn output(rank: usize, store: Arc<dyn Store>, secret: &str, dumps: &Path) -> String {
    let hints = [
        ("transport", "tcp"),
        ("tls", "on"),
        ("job_secret", secret),
        ("connect_timeout_seconds", "4"),
        ("dump_directory", dumps.to_str().unwrap()),
    ];
    let hints = hints.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let options =
        CommOptions { name: "quiet".to_owned(), rank: Rank::from(rank), size: 2, store, timeout: None, hints };
    let comm = match Communicator::new(options) {
        Ok(comm) => comm,
        Err(error) => return format!("{error} {error:?}"),
    };
    comm.barrier().unwrap();
    if rank == 1 {
        return format!("{comm:?}");
    }
    let lost = comm.recv(&mut [0u8; 5], Source::Rank(Rank(1)), Tag(0)).unwrap_err();
    format!("{lost} {lost:?} {comm:?} {}", comm.dump("asked for"))
}

#[test]
fn secrets_are_in_no_log_dump_or_error() {
    log_capture::start();
    let dumps = tempfile::tempdir().unwrap();
    let (job, other) = ("what all ranks were told", "what one rank was told");
    let mut written = String::new();
    let mut secrets = vec![job.to_owned(), other.to_owned()];
    for second in [job, other] {
        let store = Arc::new(RememberingStore::default());
        std::thread::scope(|scope| {
            let ranks = [job, second].into_iter().enumerate().map(|(rank, secret)| {
                let (store, dumps) = (store.clone(), dumps.path());
                scope.spawn(move || output(rank, store, secret, dumps))
            });
            for rank in ranks.collect::<Vec<_>>() {
                written += &rank.join().unwrap();
            }
        });
        let record: serde_json::Value = serde_json::from_slice(store.published.get().unwrap()).unwrap();
        let bytes: Vec<u8> = serde_json::from_value(record["root"]["Listening"]["keys"]["secret"].clone()).unwrap();
        secrets.push(bytes.iter().map(|byte| format!("{byte:02x}")).collect());
        secrets.extend([", ", ","].map(|comma| bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(comma)));
    }
    for entry in std::fs::read_dir(&dumps).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        written += &std::fs::read_to_string(entry.path()).unwrap();
    }
    log_capture::lines().iter().for_each(|(level, line)| written += &format!("{level} {line}\n"));
    for expected in ["rank 1 is lost", "\"asked for\"", "WARN dropped the connection", "does not know the secret"] {
        assert!(written.contains(expected), "{expected}: {written}");
    }
    for secret in secrets {
        assert!(!written.contains(&secret), "{secret} is written down");
    }
}
