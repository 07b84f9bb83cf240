//! A launcher, for examples that run without one.

use std::error::Error;
use std::net::TcpListener;
use std::process::Command;

/// Starts this program again, with its arguments, as each of `size` ranks, and waits for all.
pub(crate) fn start(size: usize) -> Result<(), Box<dyn Error>> {
    let program = std::env::current_exe()?;
    // Below those that the system gives away by itself: another program might get one of these before rank 0 listens.
    let first = 10_000 + (std::process::id() % 20_000) as u16;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let port = (first..32_768).find(is_free).ok_or("no port is free")?;
    let start = |rank: usize| {
        let place = [("RANK", rank.to_string()), ("WORLD_SIZE", size.to_string())];
        let master = [("MASTER_ADDR", "127.0.0.1".to_string()), ("MASTER_PORT", port.to_string())];
        Command::new(&program).args(std::env::args_os().skip(1)).envs(place).envs(master).spawn()
    };
    let ranks = (0..size).map(start).collect::<Result<Vec<_>, _>>()?;
    for (rank, mut process) in ranks.into_iter().enumerate() {
        let status = process.wait()?;
        if !status.success() {
            return Err(format!("rank {rank} failed: {status}").into());
        }
    }
    Ok(())
}
