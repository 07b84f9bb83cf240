//! Worlds of hundreds of ranks on one machine, over real sockets and shared memory: many ranks to a process, in threads, on posed
//! hosts of sixteen. Prints what each world took, as the process of rank 0 saw it. That depends on the machine, so only results
//! and what a rank holds are checked.
//!
//! `NCCLX_RS_SCALE` lists the sizes, multiples of 64; `make scale` takes larger ones than the tests.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not count as tests")]
#![allow(clippy::print_stdout, reason = "what a world took")]

use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use ncclx_rs::comm::store::TcpStore;
use ncclx_rs::{CommOptions, Communicator, Error, Rank, ReduceOp};

/// Ranks of a posed host.
const HOST: usize = 16;

/// Ranks of a process, which has descriptors for so many and not for many more.
const PROCESS: usize = 64;

/// Larger worlds have short rings, of which each rank has 30 here: all hosts are one machine.
const LARGE: usize = 1024;

/// Longer than a world takes on a slow machine that has other work.
const LONG: Duration = Duration::from_secs(300);

/// What a rank may hold once it has run short collectives and is in a row and a column: memory in bytes, and descriptors.
const BYTES_MAX: usize = 4 << 20;
const DESCRIPTORS_MAX: usize = 160;

/// Tells a process which part of a world it is: its number, the size of the world, and the store's address.
const VARIABLE: &str = "NCCLX_RS_TEST_SCALE";

#[test]
fn worlds_of_many_ranks() {
    if let Ok(part) = std::env::var(VARIABLE) {
        let [number, size, address] = part.split(' ').collect::<Vec<_>>().try_into().expect("a part");
        return run_part(number.parse().expect("a number"), size.parse().expect("a size"), address);
    }
    println!(
        "ranks, start, first and hundredth all_reduce, row and column; KiB and descriptors a rank; barrier, all_gather, all_to_all, \
         loss of a rank known to all"
    );
    let sizes = std::env::var("NCCLX_RS_SCALE").unwrap_or_else(|_| "128".to_owned());
    for size in sizes.split_whitespace() {
        let size: usize = size.parse().expect("NCCLX_RS_SCALE has numbers of ranks");
        assert!(size.is_multiple_of(PROCESS) && size > PROCESS, "{size} ranks are not whole processes of {PROCESS}");
        let store = TcpStore::serve("127.0.0.1:0").expect("a store");
        let start = |number| {
            let mut part = Command::new(std::env::current_exe().expect("this program"));
            part.args(["worlds_of_many_ranks", "--exact", "--nocapture", "--quiet"]);
            part.env(VARIABLE, format!("{number} {size} {}", store.address())).spawn().expect("a process")
        };
        let parts: Vec<_> = (0..size / PROCESS).map(start).collect();
        for mut part in parts {
            assert!(part.wait().expect("it ends").success(), "a part of {size} ranks has failed; see above");
        }
    }
}

/// What this process holds: bytes in memory and descriptors.
fn holdings() -> (usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kilobytes: usize = resident.trim().trim_end_matches(" kB").parse().unwrap();
    (kilobytes << 10, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

fn run_part(number: usize, size: usize, address: &str) {
    let (bytes_before, descriptors_before) = holdings();
    let store = Arc::new(TcpStore::connect(address, LONG).expect("the store"));
    let together = Barrier::new(PROCESS + 1);
    std::thread::scope(|scope| {
        let (store, together) = (&store, &together);
        let start = |rank| {
            // The others wait for one that has panicked, whose message stands above.
            let run = move || {
                let run = AssertUnwindSafe(|| run_rank(rank, size, store.clone(), together));
                std::panic::catch_unwind(run).unwrap_or_else(|_| std::process::exit(1));
            };
            scope.spawn(run);
        };
        (number * PROCESS..).take(PROCESS).for_each(start);
        // The time until all ranks of this process wait again.
        let mut since = Instant::now();
        let mut lap = || {
            together.wait();
            std::mem::replace(&mut since, Instant::now()).elapsed()
        };
        // As it comes: who waits for a large world sees what it waits for.
        let tell = |text: String| {
            if number == 0 {
                print!("{text}");
                std::io::stdout().flush().unwrap();
            }
        };
        tell(format!("{size:>6} {:>9.1?}", lap()));
        for is_told in [true, false, true, true] {
            let took = lap();
            if is_told {
                tell(format!(" {took:>9.1?}"));
            }
        }
        let (bytes, descriptors) = holdings();
        let bytes = bytes.saturating_sub(bytes_before) / PROCESS;
        let descriptors = (descriptors - descriptors_before) / PROCESS;
        tell(format!(" {:>6} {descriptors:>4}", bytes >> 10));
        lap();
        (0..4).for_each(|_| tell(format!(" {:>9.1?}", lap())));
        tell("\n".to_owned());
        assert!(bytes <= BYTES_MAX, "a rank takes {bytes} bytes");
        assert!(descriptors <= DESCRIPTORS_MAX, "a rank takes {descriptors} descriptors");
    });
}

fn run_rank(rank: usize, size: usize, store: Arc<TcpStore>, together: &Barrier) {
    let options = CommOptions {
        name: "scale".to_owned(),
        rank: Rank::from(rank),
        size,
        store,
        timeout: Some(LONG),
        hints: [
            ("host_id", format!("host {}", rank / HOST)),
            ("connect_timeout_seconds", LONG.as_secs().to_string()),
            // The kernel's own threads wait for a core, too.
            ("peer_timeout_seconds", LONG.as_secs().to_string()),
            ("shm_ring_bytes", if size > LARGE { "32768" } else { "" }.to_owned()),
            // Each thread of a process that sleeps is woken for what comes for others.
            ("shared_streams", if size > LARGE { "off" } else { "" }.to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec(),
    };
    let comm = Communicator::new(options).expect("the world forms");
    together.wait();
    all_reduce(&comm);
    together.wait();
    (2..100).for_each(|_| all_reduce(&comm));
    together.wait();
    all_reduce(&comm);
    together.wait();
    let part = |ranks: Vec<usize>, name: &str| {
        let ranks: Vec<Rank> = ranks.into_iter().map(Rank::from).collect();
        let part = comm.split(&ranks, name).expect("a part");
        let mut sum = [rank as u64];
        part.all_reduce(&mut sum, ReduceOp::Sum).expect("a sum");
        assert_eq!(sum[0], ranks.iter().map(|rank| u64::from(rank.0)).sum::<u64>());
        part
    };
    let row = part((rank / HOST * HOST..).take(HOST).collect(), "row");
    let column = part((rank % HOST..size).step_by(HOST).collect(), "column");
    together.wait();
    // What all hold is counted here.
    together.wait();
    comm.barrier().expect("a barrier");
    together.wait();
    let ranks: Vec<u64> = (0..size as u64).collect();
    let mut all = vec![0; size];
    comm.all_gather(&mut all[..], &[rank as u64]).expect("a gather");
    assert_eq!(all, ranks);
    together.wait();
    let own = vec![rank as u64; size];
    comm.all_to_all(&mut all[..], &own[..]).expect("an exchange");
    assert_eq!(all, ranks);
    together.wait();
    let victim = size / 2;
    if rank == victim {
        drop((row, column, comm));
    } else {
        let lost = comm.barrier().expect_err("a rank has ended");
        assert!(matches!(&lost, Error::PeerLost { rank, .. } if *rank as usize == victim), "{lost}");
    }
    together.wait();
}

fn all_reduce(comm: &Communicator) {
    let mut sum = [u64::from(comm.rank().0)];
    comm.all_reduce(&mut sum, ReduceOp::Sum).expect("a sum");
    let size = comm.size() as u64;
    assert_eq!(sum[0], size * (size - 1) / 2);
}
