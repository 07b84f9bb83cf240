//! What communicators that are split from another one take over from its device.

use std::time::Duration;

use super::{DeviceSide, Group, hear, tell};
use crate::device::vendor::part::Part;
use crate::device::vendor::split::Others;
use crate::error::Error;
use crate::sync::lock;
use crate::types::{Rank, Tag};

impl DeviceSide {
    /// Splits the communicator of the vendor's library, if one runs collectives here, with all ranks. `ranks` are those of this
    /// rank's part in their order; none if it is in no part.
    ///
    /// All ranks have set up by now, or none: the setup returns on none before all have come to it.
    pub(in crate::comm) fn part(
        &self,
        group: &impl Group,
        ranks: &[Rank],
        timeout: Duration,
    ) -> Result<Option<Part>, Error> {
        let Some(executor) = self.executor.get() else { return Ok(None) };
        let driver = group.driver();
        let open = driver
            .is_here()
            .then(|| driver.with_engine(|engine| engine.check_open("split").is_ok().then(|| engine.id.clone())));
        let Some(id) = open.flatten() else { return Ok(None) };
        match executor.part((&id, ranks), timeout, &OtherRanks(group), group) {
            // The ranks of a part that are there still have each other.
            Err(error @ Error::PeerLost { .. }) => {
                let comm = group.name();
                log::info!("communicator `{comm}`: parts begin their own communicators of the library: {error}");
                Ok(None)
            }
            other => other,
        }
    }

    /// Takes over a part that the ranks of this communicator have, before it is set up.
    pub(in crate::comm) fn inherit(&self, part: Part) {
        *lock(&self.part) = Some(part);
    }
}

struct OtherRanks<'a, G>(&'a G);

impl<G: Group> Others for OtherRanks<'_, G> {
    fn tell(&self, rank: Rank, told: Vec<u8>) -> Result<(), Error> {
        tell(self.0, rank, Tag::PART, told)
    }

    fn hear(&self, rank: Rank, timeout: Duration) -> Result<Vec<u8>, Error> {
        hear(self.0, rank, Tag::PART, timeout)
    }

    fn are_there(&self) -> bool {
        self.0.driver().with_engine(|engine| engine.is_whole())
    }
}
