//! The sim transport.
