//! Ranks that meet by what a launcher tells them.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not count as tests")]

use std::net::TcpListener;
use std::time::Duration;

use ncclx_rs::comm::launch::{Master, StoreServer};
use ncclx_rs::comm::store::Store;
use ncclx_rs::sys::net;
use ncclx_rs::{Communicator, Launch, Rank};

fn launches(host: &str, size: usize) -> Vec<Launch> {
    let port = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")).unwrap();
    let port = port.local_addr().unwrap().port();
    let master = Some(Master { host: host.to_owned(), port, server: StoreServer::RankZero });
    (0..size).map(|rank| Launch { rank: Rank::from(rank), size, local_rank: None, master: master.clone() }).collect()
}

/// Loopback by address and by name, and this host as others call it.
fn hosts() -> Vec<String> {
    let outside =
        net::interfaces().unwrap().into_iter().find(|one| one.address.is_ipv4() && !one.address.is_loopback());
    let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
    names.into_iter().chain(outside.map(|interface| interface.address.to_string())).collect()
}

#[test]
fn a_launch_makes_a_communicator() {
    for host in hosts() {
        let start = |launch: Launch| std::thread::spawn(move || launch.communicator("world").unwrap());
        let threads: Vec<_> = launches(&host, 3).into_iter().map(start).collect();
        let comms: Vec<Communicator> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for (rank, comm) in comms.iter().enumerate() {
            assert_eq!((comm.rank(), comm.size(), comm.name()), (Rank::from(rank), 3, "world"));
        }
    }
}

#[test]
fn one_rank_needs_no_store() {
    let alone = Launch { rank: Rank(0), size: 1, local_rank: None, master: None };
    assert_eq!(alone.communicator("alone").unwrap().size(), 1);
}

#[test]
fn the_store_is_known_by_the_masters_name() {
    for host in hosts() {
        let launches = launches(&host, 2);
        let served = launches[0].store(Duration::from_secs(60)).unwrap();
        let client = launches[1].store(Duration::from_secs(60)).unwrap();
        served.set("key", b"1").unwrap();
        assert_eq!(client.get("key", Duration::ZERO), Ok(b"1".to_vec()));
        assert_eq!(client.rendezvous_host(), Some(host));
    }
}

#[test]
fn an_absent_rank_zero_is_named_by_its_address() {
    let launch = launches("127.0.0.1", 2).remove(1);
    let error = launch.store(Duration::from_millis(50)).unwrap_err().to_string();
    let port = launch.master.unwrap().port;
    assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains("refused"), "{error}");
}
