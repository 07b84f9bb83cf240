//! A schedule made ready to run: who waits for whom turned around, messages numbered.

use std::collections::HashMap;

use smallvec::SmallVec;

use crate::algo::{self, Collective, Setting, Tuning};
use crate::schedule::{Action, Schedule, StepId};
use crate::sync::Arc;
use crate::types::Rank;

/// A schedule with what the executor looks up per step.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) schedule: Schedule,
    /// For a send or receive: its position among the messages between the two ranks in that direction.
    pub(crate) message: Vec<u32>,
    /// The steps that wait for each step.
    pub(crate) dependents: Vec<SmallVec<[StepId; 4]>>,
}

impl Plan {
    fn new(schedule: Schedule) -> Plan {
        let mut dependents = vec![SmallVec::new(); schedule.steps.len()];
        let mut sent: HashMap<Rank, u32> = HashMap::new();
        let mut received: HashMap<Rank, u32> = HashMap::new();
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
        Plan { schedule, message, dependents }
    }
}

/// Plans of the shapes seen lately: training repeats the same few.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    /// Which algorithms were measured to be the fastest. The same on every rank.
    pub(crate) tuning: Tuning,
    plans: HashMap<(Collective, usize, bool), Arc<Plan>>,
}

impl PlanCache {
    /// The plan for `collective`, made now if it is new. `forced` names the algorithm where it has one for the shape.
    pub(crate) fn plan(&mut self, collective: Collective, setting: Setting<'_>, forced: Option<&str>) -> Arc<Plan> {
        if self.plans.len() >= CAPACITY {
            self.plans.clear();
        }
        let key = (collective, setting.element, setting.premultiply);
        if let Some(plan) = self.plans.get(&key) {
            return Arc::clone(plan);
        }
        let tuned = self.tuning.algorithm(&key.0, &setting);
        let named = [forced, tuned].into_iter().flatten();
        let chosen = named.filter_map(|name| algo::plan_with(name, &key.0, setting)).next();
        let plan = Arc::new(Plan::new(chosen.unwrap_or_else(|| algo::plan(&key.0, setting))));
        log::debug!("{:?} of elements of {} bytes runs by {}", key.0, setting.element, plan.schedule.name);
        self.plans.insert(key, Arc::clone(&plan));
        plan
    }
}

const CAPACITY: usize = 256;
