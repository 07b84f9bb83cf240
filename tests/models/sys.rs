//! What the driver asks of the system.

pub(crate) mod fork {
    #[derive(Clone, Copy)]
    pub(crate) struct Origin;

    impl Origin {
        pub(crate) fn here() -> Origin {
            Origin
        }

        pub(crate) fn is_here(self) -> bool {
            true
        }
    }
}

pub(crate) mod file_writer {
    pub(crate) fn await_written() {}
}

pub(crate) mod process {
    pub(crate) fn current_cpu() -> u32 {
        0
    }
}

pub(crate) mod poller {
    use std::io;
    use std::time::Duration;

    use crate::sync::{Arc, Condvar, Mutex, lock};

    #[derive(Default)]
    struct Wire {
        arrived: Vec<usize>,
        woken: bool,
    }

    /// A wire and who sleeps beside it. What has come wakes until it is taken, and no time ever passes.
    #[derive(Clone, Default)]
    pub(crate) struct Poller {
        shared: Arc<(Mutex<Wire>, Condvar)>,
    }

    impl Poller {
        pub(crate) fn deliver(&self, number: usize) {
            lock(&self.shared.0).arrived.push(number);
            self.shared.1.notify_all();
        }

        pub(crate) fn take(&self) -> Vec<usize> {
            std::mem::take(&mut lock(&self.shared.0).arrived)
        }

        pub(crate) fn has_news(&self) -> bool {
            !lock(&self.shared.0).arrived.is_empty()
        }

        pub(crate) fn wait(&self, _: Option<Duration>) -> io::Result<()> {
            let mut wire = lock(&self.shared.0);
            while wire.arrived.is_empty() && !wire.woken {
                wire = self.shared.1.wait(wire).expect("no panic");
            }
            wire.woken = false;
            Ok(())
        }

        pub(crate) fn wake(&self) {
            lock(&self.shared.0).woken = true;
            self.shared.1.notify_all();
        }
    }
}
