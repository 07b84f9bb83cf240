//! One binary for the engine tests.
