//! Which ranks can use a vendor's library together, in a communicator in which others have another one, or no device.

use serde::{Deserialize, Serialize};

use super::{Candidate, Chosen};
use crate::algo::Islands;
use crate::device::setup::named;
use crate::sync::Arc;
use crate::sys::cuda::{DeviceUuid, Provider};
use crate::sys::nccl::{Nccl, Version};
use crate::types::Rank;

/// What a rank tells the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Card {
    /// None where it has no device.
    pub(crate) device: Option<OnDevice>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OnDevice {
    pub(crate) provider: Provider,
    pub(crate) uuid: DeviceUuid,
    /// The library's `NCCL_VERSION_CODE`, or why there is none, in some words.
    pub(crate) library: Result<u32, String>,
}

/// The groups of ranks with these cards that use a library together, the same on each; and why ranks with devices are in none.
pub(crate) fn islands(cards: &[Card]) -> (Islands, Vec<String>) {
    let mut why = Vec::new();
    let mut classes: Vec<(Provider, Version, Vec<usize>)> = Vec::new();
    let mut groups: Vec<Vec<Rank>> = Vec::new();
    for (rank, card) in cards.iter().enumerate() {
        match &card.device {
            Some(OnDevice { provider, library: Ok(code), .. }) => {
                let version = Version::from_code(*code);
                let is_its = |(other, known, _): &&mut (_, Version, _)| {
                    (*other, known.release()) == (*provider, version.release())
                };
                match classes.iter_mut().find(is_its) {
                    Some((.., ranks)) => ranks.push(rank),
                    None => classes.push((*provider, version, vec![rank])),
                }
            }
            Some(OnDevice { library: Err(cause), .. }) => {
                why.push(format!("rank {rank} has no library: {cause}"));
                groups.push(vec![Rank::from(rank)]);
            }
            None => groups.push(vec![Rank::from(rank)]),
        }
    }
    let names: Vec<Rank> = (0..cards.len()).map(Rank::from).collect();
    let device = |rank: usize| cards[rank].device.as_ref().map(|device| device.uuid);
    for (provider, version, ranks) in classes {
        let shared = ranks.iter().map(|rank| ranks.iter().copied().filter(|other| device(*other) == device(*rank)));
        let shared = shared.map(Iterator::collect::<Vec<_>>).find(|ranks| ranks.len() > 1);
        match (&ranks[..], shared) {
            ([one], _) => {
                why.push(format!("rank {one} alone has devices of {provider} with version {version} of its library"))
            }
            (_, Some(shared)) => why.push(format!("{} use one device, which libraries refuse", named(&names, &shared))),
            (all, None) => {
                groups.push(all.iter().copied().map(Rank::from).collect());
                continue;
            }
        }
        groups.extend(ranks.into_iter().map(|rank| vec![Rank::from(rank)]));
    }
    (Islands::new(groups), why)
}

impl Candidate<'_> {
    /// What ranks that are alike begin communicators of this library with. `names` and `me` are theirs.
    pub(crate) fn alike(self, library: Arc<Nccl>) -> Chosen {
        let Candidate { comm, me, names, limit, fields, ranks_per_root, lent, .. } = self;
        let (comm, names) = (comm.to_owned(), names.to_vec());
        // A library wants all ranks of a call to pass registered memory, or none, which nobody compares here.
        let registers = false;
        Chosen { library, comm, me, names, limit, fields, ranks_per_root, registers, lent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(provider: Provider, device: u8, library: Result<u32, &str>) -> Card {
        let library = library.map_err(str::to_owned);
        Card { device: Some(OnDevice { provider, uuid: DeviceUuid([device; 16]), library }) }
    }

    fn decided(cards: &[Card]) -> (Vec<Vec<u32>>, Vec<String>) {
        let (islands, why) = islands(cards);
        (islands.groups().iter().map(|group| group.iter().map(|rank| rank.0).collect()).collect(), why)
    }

    #[test]
    fn ranks_are_alike_if_their_libraries_work_together() {
        let [nccl, patched, newer] = [23_007, 23_009, 23_200];
        let (cuda, hip) =
            (|device, code| card(Provider::Cuda, device, Ok(code)), |device| card(Provider::Hip, device, Ok(22_707)));
        let none = Card { device: None };
        let (groups, why) = decided(&[hip(0), cuda(0, nccl), none.clone(), cuda(1, patched), hip(1), none]);
        assert_eq!((groups, why), (vec![vec![0, 4], vec![1, 3], vec![2], vec![5]], vec![]));
        let (groups, why) = decided(&[cuda(0, nccl), cuda(1, nccl), cuda(2, newer)]);
        assert_eq!(groups, [vec![0, 1], vec![2]]);
        assert_eq!(why, ["rank 2 alone has devices of CUDA with version 2.32.0 of its library"]);
        let (groups, why) = decided(&[cuda(0, nccl), cuda(1, nccl), cuda(1, nccl)]);
        assert_eq!(
            (groups, why),
            (vec![vec![0], vec![1], vec![2]], vec!["ranks [1, 2] use one device, which libraries refuse".to_owned()])
        );
        let (groups, why) = decided(&[card(Provider::Hip, 0, Err("no file")), hip(1), hip(2)]);
        assert_eq!((groups, why), (vec![vec![0], vec![1, 2]], vec!["rank 0 has no library: no file".to_owned()]));
    }
}
