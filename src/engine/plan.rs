//! A schedule made ready to run: who waits for whom turned around, messages numbered.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::algo::{self, Collective, Setting, Tuning};
use crate::engine::collective::Taken;
use crate::engine::memory::Spaces;
use crate::schedule::{Action, Schedule, Slice, StepId};
use crate::sync::Arc;
use crate::types::Rank;

/// A schedule with what the executor looks up per step.
#[derive(Debug)]
pub(crate) struct Plan {
    collective: Collective,
    pub(crate) schedule: Schedule,
    /// The number of the schedule's algorithm.
    pub(crate) algorithm: u8,
    /// For a send or receive: its position among the messages between the two ranks in that direction.
    pub(crate) message: Vec<u32>,
    /// Per step, how many others it waits for; the steps that wait for none.
    pub(crate) blocked: Vec<u32>,
    pub(crate) ready: Vec<StepId>,
    /// The steps that wait for each step.
    pub(crate) dependents: Vec<SmallVec<[StepId; 4]>>,
    /// Whether this rank does more with data than send it to one other, and copy it as `copy` does.
    is_busy: bool,
    /// Its first copy, which is none in place.
    copy: Option<(Slice, Slice)>,
}

impl Plan {
    fn new(collective: Collective, schedule: Schedule) -> Plan {
        let mut dependents = vec![SmallVec::new(); schedule.steps.len()];
        let mut sent: FxHashMap<Rank, u32> = FxHashMap::default();
        let mut received: FxHashMap<Rank, u32> = FxHashMap::default();
        let mut message = Vec::with_capacity(schedule.steps.len());
        for (id, step) in schedule.steps.iter().enumerate() {
            for &earlier in &step.after {
                dependents[earlier as usize].push(id as StepId);
            }
            let counter = match step.action {
                Action::Send { to, .. } => Some(sent.entry(to).or_default()),
                Action::Recv { from, .. } | Action::RecvReduce { from, .. } => Some(received.entry(from).or_default()),
                _ => None,
            };
            message.push(counter.map_or(0, |count| {
                *count += 1;
                *count - 1
            }));
        }
        let blocked: Vec<u32> = schedule.steps.iter().map(|step| step.after.len() as u32).collect();
        let ready = (0..blocked.len() as StepId).filter(|&step| blocked[step as usize] == 0).collect();
        let (algorithm, is_busy) = (algo::select::number(schedule.name), is_busy(&schedule));
        let copy = schedule.steps.iter().find_map(|step| match step.action {
            Action::Copy { from, into } if into.len > 0 => Some((from, into)),
            _ => None,
        });
        Plan { collective, schedule, algorithm, message, blocked, ready, dependents, is_busy, copy }
    }

    /// Whether a rank does more with data in these spaces than send it to one other.
    pub(crate) fn is_busy(&self, spaces: &Spaces) -> bool {
        self.is_busy || self.copy.is_some_and(|(from, into)| !spaces.begin_alike(from, into))
    }

    /// Sets, for a collective that has come so far, how many others each step still waits for, and which wait for none.
    pub(crate) fn after(&self, taken: Taken, blocked: &mut Vec<u32>, ready: &mut VecDeque<StepId>) {
        blocked.clone_from(&self.blocked);
        ready.clear();
        if taken.steps == 0 && !taken.one_more_begun {
            return ready.extend(&self.ready);
        }
        for &dependent in self.dependents[..taken.steps].iter().flatten() {
            blocked[dependent as usize] -= 1;
        }
        let next = taken.steps + usize::from(taken.one_more_begun);
        ready.extend((next..blocked.len()).filter(|&step| blocked[step] == 0).map(|step| step as StepId));
    }
}

/// Whether a rank that takes these steps receives or computes data, or sends it to more than one other.
fn is_busy(schedule: &Schedule) -> bool {
    let mut receiver = None;
    schedule.steps.iter().any(|step| match step.action {
        Action::Send { to, from } => from.len > 0 && *receiver.get_or_insert(to) != to,
        Action::Recv { into, .. }
        | Action::RecvReduce { into, .. }
        | Action::Reduce { into, .. }
        | Action::Fold { into, .. }
        | Action::Scale { slice: into, .. } => into.len > 0,
        Action::Copy { .. } => false,
    })
}

/// Plans of the shapes seen lately: training repeats the same few.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    /// Which algorithms were measured to be the fastest. The same on every rank.
    pub(crate) tuning: Tuning,
    plans: FxHashMap<Elements, FxHashMap<Collective, Arc<Plan>>>,
    /// What was asked for last is mostly asked for again, and comparing takes a quarter of finding.
    last: Option<(Elements, Arc<Plan>)>,
}

/// The size of an element, and whether the elements are scaled before and after.
type Elements = (usize, bool, bool);

impl PlanCache {
    /// The plan for `collective`, made now if it is new. `forced` names the algorithm where it has one for the shape.
    pub(crate) fn plan(&mut self, collective: &Collective, setting: Setting<'_>, forced: Option<&str>) -> Arc<Plan> {
        let elements = (setting.element, setting.premultiply, setting.average);
        if let Some((last, plan)) = &self.last
            && *last == elements
            && plan.collective == *collective
        {
            return Arc::clone(plan);
        }
        let plan = self.find_or_make(elements, collective, setting, forced);
        self.last = Some((elements, Arc::clone(&plan)));
        plan
    }

    fn find_or_make(
        &mut self,
        elements: Elements,
        collective: &Collective,
        setting: Setting<'_>,
        forced: Option<&str>,
    ) -> Arc<Plan> {
        let plans = self.plans.entry(elements).or_default();
        if let Some(plan) = plans.get(collective) {
            return Arc::clone(plan);
        }
        if plans.len() >= CAPACITY {
            plans.clear();
        }
        let tuned = self.tuning.algorithm(collective, &setting);
        let named = [forced, tuned].into_iter().flatten();
        let chosen = named.filter_map(|name| algo::plan_with(name, collective, setting)).next();
        let schedule = chosen.unwrap_or_else(|| algo::plan(collective, setting));
        let plan = Arc::new(Plan::new(collective.clone(), schedule));
        log::debug!("{collective:?} of elements of {} bytes runs by {}", setting.element, plan.schedule.name);
        plans.insert(collective.clone(), Arc::clone(&plan));
        plan
    }
}

const CAPACITY: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::memory::{Region, Words};
    use crate::topo::Topology;

    #[test]
    fn who_does_no_more_than_send_to_one_is_not_busy() {
        let (mut one, mut other) = (Words::new(vec![0; 8]), Words::new(vec![0; 8]));
        let (one, other) = (Region::of(&[one.buffer()]), Region::of(&[other.buffer()]));
        let (in_place, apart) = (Spaces::new(one.clone(), one.clone(), 8), Spaces::new(one, other, 8));
        let root = Rank(0);
        for (collective, me, size, spaces, is_busy) in [
            (Collective::Broadcast { count: 8, root }, 0, 2, &in_place, false),
            (Collective::Broadcast { count: 8, root }, 0, 2, &apart, true),
            (Collective::Broadcast { count: 8, root }, 0, 4, &in_place, true),
            (Collective::Gather { count: 4, root }, 1, 4, &apart, false),
            (Collective::Scatter { count: 4, root }, 0, 2, &apart, true),
            (Collective::AllReduce { count: 8 }, 0, 2, &in_place, true),
        ] {
            let topo = Topology::single_host(size);
            let setting = Setting { me: Rank(me), topo: &topo, element: 8, premultiply: false, average: false };
            let plan = PlanCache::default().plan(&collective, setting, None);
            assert_eq!(plan.is_busy(spaces), is_busy, "{collective:?}, rank {me} of {size}");
        }
    }
}
