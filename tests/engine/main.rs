//! One binary for the engine tests.

mod averages;
mod bits;
mod blocking;
mod bootstrap;
mod collectives;
mod cores;
mod detours;
mod diary;
mod disagreements;
mod doc_paths;
mod examples;
mod failures;
mod launch;
mod losses;
mod manual;
mod matrix;
mod memory;
mod messages;
mod schedules;
mod secrecy;
mod stores;
mod tidy;
mod tls;
mod tuning;
mod windows;
mod world;
