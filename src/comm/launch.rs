//! Launch: this process's rank and the number of processes, from the environment that the launcher set.
//!
//! ```
//! use ncclx_rs::{Launch, Rank};
//! let environment = |name: &str| match name {
//!     "RANK" => Some("1".to_owned()),
//!     "WORLD_SIZE" => Some("2".to_owned()),
//!     _ => None,
//! };
//! let launch = Launch::resolve(&environment)?;
//! assert_eq!((launch.rank, launch.size), (Rank(1), 2));
//! # Ok::<(), ncclx_rs::LaunchError>(())
//! ```

use std::fmt::Write;
use std::time::Duration;

use super::bootstrap::shared_secret;
use super::communicator::{CommOptions, Communicator};
use super::store::{MemoryStore, Store, TcpStore};
use crate::config::{self, Config};
use crate::error::{Error, LaunchError};
use crate::sync::Arc;
use crate::types::Rank;

/// A process's rank among those that were launched together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process's rank.
    pub rank: Rank,
    /// The number of processes.
    pub size: usize,
    /// The index among the processes of this host, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// Where the store is served, if the environment says so.
    pub master: Option<Master>,
}

/// Where rank 0 serves the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Rank 0's host name or address.
    pub host: String,
    /// The port.
    pub port: u16,
    /// Which process listens there.
    pub server: StoreServer,
}

/// Which process serves at a [`Master`]'s port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreServer {
    /// Rank 0, which finds the port free.
    RankZero,
    /// torchrun's agent, with PyTorch's own store.
    Agent,
}

/// The variables in which a launcher passes a process its rank.
struct Launcher {
    name: &'static str,
    /// The value of [`METHOD`] that asks for it; `auto` asks for each.
    method: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static [&'static str],
    half: Half,
}

/// What it means if only one of rank and size is set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    /// A mistake.
    Error,
    /// Nothing: this launcher also sets it in processes that it has not started as ranks.
    Ignored,
}

const METHOD: &str = "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD";
/// The default of [`METHOD`].
const AUTO: &str = "auto";

/// The variables that come before any method.
const EXPLICIT: Launcher = Launcher {
    name: "set by hand",
    method: "",
    rank: "TORCHCOMM_RANK",
    size: "TORCHCOMM_SIZE",
    local_rank: &["LOCAL_RANK"],
    half: Half::Error,
};

/// In the order of `auto`. Slurm is the last, since a batch job sets its variables for every process, also for those that
/// another launcher starts.
const LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "Open MPI",
        method: "mpi",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        half: Half::Error,
    },
    Launcher {
        name: "MPICH, Intel MPI, Slurm with PMI",
        method: "mpi",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        half: Half::Error,
    },
    Launcher {
        name: "PALS",
        method: "pals",
        rank: "PALS_RANKID",
        size: "PALS_SIZE",
        local_rank: &["PALS_LOCAL_RANKID"],
        half: Half::Ignored,
    },
    Launcher {
        name: "torchrun",
        method: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: &["LOCAL_RANK"],
        half: Half::Error,
    },
    Launcher {
        name: "Slurm",
        method: "slurm",
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: &["SLURM_LOCALID"],
        half: Half::Ignored,
    },
];

impl Launch {
    /// The launch that this process's environment describes.
    pub fn from_env() -> Result<Launch, LaunchError> {
        Launch::resolve(&config::variable)
    }

    /// As [`Launch::from_env`], but a process that nothing has launched is the only rank of a world of its own.
    pub fn from_env_or_alone() -> Result<Launch, LaunchError> {
        Launch::resolve_or_alone(&config::variable)
    }

    /// As [`Launch::from_env_or_alone`], of the variables that `variable` looks up.
    ///
    /// A program that names a master or a launcher's method expects other ranks. Then a missing rank stays an error.
    pub fn resolve_or_alone(variable: &dyn Fn(&str) -> Option<String>) -> Result<Launch, LaunchError> {
        let variables = Variables(variable);
        let expects_others = ["MASTER_ADDR", "MASTER_PORT"].iter().any(|name| variables.value(name).is_some())
            || variables.method() != AUTO;
        match Launch::resolve(variable) {
            Err(LaunchError::Absent { .. }) if !expects_others => {
                Ok(Launch { rank: Rank(0), size: 1, local_rank: None, master: None })
            }
            resolved => resolved,
        }
    }

    /// The launch that the variables describe, which `variable` looks up. An empty value counts as unset.
    pub fn resolve(variable: &dyn Fn(&str) -> Option<String>) -> Result<Launch, LaunchError> {
        let variables = Variables(variable);
        let (rank, size, launcher) = variables.rank_and_size()?;
        let local_rank = launcher.local_rank.iter().find_map(|name| Some((*name, variables.value(name)?)));
        Ok(Launch {
            rank,
            size,
            local_rank: local_rank.map(|(name, value)| number(name, &value)).transpose()?,
            master: variables.master(size)?,
        })
    }

    /// The store of this launch: rank 0 serves it at the master's port, and the other ranks try to connect for `timeout`.
    ///
    /// If `NCCLX_RS_JOB_SECRET` is set, each rank must prove that it knows it. Rank 0 must keep the store until no rank uses it
    /// any more, and can serve it only once at a time. Several communicators share it through
    /// [`PrefixStore`](super::store::PrefixStore).
    pub fn store(&self, timeout: Duration) -> Result<TcpStore, Error> {
        let master = self.master.as_ref().ok_or(LaunchError::NoMaster)?;
        if master.server == StoreServer::Agent {
            return Err(LaunchError::PortTaken { port: master.port }.into());
        }
        let secret = shared_secret(&Config::resolve(&[])?)?;
        Ok(match self.rank {
            Rank(0) => TcpStore::serve_as(&master.host, master.port, secret)?,
            _ => TcpStore::connect_to(&master.host, master.port, timeout, secret)?,
        })
    }

    /// The communicator `name` of all launched processes, with a store of its own: to be called once. Make more communicators
    /// with [`Communicator::split`] or with [`Launch::store`].
    pub fn communicator(&self, name: &str) -> Result<Communicator, Error> {
        let store: Arc<dyn Store> = match self.size {
            1 => Arc::new(MemoryStore::default()),
            _ => Arc::new(self.store(Config::resolve(&[])?.connect_timeout)?),
        };
        let Launch { rank, size, .. } = *self;
        Ok(Communicator::new(CommOptions { name: name.to_owned(), rank, size, store, timeout: None, hints: vec![] })?)
    }
}

/// The manual's table of launchers, in Markdown.
pub fn manual() -> String {
    let mut text = String::from("| launcher | method | rank | size | local rank |\n|---|---|---|---|---|\n");
    for Launcher { name, method, rank, size, local_rank, .. } in [&EXPLICIT].into_iter().chain(LAUNCHERS) {
        let method = if method.is_empty() { "any".to_owned() } else { format!("`{method}`") };
        let local_rank = local_rank.join("`, `");
        writeln!(text, "| {name} | {method} | `{rank}` | `{size}` | `{local_rank}` |")
            .expect("a string takes any text");
    }
    text
}

struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn value(&self, name: &str) -> Option<String> {
        self.0(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn method(&self) -> String {
        self.value(METHOD).map_or(AUTO.to_owned(), |method| method.to_lowercase())
    }

    /// Rank and size, and the launcher that set them.
    fn rank_and_size(&self) -> Result<(Rank, usize, &'static Launcher), LaunchError> {
        if let Some((rank, size)) = self.pair(&EXPLICIT, Half::Error)? {
            return Ok((rank, size, &EXPLICIT));
        }
        let method = self.method();
        let asked: Vec<&Launcher> =
            LAUNCHERS.iter().filter(|launcher| method == AUTO || method == launcher.method).collect();
        if asked.is_empty() {
            return Err(LaunchError::Value {
                variable: METHOD,
                value: method,
                expected: "auto, mpi, pals, torchrun or slurm".to_owned(),
            });
        }
        for launcher in &asked {
            let half = if method == AUTO { launcher.half } else { Half::Error };
            if let Some((rank, size)) = self.pair(launcher, half)? {
                return Ok((rank, size, launcher));
            }
        }
        let pairs = [&EXPLICIT].into_iter().chain(asked).map(|one| format!("{} and {}", one.rank, one.size));
        Err(LaunchError::Absent { variables: pairs.collect::<Vec<_>>().join(", ") })
    }

    fn pair(&self, launcher: &Launcher, half: Half) -> Result<Option<(Rank, usize)>, LaunchError> {
        let (rank, size) = match (self.value(launcher.rank), self.value(launcher.size)) {
            (Some(rank), Some(size)) => (rank, size),
            (Some(_), None) if half == Half::Error => {
                return Err(LaunchError::Half { set: launcher.rank, unset: launcher.size });
            }
            (None, Some(_)) if half == Half::Error => {
                return Err(LaunchError::Half { set: launcher.size, unset: launcher.rank });
            }
            _ => return Ok(None),
        };
        let count: u32 = number(launcher.size, &size)?;
        if count == 0 {
            let expected = "a whole number above 0".to_owned();
            return Err(LaunchError::Value { variable: launcher.size, value: size, expected });
        }
        let own: u32 = number(launcher.rank, &rank)?;
        if own >= count {
            let expected = format!("less than {}, which is {size}", launcher.size);
            return Err(LaunchError::Value { variable: launcher.rank, value: rank, expected });
        }
        Ok(Some((Rank(own), count as usize)))
    }

    fn master(&self, size: usize) -> Result<Option<Master>, LaunchError> {
        let (address, port) = ("MASTER_ADDR", "MASTER_PORT");
        match (self.value(address), self.value(port)) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(LaunchError::Half { set: address, unset: port }),
            (None, Some(_)) => Err(LaunchError::Half { set: port, unset: address }),
            (Some(host), Some(value)) => {
                let agent = self.value("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
                let server = if agent { StoreServer::Agent } else { StoreServer::RankZero };
                let expected = || "a port from 1 to 65535".to_owned();
                match value.parse() {
                    // With one rank, no other rank must know the port.
                    Ok(port) if port != 0 || size == 1 => Ok(Some(Master { host, port, server })),
                    _ => Err(LaunchError::Value { variable: port, value, expected: expected() }),
                }
            }
        }
    }
}

fn number(variable: &'static str, value: &str) -> Result<u32, LaunchError> {
    let expected = || "a whole number".to_owned();
    value.parse().map_err(|_| LaunchError::Value { variable, value: value.to_owned(), expected: expected() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(environment: &[(&str, &str)]) -> Result<Launch, LaunchError> {
        Launch::resolve(&|name| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    fn place(environment: &[(&str, &str)]) -> (u32, usize, Option<u32>) {
        let launch = resolve(environment).unwrap();
        (launch.rank.0, launch.size, launch.local_rank)
    }

    fn refused(environment: &[(&str, &str)]) -> String {
        resolve(environment).unwrap_err().to_string()
    }

    const TORCHRUN: [(&str, &str); 3] = [("RANK", "1"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "0")];
    const SLURM: [(&str, &str); 3] = [("SLURM_PROCID", "5"), ("SLURM_NTASKS", "6"), ("SLURM_LOCALID", "2")];
    const OPEN_MPI: [(&str, &str); 2] = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")];

    #[test]
    fn every_launcher_is_understood() {
        for (index, launcher) in [&EXPLICIT].into_iter().chain(LAUNCHERS).enumerate() {
            let rank = index.to_string();
            for local in launcher.local_rank {
                assert_eq!(
                    place(&[(launcher.rank, &rank), (launcher.size, "9"), (local, "7")]),
                    (index as u32, 9, Some(7))
                );
                assert_eq!(place(&[(launcher.rank, " 0 "), (launcher.size, "1"), (local, "")]), (0, 1, None));
            }
        }
    }

    #[test]
    fn the_explicit_pair_wins_over_mpi_and_that_over_torchrun_and_slurm_comes_last() {
        let explicit = [("TORCHCOMM_RANK", "0"), ("TORCHCOMM_SIZE", "2"), (METHOD, "env")];
        assert_eq!(place(&[explicit.as_slice(), &OPEN_MPI].concat()), (0, 2, None));
        assert_eq!(place(&[TORCHRUN.as_slice(), &OPEN_MPI].concat()), (3, 4, None));
        assert_eq!(place(&[SLURM.as_slice(), &TORCHRUN].concat()), (1, 8, Some(0)));
    }

    #[test]
    fn the_method_chooses() {
        let all = [TORCHRUN.as_slice(), &OPEN_MPI, &SLURM].concat();
        let with = |method| [all.as_slice(), &[(METHOD, method)]].concat();
        assert_eq!(place(&with("Torchrun")), (1, 8, Some(0)));
        assert_eq!(place(&with("mpi")), (3, 4, None));
        assert_eq!(place(&with("slurm")), (5, 6, Some(2)));
        assert_eq!(place(&with("")), (3, 4, None));
        let pals = refused(&with("pals"));
        assert!(pals.contains("PALS_RANKID and PALS_SIZE") && !pals.contains("WORLD_SIZE"), "{pals}");
        let unknown = refused(&with("guess"));
        assert_eq!(unknown, format!("{METHOD} is `guess`: expected auto, mpi, pals, torchrun or slurm"));
    }

    #[test]
    fn half_a_pair_is_an_error_where_it_is_no_habit() {
        assert_eq!(refused(&TORCHRUN[..1]), "RANK is set, but WORLD_SIZE is not");
        assert_eq!(refused(&OPEN_MPI[1..]), "OMPI_COMM_WORLD_SIZE is set, but OMPI_COMM_WORLD_RANK is not");
        assert_eq!(refused(&[("TORCHCOMM_RANK", "0"), TORCHRUN[0], TORCHRUN[1]]).matches("TORCHCOMM").count(), 2);
        let within_pals = [("PALS_RANKID", "4"), TORCHRUN[0], TORCHRUN[1]];
        assert_eq!(place(&within_pals), (1, 8, None));
        assert!(refused(&[within_pals.as_slice(), &[(METHOD, "pals")]].concat()).contains("PALS_SIZE is not"));
        assert!(matches!(resolve(&SLURM[..1]), Err(LaunchError::Absent { .. })));
        assert_eq!(refused(&[("RANK", "0"), ("WORLD_SIZE", "")]), "RANK is set, but WORLD_SIZE is not");
    }

    #[test]
    fn bad_values_name_their_variable() {
        let bad = |rank, size| refused(&[("RANK", rank), ("WORLD_SIZE", size)]);
        assert_eq!(bad("one", "2"), "RANK is `one`: expected a whole number");
        assert_eq!(bad("-1", "2"), "RANK is `-1`: expected a whole number");
        assert_eq!(bad("2", "2"), "RANK is `2`: expected less than WORLD_SIZE, which is 2");
        assert_eq!(bad("0", "0"), "WORLD_SIZE is `0`: expected a whole number above 0");
        let local = [TORCHRUN[0], TORCHRUN[1], ("LOCAL_RANK", "x")];
        assert_eq!(refused(&local), "LOCAL_RANK is `x`: expected a whole number");
    }

    #[test]
    fn a_process_that_nothing_has_launched_is_alone_unless_it_expects_others() {
        let resolve = |environment: &[(&str, &str)]| {
            Launch::resolve_or_alone(&|name| {
                environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
            })
        };
        for environment in [&[] as &[(&str, &str)], &SLURM[..1], &[(METHOD, "AUTO")], &[("MASTER_ADDR", "")]] {
            let alone = resolve(environment).unwrap();
            assert_eq!((alone.rank, alone.size, alone.master), (Rank(0), 1, None), "{environment:?}");
        }
        assert_eq!(resolve(&SLURM).unwrap().rank, Rank(5));
        for environment in [[("MASTER_ADDR", "here")], [("MASTER_PORT", "29500")], [(METHOD, "slurm")]] {
            let error = resolve(&environment).unwrap_err();
            assert!(matches!(error, LaunchError::Absent { .. }), "{environment:?}: {error}");
            assert!(error.to_string().contains("torchrun --standalone --nproc-per-node 2"), "{error}");
        }
        assert!(matches!(resolve(&TORCHRUN[..1]), Err(LaunchError::Half { .. })));
    }

    #[test]
    fn nothing_set_lists_what_was_looked_for() {
        let error = refused(&[]);
        assert!(error.contains("TORCHCOMM_RANK and TORCHCOMM_SIZE, OMPI") && error.contains("RANK and WORLD_SIZE"));
    }

    #[test]
    fn the_master_is_an_address_and_a_port() {
        let with = |address, port| {
            resolve(&[TORCHRUN.as_slice(), &[("MASTER_ADDR", address), ("MASTER_PORT", port)]].concat())
        };
        let master = Master { host: "::1".to_owned(), port: 29500, server: StoreServer::RankZero };
        assert_eq!(with("::1", "29500").unwrap().master, Some(master));
        assert_eq!(with("", "").unwrap().master, None);
        assert_eq!(with("here", "").unwrap_err().to_string(), "MASTER_ADDR is set, but MASTER_PORT is not");
        for port in ["0", "65536", "http"] {
            let error = with("here", port).unwrap_err().to_string();
            assert_eq!(error, format!("MASTER_PORT is `{port}`: expected a port from 1 to 65535"));
        }
    }

    #[test]
    fn one_rank_takes_any_port() {
        let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")];
        let launch = resolve(&alone).expect("port 0 is a port for one rank");
        assert_eq!(launch.master.as_ref().map(|master| master.port), Some(0));
        launch.store(Duration::ZERO).expect("any free port").set("key", b"value").expect("it serves");
    }

    #[test]
    fn a_store_needs_a_master_with_a_free_port() {
        let error = resolve(&TORCHRUN).unwrap().store(Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR"), "{error}");
        let agent = [("MASTER_ADDR", "here"), ("MASTER_PORT", "1"), ("TORCHELASTIC_USE_AGENT_STORE", "True")];
        let launch = resolve(&[TORCHRUN.as_slice(), &agent].concat()).unwrap();
        let error = launch.store(Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"), "{error}");
    }
}
