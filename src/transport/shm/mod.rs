//! The shm transport.
