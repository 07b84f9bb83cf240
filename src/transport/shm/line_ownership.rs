//! Whether the reader of a ring takes the cache lines that it has read for itself, decided for each ring from what copies cost.
//!
//! A core that writes to a line which another core has read must first have that core give the line up. On some processors
//! that takes several times as long as the copy itself. If the reader writes to each line that it has read, its core alone
//! holds the line, and the writer gets it with one transfer. But the reader's writes take time as well. Which of the two costs
//! less depends on the processor and on the distance of the cores, which a hypervisor changes while a job runs.
//!
//! So both sides measure some of their copies, and for each lap of the ring the writer tells the reader what its copies cost.
//! The reader tries both ways, keeps the cheaper one, and tries the other again from time to time. How the reader reads a lap
//! shows in what the writer pays in the next one. No other rank needs to know of it.

use crate::config::Switch;

/// Who holds a line that the reader has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lines {
    /// Both cores.
    Shared,
    /// The reader's core alone.
    Owned,
}

impl Lines {
    /// Its name in a dump.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Lines::Shared => "shared",
            Lines::Owned => "owned",
        }
    }

    fn other(self) -> Lines {
        match self {
            Lines::Shared => Lines::Owned,
            Lines::Owned => Lines::Shared,
        }
    }
}

/// What one side's copies in one lap cost, in picoseconds a byte.
pub(crate) type Cost = u32;

/// Decides, lap by lap, how a reader reads.
#[derive(Debug)]
pub(crate) struct Chooser {
    /// How this lap is read.
    lines: Lines,
    /// How the lap before was read.
    before: Option<Lines>,
    state: State,
    /// The way that was cheaper when both were tried, and how often in a row it has been.
    kept: Option<Lines>,
    confirmed: u32,
    /// What both sides paid for a byte when each way was measured last.
    costs: [Option<Cost>; 2],
}

/// The least cost of some laps. A pause of a thread makes a lap look dear, so the cheapest of a few counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Least {
    cost: Cost,
    laps: u32,
}

impl Least {
    const NONE: Least = Least { cost: Cost::MAX, laps: 0 };

    fn and(self, cost: Option<Cost>) -> Least {
        cost.map_or(self, |cost| Least { cost: self.cost.min(cost), laps: self.laps + 1 })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A setting says how.
    Fixed,
    /// One way is tried, for so many laps by now; then the other one, unless both have been.
    Trial { seen: Least, laps: u32, is_second: bool },
    /// The cheaper way is kept for so many laps more, or until its cost is another than `expected`.
    Kept { seen: Least, left: u32, expected: Cost },
}

impl State {
    fn trial(is_second: bool) -> State {
        State::Trial { seen: Least::NONE, laps: 0, is_second }
    }
}

impl Chooser {
    pub(crate) fn new(setting: Switch) -> Chooser {
        let (lines, state) = match setting {
            Switch::Auto => (Lines::Shared, State::trial(false)),
            Switch::Off => (Lines::Shared, State::Fixed),
            Switch::On => (Lines::Owned, State::Fixed),
        };
        Chooser { lines, before: None, state, kept: None, confirmed: 0, costs: [None; 2] }
    }

    /// How to read the lap that is being read.
    pub(crate) fn lines(&self) -> Lines {
        self.lines
    }

    /// What a byte cost both sides together when lines were shared, and when they were owned.
    pub(crate) fn costs(&self) -> [Option<Cost>; 2] {
        self.costs
    }

    /// Whether costs have to be measured.
    pub(crate) fn measures(&self) -> bool {
        self.state != State::Fixed
    }

    /// A lap has been read. `cost` is that of both sides, if both have measured it.
    pub(crate) fn lap_read(&mut self, cost: Option<Cost>) {
        // What the writer pays depends on how the lap before was read.
        let cost = cost.filter(|_| self.before == Some(self.lines));
        self.before = Some(self.lines);
        match self.state {
            State::Fixed => {}
            State::Trial { seen, laps, is_second } => self.tried(seen.and(cost), laps + 1, is_second),
            State::Kept { seen, left, expected } => {
                let mut seen = seen.and(cost);
                let mut has_changed = false;
                if seen.laps == MEASURES {
                    self.costs[self.lines as usize] = Some(seen.cost);
                    let (cost, expected) = (u64::from(seen.cost), u64::from(expected));
                    has_changed = cost * 2 > expected * 3 || cost * 3 < expected * 2;
                    seen = Least::NONE;
                }
                if has_changed {
                    self.confirmed = 0;
                }
                if has_changed || left == 0 {
                    self.lines = self.lines.other();
                    self.state = State::trial(false);
                } else {
                    self.state = State::Kept { seen, left: left - 1, expected };
                }
            }
        }
    }

    /// One way has been tried for `laps` laps, and is measured in some of them.
    fn tried(&mut self, seen: Least, laps: u32, is_second: bool) {
        let is_hopeless = seen.laps > 0
            && self
                .kept
                .filter(|kept| *kept != self.lines)
                .and_then(|kept| self.costs[kept as usize])
                .is_some_and(|kept| seen.cost / HOPELESS_FACTOR > kept);
        if seen.laps == MEASURES || is_hopeless {
            self.costs[self.lines as usize] = Some(seen.cost);
            if is_second {
                self.compare();
            } else {
                self.lines = self.lines.other();
                self.state = State::trial(true);
            }
        } else if laps == TRIAL_LAPS_MAX {
            // Too little is measured of what travels through this ring.
            self.keep(self.kept.unwrap_or(Lines::Shared), INTERVAL_MAX);
        } else {
            self.state = State::Trial { seen, laps, is_second };
        }
    }

    /// Keeps the cheaper way, now that both have been tried.
    fn compare(&mut self) {
        let [shared, owned] = self.costs.map(|cost| u64::from(cost.unwrap_or(Cost::MAX)));
        let cheaper = if shared <= owned { Lines::Shared } else { Lines::Owned };
        self.confirmed = if self.kept == Some(cheaper) { self.confirmed + 1 } else { 0 };
        // What a trial loses, in laps: those that are measured, one that follows another way, and one that is followed by it.
        let loss = u64::from(MEASURES + 2) * shared.abs_diff(owned) / shared.min(owned).max(1);
        let interval = (loss * LOSS_ONE_IN).clamp(u64::from(INTERVAL_MIN), u64::from(INTERVAL_MAX)) as u32;
        // Rarely at last, but not at once: both may have been measured badly.
        self.keep(cheaper, interval.min(INTERVAL_MIN.saturating_mul(1 << self.confirmed.min(16))));
    }

    fn keep(&mut self, lines: Lines, laps: u32) {
        (self.kept, self.lines) = (Some(lines), lines);
        let expected = self.costs[lines as usize].unwrap_or(Cost::MAX);
        self.state = State::Kept { seen: Least::NONE, left: laps, expected };
    }
}

/// How many laps are measured for a decision.
const MEASURES: u32 = 3;

/// How long a way is tried at most.
const TRIAL_LAPS_MAX: u32 = 24;

/// A way that costs so many times as much as the other one is not tried to the end.
const HOPELESS_FACTOR: Cost = 4;

/// What trials may lose: one in so many laps.
const LOSS_ONE_IN: u64 = 20;

/// The fewest and the most laps between trials.
const INTERVAL_MIN: u32 = 64;
const INTERVAL_MAX: u32 = 2048;

/// Measures some of one side's copies, a lap at a time.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    lap: u64,
    copies: u32,
    bytes: u64,
    picoseconds: u64,
}

impl Meter {
    /// Whether to measure the next copy, of `len` bytes: few are, since to read the clock takes as long as to copy a kilobyte.
    pub(crate) fn is_due(&mut self, len: usize) -> bool {
        if len < MEASURED_MIN {
            return false;
        }
        self.copies = self.copies.wrapping_add(1);
        self.copies.is_multiple_of(MEASURED_ONE_IN)
    }

    /// A measured copy has ended.
    pub(crate) fn record(&mut self, len: usize, took: std::time::Duration) {
        self.bytes += len as u64;
        self.picoseconds += u64::try_from(took.as_nanos()).unwrap_or(u64::MAX / 1000) * 1000;
    }

    /// This side has come to `position` in a ring of `capacity` bytes. Returns the last lap, when a new one begins, and its cost.
    pub(crate) fn advance(&mut self, position: u64, capacity: usize) -> Option<(u64, Option<Cost>)> {
        let lap = position / capacity as u64;
        if lap == self.lap {
            return None;
        }
        let last = std::mem::replace(&mut self.lap, lap);
        let cost = self.picoseconds.checked_div(self.bytes).map(|cost| cost.clamp(1, u64::from(Cost::MAX / 2)) as Cost);
        (self.bytes, self.picoseconds) = (0, 0);
        Some((last, cost))
    }
}

/// Shorter copies are not measured.
const MEASURED_MIN: usize = 4096;

/// One in so many copies is measured.
const MEASURED_ONE_IN: u32 = 4;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// What a byte costs the two sides of a link: the writer by how the lap before was read, the reader by how it reads.
    #[derive(Clone, Copy, Debug)]
    struct Link {
        writer: [Cost; 2],
        reader: [Cost; 2],
    }

    /// Two cores of an AMD EPYC that share a cache, and two that are far apart (measured, 2026-11-23).
    const NEAR: Link = Link { writer: [105, 23], reader: [23, 43] };
    const FAR: Link = Link { writer: [550, 90], reader: [45, 90] };
    /// A processor on which the writer loses nothing to a line that the reader has.
    const CHEAP: Link = Link { writer: [30, 30], reader: [25, 45] };
    const EQUAL: Link = Link { writer: [50, 30], reader: [30, 50] };

    impl Link {
        fn cost(self, before: Lines, now: Lines) -> Cost {
            self.writer[before as usize] + self.reader[now as usize]
        }

        fn best(self) -> Cost {
            self.cost(Lines::Shared, Lines::Shared).min(self.cost(Lines::Owned, Lines::Owned))
        }
    }

    /// Reads `laps` laps. Measures vary by a tenth, one in 16 is of a copy during which the thread was off its core, and one in
    /// 32 is missing.
    /// Returns how much longer than the best way it took.
    fn read(chooser: &mut Chooser, before: &mut Lines, link: Link, laps: u32, random: &mut StdRng) -> f64 {
        let (mut took, mut best) = (0.0, 0.0);
        for _ in 0..laps {
            let now = chooser.lines();
            let cost = link.cost(*before, now);
            (took, best) = (took + f64::from(cost), best + f64::from(link.best()));
            let seen =
                f64::from(cost) * random.random_range(0.95..1.05) * if random.random_ratio(1, 16) { 20.0 } else { 1.0 };
            chooser.lap_read(random.random_ratio(31, 32).then_some(seen as Cost));
            *before = now;
        }
        took / best
    }

    #[test]
    fn the_cheaper_way_is_found_in_16_laps() {
        for (link, best) in [(NEAR, Lines::Owned), (FAR, Lines::Owned), (CHEAP, Lines::Shared)] {
            let found = (0..64).filter(|seed| {
                let (mut chooser, mut before) = (Chooser::new(Switch::Auto), Lines::Shared);
                read(&mut chooser, &mut before, link, 16, &mut StdRng::seed_from_u64(*seed));
                chooser.lines() == best
            });
            // Three disturbed measures of three mislead it until the next trial.
            assert!(found.count() >= 63, "{link:?}");
        }
    }

    proptest! {
        #[test]
        fn no_link_costs_a_tenth_more_than_the_better_way(
            seed in any::<u64>(),
            writer in (20u32..200, 20u32..200),
            reader in (20u32..200, 20u32..200),
        ) {
            let any = Link { writer: [writer.0, writer.1], reader: [reader.0, reader.1] };
            for link in [NEAR, FAR, CHEAP, EQUAL, any] {
                let (mut chooser, mut before) = (Chooser::new(Switch::Auto), Lines::Shared);
                let mut random = StdRng::seed_from_u64(seed);
                read(&mut chooser, &mut before, link, 16, &mut random);
                let ratio = read(&mut chooser, &mut before, link, 20_000, &mut random);
                prop_assert!(ratio < 1.10, "{link:?} with seed {seed}: {ratio:.3}");
            }
        }

        #[test]
        fn a_link_whose_cores_move_costs_a_tenth_more_at_most(seed in any::<u64>()) {
            let (mut chooser, mut before) = (Chooser::new(Switch::Auto), Lines::Shared);
            let mut random = StdRng::seed_from_u64(seed);
            let (mut ratios, links) = (Vec::new(), [NEAR, FAR, CHEAP, NEAR, CHEAP, FAR, EQUAL]);
            for _ in 0..8 {
                for link in links {
                    ratios.push(read(&mut chooser, &mut before, link, 4096, &mut random));
                }
            }
            let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
            prop_assert!(mean < 1.10, "seed {seed}: {ratios:.3?}");
        }
    }

    #[test]
    fn a_setting_decides() {
        for (setting, lines) in [(Switch::On, Lines::Owned), (Switch::Off, Lines::Shared)] {
            let mut chooser = Chooser::new(setting);
            assert!(!chooser.measures());
            for cost in 1..1000 {
                chooser.lap_read(Some(cost));
                assert_eq!(chooser.lines(), lines);
            }
        }
    }

    #[test]
    fn a_link_that_is_never_measured_stays_as_it_is() {
        let mut chooser = Chooser::new(Switch::Auto);
        for _ in 0..200 {
            chooser.lap_read(None);
        }
        assert_eq!((chooser.lines(), chooser.costs()), (Lines::Shared, [None; 2]));
    }

    #[test]
    fn a_meter_tells_the_cost_of_each_lap() {
        let mut meter = Meter::default();
        assert!(!(0..100).any(|_| meter.is_due(MEASURED_MIN - 1)), "short copies");
        assert_eq!((0..100).filter(|_| meter.is_due(MEASURED_MIN)).count(), 100 / MEASURED_ONE_IN as usize);
        meter.record(8000, Duration::from_micros(1));
        meter.record(2000, Duration::from_nanos(250));
        assert_eq!(meter.advance(65535, 65536), None);
        assert_eq!(meter.advance(65536, 65536), Some((0, Some(125))));
        assert_eq!(meter.advance(3 * 65536, 65536), Some((1, None)), "nothing was measured");
    }
}
