//! What the ranks of a communicator do together before the first operation on their devices.
//!
//! Each rank tells the others what it runs on. All ranks [`decide`] the same from that, make their memory, hand it to each
//! other and map it. A rank on which something fails tells all others, so that each gets the same error and gives back what it
//! has made.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::deadline::deadline_after;
use crate::device::descriptors::{Address, Post};
use crate::device::network::NetworkMemory;
use crate::device::staging::{Staging, StagingKind};
use crate::error::{Error, InitError};
use crate::sync::Arc;
use crate::sys::cuda::{
    Attribute, Context, CudaError, Device, DeviceUuid, DriverVersion, HostMemoryError, Provider, RegisteredWords,
    Width, driver_version, provider,
};
use crate::sys::process::ProcessId;
use crate::sys::words::SharedWords;
use crate::topo::Topology;
use crate::types::Rank;

/// What a rank brings to the setup.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The communicator's name, for errors.
    pub comm: &'a str,
    /// This rank among those that set up.
    pub me: Rank,
    /// The communicator's numbers of these ranks, for errors.
    pub names: &'a [Rank],
    /// The number of its device in this process.
    pub device: u32,
    /// The identity of its host.
    pub host: &'a str,
    /// The bytes of half of each of a rank's staging memories, by this rank's settings; those of rank 0 apply. Without any
    /// there is no memory for messages to other hosts either.
    pub halves: &'a [usize],
    /// Whether a rank that is alone on its host has staging memory, too.
    pub stages_alone: bool,
    /// How many words the ranks of its host share: the same number on each of them.
    pub words: usize,
    /// The version of the layout of these words.
    pub layout: u32,
    /// How long to wait for the file descriptors of other ranks that have come.
    pub timeout: Duration,
}

/// Sends these bytes to every rank and returns the bytes of all ranks, by rank. Waits for all of them.
pub type AllGather<'a> = dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>, Error> + 'a;

/// What the setup has made: everything that programs need, of all ranks of the host.
#[derive(Debug)]
pub struct Parts {
    /// The context of this rank's device.
    pub context: Arc<Context>,
    /// The words of all ranks of the host.
    pub words: Arc<SharedWords>,
    /// The same words, as this rank's device reaches them.
    pub registered: RegisteredWords,
    /// The staging memories, in the order of [`Wanted::halves`]. Each maps the memory of all ranks of the host, by place.
    pub staging: Vec<Staging>,
    /// Where there are other hosts: the memory for messages to and from there.
    pub network: Option<NetworkMemory>,
    /// How much of a word every device can wait for.
    pub width: Width,
    /// Which ranks share a host.
    pub topo: Topology,
    /// What each rank runs on, by rank.
    pub members: Vec<Member>,
}

/// What a rank runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The identity of its host.
    pub host: String,
    /// Its process. Ranks may be threads of one process.
    pub process: ProcessId,
    /// Its device.
    pub device: DeviceUuid,
    /// The device's number in its process.
    pub ordinal: u32,
    /// Whose device it is.
    pub provider: Provider,
    /// Its driver.
    pub driver: DriverVersion,
    /// Whether streams wait for words of 64 bits.
    pub has_wide_words: bool,
    /// Whether device memory can be handed over as a file descriptor.
    pub exports_memory: bool,
    /// [`Attribute::ComputeMode`].
    pub compute_mode: u32,
    /// Other devices that its process sees and its device reaches.
    pub reaches: Vec<DeviceUuid>,
    /// The bytes of half of each of its staging memories, by its settings.
    pub halves: Vec<usize>,
    /// The version of the layout of the shared words.
    pub layout: u32,
}

/// What follows from the members, the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// How much of a word every device can wait for.
    pub width: Width,
    /// Where staging memory lies.
    pub staging: StagingKind,
    /// Why it does not lie on the devices; empty if it does.
    pub reason: String,
    /// The bytes of half of each of a rank's staging memories.
    pub halves: Vec<usize>,
}

/// Decides what ranks on these members do. `comm` is the communicator's name, `names` are those of its ranks that set up.
///
/// # Errors
/// They cannot work together: the text says which ranks stand in the way, and what to do.
///
/// # Panics
/// When there are no members.
pub fn decide(comm: &str, names: &[Rank], members: &[Member]) -> Result<Decision, InitError> {
    let named = |ranks: &[usize]| named(names, ranks);
    let error = |text: String| Err(InitError::Config(format!("communicator `{comm}`: {text}")));
    let layouts = groups(members, |member| &member.layout);
    if layouts.len() > 1 {
        let list: Vec<String> =
            layouts.iter().map(|(layout, ranks)| format!("{} version {layout}", named(ranks))).collect();
        return error(format!("ranks lay out shared words differently: {}; install one build on all", list.join(", ")));
    }
    let old = members.iter().find(|member| member.driver < oldest_driver(member.provider));
    if let Some(Member { provider, driver, .. }) = old {
        let ranks = ranks_where(members, |member| (member.provider, member.driver) == (*provider, *driver));
        return error(format!(
            "the driver of {} serves {provider} {driver}, and its streams cannot wait for words, which {provider} {} and \
             later can: update the driver, or move the tensors to the CPU",
            named(&ranks),
            oldest_driver(*provider),
        ));
    }
    for (device, ranks) in groups(members, |member| &member.device) {
        let is_exclusive = ranks.iter().any(|rank| EXCLUSIVE.contains(&members[*rank].compute_mode));
        if is_exclusive && ranks.iter().any(|rank| members[*rank].process != members[ranks[0]].process) {
            return error(format!(
                "{} use one device, {}, whose compute mode lets one process use it: give each rank a device of its own, \
                 or allow it with `nvidia-smi --compute-mode=DEFAULT`",
                named(&ranks),
                text(*device)
            ));
        }
    }
    let is_wide = members.iter().all(|member| member.has_wide_words);
    let reason = obstacle(names, members).unwrap_or_default();
    Ok(Decision {
        width: if is_wide { Width::Bits64 } else { Width::Bits32 },
        staging: if reason.is_empty() { StagingKind::Device } else { StagingKind::Host },
        reason,
        halves: members[0].halves.clone(),
    })
}

/// Why devices of one host cannot copy from each other's memory, if they cannot.
fn obstacle(names: &[Rank], members: &[Member]) -> Option<String> {
    let is_alone = |member: &Member| members.iter().filter(|other| other.host == member.host).count() == 1;
    let closed = ranks_where(members, |member| !member.exports_memory && !is_alone(member));
    if !closed.is_empty() {
        return Some(format!("the device of {} cannot hand its memory to another process", named(names, &closed)));
    }
    members.iter().enumerate().find_map(|(rank, member)| {
        let is_strange = |other: &Member| other.host == member.host && other.provider != member.provider;
        if let Some(other) = members.iter().position(is_strange) {
            let (whose, others) = (member.provider, members[other].provider);
            let (rank, other) = (names[rank], names[other]);
            return Some(format!(
                "the device of rank {rank} is one of {whose}, and that of rank {other} one of {others}"
            ));
        }
        let reaches = |other: &Member| {
            other.host != member.host || other.device == member.device || member.reaches.contains(&other.device)
        };
        let other = members.iter().position(|other| !reaches(other))?;
        let (rank, other) = (names[rank], names[other]);
        Some(format!("the device of rank {rank} does not reach that of rank {other}, or its process does not see it"))
    })
}

/// Sets up, with all ranks. Before it returns every rank has mapped everything.
///
/// It calls `all_gather` as often on every rank, until one of them fails, as it does once not all ranks `are_there`. The device
/// may wait for the device.
///
/// # Errors
/// Those of [`decide`] and of `all_gather`; and what failed on a rank, which the error names: the same on all ranks.
pub fn set_up(
    wanted: &Wanted<'_>,
    all_gather: &mut AllGather<'_>,
    are_there: &dyn Fn() -> bool,
) -> Result<Parts, Error> {
    let Wanted { comm, me, names, .. } = *wanted;
    let members: Vec<Member> = tell(comm, names, all_gather, probe(wanted))?;
    let decision = decide(comm, names, &members)?;
    if me.index() == 0 && decision.staging == StagingKind::Host {
        log::info!("communicator `{comm}`: tensors go through memory of the host, since {}", decision.reason);
    }
    let hosts: Vec<&str> = members.iter().map(|member| member.host.as_str()).collect();
    let topo = Topology::new(&hosts);
    let here = topo.hosts()[topo.host_of(me)].clone();
    let here_names: Vec<Rank> = here.iter().map(|rank| names[rank.index()]).collect();
    let neighbours = Neighbours { seat: topo.seat(me), names: &here_names, has_others: topo.hosts().len() > 1 };
    let (own, offer) = split(Own::make(wanted, &decision, neighbours));
    let offers: Vec<Offer> = tell(comm, names, all_gather, offer)?;
    let offers: Vec<&Offer> = here.iter().map(|rank| &offers[rank.index()]).collect();
    let own = own.expect("no rank has told a failure");
    let (mapped, told) = split(own.share(wanted, &offers, neighbours, are_there).map(|mapped| (mapped, ())));
    tell(comm, names, all_gather, told)?;
    let Mapped { context, words, registered, staging, network } = mapped.expect("no rank has told a failure");
    Ok(Parts { context, words, registered, staging, network, width: decision.width, topo, members })
}

/// The ranks of this rank's host.
#[derive(Clone, Copy)]
struct Neighbours<'a> {
    /// This rank's place among them.
    seat: Rank,
    /// By place, their numbers in the communicator.
    names: &'a [Rank],
    /// Whether there are other hosts.
    has_others: bool,
}

/// What a communicator knows of its ranks.
pub(crate) trait Presence {
    /// Whether no rank is lost, and this one has not left.
    fn are_there(&self) -> bool;
}

/// What failed on a rank, as it tells the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SetupFailure {
    /// Whose devices the rank has.
    pub(crate) whose: Provider,
    pub(crate) what: String,
    pub(crate) cause: String,
}

impl SetupFailure {
    /// What did not work, and why.
    pub(crate) fn new(what: impl Display, cause: impl Display) -> SetupFailure {
        // Where nothing has been found, CUDA's driver is missed.
        let whose = provider().unwrap_or(Provider::Cuda);
        SetupFailure { whose, what: what.to_string(), cause: cause.to_string() }
    }

    /// What this rank sends instead of what the others expect, when it does not go on.
    pub(crate) fn told(self) -> Vec<u8> {
        serde_json::to_vec(&Err::<(), SetupFailure>(self)).expect("plain data")
    }
}

pub(crate) fn failed<E: Display>(what: impl Display) -> impl FnOnce(E) -> SetupFailure {
    move |cause| SetupFailure::new(what, cause)
}

/// Tells the other ranks what this rank has, or what failed on it. Returns what all ranks have, or the first failure, the same
/// on every rank.
pub(crate) fn tell<T: Serialize + DeserializeOwned>(
    comm: &str,
    names: &[Rank],
    all_gather: &mut AllGather<'_>,
    own: Result<T, SetupFailure>,
) -> Result<Vec<T>, Error> {
    let told = all_gather(serde_json::to_vec(&own).expect("plain data"))?;
    let parsed = told.iter().zip(names).map(|(bytes, rank)| {
        let said: Result<T, SetupFailure> =
            serde_json::from_slice(bytes).unwrap_or_else(|error| Err(failed("what it has told")(error)));
        said.map_err(|SetupFailure { whose, what, cause }| InitError::Os {
            comm: comm.to_owned(),
            what: format!("{whose} on rank {rank}: {what}"),
            cause,
        })
    });
    Ok(parsed.collect::<Result<Vec<T>, InitError>>()?)
}

/// Returns what this rank has made, if every rank has made its own. Else gives it up and returns the first failure, the same on
/// every rank.
pub(crate) fn agree<T, E: Display>(
    comm: &str,
    names: &[Rank],
    what: &str,
    own: Result<T, E>,
    give_up: impl Fn(&T),
    all_gather: &mut AllGather<'_>,
) -> Result<T, Error> {
    let (kept, told) = split(own.map(|kept| (kept, ())).map_err(failed(what)));
    if let Err(error) = tell(comm, names, all_gather, told) {
        kept.iter().for_each(give_up);
        return Err(error);
    }
    Ok(kept.expect("no rank has told a failure"))
}

/// What stays on this rank, and what the others are told.
pub(crate) fn split<A, B>(result: Result<(A, B), SetupFailure>) -> (Option<A>, Result<B, SetupFailure>) {
    match result {
        Ok((kept, told)) => (Some(kept), Ok(told)),
        Err(failure) => (None, Err(failure)),
    }
}

/// What this rank runs on. Makes no context.
fn probe(wanted: &Wanted<'_>) -> Result<Member, SetupFailure> {
    let probe = || -> Result<Member, CudaError> {
        let driver = driver_version()?;
        let device = Device::new(wanted.device)?;
        let has = |attribute| device.attribute(attribute).map(|value| value != 0);
        let mut reaches = vec![];
        for other in (0..Device::count()?).filter(|other| *other != wanted.device) {
            let other = Device::new(other)?;
            if device.reaches(other)? {
                reaches.push(other.uuid()?);
            }
        }
        Ok(Member {
            host: wanted.host.to_owned(),
            process: ProcessId::own(),
            device: device.uuid()?,
            ordinal: wanted.device,
            provider: provider()?,
            driver,
            has_wide_words: has(Attribute::WordsOf64Bits)?,
            exports_memory: has(Attribute::VirtualMemory)? && has(Attribute::MemoryAsDescriptor)?,
            compute_mode: device.attribute(Attribute::ComputeMode)?,
            reaches,
            halves: wanted.halves.to_vec(),
            layout: wanted.layout,
        })
    };
    probe().map_err(failed(format_args!("a look at its device {}", wanted.device)))
}

/// What a rank has made, and is about to hand over.
struct Own {
    context: Arc<Context>,
    /// Only on the first rank of a host.
    words: Option<SharedWords>,
    /// With a file descriptor for the other ranks.
    staging: Vec<(Staging, OwnedFd)>,
    network: Option<NetworkMemory>,
    post: Post,
}

/// What the other ranks have to know of [`Own`].
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    address: Address,
    /// The bytes of each of its staging memories.
    staging: Vec<usize>,
}

/// What a rank has mapped.
struct Mapped {
    context: Arc<Context>,
    words: Arc<SharedWords>,
    registered: RegisteredWords,
    staging: Vec<Staging>,
    network: Option<NetworkMemory>,
}

impl Own {
    fn make(
        wanted: &Wanted<'_>,
        decision: &Decision,
        neighbours: Neighbours<'_>,
    ) -> Result<(Own, Offer), SetupFailure> {
        let &Wanted { device, .. } = wanted;
        let Neighbours { seat: me, names, has_others } = neighbours;
        let ranks = names.len();
        let context = Device::new(device).and_then(Context::primary);
        let context = context.map_err(failed(format_args!("the context of its device {device}")))?;
        let (mut staging, mut lengths) = (vec![], vec![]);
        for half in decision.halves.iter().copied().filter(|_| ranks > 1 || wanted.stages_alone || !has_others) {
            let made = match decision.staging {
                StagingKind::Device => Staging::new(&context, me, ranks, half).map_err(HostMemoryError::from),
                StagingKind::Host => Staging::pinned(&context, me, ranks, half),
            };
            let made = made.map_err(|error| {
                SetupFailure::new(
                    format!("staging memory of {} bytes for its device {device}", 2 * half),
                    format!("{error}; with less in the setting `device_staging_bytes` it needs less"),
                )
            })?;
            let (fd, len) = made.export().map_err(failed("a file descriptor of its staging memory"))?;
            staging.push((made, fd));
            lengths.push(len);
        }
        let half = NetworkMemory::half_beside(decision.halves.first().copied().unwrap_or(0));
        let is_staged = !decision.halves.is_empty();
        let network = (has_others && is_staged).then(|| NetworkMemory::new(&context, half)).transpose();
        let network =
            network.map_err(failed(format_args!("{} bytes of memory for messages to other hosts", 4 * half)))?;
        let words = (me.index() == 0).then(|| SharedWords::new(wanted.words)).transpose();
        let words = words.map_err(failed(format_args!("{} shared words", wanted.words)))?;
        let post = Post::open().map_err(failed("a place for file descriptors"))?;
        let offer = Offer { address: post.address().clone(), staging: lengths };
        Ok((Own { context, words, staging, network, post }, offer))
    }

    /// Hands this rank's memory to all ranks of the host, and maps theirs.
    fn share(
        self,
        wanted: &Wanted<'_>,
        offers: &[&Offer],
        neighbours: Neighbours<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<Mapped, SetupFailure> {
        let Own { context, words, staging, network, post } = self;
        let (mut staging, own_fds): (Vec<Staging>, Vec<OwnedFd>) = staging.into_iter().unzip();
        // Staging memory first, then words, as the receivers take them.
        let own: Vec<BorrowedFd<'_>> = own_fds.iter().map(AsFd::as_fd).chain(words.as_ref().map(AsFd::as_fd)).collect();
        let addresses: Vec<Address> = offers.iter().map(|offer| offer.address.clone()).collect();
        let deadline = deadline_after(Instant::now(), wanted.timeout);
        let taken = post.exchange(neighbours.seat, &addresses, &own, deadline, are_there);
        let taken = taken.map_err(|error| error.naming(neighbours.names)).map_err(failed(EXCHANGE))?;
        let mut others_words = None;
        for (seat, (fds, offer)) in taken.into_iter().zip(offers).enumerate() {
            let rank = neighbours.names[seat];
            let mut fds = fds.into_iter();
            for (number, staging) in staging.iter_mut().enumerate() {
                let (memory, len) = (fds.next(), offer.staging.get(number));
                let (memory, len) = memory.zip(len).ok_or_else(|| failed(EXCHANGE)(NONE_FROM))?;
                staging
                    .import(Rank::from(seat), memory.as_fd(), *len)
                    .map_err(failed(format_args!("the staging memory of rank {rank}")))?;
            }
            others_words = others_words.or(fds.next());
        }
        let words = match (words, others_words) {
            (Some(words), _) => words,
            (None, Some(fd)) => SharedWords::open(fd, wanted.words)
                .map_err(failed(format_args!("the words that rank {} has made", neighbours.names[0])))?,
            (None, None) => {
                return Err(failed(format_args!("the words that rank {} has made", neighbours.names[0]))(NONE_FROM));
            }
        };
        let words = Arc::new(words);
        let registered = RegisteredWords::new(&context, &words).map_err(failed("the words for its device"))?;
        Ok(Mapped { context, words, registered, staging, network })
    }
}

const EXCHANGE: &str = "the exchange of file descriptors";
const NONE_FROM: &str = "a rank has handed too few over";

/// The first version whose drivers have all that programs use: operations on words, and numbers for streams.
fn oldest_driver(provider: Provider) -> DriverVersion {
    match provider {
        Provider::Cuda => DriverVersion { major: 12, minor: 0 },
        Provider::Hip => DriverVersion { major: 7, minor: 1 },
    }
}

/// `CU_COMPUTEMODE_EXCLUSIVE`, which old drivers had, and `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`.
const EXCLUSIVE: [u32; 2] = [1, 3];

/// The ranks that have the same value of `key`, by value.
fn groups<K: Ord>(members: &[Member], key: impl Fn(&Member) -> &K) -> BTreeMap<&K, Vec<usize>> {
    let mut groups: BTreeMap<&K, Vec<usize>> = BTreeMap::new();
    for (rank, member) in members.iter().enumerate() {
        groups.entry(key(member)).or_default().push(rank);
    }
    groups
}

pub(crate) fn ranks_where(members: &[Member], is: impl Fn(&Member) -> bool) -> Vec<usize> {
    (0..members.len()).filter(|rank| is(&members[*rank])).collect()
}

pub(crate) fn named(names: &[Rank], ranks: &[usize]) -> String {
    let ranks: Vec<u32> = ranks.iter().map(|rank| names[*rank].0).collect();
    match &ranks[..] {
        [rank] => format!("rank {rank}"),
        ranks => format!("ranks {ranks:?}"),
    }
}

/// A device's UUID, as nvidia-smi writes it.
fn text(device: DeviceUuid) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let [a, b, c, d, e] = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| hex(&device.0[range]));
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A rank of its own process on a device of its own.
    pub(crate) fn member(rank: u8) -> Member {
        let process = format!(r#"{{"namespace":"here","number":{}}}"#, 100 + u32::from(rank));
        Member {
            host: "one".to_owned(),
            process: serde_json::from_str(&process).expect("a process"),
            device: DeviceUuid([rank; 16]),
            ordinal: rank.into(),
            provider: Provider::Cuda,
            driver: DriverVersion { major: 13, minor: 0 },
            has_wide_words: true,
            exports_memory: true,
            compute_mode: 0,
            reaches: (0..8).filter(|other| *other != rank).map(|other| DeviceUuid([other; 16])).collect(),
            halves: vec![1 << 20],
            layout: 1,
        }
    }

    /// What `size` ranks decide after `change` has been applied to each.
    fn decision(size: u8, change: impl Fn(u8, &mut Member)) -> Result<Decision, String> {
        let mut members: Vec<Member> = (0..size).map(member).collect();
        members.iter_mut().zip(0..).for_each(|(member, rank)| change(rank, member));
        let names: Vec<Rank> = (0..u32::from(size)).map(Rank).collect();
        decide("main", &names, &members).map_err(|error| error.to_string())
    }

    #[test]
    fn devices_that_reach_each_other_stage_on_themselves() {
        for size in 1..=8 {
            let decided = decision(size, |_, _| {}).expect("they fit together");
            let expected = Decision {
                width: Width::Bits64,
                staging: StagingKind::Device,
                reason: String::new(),
                halves: vec![1 << 20],
            };
            assert_eq!(decided, expected);
        }
    }

    #[test]
    fn the_least_able_device_sets_the_width_of_words() {
        let decided = decision(3, |rank, member| member.has_wide_words = rank != 1).expect("they fit together");
        assert_eq!(decided.width, Width::Bits32);
    }

    #[test]
    fn the_first_ranks_setting_holds() {
        let decided = decision(3, |rank, member| member.halves = vec![4096 * (1 + usize::from(rank)), 64]);
        assert_eq!(decided.expect("they fit together").halves, [4096, 64]);
    }

    #[test]
    fn a_pair_that_does_not_reach_each_other_stages_on_the_host() {
        let apart = |rank, member: &mut Member| {
            member.reaches.retain(|other| (rank, other.0[0]) != (1, 2));
        };
        let decided = decision(3, apart).expect("they fit together");
        assert_eq!(decided.staging, StagingKind::Host);
        assert!(decided.reason.contains("device of rank 1 does not reach that of rank 2"), "{}", decided.reason);
        let alone = |_, member: &mut Member| (member.reaches, member.device) = (vec![], DeviceUuid([9; 16]));
        assert_eq!(decision(3, alone).expect("they fit together").staging, StagingKind::Device, "all on one device");
    }

    #[test]
    fn memory_that_cannot_be_handed_over_is_replaced_by_the_hosts() {
        let decided = decision(2, |rank, member| member.exports_memory = rank != 1).expect("they fit together");
        assert_eq!(decided.staging, StagingKind::Host);
        assert!(decided.reason.contains("device of rank 1"), "{}", decided.reason);
    }

    #[test]
    fn devices_need_not_reach_those_of_other_hosts() {
        let apart = |rank, member: &mut Member| {
            member.host = if rank == 1 { "two" } else { "one" }.to_owned();
            member.reaches.retain(|other| (rank == 1) == (other.0[0] == 1));
            member.exports_memory = rank != 1;
        };
        assert_eq!(decision(3, apart).expect("they fit together").staging, StagingKind::Device);
    }

    #[test]
    fn what_fails_is_named_with_whose_device_it_is() {
        let names = [Rank(0), Rank(1)];
        let failure = SetupFailure { whose: Provider::Hip, what: "its context".to_owned(), cause: "none".to_owned() };
        let mut all_gather = |own: Vec<u8>| Ok(vec![own, failure.clone().told()]);
        let error = tell("c", &names, &mut all_gather, Ok(())).expect_err("rank 1 has failed");
        assert!(error.to_string().contains("HIP on rank 1: its context: none"), "{error}");
    }

    #[test]
    fn devices_of_two_vendors_stage_on_the_host_they_share() {
        let of_hip = |rank, member: &mut Member| {
            if rank == 1 {
                member.provider = Provider::Hip;
            }
        };
        let decided = decision(2, of_hip).expect("they fit together");
        assert_eq!(decided.staging, StagingKind::Host);
        assert!(decided.reason.contains("rank 0 is one of CUDA, and that of rank 1 one of HIP"), "{}", decided.reason);
        let apart = |rank, member: &mut Member| {
            of_hip(rank, member);
            member.host = ["one", "two"][usize::from(rank)].to_owned();
        };
        assert_eq!(decision(2, apart).expect("they fit together").staging, StagingKind::Device);
    }

    #[test]
    fn an_old_driver_is_named_with_what_it_lacks() {
        let old = |rank, member: &mut Member| {
            if rank == 1 {
                member.driver = DriverVersion { major: 11, minor: 8 };
            }
        };
        let error = decision(2, old).expect_err("it is too old");
        assert!(
            error.contains("driver of rank 1 serves CUDA 11.8") && error.contains("which CUDA 12.0 and"),
            "{error}"
        );
        let of_hip = |rank, member: &mut Member| {
            (member.provider, member.driver.major) = (Provider::Hip, if rank == 1 { 6 } else { 8 });
        };
        let error = decision(2, of_hip).expect_err("it is too old");
        assert!(error.contains("driver of rank 1 serves HIP 6.0") && error.contains("which HIP 7.1 and"), "{error}");
    }

    #[test]
    fn a_device_for_one_process_alone_is_not_shared() {
        let shared = |_, member: &mut Member| (member.device, member.compute_mode) = (DeviceUuid([0xab; 16]), 3);
        let error = decision(2, shared).expect_err("two processes");
        let device = "GPU-abababab-abab-abab-abab-abababababab";
        assert!(error.contains("ranks [0, 1] use one device") && error.contains(device), "{error}");
        assert!(error.contains("--compute-mode=DEFAULT"), "{error}");
        let threads = |rank, changed: &mut Member| {
            shared(rank, changed);
            changed.process = member(0).process;
        };
        assert!(decision(2, threads).is_ok(), "one process may have several ranks");
        assert!(decision(2, |_, member| member.compute_mode = 3).is_ok(), "a device each");
    }

    #[test]
    fn different_layouts_are_an_error() {
        let error = decision(2, |rank, member| member.layout = rank.into()).expect_err("they differ");
        assert!(error.contains("rank 0 version 0, rank 1 version 1"), "{error}");
    }
}
