//! How ranks find out which of them are alike (`engine=mixed`).

use super::{DeviceSide, Group, own_device};
use crate::comm::island::{Member, Mixed, Turn};
use crate::config::EngineChoice;
use crate::device::setup::{self, AllGather, SetupFailure};
use crate::device::vendor::alike::{self, Card, OnDevice};
use crate::device::vendor::ending::Leaving;
use crate::device::watch;
use crate::engine::region::Words;
use crate::error::Error;
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{Context, Device, Relaxed, provider};
use crate::sys::nccl::Nccl;
use crate::types::Rank;

/// What a rank tells of its device, its library, and the context.
type Own = (OnDevice, Option<Arc<Nccl>>, Arc<Context>);

impl DeviceSide {
    /// Whether a vendor's library moves data within the ranks that are alike.
    pub(in crate::comm) fn is_mixed(&self) -> bool {
        self.libraries.engine == EngineChoice::Mixed
    }

    /// Which ranks are alike. All ranks find out together at the first call that depends on it, by `exchange`; what a rank has
    /// then, `device` or none, is what it has in this communicator.
    pub(in crate::comm) fn islands(
        &self,
        group: &impl Group,
        operation: &str,
        device: Option<u32>,
        exchange: &mut AllGather<'_>,
    ) -> Result<Arc<Mixed>, Error> {
        let mut known = lock(&self.mixed);
        let mixed = match &*known {
            Some(mixed) if !mixed.is_doubtful() => mixed.clone(),
            _ => known.insert(Arc::new(self.find_islands(group, device, exchange)?)).clone(),
        };
        if let (Some(member), Some(device)) = (&mixed.member, device) {
            own_device(member.context.device().ordinal(), operation, device)?;
        }
        Ok(mixed)
    }

    fn find_islands(
        &self,
        group: &impl Group,
        device: Option<u32>,
        exchange: &mut AllGather<'_>,
    ) -> Result<Mixed, Error> {
        let (comm, me) = (group.name(), group.place().me);
        // Loading a library and making a context spoil captures otherwise. Where there is no driver, the card says so.
        let _relaxed = device.and_then(|_| Relaxed::enter().ok());
        let (own, card) = match device.map(|device| self.card(device)).transpose() {
            Ok(own) => {
                let card = Card { device: own.as_ref().map(|(card, ..)| card.clone()) };
                (own, Ok(card))
            }
            Err(failure) => (None, Err(failure)),
        };
        let names: Vec<Rank> = (0..group.place().size).map(Rank::from).collect();
        let cards: Vec<Card> = setup::tell(comm, &names, exchange, card)?;
        let (islands, why) = alike::islands(&cards);
        let ranks = islands.groups()[islands.group_of(me)].clone();
        if me.index() == 0 {
            let groups: Vec<&Vec<Rank>> = islands.groups().iter().filter(|group| group.len() > 1).collect();
            log::info!("communicator `{comm}`: a vendor's library moves data within {groups:?}");
            why.iter().for_each(|why| log::warn!("communicator `{comm}`: tensors go through the host: {why}"));
        }
        let member = match own {
            Some((_, Some(library), context)) if ranks.len() > 1 => {
                let place = ranks.iter().position(|rank| *rank == me).expect("it is in its group");
                let candidate = self.libraries.candidate(comm, (Rank::from(place), &ranks));
                let chosen = candidate.alike(library);
                let turn = Mutex::new(Turn { staging: Words::new(Vec::new()), generation: 0, has_begun: false });
                Some(Member { chosen, context, ranks, place, turn, library: Mutex::new(None) })
            }
            _ => None,
        };
        Ok(Mixed::new(islands, member))
    }

    /// What this rank has on a device.
    fn card(&self, device: u32) -> Result<Own, SetupFailure> {
        watch::begin().map_err(setup::failed("the threads that watch devices"))?;
        let device = Device::new(device).map_err(setup::failed("its device"))?;
        let context = Context::primary(device).map_err(setup::failed("a context"))?;
        let provider = provider().map_err(setup::failed("the driver"))?;
        let uuid = device.uuid().map_err(setup::failed("its device's identity"))?;
        let (library, told) = match self.libraries.own() {
            Ok(library) => {
                let code = library.version().to_code();
                (Some(library), Ok(code))
            }
            Err(cause) => (None, Err(beginning(&cause))),
        };
        Ok((OnDevice { provider, uuid, library: told }, library, context))
    }

    /// Has the reaper give back what the ranks that are alike have of a library. Nothing of it is on a stream, or it was given up.
    pub(super) fn close_island(&self, leaving: Leaving) {
        let Some(mixed) = lock(&self.mixed).take() else { return };
        let member = mixed.member.as_ref();
        if let Some(library) = member.and_then(|member| lock(&member.library).take()) {
            watch::reap_with(vec![library], leaving, Vec::new(), Box::new(mixed));
        }
    }
}

/// The beginning of a text, as much as has room in what ranks tell.
fn beginning(text: &str) -> String {
    let plain = text
        .chars()
        .map(|letter| if letter.is_ascii_graphic() && !['"', '\\'].contains(&letter) { letter } else { ' ' });
    plain.take(700).collect()
}
