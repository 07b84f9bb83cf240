//! The interfaces to the network: one a rank for messages within its host, one a host for all its ranks' messages to others.
//!
//! An interface sends one message at a time and receives one at a time, both at once if need be.

use super::model::{Link, Model};
use super::time::Time;
use super::world::World;

/// Until when each interface is taken in one direction.
#[derive(Debug)]
pub(super) struct Interfaces<'a> {
    world: &'a World,
    model: &'a Model,
    of_ranks: Vec<Time>,
    of_hosts: Vec<Time>,
}

impl<'a> Interfaces<'a> {
    pub(super) fn new(world: &'a World, model: &'a Model) -> Self {
        Interfaces {
            world,
            model,
            of_ranks: vec![Time::ZERO; world.ranks()],
            of_hosts: vec![Time::ZERO; world.hosts()],
        }
    }

    /// The parameters of messages between two ranks.
    ///
    /// # Panics
    /// When they are on different hosts and the model has no network.
    pub(super) fn link(&self, one: u32, other: u32) -> &'a Link {
        if self.is_within_host(one, other) {
            return &self.model.within_host;
        }
        self.model.between_hosts.as_ref().expect("a model of several hosts has a network")
    }

    /// Passes a message between `rank` and its `peer` through the interface of `rank`, from `now` on at the earliest: when the
    /// first byte passes, and when the last one has.
    pub(super) fn pass(&mut self, rank: u32, peer: u32, bytes: u64, now: Time) -> (Time, Time) {
        let link = self.link(rank, peer);
        let free = if self.is_within_host(rank, peer) {
            &mut self.of_ranks[rank as usize]
        } else {
            &mut self.of_hosts[self.world.host_of(rank)]
        };
        let begin = now.max(*free);
        let end = begin.plus(link.bytes(bytes));
        *free = end.plus(link.gap);
        (begin, end)
    }

    fn is_within_host(&self, one: u32, other: u32) -> bool {
        self.world.host_of(one) == self.world.host_of(other)
    }
}
