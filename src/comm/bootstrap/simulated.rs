//! The bootstrap of worlds that nobody has at hand: its own messages, by its own tree, run by the events of
//! [`simulate`](crate::simulate).
//!
//! Ranks are imagined, each with addresses of its own. What they tell each other is written by the code that real ones write
//! it with, so that it is as long. Left out are the store, TLS, and what a rank takes to begin (its process, its transports).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use super::build::Build;
use super::groups::Groups;
use super::leader;
use super::protocol::{
    Host, INFO_BYTES_MAX, JoinRequest, Joiner, JoinerState, Keys, ListenerState, NONCE_BYTES, Next, PROOF_BYTES, Place,
    RELAYED_BYTES_MAX, Relayed, frame,
};
use super::rank_info::{Common, RankInfo};
use super::reply::{JoinReply, World as Ranks};
use super::root;
use super::table;
use super::tree::STAR_RANKS;
use crate::algo::{ScratchLimit, Tuning};
use crate::schedule::StepId;
use crate::simulate::{Model, Report, SimulateError, Start, Task, Tasks, World, simulate_tasks};
use crate::sync::Arc;
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::types::Rank;

/// Simulates how the ranks of a world meet, from the moment at which rank 0 has told the store where it listens until the last
/// rank knows all others. The ranks in `late` come so many seconds after the others.
pub fn simulate_start(world: &World, model: &Model, late: &[(usize, f64)]) -> Result<Report, SimulateError> {
    let start = model.start.ok_or(SimulateError::Start)?;
    let ranks = world.ranks();
    // So that what is much too large is refused at once: no description is shorter than the first.
    let lengths = table::fits(&imagined(world, 0).info, ranks)
        .and_then(|()| Lengths::of((0..ranks).map(|rank| imagined(world, rank)).collect(), Groups::of(ranks)));
    let lengths = lengths.map_err(|cause| SimulateError::Table { ranks, cause })?;
    simulate_tasks(lengths.table as usize, world, model, late, |rank| lengths.tasks(rank, &start))
}

/// The rank of a world, with what it might tell of itself on an ordinary host.
pub(super) fn imagined(world: &World, rank: usize) -> Joiner {
    let host = world.host_of(rank as u32);
    let number = rank % (world.ranks() / world.hosts());
    let id = format!("{:08x}-1234-4567-89ab-{:012x} net:[4026531840]", scrambled(host), scrambled(host + 1));
    let here = Host { id: id.clone(), machine: id };
    let info = RankInfo {
        rank: Rank::from(rank),
        host_id: here.id.as_str().into(),
        addresses: addresses_of(rank, host).into(),
        process: ProcessId::imagined(here.id.replace("net:", "pid:"), 4000 + number as i32),
        cpus: Cpus::new((0..8).map(|cpu| (8 * number + cpu) as u32), None),
        common: Arc::new(Common {
            build: Build::own(),
            world_size: world.ranks() as u32,
            name: "default_pg".to_owned(),
            algorithm: None,
            through_host: None,
        }),
    };
    let place = Place { host: here, addresses: vec![network(host)], port: port(rank) };
    Joiner { info, place: (world.ranks() > STAR_RANKS).then_some(place) }
}

/// What the transports of a rank publish by default, on a host with one network.
pub(crate) fn addresses_of(rank: usize, host: usize) -> BTreeMap<String, Vec<u8>> {
    let token = |which| u128::from(scrambled(2 * rank + which)).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    let tcp = |which| format!(r#"{{"hosts":["{}"],"port":{}}}"#, network(host), port(2 * rank + which)).into_bytes();
    let of = |name: &str, which| match name {
        "shm" => token(which).to_le_bytes().to_vec(),
        _ => tcp(which),
    };
    ["shm", "tcp"]
        .into_iter()
        .flat_map(|name| [(name.to_owned(), of(name, 0)), (format!("{name} failure detector"), of(name, 1))])
        .collect()
}

fn network(host: usize) -> IpAddr {
    let [_, high, middle, low] = (host as u32).to_be_bytes();
    Ipv4Addr::new(10, high, middle, low).into()
}

fn port(number: usize) -> u16 {
    32768 + (scrambled(number) % 28232) as u16
}

/// Numbers of which one does not tell the next (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
fn scrambled(number: usize) -> u32 {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 32) as u32
}

/// The bytes that rank 0 receives and sends while these ranks meet, its own description among theirs.
#[cfg(test)]
pub(super) fn bytes_at_rank_0(joiners: Vec<Joiner>, groups: Groups) -> (u64, u64) {
    use crate::simulate::Time;
    let start = Start { admit: Time::ZERO, relay: Time::ZERO, table_per_rank: Time::ZERO };
    Lengths::of(joiners, groups).expect("a small world").tasks(Rank(0), &start).bytes()
}

/// How long the messages of a bootstrap are, and between whom they go.
struct Lengths {
    groups: Groups,
    hello: u64,
    challenge: u64,
    proof: u64,
    /// What each rank tells of itself.
    requests: Vec<u64>,
    /// What a leader tells rank 0 of each rank that joins through it.
    relayed: Vec<u64>,
    /// What each rank is answered where it joins.
    answers: Vec<u64>,
    /// What rank 0 tells a leader to answer its group.
    for_groups: Vec<u64>,
    /// The answer with the table.
    table: u64,
    /// From whom each rank gets the table, and to whom it passes it.
    parents: Vec<Rank>,
    children: Vec<Vec<Rank>>,
}

impl Lengths {
    /// Those of a world of these ranks, in order.
    fn of(joiners: Vec<Joiner>, groups: Groups) -> Result<Lengths, String> {
        let (hello, challenge, proof) = proofs()?;
        let requests =
            joiners.iter().map(request).map(|request| Ok(request?.len() as u64)).collect::<Result<_, String>>()?;
        let told = |joiner: &Joiner| match groups.listener_of(joiner.info.rank) {
            Rank(0) => Ok(0),
            _ => Ok(relayed(joiner)?.len() as u64),
        };
        let relayed = joiners.iter().map(told).collect::<Result<_, String>>()?;
        let (ranks, places): (Vec<_>, Vec<_>) = joiners.into_iter().map(|joiner| (joiner.info, joiner.place)).unzip();
        let world = Ranks { ranks, tuning: Tuning::default(), scratch_bytes: ScratchLimit::DEFAULT.limit() };
        let (mut answers, mut for_groups) = (vec![0; places.len()], vec![0; places.len()]);
        for (rank, messages) in root::answers(&world, &places, groups)?.iter().enumerate() {
            let Some((own, for_group)) = messages.split_last() else { continue };
            answers[rank] = own.len() as u64;
            let Some(for_group) = for_group.first() else { continue };
            for_groups[rank] = for_group.len() as u64;
            if let JoinReply::Members(replies) = JoinReply::parse(&for_group[size_of::<u32>()..], places.len())? {
                let messages = leader::messages(replies)?;
                messages.iter().for_each(|(member, message)| answers[member.index()] = message.len() as u64);
            }
        }
        let tree = world.tree(groups);
        let parents: Vec<Rank> = (0..places.len()).map(|rank| tree.parent(Rank::from(rank))).collect();
        let mut children = vec![Vec::new(); parents.len()];
        for (rank, parent) in parents.iter().enumerate().skip(1) {
            children[parent.index()].push(Rank::from(rank));
        }
        let table = answers[0];
        Ok(Lengths {
            groups,
            hello,
            challenge,
            proof,
            requests,
            relayed,
            answers,
            for_groups,
            table,
            parents,
            children,
        })
    }

    fn tasks(&self, rank: Rank, start: &Start) -> Tasks {
        let mut tasks = Tasks::default();
        let table = Task::Work(start.table_per_rank.times(self.parents.len() as u64));
        let listener = self.groups.listener_of(rank);
        let members = || self.groups.members(rank).map(Rank);
        if rank == Rank(0) {
            let direct =
                || (1..self.parents.len()).map(Rank::from).filter(|to| self.groups.listener_of(*to) == Rank(0));
            let mut known = Vec::new();
            for to in direct() {
                known.push(self.admit(&mut tasks, to, start, &[]));
                for member in self.groups.members(to).map(Rank) {
                    let bytes = self.relayed[member.index()];
                    let told = tasks.push(Task::Receive { from: to, bytes }, [known[known.len() - 1]]);
                    known.push(tasks.push(Task::Work(start.relay), [told]));
                }
            }
            let written = tasks.push(table, known);
            for to in direct() {
                if self.groups.leads(to) {
                    tasks.push(Task::Send { to, bytes: self.for_groups[to.index()] }, [written]);
                }
                tasks.push(Task::Send { to, bytes: self.answers[to.index()] }, [written]);
            }
            return tasks;
        }
        let asked = self.join(&mut tasks, rank, listener, &[]);
        for member in members() {
            let joined = self.admit(&mut tasks, member, start, &[asked]);
            tasks.push(Task::Send { to: listener, bytes: self.relayed[member.index()] }, [joined]);
        }
        if self.groups.leads(rank) {
            let told = tasks.push(Task::Receive { from: listener, bytes: self.for_groups[rank.index()] }, [asked]);
            members().for_each(|to| _ = tasks.push(Task::Send { to, bytes: self.answers[to.index()] }, [told]));
        }
        let mut told = tasks.push(Task::Receive { from: listener, bytes: self.answers[rank.index()] }, [asked]);
        let parent = self.parents[rank.index()];
        if parent != Rank(0) {
            let asked = self.join(&mut tasks, rank, parent, &[told]);
            told = tasks.push(Task::Receive { from: parent, bytes: self.table }, [asked]);
        }
        let read = tasks.push(table, [told]);
        for &to in &self.children[rank.index()] {
            let request = self.admit(&mut tasks, to, start, &[read]);
            tasks.push(Task::Send { to, bytes: self.table }, [request]);
        }
        tasks
    }

    /// A rank joins at `listener`, up to the answer. TCP connects by a message there and one back.
    fn join(&self, tasks: &mut Tasks, rank: Rank, listener: Rank, after: &[StepId]) -> StepId {
        let mut last = after.to_vec();
        let mut step = |task| last = vec![tasks.push(task, std::mem::take(&mut last))];
        let (send, receive) =
            (|bytes| Task::Send { to: listener, bytes }, |bytes| Task::Receive { from: listener, bytes });
        step(send(0));
        step(receive(0));
        step(send(self.hello));
        step(receive(self.challenge));
        step(send(self.proof));
        step(send(self.requests[rank.index()]));
        last[0]
    }

    /// The other side of that, up to the answer: the system connects at once, and the rank listens after `after`.
    fn admit(&self, tasks: &mut Tasks, joiner: Rank, start: &Start, after: &[StepId]) -> StepId {
        let (send, receive) = (|bytes| Task::Send { to: joiner, bytes }, |bytes| Task::Receive { from: joiner, bytes });
        let called = tasks.push(receive(0), []);
        let connected = tasks.push(send(0), [called]);
        let hello = tasks.push(receive(self.hello), [&[connected], after].concat());
        let challenged = tasks.push(send(self.challenge), [hello]);
        let proof = tasks.push(receive(self.proof), [challenged]);
        let request = tasks.push(receive(self.requests[joiner.index()]), [proof]);
        tasks.push(Task::Work(start.admit), [request])
    }
}

pub(super) fn request(joiner: &Joiner) -> Result<Vec<u8>, String> {
    let request: JoinRequest = Ok(joiner.clone());
    frame(&request, INFO_BYTES_MAX)
}

/// What a leader tells of that rank.
pub(super) fn relayed(joiner: &Joiner) -> Result<Vec<u8>, String> {
    frame(&Relayed { rank: joiner.info.rank, joined: Some(Ok(joiner.clone())) }, RELAYED_BYTES_MAX)
}

/// How long the two sides' messages are before the request, by one talk of theirs.
fn proofs() -> Result<(u64, u64, u64), String> {
    let random = |error: std::io::Error| error.to_string();
    let keys = Keys::random().map_err(random)?;
    let (joiner, mut listener) = (JoinerState::new(Rank(1)).map_err(random)?, ListenerState::new(Groups::one(2)));
    let hello = joiner.hello();
    let Next::Write(challenge) = listener.receive(&keys, [0; 32], &hello)? else {
        return Err("a listener does not answer".to_owned());
    };
    let fixed: &[u8; NONCE_BYTES + PROOF_BYTES] = challenge.as_slice().try_into().map_err(|_| "another length")?;
    let proof = joiner.answer(&keys, [0; 32], fixed).ok_or("a listener does not know the secret")?;
    Ok((hello.len() as u64, challenge.len() as u64, proof.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::{Link, Time};

    fn link(latency: u64, overhead: u64) -> Link {
        let [latency, overhead] = [latency, overhead].map(Time::femtoseconds);
        Link { latency, overhead, gap: Time::ZERO, gap_per_byte: Time::ZERO, eager_bytes: u64::MAX }
    }

    /// Nothing takes time but what is given, and a tenth of `admit` to hear of a rank from a leader.
    fn model(latency: u64, overhead: u64, admit: u64, table_per_rank: u64) -> Model {
        let [admit, relay, table_per_rank] = [admit, admit / 10, table_per_rank].map(Time::femtoseconds);
        Model {
            within_host: link(latency, overhead),
            between_hosts: Some(link(latency, overhead)),
            reduce_per_byte: Time::ZERO,
            copy_per_byte: Time::ZERO,
            start: Some(Start { admit, relay, table_per_rank }),
        }
    }

    fn time(world: &World, model: &Model) -> Time {
        simulate_start(world, model, &[]).expect("a small world").time
    }

    #[test]
    fn two_ranks_meet_by_three_messages_there_and_back() {
        // There and back to connect and to prove; then the proof with the request there, and the table back.
        let world = World::new(2, 1).unwrap();
        assert_eq!(time(&world, &model(1000, 0, 0, 0)), Time::femtoseconds(6 * 1000));
        // Twelve ends of messages, of which rank 1 sends two in a row, and rank 0 receives them in a row.
        assert_eq!(time(&world, &model(0, 10, 0, 0)), Time::femtoseconds(13 * 10));
        // Rank 0 writes a table of two ranks, and rank 1 reads it.
        assert_eq!(time(&world, &model(0, 0, 100, 7)), Time::femtoseconds(100 + 2 * 7 + 2 * 7));
    }

    #[test]
    fn rank_0_takes_one_after_the_other_in_and_a_tree_takes_the_table_on() {
        let (flat, deep) = (World::new(8, 8).unwrap(), World::new(8, 64).unwrap());
        assert_eq!(time(&flat, &model(0, 0, 100, 0)), Time::femtoseconds(63 * 100));
        // Rank 0 writes it, the first rank of a host reads it and takes in the other seven, and those read it. Of 64 hosts the
        // first ranks are two steps deep, and take in sixteen.
        assert_eq!(time(&flat, &model(0, 0, 0, 1)), Time::femtoseconds(2 * 64));
        assert_eq!(time(&deep, &model(0, 0, 0, 1)), Time::femtoseconds(4 * 512));
        let late = simulate_start(&flat, &model(0, 0, 100, 0), &[(7, 1e-9)]).unwrap();
        assert_eq!(late.time, Time::femtoseconds(1_000_000 + 100), "the others have been taken in by then");
    }

    #[test]
    fn leaders_take_the_ranks_of_their_groups_in_at_the_same_time() {
        // Rank 0 takes in 127 ranks and three leaders, and hears of 381. Then 16 hosts and seven ranks come for the table to the
        // second host, and seven to each of these.
        let deep = World::new(8, 64).unwrap();
        assert_eq!(time(&deep, &model(0, 0, 100, 0)), Time::femtoseconds(130 * 100 + 381 * 10 + (16 + 7 + 7) * 100));
    }

    #[test]
    fn what_is_missing_is_told() {
        let (world, here) = (World::new(2, 2).unwrap(), model(0, 0, 0, 0));
        let of = |model: Model| simulate_start(&world, &model, &[]).unwrap_err().to_string();
        assert!(of(Model { start: None, ..here }).starts_with("start: missing"));
        assert!(of(Model { between_hosts: None, ..here }).starts_with("between_hosts: missing"));
    }
}
