//! An all_reduce whose messages are blocks of 8-bit numbers, each block with a scale.
//!
//! Each rank sums one part of the data, which it gets from the other ranks in 8 bits, and sends the sum to them in 8 bits:
//! a reduce_scatter and an all_gather, as in every all_reduce that sends 2 N (n-1)/n.

use ncclx_rs::{Communicator, Error};

/// The scale before each block.
const SCALE_BYTES: usize = size_of::<f32>();

/// Replaces `data` by the sum over all ranks, whose data have the same length; returns the bytes sent to other ranks.
///
/// An element is off by at most half a scale of each rank's block and of the sum's, where a scale is the block's greatest
/// magnitude / 127. A block with an element that is not finite becomes NaN.
pub(crate) fn all_reduce(comm: &Communicator, data: &mut [f32], block: usize) -> Result<usize, Error> {
    let size = comm.size();
    // The last part is padded with zeros, so that all parts have one length.
    let part = data.len().div_ceil(size).next_multiple_of(block);
    let mut padded = vec![0.0; size * part];
    padded[..data.len()].copy_from_slice(data);

    let mut sent = Vec::with_capacity(encoded_bytes(padded.len(), block));
    encode(&padded, block, &mut sent);
    let mut received = vec![0_u8; sent.len()];
    comm.all_to_all(&mut received, &sent)?;

    let own = comm.rank().index();
    let mut sum = padded[own * part..][..part].to_vec();
    let message = encoded_bytes(part, block);
    for rank in (0..size).filter(|rank| *rank != own) {
        let theirs = &received[rank * message..][..message];
        decode(theirs, block, &mut sum, |sum, value| *sum += value);
    }

    let mut encoded = Vec::with_capacity(message);
    encode(&sum, block, &mut encoded);
    comm.all_gather(&mut received, &encoded)?;
    decode(&received, block, &mut padded, |element, value| *element = value);
    data.copy_from_slice(&padded[..data.len()]);
    Ok(2 * (size - 1) * message)
}

fn encoded_bytes(count: usize, block: usize) -> usize {
    count / block * (SCALE_BYTES + block)
}

/// Appends the blocks of `values`: the scale, then for each value the nearest multiple of it.
fn encode(values: &[f32], block: usize, bytes: &mut Vec<u8>) {
    for values in values.chunks_exact(block) {
        let finite = values.iter().all(|value| value.is_finite());
        let greatest = values.iter().fold(0.0_f32, |greatest, value| greatest.max(value.abs()));
        let scale = if finite { greatest / 127.0 } else { f32::NAN };
        bytes.extend_from_slice(&scale.to_le_bytes());
        let factor = if scale > 0.0 { scale.recip() } else { 0.0 };
        // `as` saturates: rounding beyond the ends and infinite factors stay within 8 bits.
        bytes.extend(values.iter().map(|value| ((value * factor).round() as i8).cast_unsigned()));
    }
}

/// Combines every element with its value in the blocks.
fn decode(bytes: &[u8], block: usize, elements: &mut [f32], combine: impl Fn(&mut f32, f32)) {
    for (bytes, elements) in bytes.chunks_exact(SCALE_BYTES + block).zip(elements.chunks_exact_mut(block)) {
        let (scale, values) = bytes.split_first_chunk().expect("a block begins with its scale");
        let scale = f32::from_le_bytes(*scale);
        for (element, value) in elements.iter_mut().zip(values) {
            combine(element, f32::from(value.cast_signed()) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ncclx_rs::comm::store::MemoryStore;
    use ncclx_rs::{CommOptions, Rank};

    use super::*;

    fn summed(size: u32, count: usize, block: usize, value: fn(u32, usize) -> f32) -> Vec<(Vec<f32>, usize)> {
        let store = Arc::new(MemoryStore::default());
        let run = |rank: u32| {
            let (store, hints) = (store.clone(), vec![]);
            let options =
                CommOptions { name: "test".into(), rank: Rank(rank), size: size as usize, store, timeout: None, hints };
            let comm = Communicator::new(options).unwrap();
            let mut data: Vec<f32> = (0..count).map(|index| value(rank, index)).collect();
            let sent = all_reduce(&comm, &mut data, block).unwrap();
            comm.shutdown().unwrap();
            (data, sent)
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_element_is_within_the_scales() {
        let value = |rank: u32, index: usize| ((index as f32 + 1.0) * (rank as f32 + 1.3)).sin();
        for (size, count) in [(1, 10), (2, 1000), (3, 1), (3, 777), (4, 0)] {
            let ranks = summed(size, count, 64, value);
            for (data, _) in &ranks {
                assert_eq!(data, &ranks[0].0, "ranks differ");
                for (index, got) in data.iter().enumerate() {
                    let exact: f32 = (0..size).map(|rank| value(rank, index)).sum();
                    let most = (size as f32 + size as f32) * 0.5 / 127.0 * 1.01;
                    assert!((got - exact).abs() <= most, "{size} ranks, element {index}: {got}, not {exact}");
                }
            }
        }
    }

    #[test]
    fn a_quarter_of_the_bytes_is_sent() {
        for (_, sent) in summed(2, 4096, 256, |_, _| 1.0) {
            assert_eq!(sent, 2 * 2048 / 256 * (256 + 4));
        }
    }

    #[test]
    fn what_is_not_finite_spoils_its_block_alone() {
        let value = |rank: u32, index: usize| if (rank, index) == (1, 70) { f32::INFINITY } else { 1.0 };
        let (data, _) = &summed(2, 256, 64, value)[0];
        assert!(data[64..128].iter().all(|value| value.is_nan()));
        assert!(data[..64].iter().chain(&data[128..]).all(|value| (value - 2.0).abs() < 0.05));
    }
}
