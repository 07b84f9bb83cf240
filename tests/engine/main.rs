//! One binary for the engine tests.

mod blocking;
mod bootstrap;
mod collectives;
mod examples;
mod failures;
mod launch;
mod manual;
mod memory;
mod messages;
mod schedules;
mod stores;
mod tidy;
mod tuning;
mod windows;
mod world;
