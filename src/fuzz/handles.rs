//! Fuzz targets of the handles of another process's memory: segments, rings, and the sockets that hand rings over.

use std::os::fd::AsFd;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::fuzz_input::Input;
use crate::sys::segment::{self, PeerSegment, SegmentId, SharedMemory};
use crate::sys::shm_ring::{ShmRing, before_ring};
use crate::sys::socket;

/// Arbitrary names and descriptors of a peer.
pub(super) fn handles(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 3 {
        0 => segments(&mut input),
        1 => ring(&mut input),
        _ => _ = socket::connect_unix(input.rest()),
    }
}

/// Arbitrary names, offsets and lengths instead of those of a segment.
fn segments(input: &mut Input<'_>) {
    let mut memory = SharedMemory::<u8>::new(5000).expect("memory");
    memory.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8);
    let (own, _) = segment::locate(memory.as_ptr() as u64, 1).expect("a segment");
    let change = input.number();
    let Some(id) = SegmentId::from_bits(own.to_bits() ^ change) else { return };
    let process = rustix::process::getpid().as_raw_pid();
    let Ok(segment) = PeerSegment::open(process, id) else { return assert_ne!(id, own) };
    assert_eq!(id, own, "another file was taken for the segment");
    let (offset, mut into) = (input.number().wrapping_mul(16), vec![0; usize::from(input.byte()) * 32]);
    let end = offset.checked_add(into.len() as u64);
    assert_eq!(segment.read(offset, &mut into).is_ok(), end.is_some_and(|end| end <= 5000));
}

/// A descriptor that may not be a ring.
fn ring(input: &mut Input<'_>) {
    let page = rustix::param::page_size() as u64;
    let (pages, odd) = (input.byte(), input.byte());
    // Seals against writing would have the mapping fail.
    let seals =
        SealFlags::from_bits_truncate(input.byte().into()) & (SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW);
    let fd = rustix::fs::memfd_create("fuzz", MemfdFlags::ALLOW_SEALING).expect("a memfd");
    let length = u64::from(pages) * page + u64::from(odd);
    rustix::fs::ftruncate(&fd, length).expect("its size");
    let sealed = rustix::fs::fcntl_add_seals(&fd, seals).is_ok() && seals.contains(SealFlags::SHRINK);
    let data = length.saturating_sub(before_ring() as u64) as usize;
    let fits = data.is_power_of_two() && data as u64 >= page && odd == 0;
    let opened = ShmRing::open(fd.as_fd());
    assert_eq!(opened.is_ok(), sealed && fits, "{length} bytes, {seals:?}");
    if let Ok(mut ring) = opened {
        let position = input.number();
        ring.write(position, &[7; 100]);
        assert_eq!(ring.bytes(position, 100), [7; 100]);
    }
}
