//! Numbers of every kind, those among them around which arithmetic goes wrong.

use ncclx_rs::DType;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// The bits of a floating-point format: how wide it is, and its fraction.
fn format(dtype: DType) -> Option<(u32, u32)> {
    match dtype {
        DType::F16 | DType::C32 => Some((16, 10)),
        DType::BF16 => Some((16, 7)),
        DType::F32 | DType::C64 => Some((32, 23)),
        DType::F64 | DType::C128 => Some((64, 52)),
        _ => None,
    }
}

/// A number of a floating-point format: any bits, those around which arithmetic goes wrong, or a plain one.
fn float((width, fraction): (u32, u32), random: &mut StdRng) -> u64 {
    let infinity = ((1u64 << (width - 1 - fraction)) - 1) << fraction;
    let one = (infinity >> 1) & infinity;
    let magnitude = match random.random_range(0..4) {
        0 => return random.random(),
        1 => {
            let least_normal = 1 << fraction;
            let nans = [infinity + 1, infinity + (1 << (fraction - 1)), infinity + least_normal - 1];
            let peculiar = [0, 1, least_normal - 1, least_normal, one, infinity - 1, infinity].map(|bits| [bits; 2]);
            *[peculiar.as_flattened(), &nans].concat().choose(random).expect("one of them")
        }
        2 => random.random_range(0..2 << fraction),
        _ => one + (random.random_range(0..8 << fraction)) - (4 << fraction),
    };
    magnitude | u64::from(random.random::<bool>()) << (width - 1)
}

/// So many bytes of numbers of every kind.
pub(crate) fn numbers(dtype: DType, len: usize, random: &mut StdRng) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        let (number, size) = match format(dtype) {
            Some(format) => (float(format, random), format.0 as usize / 8),
            None => {
                let (bits, extreme) = (8 * dtype.size(), random.random_range(0..8));
                let greatest = u64::MAX >> (65 - bits);
                let numbers = [0, 1, greatest, greatest + 1, u64::MAX];
                (numbers.get(extreme).copied().unwrap_or_else(|| random.random()), dtype.size())
            }
        };
        bytes.extend_from_slice(&number.to_le_bytes()[..size]);
    }
    bytes
}
