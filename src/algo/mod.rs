//! Algorithms: pure functions from an operation's shape to one rank's [`Schedule`](crate::schedule::Schedule).
//!
//! Each file appends the steps of one algorithm to a [`Builder`](crate::schedule::Builder), for a group of ranks and
//! data described by slices, so that algorithms compose ([`hierarchical`], [`islands`]). [`select`] is the table that picks one.
//!
//! In an all_reduce, an equal all_gather or an equal reduce_scatter every rank needs data of every other, so nobody finishes
//! when two ranks disagree. `agreement` sees to that in the other collectives.

mod agreement;
pub mod alike;
pub mod binomial;
mod bounded;
pub mod bruck;
pub mod chain;
pub mod collective;
pub mod direct;
pub mod dissemination;
pub(crate) mod equality;
pub mod forwarding;
pub mod group;
pub mod halving_doubling;
pub mod hierarchical;
pub mod islands;
pub mod put;
pub mod ring;
pub mod select;
pub mod tuning;
pub mod van_de_geijn;

pub use alike::{IslandCall, Islands};
pub use collective::{Chunking, Collective, Scaling, ScratchLimit, Setting};
pub use select::{names, plan, plan_with};
pub use tuning::Tuning;
