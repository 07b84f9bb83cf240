//! UCX as a way for bytes, beside a connection whose sides have proved themselves: how the sides connect through it, and how they
//! wait.
//!
//! Either side only ever reads by it. So whoever writes to memory is a thread of its owner.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::rdma::protocol::{PACKED_MAX, Request, Say};
use crate::rdma::wire::Wire;
use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;
use crate::sys::ucx::{Context, Device, Endpoint, RegisteredMemory, UcxError};
use crate::transport::ucx::{Need, Offer};

/// The opening side's part: asks the peer for its end, connects, and reads a few bytes. So what is returned works.
pub(super) fn open(wire: &mut Wire, context: &Arc<Context>, need: Need, deadline: Instant) -> io::Result<Endpoint> {
    let mut endpoint = Endpoint::new(context).map_err(io::Error::other)?;
    let address = endpoint.address().map_err(io::Error::other)?;
    check_packed("an address", &address)?;
    wire.ask_before(Request::to_connect(address.len()), &address, deadline)?;
    let (say, bytes) = wire.answer_before(deadline)?;
    if say != Say::Packed {
        return Err(io::Error::other(format!("the peer has no UCX: {}", String::from_utf8_lossy(&bytes))));
    }
    let theirs = Introduction::decode(&bytes).ok_or_else(|| io::Error::other("the peer sent no address of UCX"))?;
    endpoint.connect(theirs.address).map_err(io::Error::other)?;
    let names = check_devices(&endpoint, need).map_err(io::Error::other)?;
    let probe = Arc::new(LentBytes::owned(vec![0; PROBE.len()]));
    let from = (theirs.probe, theirs.probe_key);
    endpoint.get(0, from, (&probe, 0, PROBE.len())).map_err(io::Error::other)?;
    loop {
        if let Some((_, ended)) = endpoint.progress().pop() {
            break ended.map_err(io::Error::other)?;
        }
        check(&endpoint)?;
        let left = deadline.checked_duration_since(Instant::now()).ok_or(io::ErrorKind::TimedOut)?;
        sleep(&mut endpoint, wire, PollFlags::RDHUP, Some(left))?;
        if is_left(wire) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let mut read = [0; PROBE.len()];
    probe.copy_out(0, &mut read);
    if read != PROBE {
        return Err(io::Error::other("UCX read other bytes than the peer has"));
    }
    log::info!("UCX goes through {names}");
    Ok(endpoint)
}

/// The accepting side's end.
pub(super) struct Accepted {
    pub(super) endpoint: Endpoint,
    pub(super) introduction: Vec<u8>,
    /// What the peer reads to see that it can.
    _probe: (Arc<LentBytes>, Arc<RegisteredMemory>),
}

/// The accepting side's part: connects to an address, and introduces itself.
pub(super) fn accept(offer: &Offer, address: &[u8]) -> Result<Accepted, String> {
    let context = offer.as_ref()?;
    let said = |error: UcxError| error.to_string();
    let mut endpoint = Endpoint::new(context).map_err(said)?;
    let own = endpoint.address().map_err(said)?;
    endpoint.connect(address).map_err(said)?;
    check_devices(&endpoint, Need::Any)?;
    let probe = Arc::new(LentBytes::owned(PROBE.to_vec()));
    let registered = RegisteredMemory::of(context, &probe).map_err(said)?;
    let introduction = Introduction { address: &own, probe: probe.address(), probe_key: registered.key() }.encode();
    check_packed("an address", &introduction).map_err(|error| error.to_string())?;
    Ok(Accepted { endpoint, introduction, _probe: (probe, registered) })
}

/// The names of what the endpoint goes through, or why that is not taken.
///
/// Where no device reads by itself, the peer's UCX answers each read by a message. If it has seen the connection end when it
/// begins to answer, it calls `ucs_fatal`, which ends the process (`ucp_progress_get_reply` of `rma_sw.c`, as of 1.22). Over TCP that
/// happens whenever the other side goes away. Over shared memory UCX looks for that each 20 s, and the connection beside it ends
/// at once, after which this side closes its endpoint, and UCX drops what comes.
fn check_devices(endpoint: &Endpoint, need: Need) -> Result<String, String> {
    let devices = endpoint.devices();
    let has_rdma = devices.iter().any(Device::is_rdma);
    let names = devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let reason = match need {
        _ if !has_rdma && !devices.iter().any(Device::is_shared_memory) => {
            "where a peer that goes away can end this process"
        }
        Need::Better if !has_rdma => "none of which is an RDMA device",
        Need::Better | Need::Any => return Ok(names),
    };
    Err(format!("UCX would go through {names}, {reason}"))
}

/// What the accepting side tells of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Introduction<'a> {
    address: &'a [u8],
    /// Where [`PROBE`] lies.
    probe: u64,
    probe_key: &'a [u8],
}

impl Introduction<'_> {
    fn encode(&self) -> Vec<u8> {
        let head = [self.probe.to_le_bytes(), (self.address.len() as u64).to_le_bytes()].concat();
        [head.as_slice(), self.address, self.probe_key].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Introduction<'_>> {
        let (probe, rest) = bytes.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (address, probe_key) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        Some(Introduction { address, probe: u64::from_le_bytes(*probe), probe_key })
    }
}

/// Refuses what UCX packed if it is longer than a peer takes.
pub(super) fn check_packed(what: &str, packed: &[u8]) -> io::Result<()> {
    if packed.len() <= PACKED_MAX {
        return Ok(());
    }
    Err(io::Error::other(format!("UCX packed {what} of {} bytes, more than {PACKED_MAX}", packed.len())))
}

/// The error of a connection that has ended.
pub(super) fn check(endpoint: &Endpoint) -> io::Result<()> {
    endpoint.failure().map_or(Ok(()), |failure| Err(io::Error::other(format!("UCX: {failure}"))))
}

/// Sleeps until the endpoint has progress to make, something of `wanted` happens on the connection, or the time is over.
pub(super) fn sleep(
    endpoint: &mut Endpoint,
    wire: &Wire,
    wanted: PollFlags,
    limit: Option<Duration>,
) -> io::Result<()> {
    if !endpoint.arm().map_err(io::Error::other)? {
        return Ok(());
    }
    let mut watched =
        [PollFd::from_borrowed_fd(wire.as_fd(), wanted), PollFd::from_borrowed_fd(endpoint.as_fd(), PollFlags::IN)];
    let limit = limit.map(timespec);
    match rustix::event::poll(&mut watched, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether the peer has ended the connection, or its process has ended. What it sent before may still be unread.
pub(super) fn is_left(wire: &Wire) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(wire.as_fd(), PollFlags::RDHUP)];
    rustix::event::poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// As poll(2) takes it.
pub(super) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

/// What the opening side reads first.
const PROBE: [u8; 8] = *b"ncclx_rs";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_introduction_is_read_as_it_was_written() {
        let introduction = Introduction { address: &[1, 2, 3], probe: 77, probe_key: &[4; 9] };
        let bytes = introduction.encode();
        assert_eq!(Introduction::decode(&bytes), Some(introduction));
        assert_eq!(bytes.len(), 16 + 3 + 9);
        assert!((0..19).all(|len| Introduction::decode(&bytes[..len]).is_none()), "its address is cut off");
    }
}
