use super::*;
use crate::device::setup::tests::member;

/// What ranks decide of which each has a library of this version, after a change of some.
fn decision(
    choice: EngineChoice,
    ranks: usize,
    change: impl Fn(usize, &mut Offer, &mut Member),
) -> Result<Decision, String> {
    let mut offers = vec![Offer { choice, library: Some(Ok(23_007)), registers: true, part: None }; ranks];
    let mut members: Vec<Member> = (0..ranks).map(|rank| member(rank as u8)).collect();
    for (rank, (offer, member)) in offers.iter_mut().zip(&mut members).enumerate() {
        change(rank, offer, member);
    }
    let names: Vec<Rank> = (0..ranks).map(Rank::from).collect();
    decide("main", &names, &offers, &members).map_err(|error| error.to_string())
}

#[test]
fn a_library_is_taken_where_it_was_asked_for() {
    let untouched = |_: usize, _: &mut Offer, _: &mut Member| {};
    for choice in [EngineChoice::Auto, EngineChoice::Streams] {
        assert_eq!(decision(choice, 2, untouched), Ok(Decision::Streams));
    }
    for choice in [EngineChoice::Nccl, EngineChoice::Rccl] {
        assert_eq!(decision(choice, 2, untouched), Ok(Decision::Vendor));
    }
}

#[test]
fn what_stands_in_the_way_is_an_error_where_the_library_was_asked_for() {
    let lacks = |rank: usize, offer: &mut Offer, _: &mut Member| {
        if rank == 1 {
            offer.library = Some(Err("it is nowhere".to_owned()));
        }
    };
    let reason = "rank 1 has no NCCL: it is nowhere";
    let expected = format!("communicator `main`: engine=nccl: {reason}; or take engine=streams");
    let error = decision(EngineChoice::Nccl, 2, lacks).expect_err("there is none");
    assert!(error.ends_with(&expected), "{error}");
    assert_eq!(decision(EngineChoice::Auto, 2, lacks), Ok(Decision::Streams));
}

#[test]
fn hips_devices_are_rccls() {
    let of_hip = |_: usize, _: &mut Offer, member: &mut Member| member.provider = Provider::Hip;
    assert_eq!(decision(EngineChoice::Auto, 2, of_hip), Ok(Decision::Vendor));
    assert_eq!(decision(EngineChoice::Streams, 2, of_hip), Ok(Decision::Streams));
    let error = decision(EngineChoice::Nccl, 2, of_hip).expect_err("it is the other vendor's");
    assert!(error.contains("devices are HIP's, which NCCL does not serve: take engine=rccl"), "{error}");
    let lacks = |rank: usize, offer: &mut Offer, member: &mut Member| {
        of_hip(rank, offer, member);
        if rank == 1 {
            offer.library = Some(Err("it is nowhere".to_owned()));
        }
    };
    let error = decision(EngineChoice::Auto, 2, lacks).expect_err("there is none");
    assert!(error.contains("engine=auto: rank 1 has no RCCL: it is nowhere; or take engine=streams"), "{error}");
    for choice in [EngineChoice::Auto, EngineChoice::Nccl, EngineChoice::Rccl] {
        assert!(no_streams(choice, Provider::Hip).is_some() && no_streams(choice, Provider::Cuda).is_none());
    }
    assert_eq!(no_streams(EngineChoice::Streams, Provider::Hip), None);
}

#[test]
fn devices_of_two_vendors_have_no_library() {
    let mixed = |rank: usize, _: &mut Offer, member: &mut Member| {
        if rank == 1 {
            member.provider = Provider::Hip;
        }
    };
    let error = decision(EngineChoice::Auto, 2, mixed).expect_err("neither library serves both");
    let expected = "engine=auto: the device of rank 0 is one of CUDA, and that of rank 1 one of HIP";
    assert!(error.contains(expected) && error.contains("take engine=streams"), "{error}");
    assert_eq!(decision(EngineChoice::Streams, 2, mixed), Ok(Decision::Streams));
}

#[test]
fn versions_may_differ_in_the_last_number_only() {
    let with = |code| {
        move |rank: usize, offer: &mut Offer, _: &mut Member| {
            if rank == 2 {
                offer.library = Some(Ok(code));
            }
        }
    };
    assert_eq!(decision(EngineChoice::Nccl, 3, with(23_003)), Ok(Decision::Vendor));
    let error = decision(EngineChoice::Nccl, 3, with(22_907)).expect_err("it is older");
    assert!(error.contains("rank 0 has NCCL 2.30.7, rank 2 NCCL 2.29.7: install one version on all"), "{error}");
}

#[test]
fn ranks_on_one_device_and_ranks_that_are_set_otherwise_are_named() {
    let shared = |rank: usize, _: &mut Offer, changed: &mut Member| {
        if rank == 2 {
            changed.device = member(1).device;
        }
    };
    let error = decision(EngineChoice::Rccl, 3, shared).expect_err("they share one");
    assert!(error.contains("engine=rccl: ranks [1, 2] use one device, which RCCL refuses"), "{error}");
    let otherwise = |rank: usize, offer: &mut Offer, _: &mut Member| {
        if rank == 1 {
            *offer = Offer { choice: EngineChoice::Streams, library: None, registers: true, part: None };
        }
    };
    let error = decision(EngineChoice::Nccl, 2, otherwise).expect_err("they differ");
    assert!(error.contains("rank 0 has engine=nccl, rank 1 engine=streams: set the same on all ranks"), "{error}");
}
