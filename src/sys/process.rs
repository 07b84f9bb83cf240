//! Whether another process is alive, by pidfd_open(2), and on which CPU this thread runs.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};

use crate::sync::{Arc, Mutex, Weak, lock};
use crate::sys::fork::PerProcess;
use crate::sys::socket;

/// A process's number, and the namespace in which it has that number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// The kernel and the process namespace.
    namespace: Arc<str>,
    number: i32,
}

impl ProcessId {
    /// This process.
    pub fn own() -> ProcessId {
        ProcessId { namespace: namespace().into(), number: rustix::process::getpid().as_raw_pid() }
    }

    /// One that is imagined: process `number` of a host with a name of its own.
    pub(crate) fn imagined(namespace: String, number: i32) -> ProcessId {
        ProcessId { namespace: namespace.into(), number }
    }

    /// Holds the name of the namespace in common with another process of it.
    pub(crate) fn share(&mut self, other: &ProcessId) {
        if self.namespace == other.namespace {
            self.namespace = other.namespace.clone();
        }
    }
}

/// A process that may end. Its file descriptor becomes readable then.
#[derive(Debug)]
pub struct Process {
    fd: OwnedFd,
}

impl Process {
    /// The process with this id; an error if it is not visible from here, as in another container or on another host.
    pub fn find(id: &ProcessId) -> io::Result<Process> {
        if *id.namespace != *namespace() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Process::with_number(id.number)
    }

    /// The process with this number in this one's namespace.
    pub fn with_number(number: i32) -> io::Result<Process> {
        let number = Pid::from_raw(number).ok_or(io::ErrorKind::NotFound)?;
        Ok(Process { fd: rustix::process::pidfd_open(number, PidfdFlags::empty())? })
    }

    /// The process at the other end of a Unix socket, by one descriptor for all who ask. An error if it is not visible from here,
    /// as in another container, or has closed the socket.
    pub fn behind(socket: BorrowedFd<'_>) -> io::Result<Arc<Process>> {
        static KNOWN: PerProcess<Mutex<FxHashMap<i32, Weak<Process>>>> = PerProcess::unset();
        let number = socket::peer_credentials(socket)?.pid;
        let mut known = lock(KNOWN.get());
        known.retain(|_, process| process.strong_count() > 0);
        let process = known.get(&number).and_then(Weak::upgrade).filter(|process| !process.has_ended());
        let process = process.map_or_else(|| Process::with_number(number).map(Arc::new), Ok)?;
        // Another one may have got the number of one that had ended before.
        if socket::is_hung_up(socket) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        known.insert(number, Arc::downgrade(&process));
        Ok(process)
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        let mut watched = [PollFd::new(&self.fd, PollFlags::IN)];
        rustix::event::poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ended| ended > 0)
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The number of the CPU that this thread runs on.
pub fn current_cpu() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// Has this thread run on one CPU alone.
pub fn bind_to_cpu(cpu: u32) -> io::Result<()> {
    bind_to_cpus(&[cpu])
}

/// Has this thread run on these CPUs alone.
pub fn bind_to_cpus(cpus: &[u32]) -> io::Result<()> {
    if cpus.iter().any(|cpu| *cpu as usize >= CpuSet::MAX_CPU) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu as usize));
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// The numbers of the CPUs that this thread may run on, and how many the system lets it use at a time, if fewer.
pub fn own_cpus() -> (Vec<u32>, Option<u32>) {
    let usable = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let numbers = match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32).collect(),
        // The system has more CPUs than fit into a set: as many as there are, under the same numbers in every process.
        Err(_) => (0..usable as u32).collect::<Vec<_>>(),
    };
    let quota = (usable < numbers.len()).then_some(usable as u32);
    (numbers, quota)
}

fn namespace() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("cat");
        let id = ProcessId { number: child.id() as i32, ..ProcessId::own() };
        let process = Process::find(&id).expect("a child is seen");
        assert!(!process.has_ended());
        drop(child.stdin.take());
        child.wait().expect("it ends with its input");
        assert!(process.has_ended());
    }

    #[test]
    fn who_asks_for_a_process_again_gets_the_same_until_its_socket_is_closed() {
        let (near, far) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let [one, other] = [(); 2].map(|()| Process::behind(near.as_fd()).expect("this process"));
        assert!(Arc::ptr_eq(&one, &other) && !one.has_ended());
        drop(far);
        assert_eq!(Process::behind(near.as_fd()).expect_err("nobody is there").kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_number_means_nothing_elsewhere() {
        assert!(Process::find(&ProcessId::own()).is_ok());
        assert!(Process::find(&ProcessId { namespace: "elsewhere".into(), ..ProcessId::own() }).is_err());
    }
}
