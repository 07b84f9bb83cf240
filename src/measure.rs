//! Measures the parameters of LogGP ([`simulate`](crate::simulate)) between two ranks of this host.
//!
//! The ranks are threads of this process, which meet as the processes of a job do, and messages go the same ways. Overheads are
//! told from the rest as in Culler, Liu, Martin and Yoshikawa, "Assessing fast network interfaces", 1996.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use crate::comm::bootstrap::measure_start;
use crate::comm::store::MemoryStore;
use crate::comm::{CommOptions, Communicator};
use crate::engine::reduce::{Operands, combine};
use crate::error::Error;
use crate::simulate::Start;
use crate::types::{DType, Rank, ReduceOp, Tag};

/// How often each figure is measured. The fastest counts: what else the host does only adds to it.
const ROUNDS: usize = 15;
/// Round trips of a round, for the shortest messages.
const TRIPS: usize = 200;
/// Of long messages there are fewer: so many bytes each way.
const ENOUGH_BYTES: usize = 4 << 20;
/// Messages that are sent one after the other: few enough to fit into a ring all at once.
const BURST: usize = 16;
/// Messages of a stream that the receiver takes as it comes.
const STREAM: usize = 500;
/// The shortest message that is measured, and those that are long enough for their bytes to count most.
const SHORT_BYTES: usize = 8;
const LONG_BYTES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// What is combined and copied at a time: a piece of a long message.
const PIECE_BYTES: usize = 256 << 10;

/// What was measured, in seconds; [`Link`](crate::simulate::Link) says what each means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// L, never negative.
    pub latency: f64,
    /// o: the mean of a sender's and a receiver's.
    pub overhead: f64,
    /// g.
    pub gap: f64,
    /// G: the median over lengths from 64 KiB to 4 MiB.
    pub gap_per_byte: f64,
    /// What adding a byte of float32 to another takes while the other rank does the same.
    pub reduce_per_byte: f64,
    /// What copying a byte takes.
    pub copy_per_byte: f64,
    /// What it takes to let a rank in that joins; see [`Start`].
    pub admit: f64,
    /// What it takes rank 0 to let a rank in that joins through another one.
    pub relay: f64,
    /// What it takes to write or read what the table of all ranks says of one.
    pub table_per_rank: f64,
}

/// Measures them, which takes about a second.
///
/// # Panics
/// When a rank's thread does.
pub fn measure() -> Result<Measured, Error> {
    let store = Arc::new(MemoryStore::default());
    let run = |rank: u32, to: Sender<()>, from: Receiver<()>| {
        let store = store.clone();
        let (name, size) = ("measure".to_owned(), 2);
        let comm =
            Communicator::new(CommOptions { name, rank: Rank(rank), size, store, timeout: None, hints: vec![] })?;
        let found = Side { comm: &comm, peer: Rank(1 - rank), to, from }.measure()?;
        comm.shutdown()?;
        Ok::<_, Error>(found)
    };
    let ((to_one, from_zero), (to_zero, from_one)) = (channel(), channel());
    let (one, other) = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(1, to_zero, from_zero));
        let one = run(0, to_one, from_one);
        (one, other.join().expect("a rank does not panic"))
    });
    Ok(combined(&one?, &other?, &measure_start()?))
}

/// What one rank sees.
struct Seen {
    overhead: f64,
    /// Half a round trip, and the length: of a short message, then of long ones.
    half_trips: Vec<(usize, f64)>,
    interval: f64,
    reduce_per_byte: f64,
    copy_per_byte: f64,
}

fn combined(one: &Seen, other: &Seen, start: &Start) -> Measured {
    let mean = |of: fn(&Seen) -> f64| f64::midpoint(of(one), of(other));
    let overhead = mean(|seen| seen.overhead);
    let short = one.half_trips[0];
    let slope = |&(bytes, time): &(usize, f64)| (time - short.1).max(0.0) / (bytes - short.0) as f64;
    Measured {
        latency: (short.1 - 2.0 * overhead).max(0.0),
        overhead,
        gap: other.interval,
        gap_per_byte: median(one.half_trips[1..].iter().map(slope).collect()),
        reduce_per_byte: mean(|seen| seen.reduce_per_byte),
        copy_per_byte: mean(|seen| seen.copy_per_byte),
        admit: start.admit.seconds(),
        relay: start.relay.seconds(),
        table_per_rank: start.table_per_rank.seconds(),
    }
}

/// One of the two ranks.
struct Side<'a> {
    comm: &'a Communicator,
    peer: Rank,
    /// By which ranks wait for each other without making progress meanwhile.
    to: Sender<()>,
    from: Receiver<()>,
}

impl Side<'_> {
    fn is_first(&self) -> bool {
        self.peer == Rank(1)
    }

    fn measure(&self) -> Result<Seen, Error> {
        let lengths = [SHORT_BYTES].into_iter().chain(LONG_BYTES);
        let half_trips = lengths.map(|bytes| Ok((bytes, self.half_trip(bytes)?))).collect::<Result<_, Error>>()?;
        let (overhead, interval) = (self.overhead()?, self.interval()?);
        self.meet();
        let (from, mut into) = (vec![1u8; PIECE_BYTES], vec![0u8; PIECE_BYTES]);
        let operands = Operands::Elements(ReduceOp::Sum, DType::F32);
        let reduce_per_byte = per_byte(|| combine(operands, &mut into, black_box(&from)));
        let copy_per_byte = per_byte(|| black_box(&mut into).copy_from_slice(black_box(&from)));
        Ok(Seen { overhead, half_trips, interval, reduce_per_byte, copy_per_byte })
    }

    /// Waits for the other rank, unless that has failed, which the next message tells.
    fn meet(&self) {
        let _ = self.to.send(());
        let _ = self.from.recv();
    }

    fn send(&self, data: &[u8]) -> Result<(), Error> {
        self.comm.send(data, self.peer, Tag(0))
    }

    fn receive(&self, data: &mut [u8]) -> Result<(), Error> {
        self.comm.recv(data, self.peer, Tag(0)).map(|_| ())
    }

    /// Seconds of a message there, from half of that there and back.
    fn half_trip(&self, bytes: usize) -> Result<f64, Error> {
        let (out, mut back) = (vec![1u8; bytes], vec![0u8; bytes]);
        let trips = (ENOUGH_BYTES / bytes).clamp(2, TRIPS);
        let round = || {
            for _ in 0..trips {
                if self.is_first() {
                    self.send(&out)?;
                }
                self.receive(&mut back)?;
                if !self.is_first() {
                    self.send(&out)?;
                }
            }
            Ok(())
        };
        Ok(self.rounds(round)? / (2 * trips) as f64)
    }

    /// Seconds that a message keeps its sender, on the first rank, or its receiver, on the other: neither works while the
    /// other does.
    fn overhead(&self) -> Result<f64, Error> {
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let mut turn = |is_own: bool| {
                self.meet();
                if is_own {
                    times.push(self.seconds(|| self.burst(BURST))? / BURST as f64);
                }
                self.meet();
                Ok::<_, Error>(())
            };
            turn(self.is_first())?;
            turn(!self.is_first())?;
        }
        Ok(fastest(times))
    }

    /// Seconds between messages of a stream.
    fn interval(&self) -> Result<f64, Error> {
        Ok(self.rounds(|| self.burst(STREAM))? / STREAM as f64)
    }

    /// Sends so many short messages from the first rank to the other.
    fn burst(&self, count: usize) -> Result<(), Error> {
        let mut message = [0u8; SHORT_BYTES];
        for _ in 0..count {
            if self.is_first() {
                self.send(&message)?;
            } else {
                self.receive(&mut message)?;
            }
        }
        Ok(())
    }

    /// The seconds of the fastest of some rounds that both ranks begin together.
    fn rounds(&self, mut round: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            self.comm.barrier()?;
            times.push(self.seconds(&mut round)?);
        }
        Ok(fastest(times))
    }

    fn seconds(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
        let begin = Instant::now();
        work()?;
        Ok(begin.elapsed().as_secs_f64())
    }
}

/// Seconds a byte of work on a piece.
fn per_byte(mut work: impl FnMut()) -> f64 {
    let mut time = || {
        let begin = Instant::now();
        work();
        begin.elapsed().as_secs_f64() / PIECE_BYTES as f64
    };
    fastest((0..ROUNDS).map(|_| time()).collect())
}

fn fastest(found: Vec<f64>) -> f64 {
    found.into_iter().fold(f64::INFINITY, f64::min)
}

fn median(mut found: Vec<f64>) -> f64 {
    found.sort_by(f64::total_cmp);
    found[found.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_is_measured() {
        let found = measure().unwrap();
        assert!(found.latency.is_finite() && found.latency >= 0.0);
        let Measured {
            overhead, gap, gap_per_byte, reduce_per_byte, copy_per_byte, admit, relay, table_per_rank, ..
        } = found;
        for figure in [overhead, gap, gap_per_byte, reduce_per_byte, copy_per_byte, admit, relay, table_per_rank] {
            assert!(figure.is_finite() && figure > 0.0, "{figure}");
        }
    }
}
