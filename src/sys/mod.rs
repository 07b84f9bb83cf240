//! The fence: operating system calls and the unsafe code they need, behind safe faces.

pub mod fork;
pub mod limits;
pub mod memory;
pub mod net;
pub mod peer_memory;
pub mod poller;
pub mod process;
pub mod ring;
pub mod segment;
pub mod simd;
pub mod socket;
pub mod tcp_info;
