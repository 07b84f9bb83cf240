//! How a rank waits that may share its CPU with the rank that it waits for.
//!
//! A thread that looks for news takes nothing away from a rank on another CPU. One on the same CPU, though, cannot go on
//! until it stops. So the ranks of a host let each other know where they wait.

use std::time::{Duration, Instant};

use crate::engine::driver::Wait;
use crate::engine::progress::Engine;

/// What a rank knows of its CPU.
#[derive(Debug, Default)]
pub(crate) struct Cpu {
    /// Another rank was there, too, when this one waited last.
    pub(crate) is_shared: bool,
    /// When this rank last slept for that.
    left: Option<Instant>,
}

impl Engine {
    /// Lets the others know that this rank waits on `cpu`, and says how.
    pub(crate) fn next_wait(&mut self, cpu: u32, now: Instant) -> Wait {
        self.cpu.is_shared = false;
        for peer in &mut self.peers {
            peer.outbox.publish_cpu(cpu);
            self.cpu.is_shared |= peer.inbox.as_ref().is_some_and(|inbox| inbox.peer_cpu() == Some(cpu));
        }
        if !self.cpu.is_shared {
            Wait::Spin
        } else if self.cpu.left.is_none_or(|left| now - left >= LEAVE_EVERY) {
            self.cpu.left = Some(now);
            Wait::Sleep
        } else {
            Wait::Yield
        }
    }
}

/// How often a rank that shares its CPU sleeps to be given another one.
const LEAVE_EVERY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::message::Direction;
    use crate::engine::mock_peer::Harness;
    use crate::engine::region::Words;
    use crate::types::Rank;

    #[test]
    fn ranks_know_with_whom_they_share_a_cpu() {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0]));
        let began = Instant::now();
        assert_eq!(harness.engine.next_wait(3, began), Wait::Spin, "no stream is there yet");
        let _send = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        assert_eq!(harness.engine.next_wait(3, began), Wait::Spin, "the other rank has not told");
        harness.link().cpu = Some(3);
        assert_eq!(harness.engine.next_wait(3, began), Wait::Sleep, "there may be another CPU");
        assert_eq!(
            (harness.engine.next_wait(3, began), harness.engine.cpu.is_shared),
            (Wait::Yield, true),
            "there was none"
        );
        assert_eq!((harness.engine.next_wait(4, began), harness.engine.cpu.is_shared), (Wait::Spin, false));
        assert_eq!(harness.link().engine_cpu, Some(4));
        assert_eq!(harness.engine.next_wait(3, began + LEAVE_EVERY), Wait::Sleep, "once in a while it tries again");
    }
}
