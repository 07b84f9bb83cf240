//! Simulates collectives of worlds that nobody has at hand: the planner's own schedules ([`algo`](crate::algo)), run by events
//! under LogGP ([`Model`]). [`bootstrap::simulate_start`](crate::comm::bootstrap::simulate_start) simulates how the ranks meet. Pure: no clock, no thread; the same question has the same answer.
//!
//! ```
//! use ncclx_rs::simulate::{Case, Model, World, simulate};
//! let link = r#"{"latency": 2e-6, "overhead": 1e-6, "gap": 1e-6, "gap_per_byte": 8e-11}"#;
//! let text = format!(r#"{{"version": 1, "within_host": {link}, "between_hosts": {link}, "reduce_per_byte": 1e-10}}"#);
//! let (model, world) = (Model::parse(&text).unwrap(), World::new(8, 16).unwrap());
//! let case = Case { collective: "all_reduce", algorithm: "ring", bytes: 1 << 20 };
//! let report = simulate(&case, &world, &model, &[]).unwrap();
//! assert_eq!(report.rank_most.messages, 2 * 127);
//! ```

mod error;
mod interfaces;
mod model;
mod program;
mod run;
mod time;
mod world;

use serde::Deserialize;

pub use error::{MAX_BYTES, MAX_STEPS, SimulateError};
pub use model::{Link, Model, Start};
pub use program::Traffic;
use program::{Placement, Program};
pub(crate) use program::{Task, Tasks};
pub use time::Time;
pub use world::World;

use crate::algo::select::{bytes, candidates};
use crate::algo::{Chunking, Collective, Scaling, ScratchLimit, Setting, plan_with};
use crate::op::CollectiveKind;
use crate::schedule::Schedule;
use crate::types::Rank;

/// What is simulated: a collective of float32, which adds where it reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case<'a> {
    /// Its name, such as `all_reduce`.
    pub collective: &'a str,
    /// The algorithm's name.
    pub algorithm: &'a str,
    /// The size: of one rank's tensor in all_reduce, reduce and broadcast, of all ranks' blocks together elsewhere. It is rounded
    /// down to equal blocks of whole elements, of which each rank has at least one.
    pub bytes: usize,
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The size after rounding; of a start, that of the message with the table of all ranks.
    pub bytes: usize,
    /// When the last rank ends.
    pub time: Time,
    /// The same where no rank is late.
    pub time_without_late: Time,
    /// The most messages that a rank sends, and the most bytes.
    pub rank_most: Traffic,
    /// What all ranks send.
    pub rank_total: Traffic,
    /// The most messages, and the most bytes, that the ranks of a host send to other hosts.
    pub host_most: Traffic,
    /// What all hosts send to other hosts.
    pub host_total: Traffic,
}

/// Simulates a collective. The ranks in `late` call it so many seconds after the others.
pub fn simulate(case: &Case<'_>, world: &World, model: &Model, late: &[(usize, f64)]) -> Result<Report, SimulateError> {
    let late = lateness(world, late)?;
    let collective = collective(case, world)?;
    check_network(world, model)?;
    let setting = |me| Setting {
        me,
        topo: world.topo(),
        element: ELEMENT_BYTES,
        scaling: Scaling::Nothing,
        chunking: Chunking::Chunks,
        scratch: ScratchLimit::DEFAULT,
    };
    let plan = |rank| plan_with(case.algorithm, &collective, setting(rank));
    if plan(Rank(0)).is_none() {
        let known: Vec<_> = candidates(&collective, &setting(Rank(0))).collect();
        let name = case.algorithm.to_owned();
        return Err(SimulateError::Algorithm { name, collective: collective.kind().name(), known: known.join(", ") });
    }
    let plan = |rank| plan(rank).expect("an algorithm that plans for one rank plans for all");
    let placement = match collective {
        Collective::AllReduce { .. } | Collective::Reduce { .. } | Collective::Broadcast { .. } => Placement::InPlace,
        _ => Placement::Apart,
    };
    let bytes = bytes(&collective, &setting(Rank(0)));
    report(bytes, &program(world, placement, plan)?, world, model, &late)
}

/// Simulates ranks that do these tasks. What they send all at once is of `bytes`.
pub(crate) fn simulate_tasks(
    bytes: usize,
    world: &World,
    model: &Model,
    late: &[(usize, f64)],
    tasks: impl Fn(Rank) -> Tasks,
) -> Result<Report, SimulateError> {
    let late = lateness(world, late)?;
    check_network(world, model)?;
    let mut program = Program::new(world);
    for rank in (0..world.ranks()).map(Rank::from) {
        program.add_tasks(&tasks(rank))?;
    }
    report(bytes, &program, world, model, &late)
}

fn check_network(world: &World, model: &Model) -> Result<(), SimulateError> {
    match world.hosts() > 1 && model.between_hosts.is_none() {
        true => Err(SimulateError::Network(world.hosts())),
        false => Ok(()),
    }
}

fn report(
    bytes: usize,
    program: &Program<'_>,
    world: &World,
    model: &Model,
    late: &[(u32, Time)],
) -> Result<Report, SimulateError> {
    let time_without_late = end(run::run(program, world, model, &[]))?;
    let time = if late.is_empty() { time_without_late } else { end(run::run(program, world, model, late))? };
    let (rank_most, rank_total) = summary(&program.sent);
    let (host_most, host_total) = summary(&program.sent_by_hosts);
    Ok(Report { bytes, time, time_without_late, rank_most, rank_total, host_most, host_total })
}

fn lateness(world: &World, late: &[(usize, f64)]) -> Result<Vec<(u32, Time)>, SimulateError> {
    let mut found = std::collections::BTreeMap::new();
    for &(rank, seconds) in late {
        if rank >= world.ranks() {
            return Err(SimulateError::LateRank { rank, ranks: world.ranks() });
        }
        let time = Time::from_seconds(seconds);
        let time = time.ok_or_else(|| SimulateError::Lateness { rank, seconds: seconds.to_string() })?;
        found.insert(rank as u32, time);
    }
    Ok(found.into_iter().collect())
}

fn collective(case: &Case<'_>, world: &World) -> Result<Collective, SimulateError> {
    let kind = CollectiveKind::deserialize(serde_json::Value::from(case.collective));
    let kind = kind.map_err(|_| SimulateError::Collective(case.collective.to_owned()))?;
    if case.bytes > MAX_BYTES {
        return Err(SimulateError::Bytes(case.bytes));
    }
    let (count, ranks) = (case.bytes / ELEMENT_BYTES, world.ranks());
    Ok(Collective::of_kind(kind, count.max(1), (count / ranks).max(1), ranks))
}

/// The schedules of all ranks, of which one at a time is held in full.
fn program<'a>(
    world: &'a World,
    placement: Placement,
    plan: impl Fn(Rank) -> Schedule,
) -> Result<Program<'a>, SimulateError> {
    let ranks = world.ranks();
    // So that what is much too large is refused at once. Rank 0 may have more to do than the others, never less.
    let samples = [ranks / 2, ranks - 1].map(|rank| plan(Rank::from(rank)).steps.len() as u64);
    let steps = samples.into_iter().min().unwrap_or(0) * ranks as u64;
    if steps > MAX_STEPS {
        return Err(SimulateError::Steps { steps, ranks });
    }
    let mut program = Program::new(world);
    for rank in (0..ranks).map(Rank::from) {
        program.add(&plan(rank), ELEMENT_BYTES, placement)?;
    }
    Ok(program)
}

/// When the last rank ends.
fn end(ended: Vec<Time>) -> Result<Time, SimulateError> {
    let end = ended.into_iter().max().unwrap_or_default();
    if end == Time::MAX { Err(SimulateError::Time) } else { Ok(end) }
}

/// The most, and the sum.
fn summary(all: &[Traffic]) -> (Traffic, Traffic) {
    all.iter().fold(Default::default(), |(most, sum): (Traffic, Traffic), one| {
        let most = Traffic { messages: most.messages.max(one.messages), bytes: most.bytes.max(one.bytes) };
        (most, Traffic { messages: sum.messages + one.messages, bytes: sum.bytes + one.bytes })
    })
}

/// Those of float32.
const ELEMENT_BYTES: usize = 4;

#[cfg(test)]
mod tests;
