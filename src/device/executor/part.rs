//! Splits of the vendor's library that runs collectives.

use std::time::Duration;

use super::{Executor, Ranks};
use crate::device::vendor::part::Part;
use crate::device::vendor::split::{Others, Wanted};
use crate::error::Error;
use crate::sync::lock;
use crate::sys::cuda::Relaxed;
use crate::types::Rank;

impl Executor {
    /// Splits the communicator of the library, if one runs collectives here, with all ranks. `ranks` are those of this rank's
    /// part in their order; none if it is in no part. Earlier collectives are waited for, and later ones wait.
    ///
    /// # Errors
    /// Those of [`VendorComm::split`](crate::device::vendor::VendorComm::split).
    pub(crate) fn part(
        &self,
        (id, ranks): (&str, &[Rank]),
        timeout: Duration,
        others: &dyn Others,
        group: &dyn Ranks,
    ) -> Result<Option<Part>, Error> {
        let mut state = lock(&self.state);
        let Some(state) = state.as_mut() else { return Ok(None) };
        let Some(vendor) = &state.vendor else { return Ok(None) };
        // The library allocates, which spoils captures otherwise.
        let _relaxed = Relaxed::enter();
        // A library that still has something on a stream may never end a split.
        let is_idle = self.in_flight.wait_for(u64::MAX, timeout).is_ok() && self.in_flight.halt().is_none();
        let current = state.context.enter().inspect_err(|error| {
            log::warn!("communicator `{}`: parts begin their own communicators of the library: {error}", self.comm);
        });
        let current = current.ok().filter(|_| is_idle);
        let wanted = Wanted { id, ranks, device: self.device, timeout };
        vendor.comm.split(current.as_ref(), &wanted, others, &mut |own| group.all_gather(own, timeout)).inspect_err(
            // Where it could not begin anew either, nothing goes on.
            |error| {
                if vendor.comm.is_given_up() {
                    self.in_flight.stop(error);
                }
            },
        )
    }
}
