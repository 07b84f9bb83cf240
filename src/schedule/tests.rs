use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// What is done to a builder.
#[derive(Clone, Debug)]
enum Call {
    Push(Action),
    Barrier,
    PutFirst(usize),
}

fn slices() -> impl Strategy<Value = Slice> {
    let space = prop_oneof![Just(Space::Input), Just(Space::Output), Just(Space::Scratch), Just(Space::Sums)];
    (space, 0..12_usize, 0..8_usize).prop_map(|(space, offset, len)| Slice::new(space, offset, len))
}

fn calls() -> impl Strategy<Value = Call> {
    let (to, from) = (Rank(1), Rank(1));
    let push = prop_oneof![
        slices().prop_map(move |from| Action::Send { to, from }),
        slices().prop_map(move |into| Action::Recv { from, into }),
        slices().prop_map(move |into| Action::RecvReduce { from, into }),
        (slices(), slices()).prop_map(|(from, into)| Action::Copy { from, into }),
        (slices(), slices()).prop_map(|(from, into)| Action::CopyBlocks { from, into, count: 2, is_reversed: true }),
        slices().prop_map(|slice| Action::Scale { slice }),
        (slices(), slices()).prop_map(|(from, into)| Action::Average { from, into }),
    ];
    prop_oneof![20 => push.prop_map(Call::Push), 1 => Just(Call::Barrier), 1 => (0..3_usize).prop_map(Call::PutFirst)]
}

/// Whether one of two steps must wait for the other, by the elements that they touch.
fn conflict(one: Action, other: Action) -> bool {
    let shares = |a: Option<Slice>, b: Option<Slice>| {
        let (Some(a), Some(b)) = (a, b) else { return false };
        a.space == b.space && (a.offset..a.end()).any(|element| (b.offset..b.end()).contains(&element))
    };
    let ((read, written), (other_read, other_written)) = (one.touches(), other.touches());
    shares(written, other_read) || shares(written, other_written) || shares(read, other_written)
}

/// Per step, all steps that are done before it.
fn before(steps: &[Step]) -> Vec<BTreeSet<StepId>> {
    let mut all: Vec<BTreeSet<StepId>> = Vec::new();
    for step in steps {
        let direct = step.after.iter().copied();
        let through = step.after.iter().flat_map(|earlier| all[*earlier as usize].clone());
        all.push(direct.chain(through).collect());
    }
    all
}

proptest! {
    #[test]
    fn a_step_waits_for_what_it_conflicts_with_and_for_no_more(calls in prop::collection::vec(calls(), 0..40)) {
        let mut builder = Builder::new("test");
        // By comparing all steps with each other.
        let mut expected: Vec<Step> = Vec::new();
        let mut fence = None;
        let mut fence_pending = false;
        for call in calls {
            match call {
                Call::Push(action) => {
                    builder.push(action);
                    let id = expected.len() as StepId;
                    let waits = |earlier: &StepId| {
                        fence_pending || Some(*earlier) == fence || conflict(expected[*earlier as usize].action, action)
                    };
                    let after = (fence.unwrap_or(0)..id).filter(waits).collect();
                    expected.push(Step { action, after });
                    fence = if fence_pending { Some(id) } else { fence };
                    fence_pending = false;
                }
                Call::Barrier => {
                    builder.barrier();
                    fence_pending = !expected.is_empty();
                }
                Call::PutFirst(count) => {
                    let action = Action::Send { to: Rank(2), from: Slice::empty() };
                    builder.put_first(std::iter::repeat_n(action, count));
                    let later = count as StepId;
                    expected.iter_mut().flat_map(|step| &mut step.after).chain(&mut fence).for_each(|id| *id += later);
                    expected.splice(..0, std::iter::repeat_n(Step { action, after: SmallVec::new() }, count));
                }
            }
        }
        let steps = builder.finish().steps;
        prop_assert_eq!(before(&steps), before(&expected));
        prop_assert!(steps.iter().all(|step| step.after.is_sorted_by(|one, other| one < other)));
    }
}

/// How many runs of memory were looked at, and how many waits there are, with so many steps of each kind.
fn work(steps: usize, write: impl Fn(&mut Builder, usize)) -> (usize, usize) {
    let mut builder = Builder::new("test");
    (0..steps).for_each(|index| write(&mut builder, index));
    (builder.uses.looks, builder.steps.iter().map(|step| step.after.len()).sum())
}

#[test]
fn planning_grows_with_the_steps_and_not_with_their_square() {
    let (to, from) = (Rank(1), Rank(1));
    let piece = |index: usize| Slice::new(Space::Output, 10 * index, 10);
    let exchange = |builder: &mut Builder, index: usize| {
        builder.push(Action::Send { to, from: Slice { space: Space::Input, ..piece(index) } });
        builder.push(Action::Recv { from, into: piece(index) });
    };
    let backwards = |builder: &mut Builder, index: usize| exchange(builder, 1_000_000 - index);
    let around = |builder: &mut Builder, index: usize| {
        builder.push(Action::Send { to, from: piece(index % 8) });
        builder.push(Action::RecvReduce { from, into: piece((index + 1) % 8) });
    };
    let one_place = |builder: &mut Builder, _| {
        builder.push(Action::RecvReduce { from, into: piece(0) });
        builder.push(Action::Send { to, from: piece(0) });
    };
    let read_by_all = |builder: &mut Builder, _| _ = builder.push(Action::Send { to, from: piece(0) });
    for steps in [1000, 4000] {
        for (looks, waits) in [
            work(steps, exchange),
            work(steps, backwards),
            work(steps, around),
            work(steps, one_place),
            work(steps, read_by_all),
        ] {
            assert!(looks <= 10 * steps && waits <= 4 * steps, "{steps} steps: {looks} looks, {waits} waits");
        }
    }
}
