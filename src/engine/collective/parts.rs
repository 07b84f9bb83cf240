//! Calls of two parts: an all_to_all of many ranks, which first learn whether all their blocks are equal, and then exchange them by what
//! is the fastest for the answer. Both parts are one collective, with one number and one signature.

use super::Collectives;
use crate::algo::{Collective, equality};
use crate::engine::context::OpContext;
use crate::engine::plan::Executed;
use crate::engine::question::Question;
use crate::engine::request::Request;

impl Collectives {
    /// Whether the ranks ask before they do this.
    #[inline]
    pub(crate) fn asks(&self, ctx: &OpContext, collective: &Collective) -> bool {
        equality::is_asked(collective, ctx.size(), self.algorithm.as_deref())
    }

    /// What a call begins with, of which the plan is taken, and what follows that.
    pub(super) fn first_part(
        &mut self,
        ctx: &OpContext,
        call: Request,
        taken: &mut Executed,
    ) -> (Request, Option<Box<Question>>) {
        if !self.asks(ctx, &call.collective) {
            return (call, None);
        }
        let (mut first, question) = Question::before(call);
        taken.plan = Some(self.prepare_question(ctx, &mut first));
        (first, Some(Box::new(question)))
    }

    /// The active collective has taken all its steps: it ends, or its second part begins.
    pub(super) fn end_part(&mut self, ctx: &mut OpContext) {
        let Some(question) = self.active.as_mut().and_then(|active| active.question.take()) else {
            return self.finish_active(ctx, Ok(()));
        };
        let mut request = question.answered();
        let plan = self.prepare(ctx, &mut request);
        debug_assert!(plan.words().next().is_none(), "words are counted as those of a first part");
        let Some(active) = &mut self.active else { return };
        plan.after(&Executed::default(), &mut active.blocked, &mut active.ready);
        (active.left, active.first_message) = (plan.own_steps(), SECOND_PART);
        (active.request, active.plan) = (request, plan);
    }
}

/// What messages of the second part are counted from: more than the first one has between two ranks.
const SECOND_PART: u32 = 1 << 31;
