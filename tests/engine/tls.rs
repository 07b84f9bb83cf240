//! TLS between ranks: what passes through it, and how ranks that do not fit together learn of it.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not count as tests")]

use std::sync::Arc;

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::{CommOptions, Communicator, Rank, ReduceOp};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::{TempDir, tempdir};

type Hints = Vec<(String, String)>;

fn hints(pairs: &[(&str, &str)]) -> Hints {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn write(folder: &TempDir, name: &str, text: &str) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Who signs certificates.
struct Authority {
    name: &'static str,
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl Authority {
    fn new(name: &'static str) -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().pem();
        Authority { name, issuer: Issuer::new(params, key), certificate }
    }

    /// The settings of a rank whose certificate this has signed, good until `year`.
    fn settings(&self, folder: &TempDir, rank: usize, year: i32) -> Hints {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![format!("rank-{rank}.example")]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        let file = |what: &str, text: &str| write(folder, &format!("{}-{rank}-{what}.pem", self.name), text);
        hints(&[
            ("tls_certificate", &file("certificate", &certificate)),
            ("tls_key", &file("key", &key.serialize_pem())),
            ("tls_ca_file", &file("authority", &self.certificate)),
        ])
    }
}

/// Makes a communicator of as many ranks as there are settings, and runs `f` on each.
fn run<T: Send>(settings: &[Hints], f: impl Fn(&Communicator) -> T + Sync) -> Vec<Result<T, String>> {
    let store = Arc::new(MemoryStore::default());
    let rank = |rank: usize| {
        let options = CommOptions {
            name: "tls".to_owned(),
            rank: Rank::from(rank),
            size: settings.len(),
            store: store.clone(),
            timeout: None,
            hints: [hints(&[("host_id", &format!("host {rank}"))]), settings[rank].clone()].concat(),
        };
        Communicator::new(options).map(|comm| f(&comm)).map_err(|error| error.to_string())
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..settings.len()).map(|index| scope.spawn(move || rank(index))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Both ranks of a world that does not come to be, with what each is told.
fn refused(first: &Hints, second: &Hints) -> [String; 2] {
    let errors: Vec<_> = run(&[first.clone(), second.clone()], |_| ()).into_iter().map(Result::unwrap_err).collect();
    errors.try_into().unwrap()
}

#[test]
fn long_and_short_messages_pass_between_hosts_with_certificates() {
    let (folder, authority) = (tempdir().unwrap(), Authority::new("ours"));
    let settings: Vec<_> = (0..3).map(|rank| authority.settings(&folder, rank, 4000)).collect();
    let results = run(&settings, |comm| {
        for count in [1, 1 << 10, 3 << 20] {
            let mut data: Vec<u32> = (0..count).map(|index| index + comm.rank().0).collect();
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().enumerate().all(|(index, value)| *value == 3 * index as u32 + 3), "{count}");
        }
        comm.shutdown().unwrap();
    });
    assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn ranks_that_differ_in_protection_learn_it_on_both_sides() {
    let (folder, authority) = (tempdir().unwrap(), Authority::new("ours"));
    let kinds = [
        ("no TLS", hints(&[("tls", "off")])),
        ("TLS with keys from the secret", hints(&[("tls", "on")])),
        ("TLS with certificates", authority.settings(&folder, 0, 4000)),
    ];
    for (ours, first) in &kinds {
        for (theirs, second) in kinds.iter().filter(|(theirs, _)| theirs != ours) {
            for error in refused(first, second) {
                assert!(error.contains(&format!("rank 1 has {theirs}, rank 0 {ours}: see tls")), "{error}");
            }
        }
    }
}

#[test]
fn a_certificate_of_another_authority_is_refused_on_both_sides() {
    let (folder, ours, others) = (tempdir().unwrap(), Authority::new("ours"), Authority::new("others"));
    let [mut outsider, own] = [&others, &ours].map(|authority| authority.settings(&folder, 1, 4000));
    let [root, joiner] = refused(&ours.settings(&folder, 0, 4000), &outsider);
    assert!(
        joiner.contains("rank 0 cannot be reached") && joiner.contains("is not signed by an authority"),
        "{joiner}"
    );
    assert!(root.contains("rank 1 failed") && root.contains("is not signed by an authority"), "{root}");
    // It trusts rank 0, but rank 0 does not trust it.
    outsider.retain(|(name, _)| name != "tls_ca_file");
    outsider.extend(own.into_iter().filter(|(name, _)| name == "tls_ca_file"));
    for error in refused(&ours.settings(&folder, 0, 4000), &outsider) {
        assert!(error.contains("does not trust the authority of this rank's certificate"), "{error}");
    }
}

#[test]
fn an_expired_certificate_is_refused_on_both_sides() {
    let (folder, authority) = (tempdir().unwrap(), Authority::new("ours"));
    let (good, bad) = (authority.settings(&folder, 0, 4000), authority.settings(&folder, 1, 2020));
    for error in refused(&bad, &good) {
        assert!(error.contains("its certificate has expired"), "{error}");
    }
    for error in refused(&good, &bad) {
        assert!(error.contains("this rank's certificate has expired"), "{error}");
    }
}

#[test]
fn settings_that_lack_a_file_are_refused_on_both_sides() {
    let (folder, authority) = (tempdir().unwrap(), Authority::new("ours"));
    let good = authority.settings(&folder, 0, 4000);
    // Beside each other: the rank whose settings are good looks for the other one for a while, in case it comes anew.
    std::thread::scope(|scope| {
        for index in 0..3 {
            let (mut without, mut elsewhere, mut empty) = (good.clone(), good.clone(), good.clone());
            let (name, _) = without.remove(index);
            elsewhere[index].1 = "/nowhere.pem".to_owned();
            empty[index].1 = write(&folder, "empty", "");
            for (bad, cause) in [(without, "is not set"), (elsewhere, "`/nowhere.pem`"), (empty, "empty`")] {
                for pair in [[good.clone(), bad.clone()], [bad, good.clone()]] {
                    let name = name.clone();
                    scope.spawn(move || {
                        for error in refused(&pair[0], &pair[1]) {
                            assert!(error.contains(&name) && error.contains(cause), "{error}");
                        }
                    });
                }
            }
        }
    });
}

#[test]
fn a_rank_with_another_job_secret_or_none_stays_outside() {
    std::thread::scope(|scope| {
        for tls in ["off", "on"] {
            let secret =
                move |text: &str| hints(&[("job_secret", text), ("tls", tls), ("connect_timeout_seconds", "4")]);
            let (one, other) = ("a job's long secret", "another long secret");
            scope.spawn(move || {
                let sums = run(&[secret(one), secret(one)], |comm| {
                    let mut sum = [comm.rank().0 + 1];
                    comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    sum
                });
                assert_eq!(sums, [Ok([3]), Ok([3])]);
            });
            scope.spawn(move || {
                let [root, joiner] = refused(&secret(one), &secret(other));
                assert!(root.contains("ranks [1] did not join"), "{root}");
                assert!(joiner.contains("does not know the secret"), "{joiner}");
            });
            scope.spawn(move || {
                let [root, joiner] = refused(&secret(one), &secret(""));
                assert!(root.contains("ranks [1] did not join"), "{root}");
                assert!(joiner.contains("rank 1 has no job secret, rank 0 one"), "{joiner}");
            });
            scope.spawn(move || {
                for error in refused(&secret(""), &secret(one)) {
                    assert!(error.contains("rank 1 has a job secret, rank 0 none"), "{error}");
                }
            });
            // Both are told which file one of them cannot read.
            for (root, joiner) in [("", "file:/nowhere"), ("file:/nowhere", one)] {
                scope.spawn(move || {
                    for error in refused(&secret(root), &secret(joiner)) {
                        assert!(error.contains("/nowhere"), "{error}");
                    }
                });
            }
        }
    });
}
