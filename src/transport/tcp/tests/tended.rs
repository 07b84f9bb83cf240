//! What the thread that looks after a stream does for it is told to the stream's user, whom no connection tells of it any more.

use super::*;
use crate::transport::tcp::tender::Tended;

/// Whether the poller names the stream for what was done since this was asked last.
fn is_told(stream: &mut Untended) -> bool {
    let is_told = stream.rails.nudge().is_set();
    while is_told && !names(&stream.sender.poller).contains(&StreamName::To(Rank(1))) {}
    stream.rails.nudge().clear();
    is_told
}

impl Untended {
    /// Writes until there is no room, also for whoever looks after the stream. Returns how many bytes.
    fn fill(&mut self) -> usize {
        let (payload, mut sent) = (content(16 << 20), 0);
        loop {
            let mut vain = 0;
            while vain < 100 {
                let count = self.rails.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
                sent += count;
                vain = if count == 0 { vain + 1 } else { 0 };
            }
            assert!(self.rails.tend(), "something is under way");
            if !is_told(self) {
                assert!(sent < payload.len());
                return sent;
            }
        }
    }

    /// Ends these connections, with so many bytes under way that they are looked at, until that is noticed.
    fn end(&mut self, rails: &[usize]) {
        let (working, begun) = (self.rails.working(), Instant::now());
        for rail in rails {
            self.sockets[*rail][1].shutdown(std::net::Shutdown::Both).unwrap();
        }
        while self.rails.working() > working - rails.len() {
            self.rails.tend();
            assert!(begun.elapsed() < WATCHDOG);
        }
    }
}

#[test]
fn the_loss_of_a_connection_is_told_and_so_is_its_return() {
    let mut stream = Untended::new("off");
    assert!(!stream.rails.tend() && !is_told(&mut stream), "nothing has been done");
    assert_eq!(stream.rails.write(&content(100_000), &[]), Ok(100_000));
    stream.end(&[1]);
    assert!(is_told(&mut stream), "what it had is to be sent again");
    let (mut received, mut piece, begun) = (0, vec![0; 100_000], Instant::now());
    while stream.rails.working() < 2 {
        stream.rails.nudge().clear();
        assert!(stream.rails.tend(), "with nothing under way, it is looked after all the same");
        assert!(stream.receiver.accept().is_empty());
        received += stream.recv_stream.read(&mut piece).unwrap();
        assert!(begun.elapsed() < WATCHDOG, "{received} bytes have come");
    }
    assert_eq!(received, 100_000);
    assert!(is_told(&mut stream), "there is room");
}

#[test]
fn the_loss_of_a_connection_is_told_also_where_the_others_have_no_room() {
    let mut stream = Untended::new("off");
    stream.fill();
    stream.end(&[1]);
    assert!(is_told(&mut stream), "what it had is to be sent again");
}

#[test]
fn the_end_is_told() {
    let mut stream = Untended::new("off");
    assert_eq!(stream.rails.write(&content(100_000), &[]), Ok(100_000));
    stream.end(&[0, 1]);
    assert!(is_told(&mut stream));
    assert!(!stream.rails.tend(), "nothing is looked after any more");
}

#[test]
fn room_that_a_look_has_found_is_told() {
    let mut stream = Untended::new("off");
    let sent = stream.fill();
    let (mut received, mut piece, begun) = (0, vec![0; 1 << 20], Instant::now());
    while !is_told(&mut stream) {
        received += stream.recv_stream.read(&mut piece).unwrap();
        stream.rails.tend();
        assert!(begun.elapsed() < WATCHDOG, "{received} of {sent} bytes have come");
    }
}
