//! The receiving end of a stream over several connections.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::error::LinkDown;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, lock};
use crate::sys::poller::{Poller, StreamName, Watched};
use crate::transport::tcp::channel::Source;
use crate::transport::tcp::connect::passing;
use crate::transport::tcp::failures::{Alarm, Failures};
use crate::transport::tcp::greeting::Caller;
use crate::transport::tcp::paths::way;
use crate::transport::tcp::rails::link::{Link, Lost};
use crate::transport::tcp::rails::receiver::Receiver;
use crate::types::Rank;

/// A connection that has come for a stream: which of its rails, and of which generation.
#[derive(Debug)]
struct Arrival {
    number: usize,
    generation: u32,
    caller: Watched<Caller>,
}

/// Connections that have come for a stream, which takes them in when it is read.
#[derive(Debug, Default)]
pub(super) struct Joining {
    arrivals: Mutex<Vec<Arrival>>,
    is_any: AtomicBool,
}

impl Joining {
    pub(super) fn push(&self, number: usize, generation: u32, caller: Watched<Caller>) {
        let mut arrivals = lock(&self.arrivals);
        // A peer may open a rail again and again while nobody reads.
        arrivals.retain(|arrival| arrival.number != number);
        arrivals.push(Arrival { number, generation, caller });
        // Read by `take`.
        self.is_any.store(true, Ordering::Release);
    }

    fn take(&self) -> Vec<Arrival> {
        // Written by `push`.
        if !self.is_any.load(Ordering::Acquire) {
            return Vec::new();
        }
        self.is_any.store(false, Ordering::Relaxed);
        std::mem::take(&mut *lock(&self.arrivals))
    }

    fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }
}

/// A connection that has come.
struct Rail {
    caller: Watched<Caller>,
    /// From where to where it goes, in words.
    way: String,
}

impl Link for Rail {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, LinkDown> {
        passing(self.caller.stream.write(bytes))
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        self.caller.read(into)
    }

    fn has_more(&mut self) -> bool {
        self.caller.has_more()
    }
}

/// The rails of a stream, as one source of bytes.
pub(super) struct Rails {
    receiver: Receiver<Rail>,
    joining: Arc<Joining>,
    failures: Failures,
    /// Since when no rail works, although some have not come yet.
    deserted: Option<Instant>,
    alarm: Alarm,
}

impl Rails {
    /// A stream from `peer` that is to have so many rails, which come by `joining`.
    pub(super) fn new(me: Rank, peer: Rank, rails: usize, poller: &Poller, joining: Arc<Joining>) -> Rails {
        let name = StreamName::From(peer);
        let (failures, alarm) = (Failures::new(me, name, rails, poller), Alarm::new(poller, name));
        Rails { receiver: Receiver::new(rails), joining, failures, deserted: None, alarm }
    }

    /// Takes in what has come.
    fn join(&mut self) {
        for Arrival { number, generation, caller } in self.joining.take() {
            let way = way(caller.stream.socket(), "from");
            if !self.receiver.add(number, generation, Rail { caller, way: way.clone() }) {
                log::debug!("rail {} ({way}) came after its end", number + 1);
            } else if generation > 0 {
                // That of the connection before it comes first.
                self.note_lost();
                self.failures.note_back(number, &way);
            }
        }
    }

    /// Takes down which rails have ended, and why.
    fn note_lost(&mut self) {
        for Lost { number, link, down } in self.receiver.take_lost() {
            self.failures.note(number, format_args!("({}) has failed: {down}", link.way));
        }
    }

    /// Takes down what has become of rails, and tells the log once the others have gone on for a while.
    fn settle(&mut self) {
        self.note_lost();
        for number in self.receiver.take_missing() {
            self.failures.note(number, "has not come: the other end has given it up");
        }
        match self.receiver.working() {
            0 => self.failures.hold_back(),
            left => self.failures.warn(left),
        }
    }

    /// While no rail works, waits for those that have not come: their opener may still be at it.
    fn await_others(&mut self) -> Result<usize, LinkDown> {
        let since = *self.deserted.get_or_insert_with(|| {
            self.alarm.set(OTHERS_TIMEOUT);
            Instant::now()
        });
        if since.elapsed() < OTHERS_TIMEOUT {
            return Ok(0);
        }
        let down = LinkDown::new(format!("its connections have ended, and no other came within {OTHERS_TIMEOUT:?}"));
        self.receiver.close(down.clone());
        Err(down)
    }
}

impl Source for Rails {
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        self.join();
        let mut outcome = self.receiver.read(into);
        self.settle();
        match outcome {
            Ok(0) if self.receiver.working() == 0 => outcome = self.await_others(),
            _ if self.deserted.take().is_some() => self.alarm.clear(),
            _ => {}
        }
        if outcome.is_err() {
            self.failures.forget();
            self.alarm.clear();
        }
        outcome
    }

    fn has_more(&mut self) -> bool {
        self.joining.is_any() || self.receiver.has_more()
    }
}

/// How long to wait for another rail once none works: as long as its opener tries an address.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::*;
    use crate::sys::poller::Interest;
    use crate::transport::testing::names;
    use crate::transport::tls::Stream;

    /// The end of a stream of two rails from rank 0, of which none has come, and where they come.
    fn rails(poller: &Poller) -> (Rails, Arc<Joining>, TcpListener) {
        let joining = Arc::new(Joining::default());
        let rails = Rails::new(Rank(1), Rank(0), 2, poller, Arc::clone(&joining));
        (rails, joining, TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap())
    }

    /// Has a rail come; the opener's end of it.
    fn come(number: usize, joining: &Joining, listener: &TcpListener, poller: &Poller) -> TcpStream {
        come_again(number, 0, joining, listener, poller)
    }

    /// The same of a later connection for it.
    fn come_again(
        number: usize,
        generation: u32,
        joining: &Joining,
        listener: &TcpListener,
        poller: &Poller,
    ) -> TcpStream {
        let opener = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        let caller = Caller::new(Stream::accept(accepted, None));
        joining.push(number, generation, poller.watch_named(caller, Interest::Read, NAME).unwrap());
        opener
    }

    const NAME: StreamName = StreamName::From(Rank(0));

    #[test]
    fn a_stream_that_no_connection_is_left_of_waits_for_the_others_and_not_for_ever() {
        let poller = Poller::new().unwrap();
        let (mut rails, joining, listener) = rails(&poller);
        drop(come(0, &joining, &listener, &poller));
        while rails.deserted.is_none() {
            assert_eq!(rails.read(&mut [0; 9]), Ok(0));
        }
        assert_eq!(names(&poller), [], "it may sleep");
        let deserted = rails.deserted.unwrap();
        while names(&poller).is_empty() {
            poller.wait(None).unwrap();
        }
        assert!(deserted.elapsed() >= OTHERS_TIMEOUT);
        for _ in 0..2 {
            let down = rails.read(&mut [0; 9]).unwrap_err();
            assert_eq!(down.cause, "its connections have ended, and no other came within 10s");
            assert!(!rails.alarm.is_set(), "nobody reads after the end");
        }
        poller.wait(Some(Duration::from_millis(1))).unwrap();
        assert_eq!((names(&poller), rails.failures.is_any()), (vec![], false), "of its end nothing is left to tell");
    }

    #[test]
    fn a_connection_that_comes_late_ends_the_wait_for_it() {
        let poller = Poller::new().unwrap();
        let (mut rails, joining, listener) = rails(&poller);
        drop(come(0, &joining, &listener, &poller));
        while rails.deserted.is_none() {
            assert_eq!(rails.read(&mut [0; 9]), Ok(0));
        }
        rails.alarm.set(Duration::ZERO);
        assert!(!rails.has_more());
        let mut opener = come(1, &joining, &listener, &poller);
        assert!(rails.has_more(), "it has come, of which no poller tells");
        let piece = [[0; 8].as_slice(), &3u32.to_le_bytes(), &[0; 8], b"abc"].concat();
        opener.write_all(&piece).unwrap();
        let (mut received, mut into) = (0, [0; 9]);
        while received < 3 {
            received += rails.read(&mut into[received..]).unwrap();
        }
        assert_eq!((&into[..3], rails.deserted, rails.has_more()), (b"abc".as_slice(), None, false));
        poller.wait(Some(Duration::from_millis(1))).unwrap();
        assert_eq!(names(&poller), [], "nothing is waited for");
    }

    #[test]
    fn while_a_connection_works_none_is_waited_for_though_it_brings_nothing() {
        let poller = Poller::new().unwrap();
        let (mut rails, joining, listener) = rails(&poller);
        let waits = |rails: &mut Rails| {
            assert_eq!(rails.read(&mut [0; 9]), Ok(0));
            (rails.deserted.is_some(), rails.alarm.is_set())
        };
        // The other has not come.
        let first = come(0, &joining, &listener, &poller);
        assert_eq!(waits(&mut rails), (false, false));
        drop(first);
        while rails.deserted.is_none() {
            assert_eq!(rails.read(&mut [0; 9]), Ok(0));
        }
        assert_eq!(waits(&mut rails), (true, true));
        // Now the first has ended, and the other brings nothing either.
        let second = come(1, &joining, &listener, &poller);
        assert_eq!(waits(&mut rails), (false, false), "it has come");
        drop(second);
        while rails.read(&mut [0; 9]).is_ok() {}
        assert_eq!((rails.deserted, rails.alarm.is_set()), (None, false), "no other is to come");
    }

    #[test]
    fn who_waits_for_a_connection_hears_at_once_that_it_does_not_come() {
        let poller = Poller::new().unwrap();
        let (mut rails, joining, listener) = rails(&poller);
        let mut opener = come(0, &joining, &listener, &poller);
        opener.write_all(&[[0; 14].as_slice(), &2u16.to_le_bytes(), &[0; 4]].concat()).unwrap();
        drop(opener);
        let down = loop {
            match rails.read(&mut [0; 9]) {
                Ok(count) => assert_eq!((count, rails.deserted), (0, None), "its opener has given the other up"),
                Err(down) => break down,
            }
        };
        assert!(!down.cause.contains("no other came"), "{down}");
        assert_eq!((rails.alarm.is_set(), rails.failures.is_any()), (false, false));
    }

    #[test]
    fn an_end_while_others_are_waited_for_clears_the_alarm() {
        let poller = Poller::new().unwrap();
        let (mut rails, joining, listener) = rails(&poller);
        drop(come(0, &joining, &listener, &poller));
        while rails.deserted.is_none() {
            assert_eq!(rails.read(&mut [0; 9]), Ok(0));
        }
        // What comes then cannot be.
        let mut opener = come(1, &joining, &listener, &poller);
        opener.write_all(&[0xff; 20]).unwrap();
        let down = loop {
            match rails.read(&mut [0; 9]) {
                Ok(count) => assert_eq!(count, 0),
                Err(down) => break down,
            }
        };
        assert!(down.cause.contains("it sent a piece of"), "{down}");
        assert_eq!((rails.deserted, rails.alarm.is_set(), rails.failures.is_any()), (None, false, false));
    }

    #[test]
    fn a_connection_that_comes_again_takes_the_place_of_the_one_before() {
        let poller = Poller::new().unwrap();
        let (mut rails, joining, listener) = rails(&poller);
        let openers = [0, 1].map(|number| come(number, &joining, &listener, &poller));
        assert_eq!((rails.read(&mut [0; 9]), rails.receiver.working()), (Ok(0), 2));
        // Nobody has read between two attempts, of which the last one counts.
        let mut vain = come_again(1, 1, &joining, &listener, &poller);
        let mut again = come_again(1, 2, &joining, &listener, &poller);
        let piece = [[0; 8].as_slice(), &3u32.to_le_bytes(), &[0; 8], b"abc"].concat();
        again.write_all(&piece).unwrap();
        let (mut received, mut into) = (0, [0; 9]);
        while received < 3 {
            received += rails.read(&mut into[received..]).unwrap();
        }
        assert_eq!((&into[..3], rails.receiver.working()), (b"abc".as_slice(), 2));
        let due = rails.failures.take_due(Instant::now() + OTHERS_TIMEOUT, 2);
        let [lost, back] = &due[..] else { panic!("{due:?}") };
        assert!(lost.starts_with("rail 2 of 2 (") && lost.contains("the other end has opened it again"), "{lost}");
        assert!(back.starts_with("rail 2 of 2 (") && back.ends_with(") is back; 2 work now"), "{back}");
        for mut closed in [openers[1].try_clone().unwrap(), vain.try_clone().unwrap()] {
            assert!(
                matches!(std::io::Read::read(&mut closed, &mut [0]), Ok(0) | Err(_)),
                "no descriptor is left of it"
            );
        }
        drop((openers, &mut vain));
    }

    #[test]
    fn the_log_hears_of_a_rail_that_has_ended_and_of_one_that_does_not_come() {
        let poller = Poller::new().unwrap();
        let (mut rails, joining, listener) = rails(&poller);
        let mut opener = come(1, &joining, &listener, &poller);
        // A piece of no bytes that says that the first rail is given up.
        opener.write_all(&[[0; 12].as_slice(), &1u16.to_le_bytes(), &1u16.to_le_bytes(), &[0; 4]].concat()).unwrap();
        while !rails.failures.is_any() {
            assert_eq!(rails.read(&mut [0; 9]), Ok(0));
        }
        let due = rails.failures.take_due(Instant::now() + OTHERS_TIMEOUT, 1);
        assert_eq!(due, ["rail 1 of 2 has not come: the other end has given it up; 1 go on without it"]);
        drop(opener);
        while rails.receiver.working() > 0 {
            rails.receiver.read(&mut [0; 9]).unwrap_or_default();
        }
        rails.settle();
        let due = rails.failures.take_due(Instant::now() + OTHERS_TIMEOUT, 0);
        assert!(due[0].starts_with("rail 2 of 2 (") && due[0].contains(" has failed: "), "{due:?}");
    }
}
