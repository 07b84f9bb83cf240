//! Calls of two parts: an all_to_all of many ranks, which first [ask](equality) whether all their blocks are equal, and then exchange
//! them by what is the fastest for the answer. Both parts are one collective, with one number and one signature.

use super::Collectives;
use crate::algo::{Collective, equality, select};
use crate::engine::context::OpContext;
use crate::engine::plan::Executed;
use crate::engine::region::{Region, Spaces, Words};
use crate::engine::request::Request;
use crate::types::{DType, ReduceOp};

/// What is exchanged once the ranks have answered.
pub(super) struct Question {
    call: Request,
    words: Words,
}

impl Question {
    /// The first part of a call: the least of what all ranks say; and what comes after it.
    fn before(mut call: Request) -> (Request, Question) {
        call.signature.algorithm = select::ASKED;
        let mut words = Words::new(equality::words(&call.collective).to_vec());
        let said = Region::of(&[words.buffer()]);
        let first = Request {
            collective: Collective::AllReduce { count: words.get().len() },
            signature: call.signature,
            reduce: Some(ReduceOp::Min),
            dtype: DType::U64,
            spaces: Spaces::new(said.clone(), said, DType::U64.size()),
            timeout: call.timeout,
        };
        (first, Question { call, words })
    }

    /// The second part, once the first has ended.
    fn answered(self) -> Request {
        let Question { mut call, words } = self;
        let least = [words.get()[0], words.get()[1]];
        call.collective = equality::answered(call.collective, least);
        call
    }
}

impl Collectives {
    /// Whether the ranks ask before they do this.
    #[inline]
    pub(crate) fn asks(&self, ctx: &OpContext, collective: &Collective) -> bool {
        equality::is_asked(collective, ctx.size(), self.algorithm.as_deref())
    }

    /// What a call begins with, and what follows that.
    pub(super) fn first_part(&self, ctx: &OpContext, call: Request) -> (Request, Option<Box<Question>>) {
        if !self.asks(ctx, &call.collective) {
            return (call, None);
        }
        let (first, question) = Question::before(call);
        (first, Some(Box::new(question)))
    }

    /// The active collective has taken all its steps: it ends, or its second part begins.
    pub(super) fn end_part(&mut self, ctx: &mut OpContext) {
        let Some(question) = self.active.as_mut().and_then(|active| active.question.take()) else {
            return self.finish_active(ctx, Ok(()));
        };
        let mut request = question.answered();
        let plan = self.prepare(ctx, &mut request);
        let Some(active) = &mut self.active else { return };
        plan.after(&Executed::default(), &mut active.blocked, &mut active.ready);
        (active.left, active.first_message) = (plan.own_steps(), SECOND_PART);
        (active.request, active.plan) = (request, plan);
    }
}

/// What messages of the second part are counted from: more than the first one has between two ranks.
const SECOND_PART: u32 = 1 << 31;
