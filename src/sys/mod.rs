//! System calls and the unsafe code that they need, behind safe interfaces.

pub(crate) mod cache;
pub mod cma;
pub mod cuda;
pub mod exit;
pub(crate) mod file_writer;
pub mod fork;
pub mod lent_bytes;
mod library;
pub mod limits;
mod memfd;
pub mod nccl;
pub mod net;
pub mod numa;
pub mod nvrtc;
pub mod poller;
pub mod process;
pub mod random;
pub mod ring_sync;
pub mod segment;
pub mod shm_ring;
pub mod simd;
pub mod socket;
pub mod tcp_info;
pub mod team;
pub mod ucx;
pub mod words;
