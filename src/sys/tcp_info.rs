//! The kernel's statistics of a TCP connection: tcp(7), `TCP_INFO`.
#![allow(unsafe_code, reason = "a socket option that rustix and socket2 do not have")]

use std::io;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use serde::Serialize;

/// Statistics of the sending side of a connection since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TcpStats {
    /// The shortest time until the other host acknowledged, in microseconds.
    pub round_trip: u32,
    /// Bytes that the other host has acknowledged.
    pub bytes: u64,
    /// Microseconds in which there were bytes to send and the receiver had room for them.
    pub sending: u64,
    /// Segments sent.
    pub segments: u32,
    /// Segments sent again.
    pub resent: u32,
}

impl TcpStats {
    /// Those of two connections together.
    pub fn and(self, other: TcpStats) -> TcpStats {
        TcpStats {
            round_trip: self.round_trip.min(other.round_trip),
            bytes: self.bytes + other.bytes,
            sending: self.sending.max(other.sending),
            segments: self.segments.wrapping_add(other.segments),
            resent: self.resent.wrapping_add(other.resent),
        }
    }
}

/// What a connection has under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnderWay {
    /// The segments that the other host has not acknowledged.
    pub unacknowledged: u32,
    /// The bytes that are not sent yet.
    pub unsent: u32,
    /// How often the kernel has sent the first of them again in vain, each time after twice as long, since an answer came last.
    /// Where none is under way and the first cannot be sent, for want of room at the other host or of a way there, how often it
    /// has tried to or asked for an answer.
    pub retries: u8,
}

impl UnderWay {
    /// Whether there are bytes that the other host has not acknowledged.
    pub fn is_any(&self) -> bool {
        self.unacknowledged > 0 || self.unsent > 0
    }
}

/// What `stream` has under way.
pub fn under_way(stream: &TcpStream) -> io::Result<UnderWay> {
    let info = tcp_info(stream)?;
    let retries = info.tcpi_retransmits.max(info.tcpi_probes);
    Ok(UnderWay { unacknowledged: info.tcpi_unacked, unsent: info.tcpi_notsent_bytes, retries })
}

/// The kernel's statistics of `stream`.
pub fn tcp_stats(stream: &TcpStream) -> io::Result<TcpStats> {
    let info = tcp_info(stream)?;
    Ok(TcpStats {
        round_trip: info.tcpi_min_rtt,
        bytes: info.tcpi_bytes_acked,
        sending: info.tcpi_busy_time.saturating_sub(info.tcpi_rwnd_limited),
        segments: info.tcpi_segs_out,
        resent: info.tcpi_total_retrans,
    })
}

fn tcp_info(stream: &TcpStream) -> io::Result<libc::tcp_info> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which is the size of what `info` has room for.
    let status = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len)
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: made of integers alone, of which a kernel that knows fewer has left the last at zero.
    Ok(unsafe { info.assume_init() })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_was_acknowledged_is_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let mut sender = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (mut receiver, _) = listener.accept().expect("a connection");
        let before = tcp_stats(&sender).expect("a TCP socket").bytes;
        sender.write_all(&[7; 1000]).expect("room");
        receiver.read_exact(&mut [0; 1000]).expect("sent");
        // The answer acknowledges.
        receiver.write_all(&[8]).expect("room");
        sender.read_exact(&mut [0]).expect("sent");
        let after = tcp_stats(&sender).expect("a TCP socket");
        assert_eq!(after.bytes - before, 1000);
        assert!(after.segments > 0 && after.resent == 0, "{after:?}");
    }
}
