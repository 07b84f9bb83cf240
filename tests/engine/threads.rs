//! Teams of threads within a rank: long operations end with the bits that one thread makes.

use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use ncclx_rs::types::Arithmetic;
use ncclx_rs::{DType, OpKind, Rank, ReduceOp};
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

use crate::world::{Wire, buffer_as, run, world_hinted};

/// Of a length that nothing divides, and more parts than a team has threads.
const COUNT: usize = 150_011;

/// Memory of some elements at an odd address.
struct Operand(Vec<u8>);

impl Operand {
    fn random(dtype: DType, rng: &mut StdRng) -> Operand {
        let mut bytes = vec![0; COUNT * dtype.size() + 1];
        rng.fill_bytes(&mut bytes);
        Operand(bytes)
    }

    fn digest(&self) -> u64 {
        let mut hasher = rustc_hash::FxBuildHasher.build_hasher();
        hasher.write(&self.0);
        hasher.finish()
    }
}

/// Digests of what reductions of any bits make on each rank, with so many threads beside one.
fn reductions(size: usize, threads: &str) -> Vec<Vec<(String, u64)>> {
    world_hinted(Wire::Shm, size, Duration::from_secs(120), &[("threads", threads)], |comm| {
        let mut rng = StdRng::seed_from_u64(comm.rank().0.into());
        let mut digests = Vec::new();
        for dtype in DType::ALL.iter().copied().filter(|dtype| dtype.arithmetic() != Arithmetic::None) {
            for op in ReduceOp::all(0.5).into_iter().filter(|op| op.supports(dtype)) {
                for kind in [OpKind::AllReduce(op), OpKind::Reduce { op, root: Rank(0) }] {
                    let [mut input, mut output] = [(); 2].map(|()| Operand::random(dtype, &mut rng));
                    let [from, into] = [&mut input, &mut output].map(|operand| buffer_as(&mut operand.0[1..], dtype));
                    let name = format!("{} by {} of {dtype}", kind.name(), op.name());
                    run(comm, kind, vec![from], vec![into]).expect(&name);
                    digests.push((name, output.digest()));
                }
            }
        }
        digests
    })
}

#[test]
fn teams_end_with_the_bits_of_one_thread() {
    for size in [1, 2, 3] {
        let alone = reductions(size, "0");
        for threads in ["1", "3"] {
            let shared = reductions(size, threads);
            for (one, other) in alone.iter().flatten().zip(shared.iter().flatten()) {
                assert_eq!(one, other, "{threads} more threads, {size} ranks");
            }
            assert_eq!(alone.len(), shared.len());
        }
    }
}
