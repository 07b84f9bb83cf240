//! What the driver drives: instead of operations, works that end when their number comes over a wire.

#[path = "../../src/engine/driver.rs"]
#[allow(dead_code, reason = "the engine uses the rest")]
pub(crate) mod driver;

pub(crate) mod progress {
    use std::time::Instant;

    use crate::engine::completion::Finished;
    use crate::engine::failures::{Departed, OnLoss};
    use crate::engine::heartbeat::{Absence, Heartbeat, InFlight};
    use crate::engine::wait_policy::Wait;
    use crate::error::Error;
    use crate::sys::poller::Poller;
    use crate::work::Work;

    #[derive(Default)]
    pub(crate) struct Engine {
        pub(crate) name: String,
        pub(crate) finished: Finished,
        pub(crate) wire: Poller,
        pub(crate) in_flight: Vec<Work>,
    }

    impl Engine {
        pub(crate) fn end(&mut self, number: usize) {
            let ended = |work: &Work| work.number() == number as u64;
            if let Some(index) = self.in_flight.iter().position(ended) {
                let work = self.in_flight.remove(index);
                work.complete(Ok(()), None);
                self.finished.push(work);
            }
        }

        pub(crate) fn progress(&mut self, _: bool) -> bool {
            let arrived = self.wire.take();
            arrived.iter().for_each(|number| self.end(*number));
            !arrived.is_empty()
        }

        pub(crate) fn arm(&mut self) -> bool {
            self.wire.has_news()
        }

        pub(crate) fn disarm(&mut self) {}

        pub(crate) fn next_wait(&mut self, _: u32, _: Instant) -> Wait {
            Wait::Spin
        }

        pub(crate) fn check_open(&self, _: &str) -> Result<(), Error> {
            Ok(())
        }

        pub(crate) fn is_busy(&self) -> bool {
            !self.in_flight.is_empty()
        }

        pub(crate) fn next_deadline(&self) -> Option<Instant> {
            None
        }

        pub(crate) fn heartbeat_arrives(&mut self, _: &Heartbeat, _: Instant) {}

        pub(crate) fn absences(&mut self, _: &[Heartbeat], _: Instant) -> Vec<Absence> {
            Vec::new()
        }

        pub(crate) fn tell_absence(&mut self, _: Absence, _: InFlight) {}

        pub(crate) fn end_on_device(&mut self, _: &Work, _: Result<(), Error>) {}

        pub(crate) fn departed(&mut self, _: &Departed) {}

        pub(crate) fn end_after_loss(&mut self, _: Instant) -> Option<Instant> {
            None
        }

        pub(crate) fn write_due_dump(&mut self) {}

        pub(crate) fn name(&self) -> &str {
            &self.name
        }

        pub(crate) fn take_finished(&mut self) -> Finished {
            std::mem::take(&mut self.finished)
        }

        pub(crate) fn set_on_loss(&mut self, _: OnLoss) -> Option<OnLoss> {
            None
        }

        pub(crate) fn take_on_loss(&mut self) -> Option<(OnLoss, Error)> {
            None
        }
    }
}

pub(crate) mod completion {
    use crate::work::Work;

    pub(crate) type Finished = Vec<Work>;
}

#[path = "../../src/engine/wait_policy.rs"]
pub(crate) mod wait_policy;

pub(crate) mod heartbeat {
    pub(crate) struct Heartbeat;

    pub(crate) struct Absence;

    pub(crate) struct InFlight;
}

pub(crate) mod failures {
    use crate::error::Error;

    pub(crate) struct Departed;

    pub(crate) type OnLoss = Box<dyn FnOnce(Error) + Send>;
}

pub(crate) mod callbacks {
    use crate::work::Work;

    pub(crate) fn run_elsewhere(work: Work) {
        work.run_callbacks();
    }

    pub(crate) fn call_elsewhere(job: Box<dyn FnOnce() + Send>) {
        job();
    }
}
