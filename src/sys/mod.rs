//! The fence: operating system calls and the unsafe code they need, behind safe faces.

pub mod poller;
