//! The handle of an operation in flight.
