//! Hot paths, so many times, for `instructions.py` to count: `ncclx_rs_instructions PATH CALLS`.
//!
//! Ranks are threads that never poll: whoever waits sleeps until the other wakes it, so that the counts depend on what is
//! called and hardly on when. In `messages_at_once` nobody waits: one thread sends as one rank and receives as the other.

use std::error::Error;
use std::sync::Arc;

use ncclx_rs::algo::{Chunking, Collective, Scaling, ScratchLimit, Setting, plan};
use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::{CommOptions, Communicator, DType, Rank, ReduceOp, Tag, Topology};

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [path, calls] = words.as_slice() else { return Err("expected a path and a number of calls".into()) };
    let calls: usize = calls.parse()?;
    match path.as_str() {
        "all_reduce_alone" => world(1, "auto", |comm| all_reduce(comm, &mut [1_f32], calls)),
        "all_reduce_8_bytes" => world(2, "shm", |comm| all_reduce(comm, &mut [1_f32; 2], calls)),
        "all_reduce_64_kib" => world(2, "shm", |comm| all_reduce(comm, &mut vec![1_f32; 1 << 14], calls)),
        "reductions" => world(2, "shm", |comm| reductions(comm, calls)),
        "ping_pong_shm" => world(2, "shm", |comm| ping_pong(comm, calls)),
        "messages_at_once" => messages_at_once(calls),
        "ping_pong_tcp" => world(2, "tcp", |comm| ping_pong(comm, calls)),
        "plan" => {
            plan_anew(calls);
            Ok(())
        }
        _ => Err(format!("unknown path: {path}").into()),
    }
}

/// Runs `rank` on every rank of a world, each in a thread.
fn world(size: usize, transport: &str, rank: impl Fn(&Communicator) -> Result<(), ncclx_rs::Error> + Sync) -> Outcome {
    join(size, transport, |comm| {
        rank(&comm)?;
        comm.shutdown()
    })?;
    Ok(())
}

/// As [`world`], and returns what the ranks do.
fn join<T: Send>(
    size: usize,
    transport: &str,
    rank: impl Fn(Communicator) -> Result<T, ncclx_rs::Error> + Sync,
) -> Result<Vec<T>, Box<dyn Error + Send + Sync>> {
    let store = Arc::new(MemoryStore::default());
    let run = |number: usize| -> Result<T, Box<dyn Error + Send + Sync>> {
        // Under valgrind, what a copy costs says nothing.
        let hints = [
            ("transport", transport),
            ("spin_microseconds", "0"),
            ("shm_line_ownership", "off"),
            ("single_copy", "on"),
        ];
        let comm = Communicator::new(CommOptions {
            name: "instructions".into(),
            rank: Rank::from(number),
            size,
            store: store.clone(),
            timeout: None,
            hints: hints.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        })?;
        Ok(rank(comm)?)
    };
    let run = &run;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size).map(|number| scope.spawn(move || run(number))).collect();
        ranks.into_iter().map(|rank| rank.join().map_err(|_| "a rank panicked")?).collect()
    })
}

fn messages_at_once(calls: usize) -> Outcome {
    let comms = join(2, "shm", |comm| {
        // Opens the streams, which takes both.
        ping_pong(&comm, 1)?;
        Ok(comm)
    })?;
    let mut data = [1_u8; 8];
    for call in 0..calls {
        let (from, to) = (call % 2, (call + 1) % 2);
        comms[from].send(&data, Rank::from(to), Tag(0))?;
        comms[to].recv(&mut data, Rank::from(from), Tag(0))?;
    }
    Ok(())
}

fn all_reduce(comm: &Communicator, data: &mut [f32], calls: usize) -> Result<(), ncclx_rs::Error> {
    (0..calls).try_for_each(|_| comm.all_reduce(data, ReduceOp::Max))
}

/// So much data that hardly anything but the loops over elements counts.
fn reductions(comm: &Communicator, calls: usize) -> Result<(), ncclx_rs::Error> {
    let (mut numbers, mut bytes) = (vec![1_f32; 1 << 16], vec![1_u8; 1 << 16]);
    for _ in 0..calls {
        comm.all_reduce(&mut numbers, ReduceOp::Max)?;
        comm.all_reduce(&mut numbers, ReduceOp::Avg)?;
        comm.all_reduce(&mut bytes, ReduceOp::Sum)?;
    }
    Ok(())
}

fn ping_pong(comm: &Communicator, calls: usize) -> Result<(), ncclx_rs::Error> {
    let mut data = [1_u8; 8];
    let peer = Rank::from(1 - comm.rank().index());
    for _ in 0..calls {
        if comm.rank() == Rank(0) {
            comm.send(&data, peer, Tag(0))?;
        }
        comm.recv(&mut data, peer, Tag(0))?;
        if comm.rank() == Rank(1) {
            comm.send(&data, peer, Tag(0))?;
        }
    }
    Ok(())
}

/// Plans that no cache has.
fn plan_anew(calls: usize) {
    let topo = Topology::single_host(16);
    let setting = Setting {
        me: Rank(3),
        topo: &topo,
        element: DType::F32.size(),
        scaling: Scaling::Nothing,
        chunking: Chunking::Chunks,
        scratch: ScratchLimit::DEFAULT,
    };
    for _ in 0..calls {
        std::hint::black_box(plan(&Collective::AllReduce { count: 1 << 20 }, setting));
    }
}
