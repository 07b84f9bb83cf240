//! The parameters of LogGP: Alexandrov, Ionescu, Schauser and Scheiman, "LogGP: Incorporating long messages into the LogP
//! model", 1995; LogP itself is Culler et al., "LogP: Towards a realistic model of parallel computation", 1993.
//!
//! ```
//! use ncclx_rs::simulate::Model;
//! let text = r#"{"version": 1, "reduce_per_byte": 1e-10,
//!     "within_host": {"latency": 5e-7, "overhead": 2e-7, "gap": 3e-7, "gap_per_byte": 1e-10}}"#;
//! assert!(Model::parse(text).is_ok());
//! let error = Model::parse(&text.replace("5e-7", "-1")).unwrap_err();
//! assert_eq!(error, "within_host: latency: expected seconds from 0 to 3600, got -1");
//! ```

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::time::{MAX_SECONDS, Time};
use crate::config::Config;

/// What messages between two ranks cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// L: from the first byte's way into the network to its way out.
    pub latency: Time,
    /// o: how long a message keeps the processor of its sender, and that of its receiver.
    pub overhead: Time,
    /// g: what an interface waits after a message before it takes the next one.
    pub gap: Time,
    /// G: what each byte after a message's first adds.
    pub gap_per_byte: Time,
    /// S: of longer messages of a collective, the first byte is not sent before the sender has heard that the receiver has a buffer.
    pub eager_bytes: u64,
}

impl Link {
    /// How long an interface is taken by the bytes of a message: G (k − 1) for k bytes.
    pub fn bytes(&self, count: u64) -> Time {
        self.gap_per_byte.times(count.saturating_sub(1))
    }

    /// How long a message without content takes: o + L + o.
    pub fn notice(&self) -> Time {
        self.overhead.plus(self.latency).plus(self.overhead)
    }
}

/// The parameters of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Between ranks of one host. Each rank has an interface of its own.
    pub within_host: Link,
    /// Between hosts. The ranks of a host share one interface. None where nothing is known of it.
    pub between_hosts: Option<Link>,
    /// What a rank takes to combine a byte with another one.
    pub reduce_per_byte: Time,
    /// What a rank takes to copy a byte within its own memory.
    pub copy_per_byte: Time,
    /// What the start of a world takes. None where nothing is known of it.
    pub start: Option<Start>,
}

/// What it takes ranks to meet, beside the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// How long a rank that joins keeps the processor of the rank that takes it in.
    pub admit: Time,
    /// How long a rank that joins through another one keeps the processor of rank 0.
    pub relay: Time,
    /// What a rank takes to write or read what the table of all ranks says of one.
    pub table_per_rank: Time,
}

impl Model {
    /// The parameters in the JSON `text`, in seconds; the error names the field that is wrong.
    pub fn parse(text: &str) -> Result<Model, String> {
        let file: File = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if file.version != VERSION {
            return Err(format!("version: expected {VERSION}, got {}", file.version));
        }
        // Within a host, long messages are read where they lie, which takes no more than is measured.
        let (all, eager) = (u64::MAX, Config::default().eager_bytes.get() as u64);
        Ok(Model {
            within_host: link("within_host", file.within_host, all)?,
            between_hosts: file.between_hosts.map(|value| link("between_hosts", value, eager)).transpose()?,
            reduce_per_byte: time("reduce_per_byte", file.reduce_per_byte)?,
            copy_per_byte: time("copy_per_byte", file.copy_per_byte)?,
            start: file.start.map(start).transpose().map_err(|error| format!("start: {error}"))?,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    /// Where the numbers come from, for who reads the file.
    #[serde(default, rename = "note")]
    _note: String,
    within_host: Value,
    between_hosts: Option<Value>,
    reduce_per_byte: f64,
    #[serde(default)]
    copy_per_byte: f64,
    start: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkFields {
    latency: f64,
    overhead: f64,
    gap: f64,
    gap_per_byte: f64,
    eager_bytes: Option<u64>,
}

fn link(field: &str, value: Value, eager_bytes: u64) -> Result<Link, String> {
    let inside = |error: String| format!("{field}: {error}");
    let file: LinkFields = read(value).map_err(inside)?;
    Ok(Link {
        latency: time("latency", file.latency).map_err(inside)?,
        overhead: time("overhead", file.overhead).map_err(inside)?,
        gap: time("gap", file.gap).map_err(inside)?,
        gap_per_byte: time("gap_per_byte", file.gap_per_byte).map_err(inside)?,
        eager_bytes: file.eager_bytes.unwrap_or(eager_bytes),
    })
}

fn start(value: Value) -> Result<Start, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Seconds {
        admit: f64,
        relay: f64,
        table_per_rank: f64,
    }
    let seconds: Seconds = read(value)?;
    Ok(Start {
        admit: time("admit", seconds.admit)?,
        relay: time("relay", seconds.relay)?,
        table_per_rank: time("table_per_rank", seconds.table_per_rank)?,
    })
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn time(field: &str, seconds: f64) -> Result<Time, String> {
    let time = Time::from_seconds(seconds);
    time.ok_or_else(|| format!("{field}: expected seconds from 0 to {MAX_SECONDS}, got {seconds}"))
}

/// The format of the file.
const VERSION: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"version": 1, "note": "here", "reduce_per_byte": 1e-10, "copy_per_byte": 5e-11,
        "within_host": {"latency": 1e-6, "overhead": 2e-7, "gap": 3e-7, "gap_per_byte": 1e-10},
        "between_hosts": {"latency": 2e-6, "overhead": 1e-6, "gap": 0, "gap_per_byte": 8e-11},
        "start": {"admit": 1e-5, "relay": 3e-6, "table_per_rank": 2e-6}}"#;

    #[test]
    fn seconds_become_femtoseconds() {
        let model = Model::parse(FILE).unwrap();
        assert_eq!(model.within_host.overhead, Time::femtoseconds(200_000_000));
        assert_eq!(model.between_hosts.map(|link| link.gap_per_byte), Some(Time::femtoseconds(80_000)));
        assert_eq!(model.copy_per_byte, Time::femtoseconds(50_000));
        assert_eq!(model.start.map(|start| start.table_per_rank), Some(Time::femtoseconds(2_000_000_000)));
        assert_eq!(model.within_host.bytes(11), Time::femtoseconds(1_000_000));
        assert_eq!(model.within_host.bytes(0), Time::ZERO);
        let eager_bytes =
            |model: &Model| [Some(model.within_host), model.between_hosts].map(|link| link.unwrap().eager_bytes);
        assert_eq!(eager_bytes(&model), [u64::MAX, 65_536]);
        let other = FILE.replace("\"gap\": 0", "\"gap\": 0, \"eager_bytes\": 0");
        assert_eq!(eager_bytes(&Model::parse(&other).unwrap()), [u64::MAX, 0]);
    }

    #[test]
    fn errors_name_the_field() {
        let wrong = |from: &str, to: &str| {
            assert!(FILE.contains(from));
            Model::parse(&FILE.replacen(from, to, 1)).unwrap_err()
        };
        assert_eq!(wrong("\"version\": 1", "\"version\": 2"), "version: expected 1, got 2");
        assert!(wrong("reduce_per_byte", "reduce").starts_with("unknown field `reduce`"));
        assert_eq!(wrong("\"gap\": 0, ", ""), "between_hosts: missing field `gap`");
        assert!(wrong("\"gap\": 0", "\"gaps\": 0").starts_with("between_hosts: unknown field `gaps`"));
        assert!(wrong("2e-6", "\"2\"").starts_with("between_hosts: invalid type: string \"2\""));
        assert!(wrong("\"admit\"", "\"admits\"").starts_with("start: unknown field `admits`"));
        assert_eq!(wrong("\"relay\": 3e-6, ", ""), "start: missing field `relay`");
        assert!(
            wrong("\"gap\": 0", "\"gap\": 0, \"eager_bytes\": -1")
                .starts_with("between_hosts: invalid value: integer `-1`")
        );
        assert_eq!(wrong("1e-5", "-1"), "start: admit: expected seconds from 0 to 3600, got -1");
        assert_eq!(wrong("5e-11", "4000"), "copy_per_byte: expected seconds from 0 to 3600, got 4000");
        assert!(Model::parse("nothing").unwrap_err().contains("line 1 column"));
    }
}
