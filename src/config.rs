//! The only reader of environment variables and hints.
//!
//! Every option is one row of the table below. The variable `NCCLX_RS_<NAME>` sets it for a process, the hint `<name>` for one
//! communicator. The hint wins, and an empty value counts as unset.
//!
//! ```
//! use ncclx_rs::config::{Config, TransportChoice};
//! let hints = [("transport".to_string(), "tcp".to_string())];
//! assert_eq!(Config::resolve(&hints)?.transport, TransportChoice::Tcp);
//! # Ok::<(), ncclx_rs::InitError>(())
//! ```

use std::fmt::{self, Write};
use std::time::Duration;

use log::LevelFilter;

use crate::error::InitError;

mod algorithm;
mod engine;
mod nccl_fields;
mod numa_node;
mod tcp_streams;
mod threads;
mod transports;

pub use algorithm::AlgorithmChoice;
pub use engine::EngineChoice;
pub use nccl_fields::NcclFields;
pub use numa_node::NumaNode;
pub use tcp_streams::TcpStreams;
pub use threads::Threads;
pub use transports::{TransportChoice, UcxChoice};

macro_rules! options {
    ($($field:ident: $kind:ty, $name:literal, $default:literal, $also:expr, $meaning:literal;)*) => {
        /// The settings of one communicator.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct Config {
            $(#[doc = $meaning] pub $field: $kind,)*
        }

        const OPTIONS: &[OptionRow] = &[$(OptionRow {
            name: $name,
            also: $also,
            kind: <$kind as Value>::EXPECTED,
            default: $default,
            meaning: $meaning,
        },)*];

        impl Config {
            /// The settings that `hints` and the variables that `variable` looks up make.
            pub fn resolve_with(
                variable: &dyn Fn(&str) -> Option<String>,
                hints: &[(String, String)],
            ) -> Result<Config, InitError> {
                for name in unknown_hints(hints) {
                    log::warn!(target: UNKNOWN_HINTS, "the hint `{name}` is not known and has no effect");
                }
                Ok(Config { $($field: look_up($name, $also, $default, variable, hints)?,)* })
            }
        }
    };
}

options! {
    transport: TransportChoice, "transport", "auto", &[],
        "How bytes move between ranks; auto takes shared memory within a host and TCP between hosts, or UCX where both have \
         RDMA devices that it can use and `ucx` names the library. `shm`, `tcp` and `ucx` are that way alone, between all ranks.";
    ucx: UcxChoice, "ucx", "auto", &[],
        "The library UCX, 1.14 or later: a file; auto takes the one that the process has \
         loaded, the system's, or that of the Python package libucx-cu12 or -cu13; off for none. The first that a process takes \
         is its only one.";
    socket_interfaces: Option<String>, "socket_ifname", "", &["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"],
        "Which network interfaces to use: a comma list of name prefixes, `=name` and CIDR ranges; a leading `^` excludes.";
    tcp_streams: TcpStreams, "tcp_streams", "1", &[],
        "How many TCP connections carry a long message between two ranks at once, taken in turn from the interfaces that \
         `socket_ifname` allows. Of two ranks with different numbers, the smaller counts.";
    shared_streams: Switch, "shared_streams", "auto", &[],
        "Whether communicators of the same two processes share one TCP connection each way, which has long messages take longer. Where \
         one of two ranks does not, or `tcp_streams` is above 1, they have connections of their own. auto: if those of all \
         communicators of this process could take more than half of the descriptors that it may have (ulimit -n).";
    tls: Switch, "tls", "auto", &[],
        "Whether TLS 1.3 protects what travels through TCP: auto if `tls_certificate` is set; on also without certificates, \
         with keys made from the secret that the ranks share.";
    tls_certificate: Option<String>, "tls_certificate", "", &["GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT"],
        "The PEM file of this rank's certificate (X.509 v3), with those that lead to the authority.";
    tls_key: Option<String>, "tls_key", "", &["GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY"],
        "The PEM file of the certificate's private key.";
    tls_ca_file: Option<String>, "tls_ca_file", "", &["GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE"],
        "The PEM file of the authorities that sign the certificates of all ranks.";
    job_secret: SharedSecret, "job_secret", "", &[],
        "A secret that all ranks get in another way than from the store. Every connection to a communicator and to the \
         engine's own store must then prove that it knows it.";
    group_secret: SharedSecret, "group_secret", "", &[],
        "Internal: reconfiguration sets it. A secret like `job_secret`, and beside it, for one communicator alone.";
    host_id: Option<String>, "host_id", "", &["NCCL_HOSTID"],
        "The identity of this host; ranks with equal identities count as ranks of one host.";
    algorithm: AlgorithmChoice, "algorithm", "auto", &[],
        "The algorithm of every collective that it can do; auto takes the fastest known for size and topology. Rank 0's \
         holds for all ranks: another rank is set alike, or to auto.";
    tuning_file: Option<String>, "tuning_file", "", &[],
        "The output file of `ncclx-rs tune`, a table of the fastest algorithms; rank 0 reads it for all ranks.";
    timeout: Duration, "timeout_seconds", "1800", &[],
        "How long an operation may take.";
    connect_timeout: Duration, "connect_timeout_seconds", "300", &[],
        "Bootstrap timeout: how long to wait for all ranks to join a communicator. A `timeout` that the program gives and that \
         is shorter limits this too; a longer one does not lengthen it.";
    peer_timeout: Duration, "peer_timeout_seconds", "30", &[],
        "How long another host may be silent, its kernel included, before its ranks count as lost; whole seconds above 2.";
    eager_bytes: EagerBytes, "eager_bytes", "65536", &[],
        "Messages up to this size are sent before the receiver asks for them.";
    single_copy_bytes: usize, "single_copy_bytes", "65536", &[],
        "Within a host, the receiver may read longer messages from the sender's memory, where the system allows it \
         (process_vm_readv); 0 for never.";
    single_copy: Switch, "single_copy", "auto", &[],
        "Whether this rank reads messages in their senders' memory where these offer that, or has them sent through the shared memory \
         ring; auto measures for each sender and size of operations which way is faster.";
    scratch_bytes: usize, "scratch_bytes", "8388608", &[],
        "How much memory of its own the engine takes for the copies of a reduction, which longer ones make piece by piece, and \
         how much it keeps; from 128 times as long on, a 128th of the data. Rank 0's holds for all ranks.";
    flight_recorder_size: usize, "flight_recorder_size", "2048", &["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"],
        "How many operations the flight recorder keeps, rounded up to a power of two; 0 for none.";
    pytorch_recorder: bool, "pytorch_recorder", "false", &[],
        "Whether PyTorch's own flight recorder, from 2.15 on, records process groups too, which takes 2 to 5 µs of every \
         call. Otherwise the engine's recorder writes its dump after a failure to where PyTorch's would.";
    stack_frames: usize, "stack_frames", "0", &[],
        "How many frames of the caller's Python stack the flight recorder keeps of each operation; 0 for none.";
    dump_directory: Option<String>, "dump_directory", "", &[],
        "The folder that the flight recorder is written to when an operation fails, or is in flight at an abort.";
    dump_signal: Option<DumpSignal>, "dump_signal", "", &[],
        "The signal at which the flight recorder is also written to `dump_directory`.";
    shm_ring_bytes: RingBytes, "shm_ring_bytes", "262144", &[],
        "The size of the shared memory ring for each direction between two ranks of a host.";
    shm_line_ownership: Switch, "shm_line_ownership", "auto", &[],
        "Whether this rank, as it reads a shared memory ring, takes the cache lines for itself, so that their writer gets \
         them back faster; auto measures for each ring which way is cheaper.";
    numa_node: NumaNode, "numa_node", "auto", &[],
        "The NUMA node that this rank is on; off for none. auto: the one that all CPUs which it may run on belong to, where \
         its host has several with CPUs. The memory that others write to for this rank, its shared memory rings, is taken from there, \
         if the system allows it (mbind).";
    numa_collectives: bool, "numa_collectives", "true", &[],
        "Whether long collectives of ranks on several NUMA nodes of one host may go by node (the algorithm `numa`). Where it is false \
         on a rank, it is on all.";
    device_staging: StagingBytes, "device_staging_bytes", "16777216", &[],
        "CUDA: half the device memory for a rank's messages, for each communicator; rank 0's holds for all ranks.";
    device_timing: bool, "device_timing", "false", &["TORCH_NCCL_ENABLE_TIMING"],
        "CUDA: whether the flight recorder tells how long collectives took by their device's clock.";
    is_high_priority_stream: bool, "is_high_priority_stream", "false", &["TORCH_NCCL_HIGH_PRIORITY"],
        "CUDA: whether PyTorch's asynchronous operations go on streams of high priority.";
    engine: EngineChoice, "engine", "auto", &[],
        "What runs collectives and messages of tensors of devices: streams (the engine's own programs); a vendor's library, nccl \
         or rccl, for what it has; host (the engine of the CPU, also where other ranks have tensors of other devices or of the \
         CPU); mixed (as host, but a vendor's library within the ranks that have the same one). auto takes streams on CUDA's devices, and rccl on HIP's. The same on all ranks.";
    nccl_library: Option<String>, "nccl_library", "", &[],
        "The file of NCCL; otherwise the one that the process has loaded, that of a Python package, or the system's.";
    rccl_library: Option<String>, "rccl_library", "", &[],
        "The same for RCCL.";
    nccl_config: NcclFields, "nccl_config", "", &[],
        "Fields of `ncclConfig_t`, as nccl.h has them, for communicators of NCCL and RCCL, as `minCTAs=4,maxCTAs=16`; others \
         are left to the library. The same on all ranks.";
    nccl_ranks_per_root: usize, "nccl_ranks_per_root", "128", &["TORCH_NCCL_RANKS_PER_ROOT"],
        "How many ranks meet at one of them when a communicator of NCCL or RCCL begins; more ranks have several such roots. 0: \
         all meet at one.";
    threads: Threads, "threads", "auto", &[],
        "How many further threads of this process share a long copy or reduction within a host with the thread that makes progress; \
         0 for none. auto: this rank's share of the host's CPUs but one, at most 7, and none in a forked child. Ranks may differ.";
    spin: Spin, "spin_microseconds", "auto", &[],
        "How long a waiting thread polls before it sleeps; where ranks share a core, it yields the core after each poll. \
         auto is 50, and 100 where the host has fewer cores than ranks.";
}

/// Former names of options, which still work as hints and in `NCCLX_RS_<NAME>`: the former name and today's.
const FORMER_NAMES: &[(&str, &str)] = &[("tls_authority", "tls_ca_file"), ("flight_records", "flight_recorder_size")];

impl Config {
    /// The settings that `hints` and the process's environment make.
    pub fn resolve(hints: &[(String, String)]) -> Result<Config, InitError> {
        Config::resolve_with(&variable, hints)
    }

    /// Every option, for generated manuals.
    pub fn describe() -> Vec<Description> {
        let describe = |row: &OptionRow| Description {
            name: row.name,
            former_names: names(row.name).skip(1).collect(),
            variables: variables(row.name, row.also),
            kind: row.kind,
            default: row.default,
            meaning: row.meaning,
        };
        OPTIONS.iter().map(describe).collect()
    }
}

/// The names among `hints` that no option has.
pub fn unknown_hints(hints: &[(String, String)]) -> Vec<&str> {
    let is_known = |hint: &str| OPTIONS.iter().any(|row| names(row.name).any(|name| name == hint));
    hints.iter().map(|(name, _)| name.as_str()).filter(|name| !is_known(name)).collect()
}

/// The target under which [`unknown_hints`] are logged.
pub const UNKNOWN_HINTS: &str = "ncclx_rs::config::hints";

/// The log level for a program without a logger of its own, such as one in Python; none if the environment sets none.
/// `NCCLX_RS_LOG` is a level; without it, `NCCL_DEBUG` counts where it is one.
pub fn log_level() -> Result<Option<LevelFilter>, InitError> {
    log_level_with(&variable)
}

fn log_level_with(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<LevelFilter>, InitError> {
    let value = |name: &str| variable(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    if let Some(text) = value("NCCLX_RS_LOG") {
        let expected = "expected off, error, warn, info, debug or trace";
        let level = text.parse().map_err(|_| InitError::Config(format!("NCCLX_RS_LOG is `{text}`: {expected}")))?;
        return Ok(Some(level));
    }
    // NCCL's other values, such as VERSION, have no counterpart here.
    Ok(value("NCCL_DEBUG").and_then(|text| match text.to_lowercase().as_str() {
        level @ ("warn" | "info" | "trace") => level.parse().ok(),
        _ => None,
    }))
}

/// A variable of the process's environment.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

impl Default for Config {
    /// The settings when neither the environment nor a hint sets one.
    fn default() -> Self {
        Config::resolve_with(&|_| None, &[]).expect("every default is a valid value")
    }
}

/// One option, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The hint.
    pub name: &'static str,
    /// Former names of the hint, which still work.
    pub former_names: Vec<&'static str>,
    /// The environment variables, the strongest first.
    pub variables: Vec<String>,
    /// The values it takes.
    pub kind: &'static str,
    /// The value when nothing is set; empty for none.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

/// The manual's table of options, in Markdown.
pub fn manual() -> String {
    let mut text = String::from("| hint | environment | values | default | meaning |\n|---|---|---|---|---|\n");
    for row in Config::describe() {
        let variables: Vec<String> = row.variables.iter().map(|variable| format!("`{variable}`")).collect();
        let default = if row.default.is_empty() { "none".to_string() } else { format!("`{}`", row.default) };
        let variables = variables.join(", ");
        let former: String = row.former_names.iter().map(|name| format!(" (formerly `{name}`)")).collect();
        writeln!(text, "| `{}`{former} | {variables} | {} | {default} | {} |", row.name, row.kind, row.meaning)
            .expect("a string takes any text");
    }
    text
}

/// Whether to do something that may pay or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// Where the setting's own conditions hold.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// A secret that every rank was given, or the path of its file; never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SharedSecret(Option<String>);

impl SharedSecret {
    /// The secret's bytes, if one is set. `name` is the option, for the error.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, InitError> {
        let Some(text) = &self.0 else { return Ok(None) };
        let secret = match text.strip_prefix("file:") {
            Some(path) => std::fs::read_to_string(path)
                .map_err(|error| InitError::Config(format!("{name}: the file `{path}` cannot be read: {error}")))?,
            None => text.clone(),
        };
        let bytes = secret.trim().as_bytes();
        if bytes.len() < SECRET_BYTES_MIN {
            return Err(InitError::Config(format!(
                "{name}: expected {}, got {} bytes",
                SharedSecret::EXPECTED,
                bytes.len()
            )));
        }
        Ok(Some(bytes.to_vec()))
    }
}

impl fmt::Debug for SharedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "SharedSecret(..)" } else { "SharedSecret(none)" })
    }
}

/// Shorter secrets could be guessed by an attacker who sees a proof.
const SECRET_BYTES_MIN: usize = 16;

/// Up to which size messages are sent eagerly: before the receiver asks for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EagerBytes(usize);

impl EagerBytes {
    /// The most that any rank may choose: receivers refuse longer ones.
    pub const MAX: usize = 1 << 20;

    /// The number of bytes.
    pub fn get(self) -> usize {
        self.0
    }
}

/// The size of a shared memory ring: a power of two that whole pages make up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingBytes(usize);

impl RingBytes {
    /// The number of bytes.
    pub fn get(self) -> usize {
        self.0
    }
}

/// Half a rank's staging memory on its device: whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingBytes(usize);

impl StagingBytes {
    /// The least that any rank may choose.
    pub const MIN: usize = 1 << 16;
    /// The most.
    pub const MAX: usize = 1 << 32;

    /// The number of bytes.
    pub fn get(self) -> usize {
        self.0
    }
}

/// How long a waiting thread polls before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    /// As the host's load allows.
    Auto,
    /// Always this long.
    For(Duration),
}

impl Spin {
    /// The time to poll; `oversubscribed` says that the host has more ranks than cores.
    pub fn duration(self, oversubscribed: bool) -> Duration {
        match self {
            Spin::For(duration) => duration,
            // The peer that is waited for may itself wait for a core.
            Spin::Auto if oversubscribed => Duration::from_micros(100),
            Spin::Auto => Duration::from_micros(50),
        }
    }
}

/// A signal that programs may use freely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DumpSignal {
    /// SIGUSR1.
    Usr1,
    /// SIGUSR2.
    Usr2,
}

impl DumpSignal {
    /// The system's number for it.
    pub fn number(self) -> i32 {
        match self {
            DumpSignal::Usr1 => signal_hook::consts::SIGUSR1,
            DumpSignal::Usr2 => signal_hook::consts::SIGUSR2,
        }
    }
}

struct OptionRow {
    name: &'static str,
    also: &'static [&'static str],
    kind: &'static str,
    default: &'static str,
    meaning: &'static str,
}

/// The names of an option: today's, then the former ones.
fn names(name: &'static str) -> impl Iterator<Item = &'static str> {
    let former = FORMER_NAMES.iter().filter(move |(_, current)| *current == name).map(|(former, _)| *former);
    std::iter::once(name).chain(former)
}

/// The environment variables of an option, the strongest first.
fn variables(name: &'static str, also: &[&str]) -> Vec<String> {
    let own = names(name).map(|name| format!("NCCLX_RS_{}", name.to_uppercase()));
    own.chain(also.iter().map(ToString::to_string)).collect()
}

fn look_up<T: Value>(
    name: &'static str,
    also: &[&str],
    default: &str,
    variable: &dyn Fn(&str) -> Option<String>,
    hints: &[(String, String)],
) -> Result<T, InitError> {
    let hint = || {
        let last = |name| hints.iter().rev().find(|(hint, value)| hint == name && !value.trim().is_empty());
        names(name).find_map(last).map(|(name, value)| (format!("the hint {name}"), value.clone()))
    };
    let environment = || {
        let value = |key: String| variable(&key).map(|value| (key, value));
        variables(name, also).into_iter().filter_map(value).find(|(_, value)| !value.trim().is_empty())
    };
    let (origin, value) = hint().or_else(environment).unwrap_or_else(|| (name.to_string(), default.to_string()));
    T::parse(value.trim()).ok_or_else(|| InitError::Config(format!("{origin} is `{value}`: expected {}", T::EXPECTED)))
}

/// A type that options have.
trait Value: Sized {
    /// The values, in words.
    const EXPECTED: &'static str;

    fn parse(text: &str) -> Option<Self>;
}

impl Value for bool {
    const EXPECTED: &'static str = "1, true, yes, y, 0, false, no or n";

    fn parse(text: &str) -> Option<Self> {
        match text.to_lowercase().as_str() {
            "1" | "true" | "yes" | "y" => Some(true),
            "0" | "false" | "no" | "n" => Some(false),
            _ => None,
        }
    }
}

impl Value for usize {
    const EXPECTED: &'static str = "a whole number";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Value for Option<String> {
    const EXPECTED: &'static str = "text";

    fn parse(text: &str) -> Option<Self> {
        Some((!text.is_empty() && text != "auto").then(|| text.to_string()))
    }
}

impl Value for Duration {
    const EXPECTED: &'static str = "a number of seconds above 0";

    fn parse(text: &str) -> Option<Self> {
        let seconds: f64 = text.parse().ok()?;
        // A century is as good as forever, and adds to any clock without overflow.
        let century = 100.0 * 366.0 * 86400.0;
        (seconds > 0.0).then(|| Duration::from_secs_f64(seconds.min(century)))
    }
}

impl Value for TransportChoice {
    const EXPECTED: &'static str = TransportChoice::FORM;

    fn parse(text: &str) -> Option<Self> {
        TransportChoice::read(text)
    }
}

impl Value for UcxChoice {
    const EXPECTED: &'static str = UcxChoice::FORM;

    fn parse(text: &str) -> Option<Self> {
        Some(UcxChoice::read(text))
    }
}

impl Value for AlgorithmChoice {
    const EXPECTED: &'static str = AlgorithmChoice::FORM;

    fn parse(text: &str) -> Option<Self> {
        AlgorithmChoice::read(text)
    }
}

impl Value for EngineChoice {
    const EXPECTED: &'static str = EngineChoice::FORM;

    fn parse(text: &str) -> Option<Self> {
        EngineChoice::read(text)
    }
}

impl Value for NcclFields {
    const EXPECTED: &'static str = NcclFields::FORM;

    fn parse(text: &str) -> Option<Self> {
        NcclFields::read(text)
    }
}

impl Value for NumaNode {
    const EXPECTED: &'static str = NumaNode::FORM;

    fn parse(text: &str) -> Option<Self> {
        NumaNode::read(text)
    }
}

impl Value for Threads {
    const EXPECTED: &'static str = Threads::FORM;

    fn parse(text: &str) -> Option<Self> {
        Threads::read(text)
    }
}

impl Value for Switch {
    const EXPECTED: &'static str = "auto, on or off";

    fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Switch::Auto),
            "on" => Some(Switch::On),
            "off" => Some(Switch::Off),
            _ => None,
        }
    }
}

impl Value for SharedSecret {
    const EXPECTED: &'static str = "at least 16 characters, or `file:` and the path of a file that holds them";

    fn parse(text: &str) -> Option<Self> {
        // What is wrong with it shows when it is read: an error here would print it.
        Some(SharedSecret((!text.is_empty()).then(|| text.to_string())))
    }
}

impl Value for EagerBytes {
    const EXPECTED: &'static str = "a whole number up to 1048576";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|bytes| *bytes <= EagerBytes::MAX).map(EagerBytes)
    }
}

impl Value for TcpStreams {
    const EXPECTED: &'static str = "a whole number from 1 to 16";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().and_then(TcpStreams::new)
    }
}

impl Value for RingBytes {
    const EXPECTED: &'static str = "a power of two that is a multiple of the page size";

    fn parse(text: &str) -> Option<Self> {
        let bytes: usize = text.parse().ok()?;
        (bytes.is_power_of_two() && bytes.is_multiple_of(rustix::param::page_size())).then_some(RingBytes(bytes))
    }
}

impl Value for StagingBytes {
    const EXPECTED: &'static str = "a multiple of 4096 from 65536 to 4294967296";

    fn parse(text: &str) -> Option<Self> {
        let bytes: usize = text.parse().ok()?;
        let is_fit = (StagingBytes::MIN..=StagingBytes::MAX).contains(&bytes) && bytes.is_multiple_of(4096);
        is_fit.then_some(StagingBytes(bytes))
    }
}

impl Value for Spin {
    const EXPECTED: &'static str = "auto or a whole number of microseconds";

    fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Spin::Auto),
            text => text.parse().ok().map(|micros| Spin::For(Duration::from_micros(micros))),
        }
    }
}

impl Value for Option<DumpSignal> {
    const EXPECTED: &'static str = "USR1 or USR2";

    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => Some(None),
            "USR1" => Some(Some(DumpSignal::Usr1)),
            "USR2" => Some(Some(DumpSignal::Usr2)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(environment: &[(&str, &str)], hints: &[(&str, &str)]) -> Result<Config, InitError> {
        let variable = |name: &str| environment.iter().find(|(key, _)| *key == name).map(|(_, v)| v.to_string());
        let hints: Vec<_> = hints.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Config::resolve_with(&variable, &hints)
    }

    #[test]
    fn hints_win_over_the_environment_and_the_environment_over_defaults() {
        let environment = [("NCCLX_RS_EAGER_BYTES", "1"), ("NCCLX_RS_TIMEOUT_SECONDS", "2.5")];
        let config = resolve(&environment, &[("eager_bytes", "3"), ("unheard_of", "x")]).unwrap();
        assert_eq!(config.eager_bytes.get(), 3);
        assert_eq!(config.timeout, Duration::from_millis(2500));
        assert_eq!(config.connect_timeout, Duration::from_secs(300));
        assert_eq!(config.host_id, None);
        assert_eq!(Config::default().shm_ring_bytes.get(), 262144);
        assert_eq!(Config::default().device_staging.get(), 16 << 20);
        let staging = resolve(&[("NCCLX_RS_DEVICE_STAGING_BYTES", "65536")], &[]).unwrap().device_staging;
        assert_eq!(staging.get(), StagingBytes::MIN);
    }

    #[test]
    fn every_variable_of_the_manual_changes_a_setting() {
        // One of them is valid for each setting, and not its default.
        let values = "1|7|on|tcp|ring|streams|usr1|USR1|8192|131072|0123456789abcdef|minCTAs=2|false|some text";
        for row in Config::describe() {
            for variable in &row.variables {
                let changes =
                    |value: &str| resolve(&[(variable, value)], &[]).is_ok_and(|config| config != Config::default());
                assert!(values.split('|').any(changes), "{variable} changes nothing");
            }
        }
    }

    #[test]
    fn interfaces_fall_back_to_the_variables_of_nccl_and_gloo() {
        let both = [("GLOO_SOCKET_IFNAME", "g"), ("NCCL_SOCKET_IFNAME", "n"), ("NCCLX_RS_SOCKET_IFNAME", "")];
        assert_eq!(resolve(&both, &[]).unwrap().socket_interfaces.as_deref(), Some("n"));
        assert_eq!(resolve(&both[..1], &[]).unwrap().socket_interfaces.as_deref(), Some("g"));
        assert_eq!(resolve(&both, &[("socket_ifname", "h")]).unwrap().socket_interfaces.as_deref(), Some("h"));
    }

    #[test]
    fn former_names_still_work_and_the_names_of_today_win() {
        let size = |environment: &[(&str, &str)], hints: &[(&str, &str)]| {
            resolve(environment, hints).unwrap().flight_recorder_size
        };
        assert_eq!(size(&[("NCCLX_RS_FLIGHT_RECORDS", "1")], &[]), 1);
        assert_eq!(size(&[("NCCLX_RS_FLIGHT_RECORDS", "1"), ("TORCH_FR_BUFFER_SIZE", "2")], &[]), 1);
        assert_eq!(size(&[("NCCLX_RS_FLIGHT_RECORDS", "1"), ("NCCLX_RS_FLIGHT_RECORDER_SIZE", "3")], &[]), 3);
        assert_eq!(size(&[("NCCLX_RS_FLIGHT_RECORDER_SIZE", "3")], &[("flight_records", "4")]), 4);
        assert_eq!(size(&[], &[("flight_recorder_size", "5"), ("flight_records", "4")]), 5);
        assert_eq!(size(&[], &[("flight_recorder_size", ""), ("flight_records", "4")]), 4);
        let error = resolve(&[], &[("flight_records", "many")]).unwrap_err().to_string();
        assert_eq!(error, "the hint flight_records is `many`: expected a whole number");

        let file =
            |environment: &[(&str, &str)], hints: &[(&str, &str)]| resolve(environment, hints).unwrap().tls_ca_file;
        assert_eq!(file(&[("NCCLX_RS_TLS_AUTHORITY", "a")], &[]).as_deref(), Some("a"));
        assert_eq!(file(&[("NCCLX_RS_TLS_AUTHORITY", "a")], &[("tls_authority", "b")]).as_deref(), Some("b"));
        let hints = [("flight_records", "1"), ("tls_authority", "a"), ("flight_record", "1")];
        let hints = hints.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(unknown_hints(&hints), ["flight_record"]);
    }

    #[test]
    fn the_host_falls_back_to_the_variable_of_nccl() {
        let both = [("NCCL_HOSTID", "n"), ("NCCLX_RS_HOST_ID", "own")];
        assert_eq!(resolve(&both[..1], &[]).unwrap().host_id.as_deref(), Some("n"));
        assert_eq!(resolve(&both, &[]).unwrap().host_id.as_deref(), Some("own"));
    }

    #[test]
    fn bad_values_name_where_they_stand() {
        let bad =
            |environment: &[(&str, &str)], hints: &[(&str, &str)]| resolve(environment, hints).unwrap_err().to_string();
        assert_eq!(
            bad(&[("NCCLX_RS_TRANSPORT", "smoke")], &[]),
            "NCCLX_RS_TRANSPORT is `smoke`: expected auto, shm, tcp or ucx"
        );
        assert_eq!(
            bad(&[], &[("timeout_seconds", "-1")]),
            "the hint timeout_seconds is `-1`: expected a number of seconds above 0"
        );
        for wrong in ["5", "4095", "12288", "-4096"] {
            assert!(bad(&[], &[("shm_ring_bytes", wrong)]).contains("power of two"));
        }
        assert!(bad(&[], &[("eager_bytes", "1048577")]).contains("up to 1048576"));
        for wrong in ["0", "65535", "100000", "4294971392", "16M"] {
            assert!(bad(&[], &[("device_staging_bytes", wrong)]).contains("from 65536 to 4294967296"));
        }
        for wrong in ["nan", "0", "soon"] {
            assert!(bad(&[], &[("connect_timeout_seconds", wrong)]).contains("above 0"));
        }
    }

    #[test]
    fn the_log_level_is_our_variables_or_else_that_of_nccl() {
        let level = |environment: &[(&str, &str)]| {
            log_level_with(&|name| environment.iter().find(|(key, _)| *key == name).map(|(_, v)| v.to_string()))
        };
        assert_eq!(level(&[]), Ok(None));
        assert_eq!(level(&[("NCCL_DEBUG", "INFO")]), Ok(Some(LevelFilter::Info)));
        assert_eq!(level(&[("NCCL_DEBUG", "VERSION")]), Ok(None));
        assert_eq!(level(&[("NCCLX_RS_LOG", "off"), ("NCCL_DEBUG", "TRACE")]), Ok(Some(LevelFilter::Off)));
        assert_eq!(level(&[("NCCLX_RS_LOG", " "), ("NCCL_DEBUG", "warn")]), Ok(Some(LevelFilter::Warn)));
        let wrong = level(&[("NCCLX_RS_LOG", "loud"), ("NCCL_DEBUG", "INFO")]).unwrap_err().to_string();
        assert_eq!(wrong, "NCCLX_RS_LOG is `loud`: expected off, error, warn, info, debug or trace");
    }

    #[test]
    fn a_secret_is_text_or_a_file_and_never_printed() {
        let read = |value: &str| resolve(&[("NCCLX_RS_JOB_SECRET", value)], &[]).unwrap().job_secret;
        let text = "0123456789abcdef";
        assert_eq!(read("").read("job_secret"), Ok(None));
        assert_eq!(read(text).read("job_secret"), Ok(Some(text.as_bytes().to_vec())));
        assert!(!format!("{:?}", read(text)).contains(text));
        let short = read("hunter2").read("job_secret").unwrap_err().to_string();
        assert!(short.contains("at least 16 characters") && !short.contains("hunter2"), "{short}");
        let absent = read("file:/nowhere").read("job_secret").unwrap_err().to_string();
        assert!(absent.contains("`/nowhere`"), "{absent}");
    }

    #[test]
    fn truth_has_many_names() {
        for (text, value) in [("1", true), ("TRUE", true), ("yes", true), ("y", true), ("0", false), ("No", false)] {
            assert_eq!(bool::parse(text), Some(value));
        }
        assert_eq!(bool::parse("maybe"), None);
    }

    #[test]
    fn threads_are_a_number_or_chosen() {
        let threads = |value| resolve(&[], &[("threads", value)]).map(|config| config.threads);
        assert_eq!(threads(""), Ok(Threads::Auto));
        assert_eq!([threads("0"), threads("255")], [0, 255].map(|threads| Ok(Threads::Exactly(threads))));
        let error = "the hint threads is `256`: expected auto or a whole number up to 255".to_owned();
        assert_eq!(threads("256"), Err(InitError::Config(error)));
        assert!(threads("-1").is_err() && threads("many").is_err());
    }

    #[test]
    fn a_numa_node_is_a_number_found_or_none() {
        let node = |value| resolve(&[], &[("numa_node", value)]).map(|config| config.numa_node);
        assert_eq!([node(""), node("off")], [Ok(NumaNode::Auto), Ok(NumaNode::Off)]);
        assert_eq!([node("0"), node("1023")], [0, 1023].map(|node| Ok(NumaNode::Exactly(node))));
        assert_eq!([NumaNode::Auto, NumaNode::Off, NumaNode::Exactly(7)].map(NumaNode::number), [None, None, Some(7)]);
        let error = "the hint numa_node is `1024`: expected auto, off or a whole number up to 1023".to_owned();
        assert_eq!(node("1024"), Err(InitError::Config(error)));
        assert!(node("-1").is_err() && node("on").is_err());
    }

    #[test]
    fn polling_takes_longer_where_ranks_share_cores() {
        assert_eq!(Spin::Auto.duration(false), Duration::from_micros(50));
        assert_eq!(Spin::Auto.duration(true), Duration::from_micros(100));
        let spin = resolve(&[], &[("spin_microseconds", "7")]).unwrap().spin;
        assert_eq!(spin.duration(true), Duration::from_micros(7));
    }

    #[test]
    fn the_manual_has_a_row_for_each_option() {
        let manual = manual();
        assert!(
            manual.contains(
                "| `tls_ca_file` (formerly `tls_authority`) | `NCCLX_RS_TLS_CA_FILE`, `NCCLX_RS_TLS_AUTHORITY`"
            )
        );
        assert_eq!(manual.lines().count(), 2 + Config::describe().len());
        assert!(manual.contains("| `eager_bytes` | `NCCLX_RS_EAGER_BYTES` | a whole number up to 1048576 | `65536` |"));
        assert!(manual.lines().all(|line| line.matches('|').count() == 6));
    }
}
