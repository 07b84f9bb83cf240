//! Finds a line of which each process knows one point. The processes average their gradients, so all take the same steps:
//! the smallest data-parallel training.
//!
//! ```sh
//! cargo run --example all_reduce    # starts two ranks by itself
//! mpirun -n 4 -x MASTER_ADDR=localhost -x MASTER_PORT=29500 target/debug/examples/all_reduce
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example that shows its result")]

mod ranks;

use std::error::Error;

use ncclx_rs::{Launch, LaunchError, ReduceOp};

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    match Launch::from_env() {
        Ok(launch) => Ok(train(&launch)?),
        Err(LaunchError::Absent { .. }) => ranks::start(2),
        Err(error) => Err(error.into()),
    }
}

fn train(launch: &Launch) -> Result<(), ncclx_rs::Error> {
    let comm = launch.communicator("world")?;
    let x = launch.rank.0 as f32 / launch.size as f32;
    let y = 3.0 * x + 1.0;
    let (mut slope, mut intercept) = (0.0, 0.0);
    for _ in 0..500 {
        let error = slope * x + intercept - y;
        let mut gradient = [error * x, error];
        comm.all_reduce(&mut gradient, ReduceOp::Avg)?;
        slope -= 0.5 * gradient[0];
        intercept -= 0.5 * gradient[1];
    }
    println!("rank {} of {}: y = {slope:.3} x + {intercept:.3}", launch.rank, launch.size);
    comm.shutdown()
}
