//! Which ranks have joined, and whether they fit together: the root's decisions, without a socket.

use super::rank_info::{Common, RankInfo};
use crate::config::EngineChoice;
use crate::types::Rank;

/// The ranks that have joined so far, by number.
pub(super) struct Roster {
    ranks: Vec<Option<RankInfo>>,
    /// How many are not there.
    lacking: usize,
}

impl Roster {
    /// A roster for the world size that rank 0 expects, with rank 0 in it.
    pub(super) fn new(root: RankInfo) -> Self {
        let mut ranks = vec![None; root.common.world_size as usize];
        ranks[0] = Some(root);
        Roster { lacking: ranks.len() - 1, ranks }
    }

    /// Adds a rank. The error says in what it differs from rank 0.
    pub(super) fn add(&mut self, mut info: RankInfo) -> Result<(), String> {
        let root = self.ranks[0].as_ref().expect("rank 0 is there from the start");
        let differ = |what: &str, theirs: &str, ours: &str| {
            Err(format!("rank {} on host `{}` has {what} {theirs}, rank 0 has {ours}", info.rank, info.host_id))
        };
        let (theirs, ours) = (&info.common, &root.common);
        if theirs.build != ours.build {
            return differ("build", &theirs.build.to_string(), &ours.build.to_string());
        }
        if theirs.world_size != ours.world_size {
            return differ("world size", &theirs.world_size.to_string(), &ours.world_size.to_string());
        }
        if theirs.name != ours.name {
            return differ("communicator name", &format!("`{}`", theirs.name), &format!("`{}`", ours.name));
        }
        if theirs.algorithm.is_some() && theirs.algorithm != ours.algorithm {
            let algorithm = |common: &Common| format!("`{}`", common.algorithm.as_deref().unwrap_or("auto"));
            return differ("algorithm", &algorithm(theirs), &algorithm(ours));
        }
        if theirs.through_host != ours.through_host {
            let engine = |common: &Common| common.through_host.map_or("another", EngineChoice::name);
            let told = theirs.through_host.or(ours.through_host).map_or("", EngineChoice::name);
            return differ("the engine", engine(theirs), engine(ours))
                .map_err(|text| format!("{text}: engine={told} is set on all ranks or on none"));
        }
        if theirs == ours {
            info.common = ours.clone();
        }
        let (rank, host, size) = (info.rank, &info.host_id, self.ranks.len());
        match self.ranks.get_mut(rank.index()) {
            None => Err(format!("rank {rank} on host `{host}` is beyond the world size {size}")),
            Some(Some(first)) => {
                Err(format!("rank {rank} joined twice, from host `{}` and from host `{host}`", first.host_id))
            }
            Some(entry) => {
                *entry = Some(info);
                self.lacking -= 1;
                Ok(())
            }
        }
    }

    /// Removes a rank whose connection has ended; it may join again.
    pub(super) fn remove(&mut self, rank: Rank) {
        self.lacking += usize::from(self.ranks[rank.index()].take().is_some());
    }

    /// The ranks that have not joined.
    pub(super) fn missing(&self) -> Vec<u32> {
        let missing = self.ranks.iter().enumerate().filter(|(_, entry)| entry.is_none());
        missing.map(|(index, _)| Rank::from(index).0).collect()
    }

    /// The table of all ranks, once all have joined.
    pub(super) fn table(&self) -> Option<Vec<RankInfo>> {
        if self.lacking > 0 {
            return None;
        }
        self.ranks.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::comm::bootstrap::build::Build;
    use crate::sync::Arc;
    use crate::sys::process::ProcessId;
    use crate::topo::Cpus;

    fn info(rank: u32, build: Build) -> RankInfo {
        RankInfo {
            rank: Rank(rank),
            host_id: "there".into(),
            addresses: BTreeMap::new().into(),
            process: ProcessId::own(),
            cpus: Cpus::default(),
            common: Arc::new(Common {
                build,
                world_size: 2,
                name: "test".to_owned(),
                algorithm: None,
                through_host: None,
            }),
        }
    }

    #[test]
    fn a_rank_of_another_build_is_refused() {
        let own = Build::own();
        for other in [
            Build { version: "0.0.9".to_owned(), ..own.clone() },
            Build { sources: "0123456789abcdef".to_owned(), ..own.clone() },
            Build { byte_order: "middle".to_owned(), ..own.clone() },
            Build { pointer_bits: 16, ..own.clone() },
        ] {
            let mut roster = Roster::new(info(0, own.clone()));
            let cause = roster.add(info(1, other.clone())).expect_err("it differs");
            assert_eq!(cause, format!("rank 1 on host `there` has build {other}, rank 0 has {own}"));
            assert_eq!((roster.add(info(1, own.clone())), roster.missing()), (Ok(()), vec![]));
        }
    }

    #[test]
    fn a_rank_whose_tensors_alone_go_through_the_host_is_refused() {
        let (host, mixed) = (Some(EngineChoice::Host), Some(EngineChoice::Mixed));
        for (choices, engines, told) in [
            ([host, None], "another, rank 0 has host", "host"),
            ([None, host], "host, rank 0 has another", "host"),
            ([None, mixed], "mixed, rank 0 has another", "mixed"),
            ([host, mixed], "mixed, rank 0 has host", "mixed"),
        ] {
            let [root, other] = [0, 1].map(|rank| {
                let mut info = info(rank, Build::own());
                Arc::make_mut(&mut info.common).through_host = choices[rank as usize];
                info
            });
            let cause = Roster::new(root).add(other).expect_err("it differs");
            let expected =
                format!("rank 1 on host `there` has the engine {engines}: engine={told} is set on all ranks");
            assert!(cause.starts_with(&expected), "{cause}");
        }
    }
}
