//! What a collective needs before it starts: its plan, and memory to work in.

use super::{Collectives, scaling};
use crate::algo::{Chunking, Scaling, Setting};
use crate::engine::context::OpContext;
use crate::engine::plan::Plan;
use crate::engine::request::Request;
use crate::sync::Arc;

impl Collectives {
    /// The collective's plan, which becomes a part of what the ranks must agree on, and its scratch memory.
    pub(crate) fn prepare(&mut self, ctx: &OpContext, request: &mut Request) -> Arc<Plan> {
        let setting = self.setting(ctx, request);
        if let Scaling::Sum { bytes } = setting.scaling {
            request.spaces.sum = bytes;
        }
        let plan = self.plans.plan(&request.collective, setting, self.algorithm.as_deref());
        self.lend(request, &plan);
        plan
    }

    /// The plan of the question before an all_to_all, made at the first one. No setting decides on it: it has to take few messages.
    pub(super) fn prepare_question(&mut self, ctx: &OpContext, request: &mut Request) -> Arc<Plan> {
        let setting = self.setting(ctx, request);
        let make = || {
            Arc::new(Plan::by("recursive_doubling", &request.collective, setting).expect("it does every all_reduce"))
        };
        let plan = Arc::clone(self.question.get_or_insert_with(make));
        self.lend(request, &plan);
        plan
    }

    fn setting<'a>(&self, ctx: &'a OpContext, request: &Request) -> Setting<'a> {
        Setting {
            me: ctx.me,
            topo: &ctx.topo,
            element: request.dtype.size(),
            scaling: scaling(request.reduce, request.dtype, ctx.size()),
            chunking: Chunking::Chunks,
            scratch: self.scratch_limit,
        }
    }

    fn lend(&mut self, request: &mut Request, plan: &Plan) {
        request.signature.run_by(plan.algorithm);
        let spaces = &mut request.spaces;
        let (scratch, sums) = ((plan.schedule.scratch, spaces.element), (plan.schedule.sums, spaces.sum));
        if scratch.0 > 0 || sums.0 > 0 {
            (spaces.scratch, spaces.sums) = self.scratch.regions(scratch, sums);
        }
    }
}
