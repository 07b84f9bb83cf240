//! How operations end that cannot go on: a peer is lost, a rank has left, or the communicator closes.

use std::time::Instant;

use crate::engine::failures::{Departed, Departure, Drain, OnLoss};
use crate::engine::frame::{Failed, Reason};
use crate::engine::progress::Engine;
use crate::error::{Error, LinkDown};
use crate::types::Rank;

impl Engine {
    // ---- one peer ----

    /// Marks `peer` as gone and ends the operations that cannot do without it.
    pub(crate) fn lose(&mut self, peer: Rank, down: &LinkDown) {
        self.context.endpoints.lose(peer, down);
        self.handle_losses();
    }

    /// Ends what needs peers that have been marked as gone, and tells the other ranks of those that operations found lost.
    #[inline]
    pub(crate) fn handle_losses(&mut self) {
        if self.context.endpoints.has_lost() || !self.context.lost_found.is_empty() {
            self.handle_all_losses();
        }
    }

    #[cold]
    fn handle_all_losses(&mut self) {
        loop {
            for (gone, error) in std::mem::take(&mut self.context.lost_found) {
                if let Error::PeerLost { rank, cause, .. } = &error {
                    self.warn_of_loss(Rank(*rank), cause);
                }
                self.report_lost(gone, &error);
            }
            match self.context.endpoints.take_lost() {
                Some(peer) => self.end_with(peer),
                None if self.context.lost_found.is_empty() => return,
                None => {}
            }
        }
    }

    /// Ends the operations that cannot do without `peer`, which is lost.
    fn end_with(&mut self, peer: Rank) {
        let ctx = &mut self.context;
        let cause = ctx.lost(peer).unwrap_or_default();
        self.messages.lose(ctx, peer, &cause);
        self.windows.lose(ctx, peer, &cause);
        let ended = ctx.finished.len();
        self.collectives.lose(ctx, peer, &cause);
        self.relay.lose(ctx, peer, &cause);
        self.device_messages.lose(ctx, peer, &cause);
        self.device_accesses.lose(ctx, peer, &cause);
        // A rank that is at its end, as this one may be, ends its streams too: then nothing waits for it.
        let is_missed = ctx.finished.len() > ended || ctx.failures.is_reported(peer);
        ctx.rndv.lose(&mut ctx.endpoints, peer);
        ctx.endpoints.drop_streams(peer);
        if is_missed {
            self.warn_of_loss(peer, &cause);
        }
    }

    /// Tells the other ranks that `gone` is, as a message or an access to a window has found out, whose `error` names whom to
    /// blame: collectives that it has not called cannot complete. Collectives that fail here tell for themselves.
    fn report_lost(&mut self, gone: Rank, error: &Error) {
        if !self.context.failures.is_first_report(gone) {
            return;
        }
        let sequence = self.collectives.called(gone).max(self.collectives.next_sequence());
        let (lost, text) = (error.lost_rank(), error.to_string());
        for peer in self.context.endpoints.others().into_iter().filter(|peer| *peer != gone) {
            let failed = Failed::Collective { sequence, reason: Reason::Loss, lost };
            self.context.endpoints.send_failure(peer, failed, &text);
        }
    }

    /// Logs that `rank` is lost, once.
    fn warn_of_loss(&mut self, rank: Rank, cause: &str) {
        if self.closed().is_none() && self.context.failures.is_first_warning(rank) {
            log::warn!("communicator `{}` rank {}: rank {rank} is lost: {cause}", self.name(), self.context.me);
        }
    }

    // ---- departures ----

    /// Ends what `departed` makes impossible; see [`Engine::end_after_loss`] for the rest.
    pub(crate) fn departed(&mut self, departed: &Departed) {
        let Departed { rank, how, cause } = departed;
        if self.closed().is_some() {
            return;
        }
        match *how {
            Departure::Lost => {
                self.warn_of_loss(*rank, cause);
                self.context.failures.record_loss(*rank, cause);
                self.lose(*rank, &LinkDown::new(cause));
            }
            Departure::Left { called } => {
                log::info!("communicator `{}` rank {}: rank {rank} has left: {cause}", self.name(), self.context.me);
                self.context.failures.record_left(*rank, called, cause);
                self.collectives.end_after_leave(&mut self.context);
            }
        }
        let now = Instant::now();
        self.collectives.resolve_suspect(&mut self.context, now);
        self.context.check_deserted(now);
        self.handle_losses();
    }

    /// The error of `operation` because a rank is lost, if one is.
    pub(crate) fn loss_of(&self, operation: &str) -> Option<Error> {
        self.context.failures.loss_of(operation)
    }

    /// The same for all operations.
    pub(crate) fn loss(&self) -> Option<Error> {
        self.loss_of(&self.whole())
    }

    /// All operations, as errors call them.
    fn whole(&self) -> String {
        format!("communicator `{}`", self.name())
    }

    /// Ends every operation if a rank is lost and they have had their time. When that will be, if it is not now.
    pub(crate) fn end_after_loss(&mut self, now: Instant) -> Option<Instant> {
        if self.closed().is_some() {
            return None;
        }
        let is_settled = self.is_settled();
        match self.context.failures.drain(is_settled, now) {
            Drain::Idle => None,
            Drain::Until(due) => Some(due),
            Drain::Over(lost) => {
                self.end_all(&|operation| lost.error(operation));
                let reason = lost.error(self.whole()).to_string();
                self.context.dump_due.get_or_insert(reason);
                None
            }
        }
    }

    /// Stores the loss callback; see [`Engine::take_on_loss`]. Returns the one that is not called any more, to be dropped without
    /// the engine's lock: the one before, or this one if the communicator is closed.
    #[must_use]
    pub(crate) fn set_on_loss(&mut self, on_loss: OnLoss) -> Option<OnLoss> {
        if self.closed().is_some() { Some(on_loss) } else { self.context.failures.set_on_loss(Some(on_loss)) }
    }

    /// Takes the loss callback out, which the end of the communicator forgets.
    pub(crate) fn forget_on_loss(&mut self) -> Option<OnLoss> {
        self.context.failures.set_on_loss(None)
    }

    /// The loss callback and what to call it with, once a loss has ended everything; to be called without an engine lock.
    pub(crate) fn take_on_loss(&mut self) -> Option<(OnLoss, Error)> {
        let whole = self.whole();
        self.context.failures.take_on_loss(&whole)
    }

    // ---- the end ----

    /// How the others have to take it if this rank leaves now; nothing if all are at the end already, because of a loss.
    pub(crate) fn departure(&self, how: &str) -> Option<Departed> {
        let cause = self.context.failures.cause_to_leave(how, self.context.last_failure())?;
        let how = Departure::Left { called: self.collectives.current() };
        Some(Departed { rank: self.context.me, how, cause })
    }

    /// Tells the ranks that would see this one leave that it leaves because of a failure or a loss, and which, so that they
    /// do not blame it. They may not have noticed the loss themselves.
    pub(crate) fn announce_failure(&mut self) {
        let failures = &mut self.context.failures;
        let Some(failure) = failures.last_operation.take().or_else(|| self.loss()) else { return };
        let (lost, text) = (failure.lost_rank(), failure.to_string());
        let sequence = self.collectives.next_sequence();
        for peer in self.context.endpoints.known().to_vec() {
            if self.context.endpoints.is_connected(peer) {
                let failed = Failed::Collective { sequence, reason: Reason::Loss, lost };
                self.context.endpoints.send_failure(peer, failed, &text);
            }
        }
    }

    /// Ends every operation with the reason that the communicator is `how` ("aborted: …"), and drops every stream.
    pub(crate) fn close(&mut self, how: &str) {
        if self.closed().is_some() {
            return;
        }
        let failure = self.context.failures.last_operation.clone();
        // What is done for this rank may still be on its way from the device to other hosts, and where there was no room there
        // may be some now.
        self.progress_device();
        self.context.endpoints.write_all();
        self.progress_sends();
        // What has ended well meanwhile does not make up for the failure.
        if failure.is_some() {
            self.context.failures.last_operation = failure;
        }
        self.announce_failure();
        self.context.closed = Some(how.to_owned());
        let comm = self.name().to_owned();
        self.end_all(&|operation| Error::Closed { operation, comm: comm.clone(), how: how.to_owned() });
        self.windows.unexpose_all();
        self.relay.close();
        self.device_messages.close();
        self.device_accesses.close();
        // What this rank has said of failures still goes out, as far as it goes at once: others learn the cause from it.
        self.context.endpoints.write_all();
        self.progress_sends();
        self.context.endpoints.close(how);
        self.context.lost_found.clear();
    }

    /// Ends every operation with the error that `error` makes of its name.
    fn end_all(&mut self, error: &dyn Fn(String) -> Error) {
        let ctx = &mut self.context;
        self.collectives.end(ctx, error);
        self.messages.end(ctx, error);
        self.windows.end(ctx, error);
        ctx.end_deserted(error);
        self.relay.end(ctx);
        self.device_messages.end(ctx);
        self.device_accesses.end(ctx);
        self.buffered_sends.clear();
        ctx.rndv.clear(&mut ctx.endpoints);
        self.handle_losses();
    }
}
