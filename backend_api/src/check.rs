//! Checks an operation's arguments against each other and the communicator, so that backends need not.

use crate::error::Error;
use crate::operation::{Buffer, OpKind, Operation};

/// An error names the operation, the argument and what was expected.
pub(crate) fn check(operation: &Operation, rank: u32, size: u32) -> Result<(), Error> {
    let checker = Checker { operation, rank: rank as usize, size: size as usize };
    checker.one_dtype()?;
    checker.lengths("input", &operation.inputs)?;
    checker.lengths("output", &operation.outputs)?;
    let (inputs, outputs) = (&operation.inputs, &operation.outputs);
    match &operation.kind {
        OpKind::Send { to } => checker.peer("dst", *to),
        OpKind::Recv { from } => checker.peer("src", *from),
        OpKind::Broadcast { root } => checker.peer("root", *root).and_then(|()| checker.in_place()),
        OpKind::AllReduce(_) => checker.in_place(),
        OpKind::Reduce { root, .. } => checker.peer("root", *root).and_then(|()| checker.in_place()),
        OpKind::AllGather => checker.blocks("output", outputs, "input", inputs),
        OpKind::ReduceScatter(_) => checker.blocks("input", inputs, "output", outputs),
        OpKind::AllToAll { send, recv } => {
            checker.splits("input_split_sizes", send, inputs)?;
            checker.splits("output_split_sizes", recv, outputs)?;
            let (sent, received) = (send[checker.rank], recv[checker.rank]);
            let expected = || format!("{sent} elements from this rank itself, as the input split has");
            checker.expect(sent == received, "output_split_sizes", expected, || received.to_string())
        }
        OpKind::Gather { root } => checker.rooted(*root, "output_tensor_list", outputs, inputs),
        OpKind::Scatter { root } => checker.rooted(*root, "input_tensor_list", inputs, outputs),
        OpKind::Barrier => Ok(()),
    }
}

struct Checker<'a> {
    operation: &'a Operation,
    rank: usize,
    size: usize,
}

impl Checker<'_> {
    fn expect(
        &self,
        holds: bool,
        argument: &str,
        expected: impl FnOnce() -> String,
        got: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        if holds {
            return Ok(());
        }
        let name = &self.operation.name;
        Err(Error::usage(format!("{name}: argument `{argument}`: expected {}, got {}", expected(), got())))
    }

    fn one_dtype(&self) -> Result<(), Error> {
        let mut all = self.operation.inputs.iter().chain(&self.operation.outputs).map(|buffer| buffer.dtype);
        let Some(first) = all.next() else { return Ok(()) };
        let other = all.find(|dtype| *dtype != first);
        let got = || format!("also {}", other.map_or("", |other| other.name()));
        self.expect(other.is_none(), "tensors", || format!("all of one dtype, {}", first.name()), got)
    }

    /// Checks that no buffer is longer than memory can be, so that computations with lengths do not overflow.
    fn lengths(&self, argument: &str, buffers: &[Buffer]) -> Result<(), Error> {
        let bytes = |buffer: &Buffer| buffer.len.checked_mul(buffer.dtype.size());
        let sum = buffers.iter().try_fold(0, |sum: usize, buffer| sum.checked_add(bytes(buffer)?));
        let most = isize::MAX as usize;
        let got = || buffers.iter().map(|buffer| buffer.len.to_string()).collect::<Vec<_>>().join(" + ") + " elements";
        self.expect(sum.is_some_and(|sum| sum <= most), argument, || format!("at most {most} bytes"), got)
    }

    fn peer(&self, argument: &str, peer: u32) -> Result<(), Error> {
        let expected = || format!("a rank in [0, {})", self.size);
        self.expect((peer as usize) < self.size, argument, expected, || peer.to_string())
    }

    fn in_place(&self) -> Result<(), Error> {
        let (input, output) = (total(&self.operation.inputs), total(&self.operation.outputs));
        self.expect(input == output, "output", || format!("{input} elements, as the input has"), || output.to_string())
    }

    /// `all` is one buffer for each rank, or one of equal blocks; `own` is this rank's.
    fn blocks(&self, argument: &str, all: &[Buffer], own_argument: &str, own: &[Buffer]) -> Result<(), Error> {
        let expected = match all {
            [one] if one.len % self.size == 0 => one.len / self.size,
            [one] => {
                let expected = || format!("a number of elements that {} ranks can share equally", self.size);
                return self.expect(false, argument, expected, || one.len.to_string());
            }
            many => {
                self.listed(argument, many)?;
                many[self.rank].len
            }
        };
        let what = || format!("{expected} elements, as this rank's block of the {argument} has");
        self.expect(total(own) == expected, own_argument, what, || total(own).to_string())
    }

    fn splits(&self, argument: &str, counts: &[usize], buffers: &[Buffer]) -> Result<(), Error> {
        let sizes = || format!("{} sizes, one a rank", self.size);
        self.expect(counts.len() == self.size, argument, sizes, || counts.len().to_string())?;
        let sum = counts.iter().try_fold(0, |sum: usize, count| sum.checked_add(*count));
        let expected = || format!("sizes that add up to the tensor's {} elements", total(buffers));
        let got = || sum.map_or(format!("a sum beyond {} bits", usize::BITS), |sum| format!("a sum of {sum}"));
        self.expect(sum == Some(total(buffers)), argument, expected, got)
    }

    fn rooted(&self, root: u32, argument: &str, list: &[Buffer], own: &[Buffer]) -> Result<(), Error> {
        self.peer("root", root)?;
        let count = total(own);
        if root as usize != self.rank {
            let expected = || "no tensors on a rank that is not the root".to_owned();
            return self.expect(list.is_empty(), argument, expected, || list.len().to_string());
        }
        if let [one] = list {
            let expected = || format!("{count} elements for each of {} ranks", self.size);
            let all = count.checked_mul(self.size);
            return self.expect(all == Some(one.len), argument, expected, || one.len.to_string());
        }
        self.listed(argument, list)?;
        let other = list.iter().find(|buffer| buffer.len != count);
        let got = || other.map_or(0, |other| other.len).to_string();
        self.expect(other.is_none(), argument, || format!("tensors of {count} elements each"), got)
    }

    fn listed(&self, argument: &str, list: &[Buffer]) -> Result<(), Error> {
        let expected = || format!("a list of {} tensors", self.size);
        self.expect(list.len() == self.size, argument, expected, || list.len().to_string())
    }
}

/// The number of elements of all buffers, whose lengths have been checked.
fn total(buffers: &[Buffer]) -> usize {
    buffers.iter().map(|buffer| buffer.len).sum()
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;
    use std::time::Duration;

    use super::*;
    use crate::operation::{DType, Mode, ReduceOp};

    fn complaint(kind: OpKind, inputs: &[usize], outputs: &[usize]) -> Option<String> {
        let of = |lengths: &[usize]| {
            lengths.iter().map(|len| Buffer { ptr: null_mut(), len: *len, dtype: DType::F32 }).collect()
        };
        let (inputs, outputs) = (of(inputs), of(outputs));
        let (timeout, mode) = (Duration::ZERO, Mode::Async);
        let operation = Operation { name: "op".into(), kind, inputs, outputs, timeout, mode };
        check(&operation, 1, 3).err().map(|error| error.text)
    }

    #[test]
    fn arguments_that_fit_are_accepted() {
        let all_to_all = OpKind::AllToAll { send: vec![1, 2, 3], recv: vec![0, 2, 5] };
        for (kind, inputs, outputs) in [
            (OpKind::AllReduce(ReduceOp::Sum), &[5][..], &[5][..]),
            (OpKind::AllGather, &[2], &[6]),
            (OpKind::AllGather, &[2], &[9, 2, 0]),
            (OpKind::ReduceScatter(ReduceOp::Sum), &[6], &[2]),
            (all_to_all, &[6], &[7]),
            (OpKind::Gather { root: 1 }, &[2], &[2, 2, 2]),
            (OpKind::Gather { root: 1 }, &[2], &[6]),
            (OpKind::Gather { root: 0 }, &[2], &[]),
            (OpKind::Scatter { root: 1 }, &[2, 2, 2], &[2]),
            (OpKind::Barrier, &[], &[]),
        ] {
            assert_eq!(complaint(kind.clone(), inputs, outputs), None, "{kind:?}");
        }
    }

    #[test]
    fn arguments_that_do_not_fit_are_named() {
        let all_to_all = |send: &[usize]| OpKind::AllToAll { send: send.to_vec(), recv: vec![0, 2, 5] };
        for (kind, inputs, outputs, named) in [
            (OpKind::Send { to: 3 }, &[5][..], &[][..], "`dst`: expected a rank in [0, 3), got 3"),
            (OpKind::AllReduce(ReduceOp::Sum), &[5], &[4], "`output`: expected 5 elements"),
            (OpKind::AllGather, &[2], &[7], "`output`: expected a number of elements that 3 ranks can share"),
            (OpKind::AllGather, &[2], &[2, 2], "`output`: expected a list of 3 tensors, got 2"),
            (OpKind::AllGather, &[2], &[1, 1, 1], "`input`: expected 1 elements"),
            (all_to_all(&[1, 2]), &[3], &[7], "`input_split_sizes`: expected 3 sizes"),
            (
                all_to_all(&[1, 2, 3]),
                &[5],
                &[7],
                "expected sizes that add up to the tensor's 5 elements, got a sum of 6",
            ),
            (
                all_to_all(&[8, usize::MAX - 3, 6]),
                &[10],
                &[7],
                "expected sizes that add up to the tensor's 10 elements, got a sum beyond 64 bits",
            ),
            (OpKind::AllReduce(ReduceOp::Sum), &[usize::MAX / 4 + 2], &[1], "`input`: expected at most"),
            (OpKind::AllGather, &[1], &[usize::MAX / 8, usize::MAX / 8, 1], "`output`: expected at most"),
            (OpKind::Gather { root: 1 }, &[usize::MAX / 3 + 1], &[2], "`input`: expected at most"),
            (all_to_all(&[1, 1, 4]), &[6], &[7], "`output_split_sizes`: expected 1 elements from this rank itself"),
            (OpKind::Gather { root: 0 }, &[2], &[6], "expected no tensors on a rank that is not the root"),
            (OpKind::Gather { root: 1 }, &[2], &[2, 2, 3], "expected tensors of 2 elements each, got 3"),
        ] {
            let text = complaint(kind.clone(), inputs, outputs).unwrap_or_default();
            assert!(text.starts_with("op: argument ") && text.contains(named), "{kind:?}: {text}");
        }
    }
}
