//! One binary for the engine tests.

mod bootstrap;
mod collectives;
mod failures;
mod messages;
mod schedules;
mod tidy;
mod world;
