//! Trains a small network with tch, data-parallel over processes: each process has its own points, and all average their
//! gradients. `make test-tch` builds and runs it.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example that shows its result")]

mod ranks;

use std::error::Error;

use ncclx_rs::{Communicator, Launch, LaunchError, Rank, ReduceOp};
use tch::nn::{self, Module, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

const STEPS: usize = 500;

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    match Launch::from_env() {
        Ok(launch) => train(&launch),
        Err(LaunchError::Absent { .. }) => ranks::start(2),
        Err(error) => Err(error.into()),
    }
}

fn train(launch: &Launch) -> Result<(), Box<dyn Error>> {
    tch::set_num_threads(1);
    tch::manual_seed(i64::from(launch.rank.0));
    let comm = launch.communicator("world")?;
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let network = nn::seq()
        .add(nn::linear(&root / "first", 1, 32, Default::default()))
        .add_fn(|hidden| hidden.tanh())
        .add(nn::linear(&root / "second", 32, 1, Default::default()));
    share_weights(&comm, &store)?;
    let mut optimizer = nn::Adam::default().build(&store, 0.02)?;

    // Each rank sees its own part of a wave.
    let width = 2.0 / launch.size as f64;
    let xs = (Tensor::rand([256, 1], (Kind::Float, Device::Cpu)) + f64::from(launch.rank.0)) * width - 1.0;
    let ys = (&xs * 3.0).sin();
    for _ in 0..STEPS {
        optimizer.zero_grad();
        let loss = network.forward(&xs).mse_loss(&ys, tch::Reduction::Mean);
        loss.backward();
        average_gradients(&comm, &store)?;
        optimizer.step();
    }

    // On the whole wave, of which each rank has seen only a part.
    let xs = Tensor::linspace(-1.0, 1.0, 101, (Kind::Float, Device::Cpu)).unsqueeze(1);
    let loss = network.forward(&xs).mse_loss(&(&xs * 3.0).sin(), tch::Reduction::Mean).double_value(&[]);
    println!("rank {} of {}: loss {loss:.6}", launch.rank, launch.size);
    if loss > 0.01 {
        return Err(format!("rank {}: the network has not learned: loss {loss}", launch.rank).into());
    }
    Ok(comm.shutdown()?)
}

/// Gives all ranks the weights of rank 0.
fn share_weights(comm: &Communicator, store: &VarStore) -> Result<(), ncclx_rs::Error> {
    store.trainable_variables().iter_mut().try_for_each(|weight| comm.broadcast(weight, Rank(0)))
}

fn average_gradients(comm: &Communicator, store: &VarStore) -> Result<(), ncclx_rs::Error> {
    store.trainable_variables().iter().try_for_each(|weight| comm.all_reduce(&mut weight.grad(), ReduceOp::Avg))
}
