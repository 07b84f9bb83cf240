//! What a start takes of a processor on this host: the parameters of its [simulation](super::simulated).

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::context::JoinContext;
use super::groups::Groups;
use super::joiner;
use super::protocol::{Host, Joiner};
use super::rank_info::RankInfo;
use super::server::{Event, Server};
use super::simulated::{imagined, relayed, request};
use super::table;
use crate::comm::framing::write;
use crate::comm::store::MemoryStore;
use crate::config::Config;
use crate::error::InitError;
use crate::simulate::{Start, Time, World};
use crate::types::Rank;

/// How many ranks join to measure it, how many then join through another one, and how many a table has.
const RANKS: usize = 256;

/// How often that is measured. The fastest counts.
const ROUNDS: usize = 5;

/// How long a round may take.
const ROUND_TIMEOUT: Duration = Duration::from_secs(60);

/// Measures the processor time of a rank that takes others in, and of one that writes or reads the table.
pub(crate) fn measure_start() -> Result<Start, InitError> {
    let (store, config) = (MemoryStore::default(), Config::default());
    let host = Host::here(&config);
    let context = |rank: Rank| {
        let (groups, deadline) = (Groups { size: 2 * RANKS, ranks: RANKS }, Instant::now() + ROUND_TIMEOUT);
        JoinContext { name: "measure", rank, groups, store: &store, config: &config, host: &host, deadline }
    };
    let root = context(Rank(0));
    let world = World::new(8, 2 * RANKS / 8).expect("a world");
    let joiners: Vec<Joiner> = (0..2 * RANKS).map(|rank| imagined(&world, rank)).collect();
    let ranks: Vec<RankInfo> = joiners.iter().take(RANKS).map(|joiner| joiner.info.clone()).collect();
    let refused = |cause| root.config_error(cause);
    let requests: Vec<Vec<u8>> = joiners.iter().map(request).collect::<Result<_, _>>().map_err(refused)?;
    let members = joiners.iter().skip(RANKS + 1).map(relayed);
    let members = members.collect::<Result<Vec<_>, _>>().map_err(refused)?;
    let with_members = [&requests[RANKS][..], &members.concat()].concat();
    let others = RANKS as u32 - 1;
    let mut fastest = Start { admit: Time::MAX, relay: Time::MAX, table_per_rank: Time::MAX };
    for _ in 0..ROUNDS {
        let direct = requests[..RANKS].iter().zip(0..).skip(1).map(|(request, rank)| (Rank(rank), request));
        let admit = measure_joins(&context, direct, RANKS - 1)? / others;
        let leader = [(Rank::from(RANKS), &with_members)];
        let relay = measure_joins(&context, leader.into_iter(), RANKS)? / others;
        let begin = processor_time();
        let table = table::encode(&ranks).map_err(refused)?;
        let encoded = processor_time();
        table::decode(&table, RANKS).map_err(refused)?;
        let decoded = processor_time();
        let slower = (encoded - begin).max(decoded - encoded) / RANKS as u32;
        fastest.admit = fastest.admit.min(Time::of(admit));
        fastest.relay = fastest.relay.min(Time::of(relay));
        fastest.table_per_rank = fastest.table_per_rank.min(Time::of(slower));
    }
    Ok(fastest)
}

/// The processor time of this thread while it takes in so many ranks: those that send these messages, and those that they tell of.
fn measure_joins<'a>(
    context: &(impl Fn(Rank) -> JoinContext<'a> + Sync),
    joiners: impl Iterator<Item = (Rank, &'a Vec<u8>)> + Send,
    count: usize,
) -> Result<Duration, InitError> {
    let root = context(Rank(0));
    let failed = |error| root.os_error("ranks that join to be measured", &error);
    let keys = root.new_keys()?;
    let (listener, place) = root.listen()?;
    let routes = joiner::routes(&place, root.host).map_err(|cause| root.config_error(cause))?;
    let mut server = Server::new(root.name, root.groups, &keys, None, listener).map_err(failed)?;
    // They wait for no answer.
    let join = |(rank, messages): (Rank, &Vec<u8>)| {
        let context = context(rank);
        let mut stream = joiner::connect_any(&context, &keys, None, Rank(0), &routes, context.deadline, || false)?;
        write(&mut stream, messages, context.deadline).map_err(failed)?;
        Ok(stream)
    };
    std::thread::scope(|scope| {
        let joiners = scope.spawn(|| joiners.map(join).collect::<Result<Vec<_>, InitError>>());
        let (begin, mut left) = (processor_time(), count);
        while left > 0 {
            if Instant::now() >= root.deadline {
                return Err(root.config_error(format!("{left} ranks that were to be measured have not joined")));
            }
            let events = server.turn(root.deadline).map_err(failed)?;
            left -= events.iter().filter(|event| matches!(event, Event::Joined(_, Ok(_)))).count();
        }
        let taken = processor_time() - begin;
        joiners.join().expect("a rank that joins does not panic")?;
        Ok(taken)
    })
}

/// What this thread has had of a processor so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_measured() {
        let Start { admit, relay, table_per_rank } = measure_start().expect("it can be measured");
        let second = Time::from_seconds(1.0).unwrap();
        assert!([admit, relay, table_per_rank].into_iter().all(|time| Time::ZERO < time && time < second));
    }
}
