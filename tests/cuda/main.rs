//! Tests that need a CUDA driver: `make test-cuda` runs them on a software CUDA. Without one they say so, and pass.
#![allow(unsafe_code, reason = "asks the software CUDA, and launches a kernel")]
#![allow(clippy::print_stderr, reason = "says why a test is not run")]

mod communicators;
mod faults;
mod fence;
mod footprint;
mod graphs;
mod harness;
mod hip;
mod hosts;
mod lanes;
#[path = "../engine/log_capture.rs"]
mod log_capture;
mod message_graphs;
mod messages;
mod mixed;
mod moving;
#[path = "../engine/numbers.rs"]
mod numbers;
#[path = "../engine/nvrtc/folders.rs"]
mod nvrtc;
mod pairwise;
mod prepared;
mod processes;
mod product;
mod races;
mod ranks;
mod recording;
mod reductions;
mod rings;
mod setup;
mod simulation;
#[path = "../engine/stopped.rs"]
mod stopped;
mod through_host;
mod trouble;
mod vendor;
mod vendor_ends;
mod vendor_graphs;
mod vendor_memory;
mod vendor_messages;
mod vendor_splits;
mod window_graphs;
mod window_hosts;
mod windows;
mod world;
