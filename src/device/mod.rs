//! Collectives as programs for the streams of a GPU.
//!
//! Schedules are data, so the ones that the CPU engine runs are also turned into stream operations: a send is a copy into
//! staging memory and the write of a word, a receive a wait for that word and a copy, a reduction a kernel. No host thread
//! takes part once they are submitted.
//!
//! What decides is pure: [`segment`] cuts a collective to what fits into staging memory, [`layout`] says where its messages lie
//! there, [`lower`] turns a schedule into a [`lower::Program`], or into two that take their turns by [`halves`], which [`plans`]
//! keep, and [`counters`] give its words their values. Messages between two ranks take another way: [`rounds`] turns batches of them into operations, and [`rings`] count
//! for them. Data to and from other hosts is [`network`] traffic, which the CPU engine exchanges by [`other_hosts`];
//! [`all_to_all`] has programs of its own for it.
//!
//! What acts is the [`setup`], in which ranks map memory of each other by [`descriptors`]: [`words`], which the [`control`]
//! module reads and writes on the host, and [`staging`] memory. The [`lane`] and the [`ring_lane`] put programs and batches on
//! streams. The [`kernels`] compute reductions: one source in CUDA C++, compiled at run time, which the [`launch`]er puts on
//! streams. Collectives captured in a [`graph`] have [lanes](graph_lane) of their own, and captured messages have
//! [rings](graph_rings): both count by [`tokens`], and no call submits their [`replay`]s. The [`executor`] runs whole
//! collectives; [`messages`] go between [`pairs`] of ranks, also [far ones](far_pairs). Any thread that looks at operations
//! [`in_flight`] ends those that are done, at the latest the [`watch`]; a [`timer`] may measure how long they take. Where the ranks have chosen one, a [`vendor`]'s library
//! runs collectives and messages instead of programs, in graphs by [`graph_library`].
//!
//! Besides there are [`windows`], which ranks access on their own. Their [`signals`] are words. Their [`accesses`] in flight
//! end one by one, or fail together by the [`marks`] that ranks leave. Captured accesses have [`recordings`] of their own, and
//! their streams [wait](graph_waits) in replays. Accesses to [windows of other hosts](far_windows) take [`routes`]; the
//! [`landing`] thread carries out those from other hosts.
//!
//! The [`allocator`] is for users' programs: its memory can be exposed to other ranks. It consists of [`regions`], which a
//! vendor's library may register.

pub(crate) mod accesses;
pub mod all_to_all;
pub mod allocator;
pub(crate) mod call_log;
pub(crate) mod control;
pub mod counters;
pub mod descriptors;
pub(crate) mod executor;
pub(crate) mod far_pairs;
pub(crate) mod far_windows;
pub(crate) mod graph;
pub(crate) mod graph_lane;
pub(crate) mod graph_library;
mod graph_mark;
pub(crate) mod graph_rings;
pub(crate) mod graph_waits;
pub mod halves;
pub(crate) mod in_flight;
pub mod kernels;
pub(crate) mod landing;
pub mod lane;
pub mod launch;
pub mod layout;
pub mod lower;
pub(crate) mod marks;
pub(crate) mod message_log;
pub(crate) mod messages;
pub mod network;
pub(crate) mod other_hosts;
pub(crate) mod pairs;
pub(crate) mod parts;
pub(crate) mod plans;
mod record;
pub(crate) mod recordings;
pub(crate) mod regions;
pub(crate) mod replay;
pub mod ring_lane;
pub mod rings;
pub mod rounds;
pub mod routes;
pub mod segment;
pub mod setup;
pub(crate) mod signals;
pub mod staging;
pub(crate) mod timer;
pub mod tokens;
pub(crate) mod vendor;
pub(crate) mod watch;
pub(crate) mod windows;
pub mod words;
