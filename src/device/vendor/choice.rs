//! Whether ranks use a vendor's library: each rank tells what it has, and all decide the same.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::EngineChoice;
use crate::device::setup::{Member, named, ranks_where};
use crate::device::vendor::part::PartId;
use crate::error::InitError;
use crate::sync::Arc;
use crate::sys::cuda::{self, Provider};
use crate::sys::nccl::{Feature, Nccl, Vendor, Version};
use crate::types::Rank;

/// What a rank is set to, and what it has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub(crate) choice: EngineChoice,
    /// The library's `NCCL_VERSION_CODE`, or why there is none. `None` where nobody asks for one.
    pub(crate) library: Option<Result<u32, String>>,
    /// Whether the library registers memory.
    pub(crate) registers: bool,
    /// Where it has a communicator of the library already: which.
    pub(crate) part: Option<PartId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The vendor's library.
    Vendor,
    /// The engine's own programs.
    Streams,
}

/// Which vendor's library a choice means on devices of this provider, if one.
fn vendor(choice: EngineChoice, provider: Provider) -> Option<Vendor> {
    match (choice, provider) {
        (EngineChoice::Nccl, _) => Some(Vendor::Nccl),
        (EngineChoice::Rccl, _) | (EngineChoice::Auto, Provider::Hip) => Some(Vendor::Rccl),
        (EngineChoice::Auto | EngineChoice::Streams | EngineChoice::Host | EngineChoice::Mixed, _) => None,
    }
}

/// Why programs do not run on streams of this provider, if they do not: HIP may make a stream wait for a word by a kernel that
/// spins, which can keep the very kernel from running that it waits for. So they have to be asked for.
pub(crate) fn no_streams(choice: EngineChoice, provider: Provider) -> Option<&'static str> {
    (provider == Provider::Hip && choice != EngineChoice::Streams).then_some(
        "RCCL has no such operation, and programs for streams have not been shown to work on HIP's devices: engine=streams \
         takes them all the same",
    )
}

/// What a rank offers, with the library that it has. It is only loaded where the rank is set to use it.
pub(crate) fn offer(choice: EngineChoice, files: [Option<&Path>; 2]) -> (Offer, Option<Arc<Nccl>>) {
    let found = |library| Offer { choice, library, registers: false, part: None };
    // A rank without devices has no part in this.
    let provider = cuda::provider().unwrap_or(Provider::Cuda);
    let Some(vendor) = vendor(choice, provider) else { return (found(None), None) };
    let named = files[usize::from(vendor == Vendor::Rccl)];
    match Nccl::load(vendor, named, &[]) {
        Ok(library) => {
            let code = library.version().to_code();
            let registers = library.features().contains(&Feature::Memory);
            (Offer { registers, ..found(Some(Ok(code))) }, Some(Arc::new(library)))
        }
        Err(error) => (found(Some(Err(error.to_string()))), None),
    }
}

/// What ranks with these offers decide: the same on each.
///
/// # Errors
/// Settings differ, or ranks cannot use the library that they are set to use: what stands in the way, and on which ranks.
pub(crate) fn decide(comm: &str, names: &[Rank], offers: &[Offer], members: &[Member]) -> Result<Decision, InitError> {
    let error = |text: String| Err(InitError::Config(format!("communicator `{comm}`: {text}")));
    let choice = offers[0].choice;
    if let Some(other) = offers.iter().position(|offer| offer.choice != choice) {
        let (first, second) = (choice.name(), offers[other].choice.name());
        let (rank, other) = (names[0], names[other]);
        return error(format!(
            "rank {rank} has engine={first}, rank {other} engine={second}: set the same on all ranks"
        ));
    }
    let provider = members[0].provider;
    let other = members.iter().position(|member| member.provider != provider);
    if let Some(other) = other.filter(|_| choice != EngineChoice::Streams) {
        let (rank, there, others) = (names[0], names[other], members[other].provider);
        return error(format!(
            "engine={}: the device of rank {rank} is one of {provider}, and that of rank {there} one of {others}, which no \
             library serves together: take engine=streams, or engine=host",
            choice.name()
        ));
    }
    let Some(vendor) = vendor(choice, provider) else { return Ok(Decision::Streams) };
    if (vendor, provider) == (Vendor::Nccl, Provider::Hip) {
        return error(
            "engine=nccl: the ranks' devices are HIP's, which NCCL does not serve: take engine=rccl".to_owned(),
        );
    }
    match obstacle(vendor.name(), names, offers, members) {
        Some(obstacle) => error(format!("engine={}: {obstacle}; or take engine=streams", choice.name())),
        None => Ok(Decision::Vendor),
    }
}

/// Why the ranks cannot use the library together, if so.
fn obstacle(name: &str, names: &[Rank], offers: &[Offer], members: &[Member]) -> Option<String> {
    let mut versions: Vec<(Version, Rank)> = Vec::new();
    for (offer, rank) in offers.iter().zip(names) {
        match &offer.library {
            Some(Ok(code)) => versions.push((Version::from_code(*code), *rank)),
            Some(Err(cause)) => return Some(format!("rank {rank} has no {name}: {cause}")),
            None => return Some(format!("rank {rank} has not looked for {name}")),
        }
    }
    let (first, rank) = versions[0];
    if let Some((other, there)) = versions.iter().find(|(version, _)| version.release() != first.release()) {
        return Some(format!(
            "rank {rank} has {name} {first}, rank {there} {name} {other}: install one version on all"
        ));
    }
    let shared = members.iter().map(|member| ranks_where(members, |other| other.device == member.device));
    let shared = shared.into_iter().find(|ranks| ranks.len() > 1)?;
    Some(format!("{} use one device, which {name} refuses: give each rank a device of its own", named(names, &shared)))
}

#[cfg(test)]
mod tests;
