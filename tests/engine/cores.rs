//! Ranks that are bound to cores before they join, as launchers do: the host has the cores of all of them.

use std::sync::Arc;

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::sys::process::bind_to_cpu;
use ncclx_rs::{CommOptions, Communicator, Rank};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::lacking::lacks;
use crate::log_capture;

/// What a communicator of ranks that are bound to these cores, one each, logs of the cores that it found.
fn found(name: &str, cores: &[usize]) -> Vec<String> {
    log_capture::start();
    let store = Arc::new(MemoryStore::default());
    let join = |rank: usize| {
        bind_to_cpu(cores[rank] as u32).expect("a core that this thread may be on");
        let (name, rank, size, store) = (name.to_owned(), Rank::from(rank), cores.len(), store.clone());
        let options = CommOptions { name, rank, size, store, timeout: None, hints: vec![] };
        Communicator::new(options).expect("the world forms").shutdown().expect("shutdown");
    };
    let join = &join;
    std::thread::scope(|scope| (0..cores.len()).for_each(|rank| _ = scope.spawn(move || join(rank))));
    let start = format!("communicator `{name}` rank ");
    let lines = log_capture::lines().into_iter().filter(|(_, line)| line.starts_with(&start));
    lines
        .map(|(_, line)| line[line.find("cores: ").expect("cores")..line.rfind(';').expect("memory")].to_owned())
        .collect()
}

#[test]
fn ranks_with_a_core_each_are_not_crowded() {
    let usable = sched_getaffinity(None).expect("this thread's cores");
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| usable.is_set(*core)).take(2).collect();
    assert_eq!(found("on one core", &[cores[0]; 2]), ["cores: 1, oversubscribed; threads for long copies: 1"; 2]);
    let [one, other] = cores[..] else { return lacks("a second core") };
    assert_eq!(found("on a core each", &[one, other]), ["cores: 2; threads for long copies: 1"; 2]);
    assert_eq!(found("on two cores", &[one, other, one]), ["cores: 2, oversubscribed; threads for long copies: 1"; 3]);
}
