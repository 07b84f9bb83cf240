//! The kernels' source, compiled by the host's compiler, makes the bits that the engine makes on the CPU.
#![allow(unsafe_code, reason = "calls a library that it has built, with addresses of memory as a GPU would get them")]

use std::ffi::c_void;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use half::{bf16, f16};
use libloading::Library;
use ncclx_rs::algo::Scaling;
use ncclx_rs::device::kernels::{Blocks, Computation, Function, MAX_BLOCKS, Module};
use ncclx_rs::device::launch::{self, LaunchError};
use ncclx_rs::device::lower::Staged;
use ncclx_rs::engine::reduce::{self, Operands};
use ncclx_rs::schedule::{Action, Builder, Slice, Space};
use ncclx_rs::types::Arithmetic;
use ncclx_rs::{DType, Rank, ReduceOp};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::lacking::lacks;
use crate::numbers::numbers;

const OPS: [ReduceOp; 9] = ReduceOp::all(3.0);

const LONG: usize = 4099;

fn lengths() -> impl Iterator<Item = usize> {
    (0..=67).chain([LONG])
}

fn dtypes(op: ReduceOp) -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(move |dtype| op.supports(*dtype))
}

/// What stands for a kernel in a library for the host; see `tests/softcuda/include/softcuda_twin.h`.
#[repr(C)]
struct Twin {
    count: usize,
    sizes: *const usize,
    run: extern "C" fn(*const *const c_void, *const u32),
}

/// The source as a library for the host; nothing where there is no compiler.
fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(build).as_ref()
}
#[allow(clippy::print_stdout, reason = "says what a test lacks")]
fn build() -> Option<Library> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libkernels-{}.so", std::process::id()));
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut words = compiler.split_whitespace();
    let mut command = Command::new(words.next().expect("a compiler"));
    command.args(words).args(["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off"]);
    command.args(["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-x", "c++"]);
    command.arg("-I").arg(root.join("tests/softcuda/include"));
    command.arg(root.join("src/device/kernels.cu")).arg("-o").arg(&target);
    let Ok(output) = command.output() else {
        lacks(format_args!("a C++ compiler, {compiler}"));
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the library was built just now; its initialisers do nothing.
    let library = unsafe { Library::new(&target) }.expect("a library");
    std::fs::remove_file(target).expect("removed");
    Some(library)
}

/// A parameter of a kernel: where it lies, and how long it is.
struct Parameter(*const c_void, usize);

fn parameter<T>(value: &T) -> Parameter {
    Parameter(std::ptr::from_ref(value).cast(), size_of::<T>())
}

/// Runs a kernel in a grid of few threads.
fn launch(library: &Library, function: &Function, parameters: &[Parameter], random: &mut StdRng) {
    let symbol = format!("softcuda_twin_{}", function.name);
    // SAFETY: each function of this kind of name has this type.
    let find = unsafe { library.get::<extern "C" fn() -> *const Twin>(&symbol) };
    let find = find.unwrap_or_else(|error| panic!("{}: {error}", function.name));
    // SAFETY: what it returns lives as long as the library.
    let twin = unsafe { &*find() };
    // SAFETY: there are as many sizes as parameters.
    let sizes = unsafe { std::slice::from_raw_parts(twin.sizes, twin.count) };
    let given: Vec<usize> = parameters.iter().map(|parameter| parameter.1).collect();
    assert_eq!(sizes, given, "{}: sizes of parameters", function.name);
    let dims = [random.random_range(1..4), 1, 1, random.random_range(1..40), 1, 1];
    let pointers: Vec<*const c_void> = parameters.iter().map(|parameter| parameter.0).collect();
    (twin.run)(pointers.as_ptr(), dims.as_ptr());
}

/// Bytes that begin anywhere in memory.
struct Placed {
    memory: Vec<u128>,
    start: usize,
    len: usize,
}

const GUARD: u8 = 0xa5;

impl Placed {
    fn new(bytes: &[u8], start: usize) -> Placed {
        let mut placed = Placed::empty(bytes.len(), start);
        placed.bytes_mut()[16 + start..][..bytes.len()].copy_from_slice(bytes);
        placed
    }

    fn empty(len: usize, start: usize) -> Placed {
        let memory = vec![u128::from_ne_bytes([GUARD; 16]); len.div_ceil(16) + 3];
        Placed { memory, start, len }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: numbers are bytes, and these are all of them.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.memory.len() * 16) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; any bytes are numbers.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.memory.len() * 16) }
    }

    fn address(&mut self) -> u64 {
        let first = 16 + self.start;
        self.bytes_mut()[first..].as_mut_ptr() as u64
    }

    /// What is there, if nothing is written beside it.
    fn get(&self) -> &[u8] {
        let (before, rest) = self.bytes().split_at(16 + self.start);
        let (bytes, behind) = rest.split_at(self.len);
        assert!(before.iter().chain(behind).all(|byte| *byte == GUARD), "something is written beside it");
        bytes
    }
}

/// Where blocks begin: aligned alike, to their elements, or anyhow.
struct Starts {
    kind: u32,
    base: usize,
}

impl Starts {
    fn any(random: &mut StdRng) -> Starts {
        Starts { kind: random.random_range(0..4), base: random.random_range(0..16) }
    }

    /// The start of a block whose elements have so many bytes.
    fn next(&self, size: usize, random: &mut StdRng) -> usize {
        match self.kind {
            0 => 0,
            1 => self.base * size % 16,
            2 => random.random_range(0..16) * size % 16,
            _ => random.random_range(0..16),
        }
    }
}

/// Operands of nine ranks, of which tests take stretches.
struct Operand {
    size: usize,
    ranks: Vec<Vec<u8>>,
}

impl Operand {
    fn new(dtype: DType, random: &mut StdRng) -> Operand {
        let size = dtype.size();
        Operand { size, ranks: (0..9).map(|_| numbers(dtype, 2 * LONG * size, random)).collect() }
    }

    fn blocks(&self, count: usize, len: usize, random: &mut StdRng) -> Vec<&[u8]> {
        let start = random.random_range(0..LONG) * self.size;
        self.ranks[..count].iter().map(|block| &block[start..][..len * self.size]).collect()
    }
}

/// Calls a kernel that combines blocks, one of which may be the result's memory.
fn combine(
    library: &Library,
    function: &Function,
    blocks: &mut [Placed],
    (into, len): (u64, usize),
    world: Option<u32>,
    random: &mut StdRng,
) {
    let mut pointers = Blocks { at: [0; MAX_BLOCKS] };
    pointers.at.iter_mut().zip(blocks.iter_mut()).for_each(|(at, block)| *at = block.address());
    let (many, count) = (blocks.len() as u32, (len * function.parts) as u64);
    let mut parameters = vec![parameter(&into), parameter(&pointers), parameter(&many), parameter(&count)];
    parameters.extend(world.as_ref().map(parameter));
    launch(library, function, &parameters, random);
}

fn place(blocks: &[&[u8]], size: usize, starts: &Starts, random: &mut StdRng) -> Vec<Placed> {
    blocks.iter().map(|block| Placed::new(block, starts.next(size, random))).collect()
}

/// The random numbers of a test, always the same.
fn seeded(dtype: DType, computation: usize) -> StdRng {
    StdRng::seed_from_u64((dtype as usize * 100 + computation) as u64)
}

/// The size of what has to be aligned: of complex numbers, a part.
fn part(dtype: DType, bytes: usize) -> usize {
    if dtype.arithmetic() == Arithmetic::Complex { bytes / 2 } else { bytes }
}

#[test]
fn folds_have_the_bits_of_the_engine() {
    let Some(library) = library() else { return };
    for (index, op) in OPS.into_iter().enumerate() {
        for dtype in dtypes(op) {
            let random = &mut seeded(dtype, index);
            let function = Computation::Fold(op).function(dtype).expect("a kernel");
            let operand = Operand::new(dtype, random);
            for (count, len) in (2..=9).flat_map(|count| lengths().map(move |len| (count, len))) {
                let blocks = operand.blocks(count, len, random);
                for position in 0..count {
                    let others = [&blocks[..position], &blocks[position + 1..]].concat();
                    let mut expected = blocks[position].to_vec();
                    reduce::fold(Operands::Elements(op, dtype), &mut expected, position, &others);

                    let mut placed = place(&blocks, part(dtype, dtype.size()), &Starts::any(random), random);
                    let into = placed[position].address();
                    combine(library, &function, &mut placed, (into, len), None, random);
                    assert!(placed[position].get() == expected, "{op:?} of {dtype}: {count} of {len}, at {position}");
                    let unchanged = |(at, block): (usize, &Placed)| at == position || block.get() == blocks[at];
                    assert!(placed.iter().enumerate().all(unchanged), "{op:?} of {dtype} writes to another block");
                }
            }
        }
    }
}

#[test]
fn averages_have_the_bits_of_the_engine() {
    let Some(library) = library() else { return };
    for dtype in dtypes(ReduceOp::Avg) {
        let random = &mut seeded(dtype, 10);
        let function = |computation: Computation| computation.function(dtype).expect("a kernel");
        let operand = Operand::new(dtype, random);
        let (elements, sums) = (Operands::Elements(ReduceOp::Avg, dtype), Operands::Sums(dtype));
        let (size, sum_size) = (part(dtype, dtype.size()), part(dtype, sums.size()));
        for (count, len) in (1..=9).flat_map(|count| lengths().map(move |len| (count, len))) {
            let blocks = operand.blocks(count, len, random);
            let starts = Starts::any(random);
            let world = *[count, 1, 7, 1000].choose(random).expect("one of them");
            let context = format!("{count} blocks of {len} {dtype}, by {world}");
            let mut expected = vec![0; len * dtype.size()];
            reduce::average(elements, world, &mut expected, &blocks);

            let mut placed = place(&blocks, size, &starts, random);
            let mut apart = Placed::empty(expected.len(), starts.next(size, random));
            let place_of = |apart: &mut Placed| (apart.address(), len);
            let average = function(Computation::Average);
            combine(library, &average, &mut placed, place_of(&mut apart), Some(world as u32), random);
            assert!(apart.get() == expected, "{context}");
            let into = random.random_range(0..count);
            let in_place = (placed[into].address(), len);
            combine(library, &average, &mut placed, in_place, Some(world as u32), random);
            assert!(placed[into].get() == expected, "{context}, in place");

            let widened = |block: &&[u8]| {
                let mut sums_of_one = vec![0; len * sums.size()];
                reduce::widen(dtype, &mut sums_of_one, block);
                sums_of_one
            };
            let widened: Vec<Vec<u8>> = blocks.iter().map(widened).collect();
            let widened: Vec<&[u8]> = widened.iter().map(|sums| &sums[..]).collect();
            let mut from = Placed::new(blocks[0], starts.next(size, random));
            let mut into = Placed::empty(len * sums.size(), starts.next(sum_size, random));
            let widen = function(Computation::Widen);
            let (to, source, parts) = (into.address(), from.address(), (len * widen.parts) as u64);
            launch(library, &widen, &[parameter(&to), parameter(&source), parameter(&parts)], random);
            assert!(into.get() == widened[0], "{context}, widened");

            let mut placed = place(&widened, sum_size, &starts, random);
            let mut apart = Placed::empty(expected.len(), starts.next(size, random));
            reduce::average(sums, world, &mut expected, &widened);
            let average = function(Computation::AverageSums);
            combine(library, &average, &mut placed, place_of(&mut apart), Some(world as u32), random);
            assert!(apart.get() == expected, "{context}, of sums");

            let mut expected = widened[0].to_vec();
            reduce::fold(sums, &mut expected, 0, &widened[1..]);
            let into = (placed[0].address(), len);
            combine(library, &function(Computation::FoldSums), &mut placed, into, None, random);
            assert!(placed[0].get() == expected, "{context}, folded as sums");
        }
    }
}

/// A factor, and how a tensor of a type holds it.
fn factors(random: &mut StdRng) -> Vec<f64> {
    let mut factors = vec![0.0, -0.0, 1.0, 3.0, -3.0, 0.5, -2.75, 255.0, 1e19, -1e19, 1e300, 5e-324];
    factors.extend([2f64.powi(63), -(2f64.powi(63)), 2f64.powi(63) - 1024.0, f64::INFINITY, -f64::INFINITY, f64::NAN]);
    factors.extend((0..4).map(|_| f64::from_bits(random.random())));
    factors
}

fn scale(
    library: &Library,
    function: &Function,
    (into, from, len): (u64, u64, usize),
    (factor, factor_at, factor_type): (f64, u64, DType),
    random: &mut StdRng,
) {
    let (count, factor_type) = ((len * function.parts) as u64, factor_type as u32);
    let to = [parameter(&into), parameter(&from), parameter(&count)];
    let by = [parameter(&factor), parameter(&factor_at), parameter(&factor_type)];
    launch(library, function, &to.into_iter().chain(by).collect::<Vec<_>>(), random);
}

#[test]
fn products_with_factors_have_the_bits_of_the_engine() {
    let Some(library) = library() else { return };
    for dtype in dtypes(ReduceOp::PreMulSum(1.0)) {
        let random = &mut seeded(dtype, 11);
        let function = Computation::Scale.function(dtype).expect("a kernel");
        let operand = Operand::new(dtype, random);
        for factor in factors(random) {
            for len in lengths() {
                let block = operand.blocks(1, len, random)[0];
                let mut expected = block.to_vec();
                reduce::scale(dtype, factor, &mut expected);
                let starts = Starts::any(random);
                let size = part(dtype, dtype.size());
                let mut from = Placed::new(block, starts.next(size, random));
                let mut into = Placed::empty(block.len(), starts.next(size, random));
                let given = (factor, 0, DType::F64);
                scale(library, &function, (into.address(), from.address(), len), given, random);
                assert!(into.get() == expected, "{len} of {dtype} by {factor}");
                scale(library, &function, (from.address(), from.address(), len), given, random);
                assert!(from.get() == expected, "{len} of {dtype} by {factor}, in place");
            }
        }
    }
}

#[test]
fn factors_are_read_from_tensors_of_any_type() {
    let Some(library) = library() else { return };
    let random = &mut StdRng::seed_from_u64(12);
    let of = |dtype: DType, bytes: &[u8]| {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        match dtype {
            DType::I8 => f64::from(bits as i8),
            DType::I16 => f64::from(bits as i16),
            DType::I32 => f64::from(bits as i32),
            DType::I64 => bits as i64 as f64,
            DType::F16 => f16::from_bits(bits as u16).to_f64(),
            DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
            DType::F32 => f64::from(f32::from_bits(bits as u32)),
            DType::F64 => f64::from_bits(bits),
            _ => bits as f64,
        }
    };
    let function = Computation::Scale.function(DType::F64).expect("a kernel");
    for factor_type in Module::all().map(Module::dtype).filter(|dtype| *dtype != DType::Bool) {
        for _ in 0..1000 {
            let bytes = numbers(factor_type, factor_type.size(), random);
            let mut expected = 1.5f64.to_ne_bytes();
            reduce::scale(DType::F64, of(factor_type, &bytes), &mut expected);
            let mut factor = Placed::new(&bytes, random.random_range(0..16));
            let mut into = Placed::new(&1.5f64.to_ne_bytes(), 0);
            let address = into.address();
            scale(library, &function, (address, address, 1), (f64::NAN, factor.address(), factor_type), random);
            assert!(into.get() == expected, "by {bytes:x?}, a {factor_type}");
        }
    }
}

/// A type of half precision, as the crate `half` converts it.
struct Half {
    dtype: DType,
    widen: fn(u16) -> f32,
    narrow: fn(f32) -> u16,
    nan: u16,
}

#[test]
fn half_precision_is_rounded_and_widened_as_it_must_be() {
    let Some(library) = library() else { return };
    let random = &mut StdRng::seed_from_u64(13);
    let canonical = |wide: f32, nan: u32| if wide.is_nan() { nan } else { wide.to_bits() };
    let types = [
        Half {
            dtype: DType::F16,
            widen: |bits| f16::from_bits(bits).to_f32(),
            narrow: |wide| f16::from_f32(wide).to_bits(),
            nan: 0x7e00,
        },
        Half {
            dtype: DType::BF16,
            widen: |bits| bf16::from_bits(bits).to_f32(),
            narrow: |wide| bf16::from_f32(wide).to_bits(),
            nan: 0x7fc0,
        },
    ];
    for Half { dtype, widen, narrow, nan } in types {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let from: Vec<u8> = all.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
        let expected = all.iter().flat_map(|bits| canonical(widen(*bits), 0x7fc0_0000).to_ne_bytes());
        let (mut from, mut into) = (Placed::new(&from, 0), Placed::empty(4 * all.len(), 0));
        let function = Computation::Widen.function(dtype).expect("a kernel");
        let (to, source, count) = (into.address(), from.address(), all.len() as u64);
        launch(library, &function, &[parameter(&to), parameter(&source), parameter(&count)], random);
        assert!(into.get().iter().copied().eq(expected), "{dtype}");

        // Each number of the type, those halfway to the next, their neighbours, and any others.
        let near = |bits: u16| {
            let (here, next) = (widen(bits).to_bits(), widen(bits.wrapping_add(1)).to_bits());
            let halfway = here.wrapping_add(next.wrapping_sub(here) / 2);
            [here, halfway.wrapping_sub(1), halfway, halfway.wrapping_add(1)]
        };
        let some = (0..200_000).map(|_| random.random::<u32>());
        let wide: Vec<u32> = all.iter().flat_map(|bits| near(*bits)).chain(some).collect();
        let expected = wide.iter().map(|bits| f32::from_bits(*bits));
        let expected = expected.flat_map(|wide| if wide.is_nan() { nan } else { narrow(wide) }.to_ne_bytes());
        let bytes: Vec<u8> = wide.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
        let mut into = Placed::empty(2 * wide.len(), 0);
        let to = (into.address(), wide.len());
        let function = Computation::AverageSums.function(dtype).expect("a kernel");
        combine(library, &function, &mut [Placed::new(&bytes, 0)], to, Some(1), random);
        assert!(into.get().iter().copied().eq(expected), "{dtype}");
    }
}

#[test]
fn what_is_only_moved_has_no_kernels() {
    for dtype in DType::ALL.iter().copied() {
        for op in OPS {
            let function = Computation::Fold(op).function(dtype);
            assert_eq!(function.is_some(), op.supports(dtype), "{op:?} of {dtype}");
        }
    }
    assert_eq!(Module::of(DType::F8E4M3FN), None);
    assert_eq!(Module::all().count(), 13);
}

#[test]
fn elements_and_sums_have_the_sizes_of_the_engine() {
    for dtype in dtypes(ReduceOp::Avg) {
        let module = Module::of(dtype).expect("a module");
        let parts = dtype.size() / module.dtype().size();
        let (element, sum) = module.sizes();
        assert_eq!((parts * element, parts * sum), (dtype.size(), Operands::Sums(dtype).size()), "{dtype}");
    }
}

#[test]
fn a_program_of_more_blocks_than_a_kernel_takes_is_refused() {
    let program = |others: usize| {
        let (all, into) = (Slice::new(Space::Scratch, 0, 4 * others), Slice::new(Space::Output, 0, 4));
        let mut builder = Builder::new("example");
        builder.push(Action::Fold { from: all, into, position: 0 });
        Staged::new(vec![builder.finish()], 4, Scaling::Nothing).program(Rank(0), None)
    };
    assert_eq!(launch::check(&program(MAX_BLOCKS - 1)), Ok(()));
    let error = launch::check(&program(MAX_BLOCKS)).expect_err("one too many");
    assert_eq!(error, LaunchError::Blocks { blocks: MAX_BLOCKS + 1 });
    assert!(error.to_string().starts_with("a reduction of 129 blocks at once, of which a kernel takes 128"), "{error}");
}
