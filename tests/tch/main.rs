//! The methods of a communicator on tensors of tch.

#[path = "../engine/lacking.rs"]
mod lacking;
#[path = "../engine/ucx_process.rs"]
#[allow(dead_code, reason = "shared with the engine's tests, which use more of it")]
mod ucx_process;
#[path = "../engine/world.rs"]
#[allow(dead_code, reason = "shared with the engine's tests, which use more of it")]
mod world;

use ncclx_rs::{Communicator, Error, Rank, ReduceOp, Source, Tag};
use tch::{Device, Kind, Tensor};

use world::{Wire, world};

const CPU: Device = Device::Cpu;

fn me(comm: &Communicator) -> i64 {
    i64::from(comm.rank().0)
}

#[test]
fn every_kind_that_can_be_summed_is() {
    world(Wire::Shm, 2, |comm| {
        use Kind::{BFloat16, ComplexDouble, ComplexFloat, Double, Float, Half, Int, Int8, Int16, Int64, Uint8};
        for kind in [Uint8, Int8, Int16, Int, Int64, Half, BFloat16, Float, Double, ComplexFloat, ComplexDouble] {
            let mut data = Tensor::full([3, 2], me(comm) + 1, (kind, CPU));
            comm.all_reduce(&mut data, ReduceOp::Sum).expect("all_reduce");
            assert_eq!(data, Tensor::full([3, 2], 3, (kind, CPU)), "{kind:?}");
        }
        let mut any = Tensor::from_slice(&[comm.rank() == Rank(0), false]);
        comm.all_reduce(&mut any, ReduceOp::Max).expect("all_reduce");
        assert_eq!(any, Tensor::from_slice(&[true, false]));
    });
}

#[test]
fn kinds_that_are_only_moved_are_moved() {
    world(Wire::Shm, 2, |comm| {
        for kind in [Kind::Float8e5m2, Kind::Float8e4m3fn, Kind::ComplexHalf] {
            let value = |value: i64| Tensor::full([5], value, (Kind::Float, CPU)).to_kind(kind);
            let mut data = value(me(comm));
            comm.broadcast(&mut data, Rank(1)).expect("broadcast");
            assert_eq!(data.to_kind(Kind::Float), value(1).to_kind(Kind::Float), "{kind:?}");
        }
    });
}

#[test]
fn collectives_place_blocks_as_on_slices() {
    world(Wire::Tcp, 2, |comm| {
        let row = |rank: i64| Tensor::arange(3, (Kind::Int64, CPU)) + rank * 10;
        let mut all = Tensor::zeros([2, 3], (Kind::Int64, CPU));
        comm.all_gather(&mut all, &row(me(comm))).expect("all_gather");
        assert_eq!(all, Tensor::stack(&[row(0), row(1)], 0));
        let mut own = Tensor::zeros([3], (Kind::Int64, CPU));
        comm.reduce_scatter(&mut own, &all, ReduceOp::Sum).expect("reduce_scatter");
        assert_eq!(own, row(me(comm)) * 2);
        let mut turned = Tensor::zeros([2, 3], (Kind::Int64, CPU));
        comm.all_to_all(&mut turned, &(&all + me(comm) * 100)).expect("all_to_all");
        assert_eq!(turned, Tensor::stack(&[row(me(comm)), row(me(comm)) + 100], 0));
        let (mut first, mut second) = (own.zeros_like(), own.zeros_like());
        comm.all_gather_v(&mut [&mut first, &mut second], &row(me(comm))).expect("all_gather_v");
        assert_eq!((first, second), (row(0), row(1)));
    });
}

#[test]
fn messages_carry_tensors() {
    world(Wire::Shm, 2, |comm| {
        let mut data = Tensor::full([70, 70], me(comm), (Kind::Double, CPU));
        match comm.rank() {
            Rank(0) => {
                let from = comm.recv(&mut data, Source::Any, Tag(5)).expect("recv");
                assert_eq!((from, data.sum(Kind::Double).double_value(&[])), (Rank(1), 4900.0));
            }
            _ => comm.send(&data, Rank(0), Tag(5)).expect("send"),
        }
    });
}

#[test]
fn empty_and_zero_dimensional_tensors_are_ordinary() {
    world(Wire::Shm, 2, |comm| {
        let mut empty = Tensor::zeros([0, 4], (Kind::Float, CPU));
        comm.all_reduce(&mut empty, ReduceOp::Sum).expect("all_reduce");
        let mut one = Tensor::from(me(comm));
        comm.all_reduce(&mut one, ReduceOp::Max).expect("all_reduce");
        assert_eq!(one.int64_value(&[]), 1);
    });
}

#[test]
fn tensors_that_do_not_fit_are_refused_and_named() {
    world(Wire::Shm, 2, |comm| {
        let refused = |tensor: &mut Tensor, words: &str| {
            let error = comm.all_reduce(tensor, ReduceOp::Sum).expect_err("a usage error");
            let text = error.to_string();
            assert!(matches!(error, Error::Usage(_)) && text.contains("all_reduce") && text.contains(words), "{text}");
        };
        refused(&mut Tensor::zeros([2, 3], (Kind::Float, CPU)).tr(), "size [3, 2] with strides [1, 3]");
        refused(&mut Tensor::zeros([2, 3], (Kind::Float, CPU)).to_sparse_sparse_dim(2), "not dense");
        refused(&mut Tensor::new(), "undefined");
        let floats = Tensor::zeros([2], (Kind::Float, CPU));
        refused(&mut floats.quantize_per_tensor(0.1, 0, Kind::QInt8), "QInt8");
        let mixed = comm.all_gather(&mut Tensor::zeros([4], (Kind::Double, CPU)), &floats).expect_err("a usage error");
        assert!(mixed.to_string().contains("float64"), "{mixed}");
        comm.barrier().expect("nothing was sent");
    });
}
