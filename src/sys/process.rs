//! Whether another process is alive, by pidfd_open(2), and on which CPU this thread runs.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};

/// A process's number, and the namespace in which it has that number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// The kernel and the process namespace.
    namespace: String,
    number: i32,
}

impl ProcessId {
    /// This process.
    pub fn own() -> ProcessId {
        ProcessId { namespace: namespace(), number: rustix::process::getpid().as_raw_pid() }
    }

    /// One that is imagined: process `number` of a host with a name of its own.
    pub(crate) fn imagined(namespace: String, number: i32) -> ProcessId {
        ProcessId { namespace, number }
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
        let number = Pid::from_raw(id.number).filter(|_| id.namespace == namespace());
        let number = number.ok_or(io::ErrorKind::NotFound)?;
        Ok(Process { fd: rustix::process::pidfd_open(number, PidfdFlags::empty())? })
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
    fn a_number_means_nothing_elsewhere() {
        assert!(Process::find(&ProcessId::own()).is_ok());
        assert!(Process::find(&ProcessId { namespace: "elsewhere".to_owned(), ..ProcessId::own() }).is_err());
    }
}
