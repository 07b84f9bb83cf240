//! What a start takes of a processor on this host: the parameters of its [simulation](super::simulated).

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::context::JoinContext;
use super::joiner;
use super::protocol::{Host, Joiner, RankInfo};
use super::server::{Event, Server};
use super::simulated::{imagined, request};
use super::table;
use crate::comm::framing::write;
use crate::comm::store::MemoryStore;
use crate::config::Config;
use crate::error::InitError;
use crate::simulate::{Start, Time, World};
use crate::types::Rank;

/// How many ranks join to measure it, and how many a table has.
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
        let (size, deadline) = (RANKS, Instant::now() + ROUND_TIMEOUT);
        JoinContext { name: "measure", rank, size, store: &store, config: &config, host: &host, deadline }
    };
    let root = context(Rank(0));
    let world = World::new(8, RANKS / 8).expect("a world");
    let joiners: Vec<Joiner> = (0..RANKS).map(|rank| imagined(&world, rank)).collect();
    let ranks: Vec<RankInfo> = joiners.iter().map(|joiner| joiner.info.clone()).collect();
    let refused = |cause| root.config_error(cause);
    let requests: Vec<Vec<u8>> = joiners.iter().skip(1).map(request).collect::<Result<_, _>>().map_err(refused)?;
    let mut fastest = Start { admit: Time::MAX, table_per_rank: Time::MAX };
    for _ in 0..ROUNDS {
        let admit = measure_admit(&context, &requests)? / requests.len() as u32;
        let begin = processor_time();
        let table = table::encode(&ranks).map_err(refused)?;
        let encoded = processor_time();
        table::decode(&table, RANKS).map_err(refused)?;
        let decoded = processor_time();
        let slower = (encoded - begin).max(decoded - encoded) / RANKS as u32;
        fastest.admit = fastest.admit.min(Time::of(admit));
        fastest.table_per_rank = fastest.table_per_rank.min(Time::of(slower));
    }
    Ok(fastest)
}

/// The processor time of this thread while it takes in ranks with these requests.
fn measure_admit<'a>(
    context: &(impl Fn(Rank) -> JoinContext<'a> + Sync),
    requests: &[Vec<u8>],
) -> Result<Duration, InitError> {
    let root = context(Rank(0));
    let failed = |error| root.os_error("ranks that join to be measured", &error);
    let keys = root.new_keys()?;
    let (listener, place) = root.listen()?;
    let routes = joiner::routes(&place, root.host).map_err(|cause| root.config_error(cause))?;
    let mut server = Server::new(root.name, root.size, &keys, None, listener).map_err(failed)?;
    // They wait for no answer.
    let join = |(request, rank): (&Vec<u8>, u32)| {
        let context = context(Rank(rank));
        let mut stream = joiner::connect_any(&context, &keys, None, Rank(0), &routes, context.deadline)?;
        write(&mut stream, request, context.deadline).map_err(failed)?;
        Ok(stream)
    };
    std::thread::scope(|scope| {
        let joiners = scope.spawn(|| requests.iter().zip(1..).map(join).collect::<Result<Vec<_>, InitError>>());
        let (begin, mut left) = (processor_time(), requests.len());
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
        let Start { admit, table_per_rank } = measure_start().expect("it can be measured");
        let second = Time::from_seconds(1.0).unwrap();
        assert!(Time::ZERO < admit && admit < second && Time::ZERO < table_per_rank && table_per_rank < second);
    }
}
