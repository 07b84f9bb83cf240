//! The threads that run callbacks of works which no thread waits for.
//!
//! Callbacks run one after the other, in the order in which the works ended. They never run on a thread that makes
//! progress: a callback may wait for Python's lock, or for another operation. A callback that takes longer than
//! [`TURN_TIMEOUT`] may be waiting for one behind it: PyTorch's PowerSGD hook waits for futures, which callbacks complete.
//! Those behind it then run beside it, on one more thread. Of threads that have nothing to do, one stays.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{Arc, Condvar, Mutex, lock};
use crate::sys::fork::PerProcess;
use crate::work::Work;

/// How long a callback may hold up the callbacks behind it.
const TURN_TIMEOUT: Duration = Duration::from_millis(5);

/// How long a thread has nothing to do beside another one before it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the work's callbacks on a thread kept for them.
pub(crate) fn run_elsewhere(work: Work) {
    call_elsewhere(Box::new(move || _ = work.run_callbacks()));
}

/// Something to call.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// Calls `job` on a thread kept for callbacks, behind the jobs that came before.
pub fn call_elsewhere(job: Box<dyn FnOnce() + Send>) {
    static QUEUE: PerProcess<Arc<Queue>> = PerProcess::unset();
    QUEUE.get().push(job);
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Jobs taken so far; the latest is the one that the queued jobs wait for.
    taken: u64,
    /// When the latest job was taken, while it runs and its time is not over.
    running: Option<Instant>,
    threads: usize,
    /// Threads inside a job.
    occupied: usize,
}

impl State {
    fn idle(&self) -> usize {
        self.threads - self.occupied
    }
}

impl Queue {
    fn push(self: &Arc<Self>, job: Job) {
        let mut state = lock(&self.state);
        state.jobs.push_back(job);
        self.keep_one_free(&mut state);
        let orphan = if state.threads == 0 { state.jobs.pop_front() } else { None };
        drop(state);
        self.changed.notify_one();
        if let Some(job) = orphan {
            job();
        }
    }

    /// Starts a thread if all are inside jobs, one of which may wait for a job that is queued.
    fn keep_one_free(self: &Arc<Self>, state: &mut State) {
        if state.jobs.is_empty() || state.idle() > 0 {
            return;
        }
        let queue = Arc::clone(self);
        match std::thread::Builder::new().name("ncclx_rs_done".to_owned()).spawn(move || queue.serve()) {
            Ok(_) => state.threads += 1,
            Err(error) => log::error!("a thread for callbacks could not be started: {error}"),
        }
    }

    fn serve(self: Arc<Self>) {
        let mut state = lock(&self.state);
        loop {
            let timeout = state.running.map_or(Duration::ZERO, |since| TURN_TIMEOUT.saturating_sub(since.elapsed()));
            if !timeout.is_zero() && !state.jobs.is_empty() {
                state = self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let Some(job) = state.jobs.pop_front() else {
                if state.idle() == 1 {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                let waited = self.changed.wait_timeout(state, IDLE_TIMEOUT).unwrap_or_else(PoisonError::into_inner);
                state = waited.0;
                if waited.1.timed_out() && state.jobs.is_empty() && state.idle() > 1 {
                    state.threads -= 1;
                    return;
                }
                continue;
            };
            state.taken += 1;
            let own = state.taken;
            state.running = Some(Instant::now());
            state.occupied += 1;
            self.keep_one_free(&mut state);
            drop(state);
            job();
            state = lock(&self.state);
            state.occupied -= 1;
            if state.taken == own {
                state.running = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn short_jobs_share_a_few_threads() {
        let queue = Arc::<Queue>::default();
        let (sender, receiver) = mpsc::channel();
        for number in 0..1000 {
            let sender = sender.clone();
            queue.push(Box::new(move || sender.send(number).expect("the test listens")));
        }
        drop(sender);
        assert_eq!(receiver.iter().count(), 1000);
        let threads = lock(&queue.state).threads;
        assert!(threads < 100, "{threads} threads");
    }

    #[test]
    fn a_job_may_wait_for_those_behind_it() {
        const CHAIN: usize = 8;
        let queue = Arc::<Queue>::default();
        let (done, all_done) = mpsc::channel();
        // Each job waits for the next one to end.
        let mut ends = None;
        let mut jobs = VecDeque::<Job>::new();
        for _ in 0..CHAIN {
            let (sender, receiver) = mpsc::channel::<()>();
            let (next, done) = (ends.replace(receiver), done.clone());
            jobs.push_front(Box::new(move || {
                if let Some(next) = next {
                    next.recv().expect("the job behind ends");
                }
                done.send(()).expect("the test listens");
                sender.send(()).ok();
            }));
        }
        for job in jobs {
            queue.push(job);
        }
        for _ in 0..CHAIN {
            all_done.recv_timeout(Duration::from_secs(60)).expect("every job ends");
        }
        assert!(lock(&queue.state).threads > 1);
        while lock(&queue.state).threads > 1 {
            std::thread::sleep(Duration::from_millis(10));
        }
        let (sender, receiver) = mpsc::channel();
        queue.push(Box::new(move || sender.send(()).expect("the test listens")));
        receiver.recv_timeout(Duration::from_secs(60)).expect("the thread that stayed takes it");
    }
}
