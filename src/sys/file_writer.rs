//! The thread that writes files: a folder that another host serves may not answer for long, for which nobody who makes progress
//! can wait.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{self, Condvar, Mutex, lock};
use crate::sys::fork::PerProcess;

/// How long [`await_written`] waits for a file.
const PATIENCE: Duration = Duration::from_secs(2);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    /// A job has ended.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// When each job came that has not ended, the first one first.
    since: VecDeque<Instant>,
    has_thread: bool,
}

static QUEUE: PerProcess<Queue> = PerProcess::unset();

/// Has a thread call `job`, which writes a file, after those that came before.
pub(crate) fn write_aside(job: Job) {
    QUEUE.get().push(job);
}

/// Waits until the files that are due have been written, but for none longer than [`PATIENCE`] since it was due.
pub(crate) fn await_written() {
    QUEUE.get().settle();
}

impl Queue {
    fn push(&'static self, job: Job) {
        let mut state = lock(&self.state);
        state.since.push_back(Instant::now());
        state.jobs.push_back(job);
        if state.has_thread {
            return;
        }
        match sync::spawn("ncclx_rs files", || self.serve()) {
            Ok(()) => state.has_thread = true,
            Err(error) => {
                log::error!("a thread that writes files could not be started: {error}");
                drop(state);
                self.serve();
            }
        }
    }

    /// Calls what there is to call.
    fn serve(&self) {
        let mut state = lock(&self.state);
        while let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = lock(&self.state);
            state.since.pop_front();
            self.changed.notify_all();
        }
        state.has_thread = false;
    }

    fn settle(&self) {
        let mut state = lock(&self.state);
        while let Some(since) = state.since.front() {
            let left = PATIENCE.saturating_sub(since.elapsed());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn files_are_written_in_turn_and_waited_for_until_one_takes_too_long() {
        let queue: &'static Queue = Box::leak(Box::default());
        let (writes, written) = mpsc::channel();
        for number in 0..3 {
            let writes = writes.clone();
            queue.push(Box::new(move || writes.send(number).expect("somebody hears")));
        }
        queue.settle();
        assert_eq!(written.try_iter().collect::<Vec<_>>(), [0, 1, 2]);
        let (answer, answered) = mpsc::channel();
        let begin = Instant::now();
        queue.push(Box::new(move || answered.recv().expect("an answer")));
        queue.settle();
        assert!(begin.elapsed() >= PATIENCE, "{:?}", begin.elapsed());
        // For what comes behind it nobody waits either.
        queue.push(Box::new(move || writes.send(3).expect("somebody hears")));
        queue.settle();
        assert!(written.try_recv().is_err(), "it is behind the one that does not end");
        answer.send(()).expect("somebody waits");
        assert_eq!(written.recv(), Ok(3));
    }
}
