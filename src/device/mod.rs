//! Collectives as programs for the streams of a GPU.
//!
//! Schedules are data, so the ones that the CPU engine runs are also turned into stream operations: a send is a copy into
//! staging memory and the write of a word, a receive a wait for that word and a copy, a reduction a kernel. No host thread
//! takes part once they are submitted.
//!
//! What decides is pure: [`segment`] cuts a collective to what fits into staging memory, [`layout`] says where its messages lie
//! there, [`lower`] turns a schedule into a [`lower::Program`], [`counters`] give its words their values, and [`words`] says
//! where these lie. What acts is the [`setup`], in which ranks map memory of each other by [`descriptors`]: words and
//! [`staging`]; and the [`lane`], which puts programs on streams. The [`kernels`] compute reductions: one source in CUDA C++,
//! compiled at run time.

pub(crate) mod control;
pub mod counters;
pub mod descriptors;
pub mod kernels;
pub mod lane;
pub mod launch;
pub mod layout;
pub mod lower;
pub(crate) mod plans;
pub mod ring_lane;
pub mod rings;
pub mod rounds;
pub mod segment;
pub mod setup;
pub mod staging;
pub(crate) mod watch;
pub mod words;
