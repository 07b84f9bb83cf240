//! A schedule ready to run: each step's dependents, and each message's index.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::algo::{self, Collective, Scaling, Setting, Tuning};
use crate::engine::region::Spaces;
use crate::schedule::{Action, Schedule, Slice, Step, StepId};
use crate::sync::Arc;
use crate::types::Rank;

/// Steps that wait, or are waited for.
type Waiting = SmallVec<[StepId; 4]>;

/// A schedule with what the executor looks up per step.
#[derive(Debug)]
pub(crate) struct Plan {
    collective: Collective,
    pub(crate) schedule: Schedule,
    /// The number of the schedule's algorithm.
    pub(crate) algorithm: u8,
    /// For a send or receive: its position among the messages between the two ranks in that direction.
    pub(crate) message: Vec<u32>,
    /// Per step, how many others it waits for; the [own](Plan::own_steps) steps that wait for none.
    pub(crate) blocked: Vec<u32>,
    pub(crate) ready: Vec<StepId>,
    /// The steps that wait for each step.
    pub(crate) dependents: Vec<Waiting>,
    /// Whether this rank does more with data than send it to one other, and copy it as `copy` does.
    is_busy: bool,
    /// Its first copy, which is none in place.
    copy: Option<(Slice, Slice)>,
}

/// How far a collective has come before its state is kept.
#[derive(Debug, Default)]
pub(crate) struct Executed {
    /// The first so many steps of the schedule are done.
    pub(crate) steps: usize,
    /// The next one has begun.
    pub(crate) next_has_begun: bool,
    /// The plan, for which the request has been prepared; None if nothing was tried.
    pub(crate) plan: Option<Arc<Plan>>,
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
        let own = schedule.steps.len() - schedule.words.1;
        let ready = (0..own as StepId).filter(|&step| blocked[step as usize] == 0).collect();
        let (algorithm, is_busy) = (algo::select::number(schedule.name), is_busy(&schedule));
        let copy = schedule.steps.iter().flat_map(|step| step.action.copies()).find(|(_, into)| into.len > 0);
        Plan { collective, schedule, algorithm, message, blocked, ready, dependents, is_busy, copy }
    }

    /// The plan by this algorithm; none if that does not do the collective.
    pub(crate) fn by(name: &str, collective: &Collective, setting: Setting<'_>) -> Option<Plan> {
        algo::plan_with(name, collective, setting).map(|schedule| Plan::new(collective.clone(), schedule))
    }

    /// How many steps a rank takes before it ends the collective: all but those of [`words`](Plan::words).
    #[inline]
    pub(crate) fn own_steps(&self) -> usize {
        self.schedule.steps.len() - self.schedule.words.1
    }

    /// Whether a step only tells another rank what this one has called. It is done once it is queued, also where the other one does
    /// not take it: that rank may be ahead, at work on something else, or gone.
    #[inline]
    pub(crate) fn only_tells(&self, step: usize) -> bool {
        step < self.schedule.words.0
    }

    /// The last messages, which only tell what their senders have called: from whom, and the place among those from there.
    pub(crate) fn words(&self) -> impl Iterator<Item = (Rank, u32)> {
        let own = self.own_steps();
        self.schedule.steps[own..].iter().zip(&self.message[own..]).filter_map(|(step, index)| match step.action {
            Action::Recv { from, .. } => Some((from, *index)),
            _ => None,
        })
    }

    /// Whether a rank does more with data in these spaces than send it to one other.
    pub(crate) fn is_busy(&self, spaces: &Spaces) -> bool {
        self.is_busy || self.copy.is_some_and(|(from, into)| !spaces.begin_alike(from, into))
    }

    /// About how much memory it takes.
    fn bytes(&self) -> usize {
        let steps =
            self.schedule.steps.capacity() * size_of::<Step>() + self.dependents.capacity() * size_of::<Waiting>();
        let numbers = self.message.capacity() + self.blocked.capacity() + self.ready.capacity();
        let lists = self.schedule.steps.iter().map(|step| &step.after).chain(&self.dependents);
        let spilled: usize = lists.filter(|list| list.spilled()).map(Waiting::capacity).sum();
        // The collective is here and in the cache.
        size_of::<Plan>() + steps + (numbers + spilled) * size_of::<StepId>() + 2 * self.collective.bytes()
    }

    /// Sets, for a collective that has come so far, how many others each step still waits for, and which wait for none.
    pub(crate) fn after(&self, taken: &Executed, blocked: &mut Vec<u32>, ready: &mut VecDeque<StepId>) {
        blocked.clone_from(&self.blocked);
        ready.clear();
        if taken.steps == 0 && !taken.next_has_begun {
            return ready.extend(&self.ready);
        }
        for &dependent in self.dependents[..taken.steps].iter().flatten() {
            blocked[dependent as usize] -= 1;
        }
        let next = taken.steps + usize::from(taken.next_has_begun);
        ready.extend((next..self.own_steps()).filter(|&step| blocked[step] == 0).map(|step| step as StepId));
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
        | Action::Scale { slice: into }
        | Action::Average { into, .. } => into.len > 0,
        Action::Copy { .. } | Action::CopyBlocks { .. } | Action::Await { .. } => false,
    })
}

/// Plans of the shapes seen lately: training repeats the same few.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    /// Which algorithms were measured to be the fastest. The same on every rank.
    pub(crate) tuning: Tuning,
    /// What has been asked for since it was empty the last time.
    recent: Generation,
    /// What had been asked for before, and is forgotten when `recent` is full again.
    older: Generation,
    /// What was asked for last is mostly asked for again, and comparing takes a quarter of finding.
    last: Option<(Elements, Arc<Plan>)>,
}

/// The size of an element, and what is multiplied or divided.
type Elements = (usize, Scaling);

/// Plans, and how many bytes they have together.
#[derive(Debug, Default)]
struct Generation {
    plans: FxHashMap<Elements, FxHashMap<Collective, Arc<Plan>>>,
    bytes: usize,
}

impl Generation {
    fn get(&self, elements: Elements, collective: &Collective) -> Option<&Arc<Plan>> {
        self.plans.get(&elements)?.get(collective)
    }

    fn insert(&mut self, elements: Elements, plan: Arc<Plan>) {
        self.bytes += plan.bytes();
        self.plans.entry(elements).or_default().insert(plan.collective.clone(), plan);
    }
}

impl PlanCache {
    /// The plan for `collective`, made now if it is new. `forced` names the algorithm where it has one for the shape.
    pub(crate) fn plan(&mut self, collective: &Collective, setting: Setting<'_>, forced: Option<&str>) -> Arc<Plan> {
        let elements = (setting.element, setting.scaling);
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
        if let Some(plan) = self.recent.get(elements, collective) {
            return Arc::clone(plan);
        }
        let plan = match self.older.get(elements, collective) {
            Some(plan) => Arc::clone(plan),
            None => Arc::new(self.make(collective, setting, forced)),
        };
        self.keep(elements, &plan);
        plan
    }

    fn make(&self, collective: &Collective, setting: Setting<'_>, forced: Option<&str>) -> Plan {
        let tuned = self.tuning.algorithm(collective, &setting);
        let named = [forced, tuned].into_iter().flatten();
        let chosen = named.filter_map(|name| algo::plan_with(name, collective, setting)).next();
        let schedule = chosen.unwrap_or_else(|| algo::plan(collective, setting));
        log::debug!("{collective:?} of elements of {} bytes runs by {}", setting.element, schedule.name);
        Plan::new(collective.clone(), schedule)
    }

    /// Keeps a plan that was asked for, and forgets what has not been for long. One too large to be kept beside others is
    /// only the last.
    fn keep(&mut self, elements: Elements, plan: &Arc<Plan>) {
        let bytes = plan.bytes();
        if bytes > GENERATION_BYTES {
            return;
        }
        if self.recent.bytes + bytes > GENERATION_BYTES {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(elements, Arc::clone(plan));
    }
}

/// How much memory the plans have that are kept of one generation.
const GENERATION_BYTES: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::{Chunking, ScratchLimit};
    use crate::counts::Counts;
    use crate::engine::region::{Region, Words};
    use crate::topo::Topology;

    #[test]
    fn a_rank_that_only_sends_to_one_is_not_busy() {
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
            let setting = Setting {
                me: Rank(me),
                topo: &topo,
                element: 8,
                scaling: Scaling::Nothing,
                chunking: Chunking::Chunks,
                scratch: ScratchLimit::UNBOUNDED,
            };
            let plan = PlanCache::default().plan(&collective, setting, None);
            assert_eq!(plan.is_busy(spaces), is_busy, "{collective:?}, rank {me} of {size}");
        }
    }

    #[test]
    fn plans_are_kept_up_to_so_many_bytes() {
        let topo = Topology::single_host(64);
        let setting = Setting {
            me: Rank(3),
            topo: &topo,
            element: 4,
            scaling: Scaling::Nothing,
            chunking: Chunking::Chunks,
            scratch: ScratchLimit::UNBOUNDED,
        };
        let mut cache = PlanCache::default();
        let splits = |call: usize| {
            let counts: Counts = (0..64).map(|rank| 1000 + (rank * call) % 7 + call).collect();
            Collective::AllToAll { send: counts.clone(), recv: counts }
        };
        let often = Collective::AllReduce { count: 1 << 20 };
        let kept = cache.plan(&often, setting, None);
        let mut most = 0;
        for call in 1..1000 {
            cache.plan(&splits(call), setting, None);
            let plans = [&cache.recent, &cache.older].into_iter().flat_map(|one| one.plans.values());
            let bytes: usize = plans.flat_map(|plans| plans.values()).map(|plan| plan.bytes()).sum();
            most = most.max(bytes);
            assert!(bytes <= 2 * GENERATION_BYTES, "{bytes} bytes after {call} calls");
            assert!(Arc::ptr_eq(&cache.plan(&often, setting, None), &kept), "what is asked for again and again stays");
        }
        assert!(most > GENERATION_BYTES, "{most} bytes are not the limit");
    }

    #[test]
    fn a_plan_too_large_to_be_kept_puts_no_other_out() {
        let topo = Topology::single_host(8);
        let setting = Setting {
            me: Rank(3),
            topo: &topo,
            element: 1,
            scaling: Scaling::Nothing,
            chunking: Chunking::Chunks,
            scratch: ScratchLimit::UNBOUNDED,
        };
        let mut cache = PlanCache::default();
        let small = cache.plan(&Collective::Barrier, setting, None);
        let large = Plan {
            ready: Vec::with_capacity(GENERATION_BYTES),
            ..Plan::new(Collective::Barrier, small.schedule.clone())
        };
        cache.keep((2, Scaling::Nothing), &Arc::new(large));
        assert!(Arc::ptr_eq(&cache.plan(&Collective::Barrier, setting, None), &small));
        assert!(cache.recent.bytes <= GENERATION_BYTES);
    }
}
