//! What single schedules become: how many calls they take, where segments are cut, and what is waited for.

use ncclx_rs::algo::{self, Chunking, Collective, Scaling, ScratchLimit, Setting};
use ncclx_rs::device::counters::{Counters, Word, WordAccess};
use ncclx_rs::device::lower::{DriverCall, InPlace, Kernel, Location, Program, Staged, WordOperation};
use ncclx_rs::device::segment::Cut;
use ncclx_rs::schedule::{Action, Builder, Slice, Space};
use ncclx_rs::{Counts, Rank, Topology};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::cases::{ELEMENT, cases};
use crate::schedules::heard_in_order;

/// The program of an all_reduce of so many elements on four ranks, as rank 1 has it.
fn example(count: usize, in_place: Option<InPlace>) -> Program {
    let topo = Topology::single_host(4);
    let staged = Staged::plan("direct", &Collective::AllReduce { count }, &topo, 4, Scaling::Nothing);
    staged.expect("direct does an all_reduce").program(Rank(1), in_place)
}

#[test]
fn an_all_reduce_takes_no_more_calls_than_it_must() {
    let program = example(1 << 20, Some(InPlace { input: 0, output: 0 }));
    let count =
        |wanted: fn(&DriverCall) -> bool| program.operations.iter().filter(|operation| wanted(operation)).count();
    let words = program.operations.iter().filter_map(|operation| match operation {
        DriverCall::Words(words) => Some(words),
        _ => None,
    });
    let waits = words.flatten().filter(|word| matches!(word, WordOperation::Await { .. })).count();
    let batches = count(|operation| matches!(operation, DriverCall::Words(_)));
    let copies = count(|operation| matches!(operation, DriverCall::Copy { .. }));
    let kernels = count(|operation| matches!(operation, DriverCall::Kernel(_)));
    // Its two stripes that lie together are one copy, and each copy of a result follows its own wait.
    assert_eq!((batches, waits, copies, kernels), (5, 6, 6, 1), "{program:#?}");
    assert!(matches!(
        &program.operations[..],
        [
            DriverCall::Copy { .. },
            DriverCall::Copy { .. },
            DriverCall::Words(_),
            DriverCall::Kernel(Kernel::Fold { position: 1, .. }),
            ..
        ]
    ));
}

#[test]
fn a_reduction_reads_blocks_where_their_senders_have_them() {
    let program = example(64, None);
    let folds = program.operations.iter().filter_map(|operation| match operation {
        DriverCall::Kernel(Kernel::Fold { others, .. }) => Some(others),
        _ => None,
    });
    let senders: Vec<Rank> = folds
        .flatten()
        .map(|memory| match memory {
            Location::Staging { of, .. } => *of,
            memory => panic!("{memory:?} was copied"),
        })
        .collect();
    assert_eq!(senders, [Rank(0), Rank(2), Rank(3)]);
}

#[test]
fn what_is_used_twice_is_copied_out_of_staging_memory() {
    let (here, there) = (Slice::new(Space::Scratch, 0, 4), Slice::new(Space::Output, 0, 4));
    let mut sender = Builder::new("example");
    sender.push(Action::Send { to: Rank(1), from: here });
    let send = sender.finish();
    let copies = |uses: &dyn Fn(&mut Builder)| {
        let mut receiver = Builder::new("example");
        receiver.push(Action::Recv { from: Rank(0), into: here });
        uses(&mut receiver);
        let staged = Staged::new(vec![send.clone(), receiver.finish()], 4, Scaling::Nothing);
        let program = staged.program(Rank(1), None);
        program.operations.iter().filter(|operation| matches!(operation, DriverCall::Copy { .. })).count()
    };
    let reduce = |builder: &mut Builder| _ = builder.push(Action::Reduce { from: here, into: there });
    assert_eq!(copies(&reduce), 0);
    assert_eq!(copies(&|builder| (0..2).for_each(|_| reduce(builder))), 1, "it is read again");
    assert_eq!(copies(&|builder| _ = builder.push(Action::Scale { slice: here })), 1, "it is changed");
    let half = Action::Reduce { from: here.part(0, 2), into: there.part(0, 2) };
    assert_eq!(copies(&|builder| _ = builder.push(half)), 1, "it is no whole block");
}

#[test]
fn a_sender_waits_for_the_readers_of_the_segment_before_the_last() {
    let program = example(64, None);
    let mut counters = Counters::new(4);
    let mut credits = || {
        let numbering = counters.take_up(Rank(1), &program);
        let wait = |access: &WordAccess| match access {
            WordAccess::Wait(Word::Tail { receiver, .. }, number) => (receiver.0, *number),
            _ => panic!("{access:?} is no credit"),
        };
        (numbering.half(), numbering.credits().iter().map(wait).collect::<Vec<_>>())
    };
    assert_eq!(credits(), (0, vec![]));
    assert_eq!(credits(), (1, vec![]));
    assert_eq!(credits(), (0, vec![(0, 2), (2, 2), (3, 2)]));
    assert_eq!(credits(), (1, vec![(0, 4), (2, 4), (3, 4)]));
}

#[test]
fn whole_messages_are_legal_in_the_order_of_the_schedules() {
    let mut random = StdRng::seed_from_u64(3);
    for size in 2..=9 {
        let topo = Topology::single_host(size);
        for case in cases(size, &mut random) {
            for name in algo::names() {
                let plan = |rank: usize| {
                    let me = Rank::from(rank);
                    let (scaling, chunking) = (Scaling::Nothing, Chunking::Whole);
                    algo::plan_with(
                        name,
                        &case.of(rank),
                        Setting {
                            me,
                            topo: &topo,
                            element: ELEMENT,
                            scaling,
                            chunking,
                            scratch: ScratchLimit::UNBOUNDED,
                        },
                    )
                };
                let Some(schedules) = (0..size).map(plan).collect::<Option<Vec<_>>>() else { continue };
                assert!(heard_in_order(&schedules).is_some(), "{name} for {case:?} on {size} ranks");
            }
        }
    }
}

#[test]
fn segments_cover_every_element_once() {
    let size = 3;
    let uneven = || Counts::from(vec![5, 0, 9]);
    let collectives = [
        Collective::AllReduce { count: 11 },
        Collective::AllGather { counts: uneven() },
        Collective::ReduceScatter { counts: uneven() },
        Collective::Gather { count: 7, root: Rank(2) },
        Collective::Scatter { count: 7, root: Rank(0) },
    ];
    let sizes = |collective: &Collective, me: usize| match collective {
        Collective::AllGather { counts } => (counts[me], counts.total()),
        Collective::ReduceScatter { counts } => (counts.total(), counts[me]),
        Collective::Gather { count, root } => (*count, if root.index() == me { size * count } else { 0 }),
        Collective::Scatter { count, root } => (if root.index() == me { size * count } else { 0 }, *count),
        Collective::AllReduce { count } => (*count, *count),
        _ => unreachable!(),
    };
    for (collective, name) in collectives.iter().flat_map(|collective| [(collective, "direct"), (collective, "ring")]) {
        let cut = Cut::new(name, collective, size);
        for me in 0..size {
            let (mut input, mut output) = (vec![], vec![]);
            for from in (0..cut.longest_block()).step_by(4) {
                let segment = cut.segment(Rank::from(me), from, 4).expect("no all_to_all");
                let (read, written) = sizes(&segment.collective, me);
                for (space, len, extent, all) in [
                    (Space::Input, read, &segment.input, &mut input),
                    (Space::Output, written, &segment.output, &mut output),
                ] {
                    all.extend(
                        extent.parts(Slice::new(space, 0, len)).flat_map(|run| run.offset..run.offset + run.len),
                    );
                }
            }
            let (read, written) = sizes(collective, me);
            for (mut found, expected) in [(input, read), (output, written)] {
                found.sort_unstable();
                assert_eq!(found, (0..expected).collect::<Vec<_>>(), "{collective:?} on rank {me}");
            }
        }
    }
}

#[test]
fn a_segment_that_cannot_fit_is_an_error_that_says_how_much_it_takes() {
    let whole = Collective::AllReduce { count: 100 };
    let cut = Cut::new("direct", &whole, 2);
    let needed = cut.longest(10, |len| 100 * len).unwrap_err();
    assert_eq!((needed.needed, needed.half), (100, 10));
    assert_eq!(cut.longest(1000, |len| 100 * len), Ok(7));
}
