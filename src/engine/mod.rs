//! Drives schedules over transports.
