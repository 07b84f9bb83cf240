use super::*;
use crate::algo::group::{Group, pieces};
use crate::algo::{ScratchLimit, binomial, halving_doubling, ring};
use crate::schedule::{Action, Builder, Slice, Space};

/// Parameters by which a rank that has sent is free again before it has something else to send.
const WITHIN: Link = Link {
    latency: Time::femtoseconds(700_000_007),
    overhead: Time::femtoseconds(200_000_003),
    gap: Time::femtoseconds(1009),
    gap_per_byte: Time::femtoseconds(90_001),
    eager_bytes: u64::MAX,
};
const BETWEEN: Link = Link {
    latency: Time::femtoseconds(3_000_000_019),
    overhead: Time::femtoseconds(900_000_011),
    gap: Time::femtoseconds(2003),
    gap_per_byte: Time::femtoseconds(350_003),
    eager_bytes: u64::MAX,
};
const MODEL: Model = Model {
    within_host: WITHIN,
    between_hosts: Some(BETWEEN),
    reduce_per_byte: Time::femtoseconds(123_457),
    copy_per_byte: Time::ZERO,
    start: None,
};

fn schedule_of(write: impl FnOnce(&mut Builder)) -> Schedule {
    let mut builder = Builder::new("test");
    write(&mut builder);
    builder.finish()
}

/// When each rank ends. Elements have 4 bytes.
fn ends(world: &World, late: &[(u32, Time)], plan: impl Fn(Rank) -> Schedule) -> Vec<Time> {
    ends_in(&MODEL, world, late, plan)
}

fn ends_in(model: &Model, world: &World, late: &[(u32, Time)], plan: impl Fn(Rank) -> Schedule) -> Vec<Time> {
    run::run(&program(world, Placement::Apart, plan).expect("few steps"), world, model, late)
}

fn all(world: &World, me: Rank) -> Group {
    Group::world(world.ranks(), me)
}

/// From the beginning of a send to the end of its receive: o + (k − 1) G + L + o.
fn message(link: &Link, bytes: u64) -> Time {
    link.overhead.plus(link.bytes(bytes)).plus(link.latency).plus(link.overhead)
}

fn output(len: usize) -> Slice {
    Slice::new(Space::Output, 0, len)
}

const SPACING_IS_SHORT: &str = "the second send begins before the first receiver passes on";

#[test]
fn a_message_takes_two_overheads_its_bytes_and_the_latency() {
    for (world, link) in [(World::new(2, 1).unwrap(), &WITHIN), (World::new(1, 2).unwrap(), &BETWEEN)] {
        for len in [0, 1, 1000] {
            let found = ends(&world, &[], |me| {
                schedule_of(|builder| {
                    _ = match me {
                        Rank(0) => builder.push(Action::Send { to: Rank(1), from: output(len) }),
                        _ => builder.push(Action::Recv { from: Rank(0), into: output(len) }),
                    };
                })
            });
            assert_eq!(found[1], message(link, 4 * len as u64));
            assert_eq!(found[0], link.overhead.plus(link.bytes(4 * len as u64)), "the last byte has left");
        }
    }
}

#[test]
fn a_long_message_waits_until_its_receiver_has_a_buffer() {
    let model = Model { between_hosts: Some(Link { eager_bytes: 8000, ..BETWEEN }), ..MODEL };
    let world = World::new(1, 2).unwrap();
    let (late, busy) = (Time::femtoseconds(1 << 42), Action::Scale { slice: output(100_000) });
    let scales = MODEL.reduce_per_byte.times(400_000);
    for (len, is_long) in [(2000, false), (2001, true)] {
        let (sent, notice) = (message(&BETWEEN, 4 * len as u64), if is_long { BETWEEN.notice() } else { Time::ZERO });
        let plan = |me, is_busy| {
            schedule_of(|builder| match me {
                Rank(0) => _ = builder.push(Action::Send { to: Rank(1), from: output(len) }),
                _ if is_busy => {
                    let scaled = builder.push(busy);
                    builder.push_after(scaled, Action::Recv { from: Rank(0), into: output(len) });
                }
                _ => _ = builder.push(Action::Recv { from: Rank(0), into: output(len) }),
            })
        };
        assert_eq!(ends_in(&model, &world, &[], |me| plan(me, false))[1], notice.plus(sent));
        // A receiver that begins late, and one that does something else first.
        for (begins, found) in [
            (late, ends_in(&model, &world, &[(1, late)], |me| plan(me, false))[1]),
            (scales, ends_in(&model, &world, &[], |me| plan(me, true))[1]),
        ] {
            let expected = if is_long { notice.plus(sent) } else { BETWEEN.overhead };
            assert_eq!(found, begins.plus(expected), "{len} elements");
        }
    }
}

#[test]
fn messages_of_one_sender_keep_the_gap() {
    let world = World::new(2, 1).unwrap();
    let found = ends(&world, &[], |me| {
        schedule_of(|builder| {
            for part in pieces(output(3000), 3) {
                _ = match me {
                    Rank(0) => builder.push(Action::Send { to: Rank(1), from: part }),
                    _ => builder.push(Action::Recv { from: Rank(0), into: part }),
                };
            }
        })
    });
    // In LogGP, k bytes each: o + 3 (k − 1) G + 2 g + L + o.
    let spacing = WITHIN.bytes(4000).plus(WITHIN.gap);
    assert!(spacing > WITHIN.overhead);
    assert_eq!(found[1], message(&WITHIN, 4000).plus(spacing.times(2)));
}

#[test]
fn a_binomial_broadcast_takes_a_message_for_each_of_log_n_rounds() {
    let spacing = WITHIN.bytes(40).plus(WITHIN.gap).max(WITHIN.overhead);
    assert!(spacing < message(&WITHIN, 40), "{SPACING_IS_SHORT}");
    for rounds in 0..=10 {
        let world = World::new(1 << rounds, 1).unwrap();
        let found = ends(&world, &[], |me| {
            schedule_of(|builder| binomial::broadcast(builder, &all(&world, me), Rank(0), output(10), 10))
        });
        assert_eq!(found.iter().max(), Some(&message(&WITHIN, 40).times(rounds)));
        // The rank whose number has no zeros is last; a rank that its sender turns to later has that much to wait.
        assert_eq!(found.last().copied(), Some(message(&WITHIN, 40).times(rounds)));
        if rounds > 1 {
            assert_eq!(found[1], WITHIN.overhead.max(spacing).times(rounds - 1).plus(message(&WITHIN, 40)));
        }
    }
    // In a world of any size there are ⌈log₂ n⌉ messages one after the other where senders take no time of their own.
    for ranks in 2..40_usize {
        let world = World::new(ranks, 1).unwrap();
        let found = ends(&world, &[], |me| {
            schedule_of(|builder| binomial::broadcast(builder, &all(&world, me), Rank(0), output(10), 10))
        });
        let rounds = u64::from(ranks.next_power_of_two().trailing_zeros());
        assert!(*found.iter().max().unwrap() <= message(&WITHIN, 40).times(rounds), "{ranks} ranks");
    }
}

#[test]
fn a_ring_all_gather_takes_n_minus_1_messages() {
    for ranks in [2, 3, 7, 32] {
        for (world, link) in [(World::new(ranks, 1).unwrap(), &WITHIN), (World::new(1, ranks).unwrap(), &BETWEEN)] {
            let found = ends(&world, &[], |me| {
                let blocks = pieces(output(25 * ranks), ranks);
                schedule_of(|builder| ring::all_gather(builder, &all(&world, me), &blocks, 25))
            });
            assert!(found.iter().all(|time| *time == message(link, 100).times(ranks as u64 - 1)), "{ranks} {found:?}");
        }
    }
}

#[test]
fn recursive_doubling_takes_a_message_and_a_reduction_a_round() {
    for rounds in 1..=7 {
        let world = World::new(1 << rounds, 1).unwrap();
        let found = ends(&world, &[], |me| {
            let data = output(100);
            schedule_of(|builder| halving_doubling::all_reduce_doubling(builder, &all(&world, me), data))
        });
        let round = message(&WITHIN, 400).plus(MODEL.reduce_per_byte.times(400));
        assert!(found.iter().all(|time| *time == round.times(rounds)), "{rounds} {found:?}");
    }
}

#[test]
fn the_hosts_interface_serves_its_ranks_in_turn() {
    // Four ranks of each of two hosts send to their partners at once.
    let (world, bytes) = (World::new(4, 2).unwrap(), 40_000);
    let exchange = |builder: &mut Builder, me: Rank| {
        _ = match me.0 {
            ..4 => builder.push(Action::Send { to: Rank(me.0 + 4), from: output(bytes / 4) }),
            _ => builder.push(Action::Recv { from: Rank(me.0 - 4), into: output(bytes / 4) }),
        };
    };
    let found = ends(&world, &[], |me| schedule_of(|builder| exchange(builder, me)));
    let turn = BETWEEN.bytes(bytes as u64).plus(BETWEEN.gap);
    let expected: Vec<Time> = (0..4).map(|place| message(&BETWEEN, bytes as u64).plus(turn.times(place))).collect();
    assert_eq!(found[4..], expected, "by rank, since all come at once");

    // Where each has a host of its own, nobody waits; and where all send to one host, its interface is where they wait.
    let apart = World::new(1, 8).unwrap();
    let found = ends(&apart, &[], |me| schedule_of(|builder| exchange(builder, me)));
    assert_eq!(found[4..], [message(&BETWEEN, bytes as u64); 4]);
    let found = ends(&apart, &[], |me| {
        schedule_of(|builder| match me.0 {
            0 => {
                for from in 1..8 {
                    let into = output(7 * bytes / 4).piece(from as usize - 1, 7);
                    builder.push(Action::Recv { from: Rank(from), into });
                }
            }
            _ => _ = builder.push(Action::Send { to: Rank(0), from: output(bytes / 4) }),
        })
    });
    assert_eq!(found[0], message(&BETWEEN, bytes as u64).plus(turn.times(6)));
}

#[test]
fn who_waits_for_a_late_rank_is_as_late() {
    let (world, delay) = (World::new(16, 1).unwrap(), Time::femtoseconds(5_000_000_000_021));
    let plan =
        |me| schedule_of(|builder| halving_doubling::all_reduce_doubling(builder, &all(&world, me), output(100)));
    let on_time = ends(&world, &[], plan);
    // Everybody's result needs the late rank's data, which in the last round is one message away.
    let late = ends(&world, &[(5, delay)], plan);
    assert_eq!(late.iter().max(), Some(&on_time[5].plus(delay)));
    assert!(late.iter().all(|time| *time > delay));

    // A leaf of a broadcast delays nobody but itself, and only as far as it would not have waited anyway.
    let plan = |me| schedule_of(|builder| binomial::broadcast(builder, &all(&world, me), Rank(0), output(10), 10));
    let (on_time, late) = (ends(&world, &[], plan), ends(&world, &[(15, delay)], plan));
    assert_eq!(late[..15], on_time[..15]);
    assert_eq!(late[15], delay.plus(WITHIN.overhead), "its message was there");
    let slightly = Time::femtoseconds(1);
    assert_eq!(ends(&world, &[(15, slightly)], plan), on_time);
}

fn names(collective: &str, world: &World) -> Vec<&'static str> {
    crate::algo::tuning::algorithms(collective, world.ranks(), world.hosts()).expect("a collective")
}

const COLLECTIVES: [&str; 9] =
    ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"];

#[test]
fn what_is_sent_is_what_the_schedules_send() {
    for (ranks_per_host, hosts) in [(1, 1), (3, 1), (1, 5), (4, 4), (3, 5)] {
        let world = World::new(ranks_per_host, hosts).unwrap();
        for collective in COLLECTIVES {
            for algorithm in names(collective, &world) {
                let case = Case { collective, algorithm, bytes: 3_000_000 };
                let report = simulate(&case, &world, &MODEL, &[]).unwrap();
                let shape = super::collective(&case, &world).unwrap();
                let (mut total, mut across) = (Traffic::default(), Traffic::default());
                let mut received = Traffic::default();
                for me in (0..world.ranks()).map(Rank::from) {
                    let (topo, element) = (world.topo(), ELEMENT_BYTES);
                    let (scaling, chunking) = (Scaling::Nothing, Chunking::Chunks);
                    let setting = Setting { me, topo, element, scaling, chunking, scratch: ScratchLimit::UNBOUNDED };
                    for step in plan_with(algorithm, &shape, setting).unwrap().steps {
                        let count = |traffic: &mut Traffic, slice: Slice| {
                            traffic.messages += 1;
                            traffic.bytes += 4 * slice.len as u64;
                        };
                        match step.action {
                            Action::Send { to, from } => {
                                count(&mut total, from);
                                if !topo.same_host(me, to) {
                                    count(&mut across, from);
                                }
                            }
                            Action::Recv { into, .. } | Action::RecvReduce { into, .. } => count(&mut received, into),
                            _ => {}
                        }
                    }
                }
                let place = format!("{collective} by {algorithm}, {ranks_per_host} ranks on each of {hosts} hosts");
                assert_eq!((report.rank_total, report.host_total), (total, across), "{place}");
                assert_eq!(total, received, "{place}");
                assert!(report.rank_most.bytes * world.ranks() as u64 >= total.bytes, "{place}");
                assert!(world.ranks() == 1 || report.time > Time::ZERO, "{place}");
            }
        }
    }
}

#[test]
fn the_same_question_has_the_same_answer() {
    let world = World::new(8, 6).unwrap();
    for collective in COLLECTIVES {
        for algorithm in names(collective, &world) {
            let ask = || {
                let case = Case { collective, algorithm, bytes: 100_000 };
                simulate(&case, &world, &MODEL, &[(7, 1e-3), (7, 2e-3)])
            };
            let first = ask().unwrap();
            assert_eq!(Ok(&first), ask().as_ref());
            assert!(first.time >= first.time_without_late, "{collective} {algorithm}");
            assert!(first.time > Time::from_seconds(2e-3).unwrap(), "the later of two times counts");
        }
    }
}

#[test]
fn sizes_are_those_of_whole_blocks() {
    let world = World::new(10, 1).unwrap();
    let size = |collective, bytes| {
        let algorithm = names(collective, &world)[0];
        simulate(&Case { collective, algorithm, bytes }, &world, &MODEL, &[]).unwrap().bytes
    };
    assert_eq!(size("all_reduce", 1001), 1000);
    assert_eq!(size("all_gather", 1019), 1000);
    assert_eq!(size("gather", 1), 40, "an element a rank");
    assert_eq!(size("barrier", 1000), 0);
}

#[test]
fn what_cannot_be_simulated_is_refused() {
    let world = World::new(4, 2).unwrap();
    let model = Model { between_hosts: None, ..MODEL };
    let case = Case { collective: "all_reduce", algorithm: "ring", bytes: 1000 };
    let told = |case: &Case<'_>, model: &Model, late: &[(usize, f64)]| {
        simulate(case, &world, model, late).unwrap_err().to_string()
    };
    let expected = "algorithm: expected one of hierarchical, recursive_doubling, direct, rabenseifner, ring for all_reduce, \
                    got `bruck`";
    assert_eq!(told(&Case { algorithm: "bruck", ..case }, &MODEL, &[]), expected);
    let expected = "collective: expected one such as all_reduce, got `window_fence`";
    assert_eq!(told(&Case { collective: "window_fence", ..case }, &MODEL, &[]), expected);
    assert_eq!(told(&case, &model, &[]), "between_hosts: missing, and the world has 2 hosts");
    assert_eq!(told(&case, &MODEL, &[(8, 1.0)]), "late: expected a rank below 8, got 8");
    assert_eq!(told(&case, &MODEL, &[(3, -1.0)]), "late: expected seconds from 0 to 3600 for rank 3, got -1");
    let expected = "bytes: expected at most 68719476736, got 18446744073709551615";
    assert_eq!(told(&Case { bytes: usize::MAX, ..case }, &MODEL, &[]), expected);
    let slow = Link { gap_per_byte: Time::from_seconds(3600.0).unwrap(), ..WITHIN };
    let slow = Model { within_host: slow, between_hosts: Some(slow), ..MODEL };
    assert_eq!(told(&case, &slow, &[]), "it takes longer than five hours, and no more is counted");
    assert!(World::new(usize::MAX, 2).is_err());
    assert!(World::new(1 << 20, 2).is_err());
}

#[test]
fn worlds_whose_schedules_are_too_long_are_refused_and_others_may_be_large() {
    let large = World::new(8, 2500).unwrap();
    let told = |algorithm| simulate(&Case { collective: "all_reduce", algorithm, bytes: 4 }, &large, &MODEL, &[]);
    let refused = told("ring").unwrap_err();
    assert!(matches!(refused, SimulateError::Steps { ranks: 20_000, steps } if steps > MAX_STEPS), "{refused}");
    let report = told("recursive_doubling").unwrap();
    assert_eq!(report.rank_most.messages, 14 + 1, "⌊log₂ n⌋ rounds, and a result for the partner that stood aside");
}
