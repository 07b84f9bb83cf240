//! One binary for the engine tests.

mod collectives;
mod failures;
mod messages;
mod tidy;
mod world;
