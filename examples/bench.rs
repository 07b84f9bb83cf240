//! Measures the engine without Python, and prints the results in the format of IMB-MPI1, Intel's MPI benchmarks.
//!
//! ```sh
//! cargo run --release --example bench                                         # two ranks, every operation
//! cargo run --release --example bench -- --ranks 4 --ops Allreduce,Barrier --max 65536
//! ```
//!
//! `#bytes` is defined as in IMB: a rank's data; one block in Allgather, Alltoall, Gather and Scatter; all blocks
//! together in Reduce_scatter. Reductions work in place and add floats. PingPong is between ranks 0 and 1, one way;
//! Uniband sends from rank 0 to rank 1 only, one message after the other. Memcpy does not communicate: all ranks copy
//! that many bytes at the same time, which shows the limit of the memory. One-sided operations are measured where they are
//! named: PutPingPong puts and signals there and back, Uniput does so in one direction, and Write and Read write and read
//! the memory of rank 1 by a transport, one call after the other.
//!
//! With `--serve DIRECTORY`, under a launcher, it takes its measurements from pipes: see `tests/bench/mpi.py`.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example that shows its result")]

mod one_sided;
mod ranks;

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Parser;
use clap::builder::{PossibleValuesParser, RangedU64ValueParser};
use ncclx_rs::{Communicator, Launch, LaunchError, Rank, ReduceOp, Tag};

const OPERATIONS: [&str; 12] = [
    "PingPong",
    "Uniband",
    "Allreduce",
    "Reduce",
    "Bcast",
    "Allgather",
    "Reduce_scatter",
    "Alltoall",
    "Gather",
    "Scatter",
    BARRIER,
    "Memcpy",
];
const BARRIER: &str = "Barrier";
const ROOT: Rank = Rank(0);

/// The limits of IMB: the calls of a size, and the bytes that they move.
const MOST_CALLS: usize = 1000;
const ENOUGH_BYTES: usize = 40 << 20;
const WARM_UP: usize = 5;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// One call of an operation, on buffers that it owns.
type Call = Box<dyn FnMut(&Communicator) -> Result<(), ncclx_rs::Error>>;

// `cargo bench` runs it too.
pub(crate) fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Outcome<()> {
    let options = Options::parse();
    let launch = match Launch::from_env() {
        Ok(launch) => launch,
        Err(LaunchError::Absent { .. }) if options.serve.is_none() => return ranks::start(options.ranks as usize),
        Err(error) => return Err(error.into()),
    };
    let comm = launch.communicator("bench")?;
    match &options.serve {
        Some(directory) => serve(&comm, directory)?,
        None => options.ops.iter().try_for_each(|operation| table(&comm, operation, &options))?,
    }
    Ok(comm.shutdown()?)
}

/// Measures the engine without Python, in the format of IMB-MPI1.
#[derive(Parser)]
struct Options {
    /// The number of ranks to start
    #[arg(long, default_value = "2", value_parser = positive())]
    ranks: u64,
    /// The operations to measure
    #[arg(long, value_delimiter = ',', default_values = OPERATIONS, value_parser = known())]
    ops: Vec<String>,
    /// The first size in bytes, which is doubled up to the last
    #[arg(long, default_value = "4", value_parser = positive())]
    min: u64,
    /// The last size in bytes
    #[arg(long, default_value = "4194304", value_parser = positive())]
    max: u64,
    /// Take measurements from the pipes in this folder instead
    #[arg(long, value_name = "DIRECTORY")]
    serve: Option<PathBuf>,
    /// The option that `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
}

fn known() -> PossibleValuesParser {
    PossibleValuesParser::new(OPERATIONS.into_iter().chain(one_sided::OPERATIONS))
}

fn positive() -> RangedU64ValueParser {
    RangedU64ValueParser::new().range(1..)
}

/// Measures an operation for all sizes; rank 0 prints.
fn table(comm: &Communicator, operation: &str, options: &Options) -> Outcome<()> {
    let of_two = ["PingPong", "Uniband"].contains(&operation) || one_sided::OPERATIONS.contains(&operation);
    if of_two && comm.size() < 2 {
        return Ok(());
    }
    let tells = comm.rank() == ROOT;
    if tells {
        println!("\n# Benchmarking {operation}\n# #processes = {}", comm.size());
        println!(
            "{:>13} {:>13} {:>13} {:>13} {:>13} {:>13}",
            "#bytes", "#repetitions", "t_min[usec]", "t_max[usec]", "t_avg[usec]", "Mbytes/sec"
        );
    }
    let sizes = std::iter::successors(Some(options.min), |size| Some(size * 2)).take_while(|&size| size <= options.max);
    let sizes: Vec<u64> = if operation == BARRIER { vec![0] } else { sizes.collect() };
    for bytes in sizes.into_iter().map(|size| size as usize) {
        let calls = (ENOUGH_BYTES / bytes.max(1)).clamp(1, MOST_CALLS);
        let mut call = call(comm, operation, bytes)?;
        timed(comm, &mut call, WARM_UP)?;
        let mine = timed(comm, &mut call, calls)? * 1e6 / calls as f64 / trips(operation);
        // What a rank shares with others goes with its call, when the last of them has made its own.
        comm.barrier()?;
        let taking_part = if of_two { 2 } else { comm.size() };
        let mut times = vec![0.0; comm.size()];
        comm.gather(&mut times, &[mine], ROOT)?;
        let times = &times[..taking_part];
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        let most = times.iter().copied().fold(0.0, f64::max);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        if tells {
            let rate = bytes as f64 / most;
            println!("{bytes:>13} {calls:>13} {least:>13.2} {most:>13.2} {mean:>13.2} {rate:>13.2}");
        }
    }
    Ok(())
}

/// The number of messages in a call, one after the other.
fn trips(operation: &str) -> f64 {
    if operation.ends_with("PingPong") { 2.0 } else { 1.0 }
}

/// The seconds that the calls take on this rank. All ranks begin together.
fn timed(comm: &Communicator, call: &mut Call, calls: usize) -> Result<f64, ncclx_rs::Error> {
    comm.barrier()?;
    let began = Instant::now();
    for _ in 0..calls {
        call(comm)?;
    }
    Ok(began.elapsed().as_secs_f64())
}

/// Reads measurements from the pipe `in<rank>`, such as `Allreduce 1024 100` for a hundred calls of 1 KiB each, until it is
/// closed. Answers each in the pipe `out<rank>` with the seconds that all calls took on this rank. The first answer is the
/// process's id.
fn serve(comm: &Communicator, directory: &Path) -> Outcome<()> {
    let lines = BufReader::new(File::open(directory.join(format!("in{}", comm.rank())))?).lines();
    let mut answers = OpenOptions::new().write(true).open(directory.join(format!("out{}", comm.rank())))?;
    writeln!(answers, "{}", std::process::id())?;
    let mut ready: Option<((String, usize), Call)> = None;
    for line in lines {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let [operation, bytes, calls] = words[..] else {
            return Err(format!("expected an operation, bytes and calls, got `{line}`").into());
        };
        let (case, calls) = ((operation.to_owned(), bytes.parse()?), calls.parse()?);
        // Buffers are kept from one measurement to the next.
        if ready.as_ref().is_none_or(|(held, _)| *held != case) {
            ready = Some((case.clone(), call(comm, operation, case.1)?));
        }
        let (_, call) = ready.as_mut().expect("it was just made");
        writeln!(answers, "{}", timed(comm, call, calls)?)?;
    }
    Ok(())
}

fn call(comm: &Communicator, operation: &str, bytes: usize) -> Outcome<Call> {
    if one_sided::OPERATIONS.contains(&operation) {
        return one_sided::call(comm, operation, bytes);
    }
    let (size, rank) = (comm.size(), comm.rank());
    // Written once, so that no page is the kernel's shared page of zeroes.
    let mut data = vec![1_u8; bytes];
    let mut all = vec![1_u8; bytes * size];
    let floats = (bytes / size_of::<f32>()).max(1);
    let mut sums = vec![1_f32; floats];
    let mut part = vec![1_f32; (floats / size).max(1)];
    let parts = vec![1_f32; part.len() * size];
    Ok(match operation {
        "PingPong" => Box::new(move |comm| match rank {
            Rank(0) => {
                comm.send(&data, Rank(1), Tag(0))?;
                comm.recv(&mut data, Rank(1), Tag(0)).map(|_| ())
            }
            Rank(1) => {
                comm.recv(&mut data, Rank(0), Tag(0))?;
                comm.send(&data, Rank(0), Tag(0))
            }
            _ => Ok(()),
        }),
        "Uniband" => Box::new(move |comm| match rank {
            Rank(0) => comm.send(&data, Rank(1), Tag(0)),
            Rank(1) => comm.recv(&mut data, Rank(0), Tag(0)).map(|_| ()),
            _ => Ok(()),
        }),
        "Allreduce" => Box::new(move |comm| comm.all_reduce(&mut sums, ReduceOp::Sum)),
        "Reduce" => Box::new(move |comm| comm.reduce(&mut sums, ReduceOp::Sum, ROOT)),
        "Bcast" => Box::new(move |comm| comm.broadcast(&mut data, ROOT)),
        "Allgather" => Box::new(move |comm| comm.all_gather(&mut all, &data)),
        "Reduce_scatter" => Box::new(move |comm| comm.reduce_scatter(&mut part, &parts, ReduceOp::Sum)),
        "Alltoall" => {
            let input = all.clone();
            Box::new(move |comm| comm.all_to_all(&mut all, &input))
        }
        "Gather" => Box::new(move |comm| comm.gather(&mut all, &data, ROOT)),
        "Scatter" => Box::new(move |comm| comm.scatter(&mut data, &all, ROOT)),
        BARRIER => Box::new(|comm| comm.barrier()),
        "Memcpy" => {
            let mut copy = data.clone();
            Box::new(move |_| {
                std::hint::black_box(&mut copy).copy_from_slice(std::hint::black_box(&data));
                Ok(())
            })
        }
        _ => return Err(format!("expected one of {OPERATIONS:?}, got `{operation}`").into()),
    })
}
