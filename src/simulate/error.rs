//! Why something is not simulated.

use crate::algo::tuning::MAX_RANKS;

/// Why something is not simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// A world has no ranks or too many.
    #[error("ranks: expected from 1 to {MAX_RANKS}, got {ranks_per_host} on each of {hosts} hosts")]
    Ranks {
        /// How many each host was to have.
        ranks_per_host: usize,
        /// How many hosts there were to be.
        hosts: usize,
    },
    /// There is no such collective.
    #[error("collective: expected one such as all_reduce, got `{0}`")]
    Collective(String),
    /// No algorithm of that name does this collective in this world.
    #[error("algorithm: expected one of {known} for {collective}, got `{name}`")]
    Algorithm {
        /// The name.
        name: String,
        /// The collective.
        collective: &'static str,
        /// The algorithms that do it in this world.
        known: String,
    },
    /// There is more data than is counted.
    #[error("bytes: expected at most {MAX_BYTES}, got {0}")]
    Bytes(usize),
    /// A rank that is to be late is none of the world.
    #[error("late: expected a rank below {ranks}, got {rank}")]
    LateRank {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A rank is late by a time that is none.
    #[error("late: expected seconds from 0 to 3600 for rank {rank}, got {seconds}")]
    Lateness {
        /// The rank.
        rank: usize,
        /// The number.
        seconds: String,
    },
    /// Nothing is known of the network, and there are several hosts.
    #[error("between_hosts: missing, and the world has {0} hosts")]
    Network(usize),
    /// Nothing is known of what it takes ranks to meet.
    #[error("start: missing, and the start of a world is simulated by it; `ncclx-rs simulate --measure` measures it")]
    Start,
    /// What ranks tell each other of a world as large does not fit into a message.
    #[error("a world of {ranks} ranks does not come about: {cause}")]
    Table {
        /// The number of ranks.
        ranks: usize,
        /// Why.
        cause: String,
    },
    /// The schedules have more steps than fit in memory.
    #[error(
        "{steps} steps at least in the schedules of all {ranks} ranks together, and at most {MAX_STEPS} are simulated: \
         take fewer ranks, or an algorithm with fewer steps"
    )]
    Steps {
        /// How many there are at least.
        steps: u64,
        /// The number of ranks.
        ranks: usize,
    },
    /// It takes longer than can be counted.
    #[error("it takes longer than five hours, and no more is counted")]
    Time,
}

/// The largest collective, 64 GiB: what all ranks send then fits into 64 bits.
pub const MAX_BYTES: usize = 64 << 30;

/// The most steps of all ranks together: they take about 2 GB.
pub const MAX_STEPS: u64 = 1 << 25;
