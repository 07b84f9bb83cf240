//! Runs the schedules of all ranks, event by event.
//!
//! A rank's processor takes one step at a time: of those whose predecessors are done, the one that has waited longest, and of
//! these the first in the schedule. A receive also waits for its message. A send keeps the processor for o; then the message
//! goes through the sender's interface, takes L to the receiver's, goes through that, and its receive keeps the receiver's
//! processor for o. A byte is not sent before the interface has let the bytes before it pass, and what a receiver combines it
//! combines after that. A send is done when its last byte has left. A long one waits until its receiver has a buffer, and has said so,
//! which takes o + L + o but keeps no processor: S of LogGPS (Ino, Fujimoto, Hagihara, "LogGPS: a parallel computational model for
//! synchronization analysis", 2001).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::interfaces::Interfaces;
use super::model::Model;
use super::program::{Kind, Program, StepNumber};
use super::time::Time;
use super::world::World;

/// What happens. Events of one time are taken in the order of the variants, then of ranks and steps, so that nothing depends on
/// the order in which they were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// A late rank begins.
    Begin,
    /// The receiver of a send has said that it has a buffer.
    Asked,
    /// The last byte of a send has left.
    Sent,
    /// The processor is done with a step.
    Done,
    /// The first byte of a receive's message is at the receiver's interface.
    Arriving,
    /// The last byte is through.
    Arrived,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: Time,
    what: What,
    /// Whose step it is.
    rank: u32,
    step: StepNumber,
}

struct Run<'a> {
    program: &'a Program<'a>,
    model: &'a Model,
    now: Time,
    events: BinaryHeap<Reverse<Event>>,
    /// How many steps, and how many messages, each step still waits for.
    waits_for: Vec<u32>,
    /// For each rank, the steps that its processor may take, and since when.
    ready: Vec<BinaryHeap<Reverse<(Time, StepNumber)>>>,
    is_busy: Vec<bool>,
    /// For each receive, the send that waits for it, or `NONE`; empty where no message is long.
    waiting: Vec<StepNumber>,
    /// Ranks that may have something to take.
    idle: Vec<u32>,
    sending: Interfaces<'a>,
    receiving: Interfaces<'a>,
    /// When each rank was done with its last step so far.
    ended: Vec<Time>,
    steps_done: usize,
}

/// Runs the program; the ranks in `late` begin so much later than the others. Returns when each rank ends.
///
/// # Panics
/// When the schedules do not fit together.
pub(super) fn run(program: &Program<'_>, world: &World, model: &Model, late: &[(u32, Time)]) -> Vec<Time> {
    let mut waits_for = program.waits_for.clone();
    for (count, step) in waits_for.iter_mut().zip(&program.steps) {
        *count += u32::from(matches!(step.kind, Kind::Receive | Kind::ReceiveReduce));
    }
    let ranks = world.ranks();
    let sending = Interfaces::new(world, model);
    let waiting = waiting(program, &sending, &mut waits_for);
    let mut run = Run {
        program,
        model,
        now: Time::ZERO,
        events: BinaryHeap::new(),
        waits_for,
        ready: (0..ranks).map(|_| BinaryHeap::new()).collect(),
        is_busy: vec![false; ranks],
        waiting,
        idle: Vec::new(),
        sending,
        receiving: Interfaces::new(world, model),
        ended: vec![Time::ZERO; ranks],
        steps_done: 0,
    };
    run.begin(late);
    run.take_steps();
    while let Some(Reverse(event)) = run.events.pop() {
        run.now = event.at;
        run.handle(event);
        // All that happens at one time is known before processors choose.
        if run.events.peek().is_none_or(|Reverse(next)| next.at > run.now) {
            run.take_steps();
        }
    }
    assert_eq!(run.steps_done, program.steps.len(), "schedules that fit together end");
    run.ended
}

/// The sends of long messages, each at the receive that it waits for, and counts that in `waits_for`.
fn waiting(program: &Program<'_>, links: &Interfaces<'_>, waits_for: &mut [u32]) -> Vec<StepNumber> {
    let mut waiting = Vec::new();
    for rank in 0..program.sent.len() as u32 {
        for number in program.of_rank(rank) {
            let step = &program.steps[number as usize];
            if step.kind == Kind::Send && step.may_wait && step.bytes > links.link(rank, step.peer).eager_bytes {
                waiting.resize(program.steps.len(), NONE);
                waiting[program.receive_of(rank, step) as usize] = number;
                waits_for[number as usize] += 1;
            }
        }
    }
    waiting
}

const NONE: StepNumber = StepNumber::MAX;

impl Run<'_> {
    fn begin(&mut self, late: &[(u32, Time)]) {
        for &(rank, at) in late {
            self.is_busy[rank as usize] = true;
            self.events.push(Reverse(Event { at, what: What::Begin, rank, step: 0 }));
        }
        for rank in 0..self.ready.len() as u32 {
            for step in self.program.of_rank(rank) {
                if self.waits_for[step as usize] == 0 {
                    self.offer(rank, step);
                }
            }
            if !self.is_busy[rank as usize] {
                self.ask_first(rank);
            }
        }
    }

    /// A rank begins: it has buffers for what waits for nothing else.
    fn ask_first(&mut self, rank: u32) {
        for step in self.program.of_rank(rank) {
            if self.waits_for[step as usize] == 1 {
                self.ask(rank, step);
            }
        }
    }

    /// A step waits for one thing more. If it is a long message, its sender hears of that.
    fn ask(&mut self, rank: u32, step: StepNumber) {
        let Some(send) = self.waiting.get(step as usize).copied().filter(|send| *send != NONE) else { return };
        let peer = self.program.steps[step as usize].peer;
        let at = self.now.plus(self.sending.link(rank, peer).notice());
        self.events.push(Reverse(Event { at, what: What::Asked, rank: peer, step: send }));
    }

    fn handle(&mut self, event: Event) {
        let Event { what, rank, step, .. } = event;
        match what {
            What::Begin => {
                self.rest(rank);
                self.ask_first(rank);
            }
            What::Asked => self.wait_for_less(rank, step),
            What::Sent => self.complete(rank, step),
            What::Done => {
                self.rest(rank);
                match self.program.steps[step as usize].kind {
                    Kind::Send => self.send(rank, step),
                    _ => self.complete(rank, step),
                }
            }
            What::Arriving => {
                let receive = self.program.steps[step as usize];
                let (_, at) = self.receiving.pass(rank, receive.peer, receive.bytes, self.now);
                self.events.push(Reverse(Event { at, what: What::Arrived, rank, step }));
            }
            What::Arrived => self.wait_for_less(rank, step),
        }
    }

    /// The message of a send goes to its interface.
    fn send(&mut self, rank: u32, step: StepNumber) {
        let send = &self.program.steps[step as usize];
        let (begin, end) = self.sending.pass(rank, send.peer, send.bytes, self.now);
        let latency = self.sending.link(rank, send.peer).latency;
        let (receive, peer) = (self.program.receive_of(rank, send), send.peer);
        self.events.push(Reverse(Event { at: end, what: What::Sent, rank, step }));
        let at = begin.plus(latency);
        self.events.push(Reverse(Event { at, what: What::Arriving, rank: peer, step: receive }));
    }

    fn complete(&mut self, rank: u32, step: StepNumber) {
        self.steps_done += 1;
        self.ended[rank as usize] = self.now;
        let program = self.program;
        for &dependent in program.dependents(step) {
            self.wait_for_less(rank, dependent);
        }
    }

    fn wait_for_less(&mut self, rank: u32, step: StepNumber) {
        let count = &mut self.waits_for[step as usize];
        *count -= 1;
        match *count {
            0 => self.offer(rank, step),
            1 => self.ask(rank, step),
            _ => {}
        }
    }

    fn offer(&mut self, rank: u32, step: StepNumber) {
        self.ready[rank as usize].push(Reverse((self.now, step)));
        self.idle.push(rank);
    }

    fn rest(&mut self, rank: u32) {
        self.is_busy[rank as usize] = false;
        self.idle.push(rank);
    }

    /// Every processor that does nothing takes a step, if it has one.
    fn take_steps(&mut self) {
        while let Some(rank) = self.idle.pop() {
            if self.is_busy[rank as usize] {
                continue;
            }
            let Some(Reverse((_, step))) = self.ready[rank as usize].pop() else { continue };
            self.is_busy[rank as usize] = true;
            let at = self.now.plus(self.processor_time(rank, step));
            self.events.push(Reverse(Event { at, what: What::Done, rank, step }));
        }
    }

    fn processor_time(&self, rank: u32, step: StepNumber) -> Time {
        let step = &self.program.steps[step as usize];
        let overhead = || self.sending.link(rank, step.peer).overhead;
        match step.kind {
            Kind::Send | Kind::Receive => overhead(),
            Kind::ReceiveReduce => overhead().plus(self.model.reduce_per_byte.times(step.bytes)),
            Kind::Reduce => self.model.reduce_per_byte.times(step.bytes),
            Kind::Copy => self.model.copy_per_byte.times(step.bytes),
            Kind::Work => Time::femtoseconds(step.bytes),
            Kind::Nothing => Time::ZERO,
        }
    }
}
