//! The tcp transport.
