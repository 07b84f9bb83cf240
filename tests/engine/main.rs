//! One binary for the engine tests.

mod bootstrap;
mod collectives;
mod failures;
mod manual;
mod messages;
mod schedules;
mod tidy;
mod windows;
mod world;
