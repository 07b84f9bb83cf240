//! How long a stream is looked at in vain before it is armed, so that a turn need not look at it.
//!
//! To arm a stream costs some system calls: here, and where the bell of its shared memory is rung for the next message. So all
//! streams that bring nothing may together take as many looks as that is worth.

/// How often in a row one direction of a stream was looked at in vain.
#[derive(Debug, Default)]
pub(crate) struct VainLooks {
    looks: u32,
    /// How often this rank has slept meanwhile.
    sleeps: u32,
}

impl VainLooks {
    /// Notes whether a look `moved` something. True: the stream is to be armed, which is one of `streams` that a turn looks at,
    /// and alone is worth `patience` looks.
    #[inline]
    pub(crate) fn note(&mut self, moved: bool, patience: u32, streams: usize) -> bool {
        if moved {
            *self = VainLooks::default();
            return false;
        }
        self.looks = self.looks.saturating_add(1);
        self.looks as usize * streams >= patience as usize
    }

    /// Notes that this rank goes to sleep, for which it arms all streams. True: this one is looked at again after that.
    pub(crate) fn sleep(&mut self) -> bool {
        self.sleeps = self.sleeps.saturating_add(1);
        self.sleeps < SLEEPS_IN_VAIN
    }
}

const SLEEPS_IN_VAIN: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_streams_are_worth_no_more_looks_than_one() {
        for streams in [1, 4, 100] {
            let mut vain = VainLooks::default();
            for _ in 0..2 {
                let looks = (1..).find(|_| vain.note(false, 100, streams));
                assert_eq!(looks, Some(100 / streams));
                assert!(!vain.note(true, 100, streams), "it has brought something");
            }
        }
    }

    #[test]
    fn a_stream_that_brings_nothing_through_some_sleeps_stays_armed() {
        let mut vain = VainLooks::default();
        assert_eq!([(); 5].map(|()| vain.sleep()), [true, true, true, false, false]);
        vain.note(true, 100, 1);
        assert!(vain.sleep(), "it has brought something");
    }
}
