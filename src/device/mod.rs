//! Collectives as programs for the streams of a GPU.
//!
//! Schedules are data, so the ones that the CPU engine runs are also turned into stream operations: a send is a copy into
//! staging memory and the write of a word, a receive a wait for that word and a copy, a reduction a kernel. No host thread
//! takes part once they are submitted.
//!
//! What decides is pure: [`segment`] cuts a collective to what fits into staging memory, [`layout`] says where its messages lie
//! there, [`lower`] turns a schedule into a [`lower::Program`], [`counters`] give its words their values, and [`words`] says
//! where these lie. What acts is [`staging`] memory, which ranks map of each other, and the [`lane`], which puts programs on
//! streams. The [`kernels`] compute reductions: one source in CUDA C++, compiled at run time.
//!
//! The [`control`] segment is the memory in which ranks see what the others' streams and processes do: which operations have
//! started and ended, which calls were made (the [`call_log`]), and what has failed.

pub mod call_log;
pub mod control;
pub mod counters;
pub mod descriptors;
pub mod kernels;
pub mod lane;
pub mod launch;
pub mod layout;
pub mod lower;
mod record;
pub mod segment;
pub mod setup;
pub mod staging;
pub(crate) mod watch;
pub mod words;
