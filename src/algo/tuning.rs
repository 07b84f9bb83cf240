//! A tuning file: which algorithm is the fastest on a machine, by collective, world and size, as `ncclx-rs tune` found.
//!
//! ```
//! use ncclx_rs::algo::Tuning;
//! let text = r#"{"version": 1, "rows": [
//!     {"collective": "all_gather", "ranks": 4, "max_bytes": 65536, "algorithm": "ring"},
//!     {"collective": "all_gather", "ranks": 4, "algorithm": "direct"}
//! ]}"#;
//! assert!(Tuning::parse(text).is_ok());
//! let error = Tuning::parse(&text.replace("direct", "binomial")).unwrap_err();
//! assert_eq!(error, "row 2: algorithm: expected one of direct, bruck, ring for all_gather, got `binomial`");
//! ```

use serde::{Deserialize, Serialize};

use crate::algo::collective::{Chunking, Collective, Scaling, ScratchLimit, Setting};
use crate::algo::equality::called_by_all;
use crate::algo::select::{FORWARDING, bytes, candidates, first};
use crate::op::CollectiveKind;
use crate::topo::Topology;
use crate::types::Rank;

/// The table of a tuning file. Where it has no row, the engine's own table holds ([`plan`](crate::algo::plan)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    version: u32,
    /// Where and when it was measured, for who reads the file.
    #[serde(default)]
    note: String,
    rows: Vec<TunedRow>,
}

/// One row: the first that fits a call names its algorithm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TunedRow {
    collective: CollectiveKind,
    ranks: usize,
    #[serde(default = "one")]
    hosts: usize,
    /// The largest size it is for; without, all that are left.
    #[serde(default)]
    max_bytes: Option<usize>,
    algorithm: String,
}

impl Default for Tuning {
    /// No rows.
    fn default() -> Self {
        Tuning { version: VERSION, note: String::new(), rows: Vec::new() }
    }
}

impl Tuning {
    /// The table in `text`; the error says where it is wrong.
    pub fn parse(text: &str) -> Result<Tuning, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        if let Ok(Versioned { version }) = serde_json::from_str(text)
            && version != VERSION
        {
            return Err(format!("version: expected {VERSION}, got {version}; `ncclx-rs tune` writes a new file"));
        }
        let tuning: Tuning = serde_json::from_str(text).map_err(|error| error.to_string())?;
        for (index, row) in tuning.rows.iter().enumerate() {
            row.check().map_err(|cause| format!("row {}: {cause}", index + 1))?;
        }
        Ok(tuning)
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The algorithm of the first row that fits.
    pub fn algorithm(&self, collective: &Collective, setting: &Setting<'_>) -> Option<&str> {
        let (ranks, hosts) = (setting.topo.size(), setting.topo.hosts().len());
        let (kind, bytes) = (collective.kind(), bytes(collective, setting));
        let fits = |row: &&TunedRow| {
            (row.collective, row.ranks, row.hosts) == (kind, ranks, hosts)
                && row.max_bytes.is_none_or(|most| bytes <= most)
        };
        self.rows.iter().find(fits).map(|row| row.algorithm.as_str())
    }
}

/// The algorithms that a file may name for the collective of this name, such as `all_reduce`, in a world of so many ranks spread
/// evenly over so many hosts; nothing if there is no such collective or world.
pub fn algorithms(collective: &str, ranks: usize, hosts: usize) -> Option<Vec<&'static str>> {
    kind_of(collective, ranks, hosts).map(|kind| algorithms_for(kind, ranks, hosts))
}

/// All algorithms for such a collective, also those that run only where a program names them.
pub fn all_algorithms(collective: &str, ranks: usize, hosts: usize) -> Option<Vec<&'static str>> {
    kind_of(collective, ranks, hosts).map(|kind| candidates_for(kind, ranks, hosts))
}

/// The algorithm that the engine's own table has for such a collective of so many bytes, in equal blocks where it is about blocks;
/// nothing as for [`algorithms`].
///
/// ```
/// assert_eq!(ncclx_rs::algo::tuning::preferred("all_gather", 4, 1, 1 << 30), Some("direct"));
/// ```
pub fn preferred(collective: &str, ranks: usize, hosts: usize, bytes: usize) -> Option<&'static str> {
    kind_of(collective, ranks, hosts).map(|kind| {
        in_a_world(kind, ranks, hosts, bytes, |collective, setting| {
            first(&called_by_all(collective, ranks), setting).unwrap_or_default()
        })
    })
}

/// The collective of this name, if there are such worlds.
fn kind_of(collective: &str, ranks: usize, hosts: usize) -> Option<CollectiveKind> {
    let kind = CollectiveKind::deserialize(serde_json::Value::from(collective)).ok()?;
    (0 < hosts && hosts <= ranks).then_some(kind)
}

impl TunedRow {
    fn check(&self) -> Result<(), String> {
        if self.ranks == 0 || self.ranks > MAX_RANKS {
            return Err(format!("ranks: expected a number from 1 to {MAX_RANKS}, got {}", self.ranks));
        }
        if self.hosts == 0 || self.hosts > self.ranks {
            return Err(format!(
                "hosts: expected a number from 1 to that of ranks, {}, got {}",
                self.ranks, self.hosts
            ));
        }
        let known = algorithms_for(self.collective, self.ranks, self.hosts);
        if known.contains(&self.algorithm.as_str()) {
            return Ok(());
        }
        let (known, name) = (known.join(", "), self.collective.name());
        Err(format!("algorithm: expected one of {known} for {name}, got `{}`", self.algorithm))
    }
}

/// As [`algorithms`].
fn algorithms_for(kind: CollectiveKind, ranks: usize, hosts: usize) -> Vec<&'static str> {
    let mut names = candidates_for(kind, ranks, hosts);
    // A file is for any program, and the program has to promise what that needs.
    names.retain(|name| *name != FORWARDING);
    names
}

/// As [`all_algorithms`].
fn candidates_for(kind: CollectiveKind, ranks: usize, hosts: usize) -> Vec<&'static str> {
    in_a_world(kind, ranks, hosts, 0, |collective, setting| candidates(collective, setting).collect())
}

/// Calls `ask` with such a collective of `bytes`, at least one a rank, on rank 0.
fn in_a_world<R>(
    kind: CollectiveKind,
    ranks: usize,
    hosts: usize,
    bytes: usize,
    ask: impl FnOnce(&Collective, &Setting<'_>) -> R,
) -> R {
    let collective = Collective::of_kind(kind, bytes.max(1), (bytes / ranks).max(1), ranks);
    let names: Vec<String> = (0..ranks).map(|rank| (rank % hosts).to_string()).collect();
    let topo = Topology::new(&names);
    let setting = Setting {
        me: Rank(0),
        topo: &topo,
        element: 1,
        scaling: Scaling::Nothing,
        chunking: Chunking::Chunks,
        scratch: ScratchLimit::DEFAULT,
    };
    ask(&collective, &setting)
}

fn one() -> usize {
    1
}

/// The format of the file.
const VERSION: u32 = 1;

/// More ranks than any world has.
pub const MAX_RANKS: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"version": 1, "note": "here", "rows": [
        {"collective": "all_reduce", "ranks": 4, "max_bytes": 1000, "algorithm": "ring"},
        {"collective": "all_reduce", "ranks": 4, "algorithm": "rabenseifner"},
        {"collective": "all_reduce", "ranks": 4, "hosts": 2, "algorithm": "hierarchical"}
    ]}"#;

    fn chosen(tuning: &Tuning, count: usize, hosts: &[&str]) -> Option<String> {
        let topo = Topology::new(hosts);
        let setting = Setting {
            me: Rank(0),
            topo: &topo,
            element: 4,
            scaling: Scaling::Nothing,
            chunking: Chunking::Chunks,
            scratch: ScratchLimit::UNBOUNDED,
        };
        tuning.algorithm(&Collective::AllReduce { count }, &setting).map(str::to_owned)
    }

    #[test]
    fn the_first_row_that_fits_is_taken() {
        let tuning = Tuning::parse(FILE).unwrap();
        let one_host = ["a"; 4];
        assert_eq!(chosen(&tuning, 250, &one_host).as_deref(), Some("ring"));
        assert_eq!(chosen(&tuning, 251, &one_host).as_deref(), Some("rabenseifner"));
        assert_eq!(chosen(&tuning, 1, &["a", "a", "b", "b"]).as_deref(), Some("hierarchical"));
        assert_eq!(chosen(&tuning, 1, &["a"; 3]), None);
        assert_eq!(chosen(&Tuning::default(), 1, &one_host), None);
    }

    #[test]
    fn a_table_survives_the_way_to_the_other_ranks() {
        let tuning = Tuning::parse(FILE).unwrap();
        assert_eq!(Tuning::parse(&serde_json::to_string(&tuning).unwrap()), Ok(tuning));
    }

    #[test]
    fn errors_say_where() {
        let wrong = |from: &str, to: &str| {
            assert!(FILE.contains(from));
            Tuning::parse(&FILE.replacen(from, to, 1)).unwrap_err()
        };
        assert!(wrong("\"version\": 1", "\"version\": 2").starts_with("version: expected 1, got 2"));
        assert!(wrong("max_bytes", "most").contains("unknown field `most`"));
        assert!(wrong("max_bytes", "most").contains("at line 2 column"));
        assert!(wrong("all_reduce", "reduce_all").contains("unknown variant `reduce_all`"));
        assert_eq!(
            wrong("\"ring\"", "\"binomial\""),
            "row 1: algorithm: expected one of recursive_doubling, direct, rabenseifner, ring for all_reduce, \
             got `binomial`"
        );
        assert!(wrong("\"hosts\": 2", "\"hosts\": 5").contains("row 3: hosts: expected a number from 1 to"));
        assert!(wrong("\"ranks\": 4", "\"ranks\": 0").contains("row 1: ranks"));
        // A world in which every rank has a host of its own has no hierarchy.
        assert!(wrong("\"hosts\": 2", "\"hosts\": 4").contains("row 3: algorithm"));
    }

    #[test]
    fn algorithms_are_known_by_the_collectives_name() {
        let of_broadcast = ["hierarchical", "direct", "van_de_geijn", "binomial", "chain"];
        assert_eq!(algorithms("broadcast", 4, 2), Some(of_broadcast.to_vec()));
        assert_eq!(algorithms("reduce", 4, 1), Some(vec!["rabenseifner", "binomial", "chain"]));
        assert_eq!(algorithms("barrier", 1, 1), Some(vec!["local", "dissemination"]));
        assert_eq!(algorithms("send", 4, 1), None);
        assert_eq!(preferred("all_to_all", 64, 8, 64), Some("direct"), "so few do not ask for the length of blocks");
        assert_eq!(preferred("all_to_all", 65, 1, 65), Some("forwarding"));
        assert_eq!(preferred("all_to_all", 65, 1, 65 * 1025), Some("direct"));
        assert_eq!(algorithms("reduce", 2, 3), None);
    }
}
