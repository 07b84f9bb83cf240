//! Launches the kernels of a program on its stream.

use std::path::PathBuf;

use smallvec::SmallVec;

use crate::config;
use crate::device::kernels::cache::Cache;
use crate::device::kernels::compile::{Compiler, cache_folder, folders_beside_runtime};
use crate::device::kernels::load::Loaded;
use crate::device::kernels::{Computation, MAX_BLOCKS, Module};
use crate::device::lane::{Kernels, Places, Stretches};
use crate::device::lower::{DriverCall, Kernel, Location, Program};
use crate::schedule::{Slice, Space};
use crate::sync::Arc;
use crate::sys::cuda::{
    self, Attribute, Beside, Combine, Context, CudaError, Current, DeviceBytes, Provider, Relaxed, Stream,
    driver_version, provider,
};
use crate::types::{DType, ReduceOp};

pub use crate::device::kernels::load::LoadError;

/// Why a program's kernels cannot be launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A query of the driver has failed.
    #[error(transparent)]
    Driver(#[from] CudaError),
    /// The kernels cannot be compiled or loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// One kernel would have to combine too many blocks.
    #[error("a reduction of {blocks} blocks at once, of which a kernel takes {MAX_BLOCKS}: set another algorithm")]
    Blocks {
        /// How many.
        blocks: usize,
    },
}

/// Where to look for a compiler of kernels, and its cache.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Where NVRTC or hipRTC is looked for, before the system's folders.
    pub folders: Vec<PathBuf>,
    /// The kernels that have been compiled before.
    pub cache: Option<Cache>,
}

impl Sources {
    /// The folders of the runtime of CUDA or HIP that this process has loaded, and the user's cache.
    pub fn of_process() -> Sources {
        // If the file cannot be read, the compiler may still be in the system's folders.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let cache = cache_folder(config::variable).map(|folder| Cache::new(folder, CACHE_BYTES));
        Sources { folders: folders_beside_runtime(&maps), cache }
    }
}

/// The kernels of all types for a few devices take less.
const CACHE_BYTES: u64 = 64 << 20;

/// A device's kernels, compiled and loaded as they are needed.
#[derive(Debug)]
pub struct Launcher {
    context: Arc<Context>,
    /// The device's compute capability: 90 is 9.0.
    architecture: u32,
    /// The most blocks of threads of a launch.
    grid: u32,
    sources: Option<Sources>,
    compiler: Option<Compiler>,
    modules: Vec<Loaded>,
    ready: Vec<Ready>,
}

/// Whether kernels take a factor of this type: whole and real numbers.
pub fn is_factor(dtype: DType) -> bool {
    Module::of(dtype).is_some_and(|module| module.dtype() == dtype) && dtype != DType::Bool
}

/// The kernels for buffers of a type.
#[derive(Debug)]
struct Ready {
    dtype: DType,
    kernels: Vec<(Computation, Combine)>,
}

impl Launcher {
    /// The launcher of a context's device, which `sharing` ranks use. Once there is something to compute, it looks for a
    /// compiler in `sources`, or by default where [`Sources::of_process`] says.
    pub fn new(context: &Arc<Context>, sharing: usize, sources: Option<Sources>) -> Result<Launcher, CudaError> {
        let attribute = |attribute| context.device().attribute(attribute);
        let architecture = 10 * attribute(Attribute::CapabilityMajor)? + attribute(Attribute::CapabilityMinor)?;
        let resident = BLOCKS_A_MULTIPROCESSOR * attribute(Attribute::Multiprocessors)?;
        let grid = (resident / u32::try_from(sharing.max(1)).unwrap_or(u32::MAX)).max(1);
        let (context, compiler, modules, ready) = (context.clone(), None, vec![], vec![]);
        Ok(Launcher { context, architecture, grid, sources, compiler, modules, ready })
    }

    /// Looks for the compiler, which `prepare` needs.
    ///
    /// # Errors
    /// There is none, or none that knows the device.
    pub fn find_compiler(&mut self) -> Result<(), LaunchError> {
        let architecture = self.architecture;
        self.compiler()?.target(architecture).map_err(LoadError::from)?;
        Ok(())
    }

    /// Compiles and loads the kernels for buffers of `dtype`, unless that is done or no kernel takes this type. Call it before
    /// an operation is submitted: it may take seconds, and may wait for the device.
    pub fn prepare(&mut self, dtype: DType) -> Result<(), LaunchError> {
        let Some(module) = Module::of(dtype) else { return Ok(()) };
        if self.of(dtype).is_some() {
            return Ok(());
        }
        // Loading spoils captures of other threads otherwise.
        let _relaxed = Relaxed::enter()?;
        let loaded = match self.modules.iter().position(|loaded| loaded.module() == module) {
            Some(index) => index,
            None => {
                let (context, architecture) = (self.context.clone(), self.architecture);
                let loaded = Loaded::new(&context, self.compiler()?, module, architecture)?;
                self.modules.push(loaded);
                self.modules.len() - 1
            }
        };
        let mut kernels = vec![];
        for computation in computations() {
            if let Some(kernel) = self.modules[loaded].kernel(computation, dtype)? {
                kernels.push((computation, kernel));
            }
        }
        self.ready.push(Ready { dtype, kernels });
        Ok(())
    }

    /// The kernels that the programs of an operation launch: on elements of `dtype`, reduced by `reduce`, in a world of so many
    /// ranks.
    ///
    /// # Panics
    /// A launch panics if `prepare` has not been called with this type, or the reduction is not defined on it.
    pub fn kernels(&self, dtype: DType, reduce: Option<ReduceOp>, world: usize) -> Launches<'_> {
        let factor = match reduce {
            Some(ReduceOp::PreMulSum(factor)) => Beside::Factor(factor),
            _ => Beside::Nothing,
        };
        let kernels = self.of(dtype).map_or(&[][..], |ready| &ready.kernels);
        let divisor = u32::try_from(world).expect("a world has fewer ranks");
        let fold = Computation::Fold(without_factor(reduce.unwrap_or(ReduceOp::Sum)));
        Launches { kernels, grid: self.grid, fold, divisor, factor }
    }

    fn of(&self, dtype: DType) -> Option<&Ready> {
        self.ready.iter().find(|ready| ready.dtype == dtype)
    }

    fn compiler(&mut self) -> Result<&Compiler, LaunchError> {
        if self.compiler.is_none() {
            let Sources { folders, cache } = self.sources.clone().unwrap_or_else(Sources::of_process);
            let compiler = match provider()? {
                Provider::Cuda => Compiler::load(&folders, driver_version()?.major, cache),
                Provider::Hip => Compiler::load_for_hip(&folders, self.context.device().architecture()?, cache),
            };
            self.compiler = Some(compiler.map_err(LoadError::from)?);
        }
        Ok(self.compiler.as_ref().expect("it has just been loaded"))
    }
}

/// So many blocks of threads fill a multiprocessor.
const BLOCKS_A_MULTIPROCESSOR: u32 = 4;

fn computations() -> impl Iterator<Item = Computation> {
    use ReduceOp::{Avg, BitAnd, BitOr, BitXor, Max, Min, PreMulSum, Product, Sum};
    let folds = [Sum, Product, Min, Max, Avg, PreMulSum(1.0), BitAnd, BitOr, BitXor].map(Computation::Fold);
    let others = [Computation::FoldSums, Computation::Widen, Computation::Average, Computation::AverageSums];
    folds.into_iter().chain(others).chain([Computation::Scale])
}

/// The same operation for all factors: one kernel serves them all.
fn without_factor(op: ReduceOp) -> ReduceOp {
    if matches!(op, ReduceOp::PreMulSum(_)) { ReduceOp::PreMulSum(1.0) } else { op }
}

/// Checks that no kernel of a program would have to combine too many blocks. An operation that fails this is refused.
pub fn check(program: &Program) -> Result<(), LaunchError> {
    let blocks = |operation: &DriverCall| match operation {
        DriverCall::Kernel(Kernel::Fold { others, .. }) => 1 + others.len(),
        DriverCall::Kernel(Kernel::Average { blocks, .. }) => blocks.len(),
        _ => 1,
    };
    match program.operations.iter().map(blocks).max() {
        Some(blocks) if blocks > MAX_BLOCKS => Err(LaunchError::Blocks { blocks }),
        _ => Ok(()),
    }
}

/// Launches the kernels of one operation's programs.
#[derive(Clone, Copy, Debug)]
pub struct Launches<'a> {
    kernels: &'a [(Computation, Combine)],
    grid: u32,
    fold: Computation,
    divisor: u32,
    factor: Beside<'a>,
}

impl<'a> Launches<'a> {
    /// Takes the factor from the device's memory, as it is when the kernels run: a number of type `dtype`.
    ///
    /// # Panics
    /// When the type is not one of whole or real numbers, or there are not as many bytes as it has.
    pub fn with_factor(self, at: DeviceBytes<'a>, dtype: DType) -> Launches<'a> {
        assert!(is_factor(dtype) && at.len() == dtype.size(), "{dtype} of {} bytes is no factor", at.len());
        Launches { factor: Beside::FactorAt(at, dtype), ..self }
    }

    /// One launch for each run of elements that lies together in all operands.
    fn launch(
        &self,
        (current, stream): (&Current<'_>, &Stream),
        computation: Computation,
        (into, into_size): (Stretches<'_>, usize),
        (from, from_size): (Operands<'_>, usize),
        beside: Beside<'_>,
    ) -> Result<(), CudaError> {
        let kernel = self.kernels.iter().find(|(known, _)| *known == computation);
        let (_, kernel) = kernel.unwrap_or_else(|| panic!("{computation:?} is not prepared"));
        let mut into = Cursor::new(&into);
        let mut from: SmallVec<[Cursor<'_>; 8]> = from.iter().map(|stretches| Cursor::new(stretches)).collect();
        loop {
            let count = from.iter().map(|operand| operand.left() / from_size);
            let count = count.fold(into.left() / into_size, usize::min);
            if count == 0 {
                let is_end = into.left() == 0 && from.iter().all(|operand| operand.left() == 0);
                assert!(is_end, "operands of {computation:?} that do not end together");
                return Ok(());
            }
            let pieces: SmallVec<[DeviceBytes<'_>; 8]> =
                from.iter_mut().map(|operand| operand.take(count * from_size)).collect();
            kernel.launch(current, stream, self.grid, into.take(count * into_size), &pieces, beside)?;
        }
    }
}

/// The operands of a kernel.
type Operands<'a> = SmallVec<[Stretches<'a>; 8]>;

/// What is left of the stretches of an operand.
struct Cursor<'a> {
    rest: &'a [DeviceBytes<'a>],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(stretches: &'a [DeviceBytes<'a>]) -> Cursor<'a> {
        Cursor { rest: stretches, at: 0 }
    }

    /// How many bytes are left of the first stretch.
    fn left(&self) -> usize {
        self.rest.first().map_or(0, |first| first.len() - self.at)
    }

    fn take(&mut self, len: usize) -> DeviceBytes<'a> {
        let piece = self.rest[0].part(self.at, len);
        self.at += len;
        if self.left() == 0 {
            (self.rest, self.at) = (&self.rest[1..], 0);
        }
        piece
    }
}

impl Kernels for Launches<'_> {
    fn code(&self) -> Option<&Arc<cuda::Module>> {
        // Those of a type are of one module.
        self.kernels.first().map(|(_, kernel)| kernel.module())
    }

    fn launch(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        kernel: &Kernel,
        places: &Places<'_>,
    ) -> Result<(), CudaError> {
        let on = (current, stream);
        let (element, sum) = (places.element(), places.sum());
        let own = |slice: Slice| places.of(Location::Own(slice));
        let of = |space: Space| if space == Space::Sums { sum } else { element };
        match kernel {
            Kernel::Widen { from, into } => {
                let operands = [own(*from)].into_iter().collect();
                self.launch(on, Computation::Widen, (own(*into), sum), (operands, element), Beside::Nothing)
            }
            Kernel::Fold { into, position, others } => {
                let (size, position) = (of(into.space), *position as usize);
                let (before, after) = others.split_at(position);
                let operands = before.iter().map(|block| places.of(*block)).chain([own(*into)]);
                let operands = operands.chain(after.iter().map(|block| places.of(*block))).collect();
                let computation = if into.space == Space::Sums { Computation::FoldSums } else { self.fold };
                self.launch(on, computation, (own(*into), size), (operands, size), Beside::Nothing)
            }
            Kernel::Scale { slice } => {
                let size = of(slice.space);
                let operands = [own(*slice)].into_iter().collect();
                self.launch(on, Computation::Scale, (own(*slice), size), (operands, size), self.factor)
            }
            Kernel::Average { into, blocks } => {
                let size = blocks.first().map_or(element, |block| match block {
                    Location::Own(slice) => of(slice.space),
                    Location::Staging { bytes, .. }
                    | Location::Outbound { bytes, .. }
                    | Location::Inbound { bytes, .. } => bytes / into.len,
                });
                // Where sums are no longer than elements, they are elements.
                let computation = if size == element { Computation::Average } else { Computation::AverageSums };
                let operands = blocks.iter().map(|block| places.of(*block)).collect();
                self.launch(on, computation, (own(*into), element), (operands, size), Beside::Divisor(self.divisor))
            }
        }
    }
}
