//! The kernels of `kernels.cu`: what they are called, and what they are launched with.
//!
//! The source has one module for each type of elements, so that a program compiles and loads only those that it uses. A complex
//! number counts as two elements.

pub mod cache;
pub mod compile;
pub(crate) mod load;

use crate::types::{Arithmetic, DType, ReduceOp};

/// The source, in CUDA C++.
pub const SOURCE: &str = include_str!("kernels.cu");

pub use crate::sys::cuda::{Blocks, MAX_BLOCKS};

/// The kernels for elements of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Module(DType);

/// What a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Computation {
    /// `into = block₀ ⊕ block₁ ⊕ …`; a block may be `into`.
    Fold(ReduceOp),
    /// As `Fold`, of blocks of sums.
    FoldSums,
    /// Each element becomes a sum of one.
    Widen,
    /// `into = (block₀ + block₁ + …) / world`, of blocks of elements; a block may be `into`.
    Average,
    /// As `Average`, of blocks of sums; no block is `into`.
    AverageSums,
    /// `into = from × factor`; `from` may be `into`.
    Scale,
}

/// A kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// The module that has it.
    pub module: Module,
    /// Its name there.
    pub name: String,
    /// How many elements of the kernel, or sums, make one of the buffer: two for complex numbers.
    pub parts: usize,
}

impl Module {
    /// All modules.
    pub fn all() -> impl Iterator<Item = Module> {
        let own = |dtype: &DType| Module::of(*dtype).filter(|module| module.0 == *dtype);
        DType::ALL.iter().filter_map(own)
    }

    /// The module for buffers of `dtype`, if there are kernels for it.
    pub fn of(dtype: DType) -> Option<Module> {
        match dtype {
            DType::C32 => Some(Module(DType::F16)),
            DType::C64 => Some(Module(DType::F32)),
            DType::C128 => Some(Module(DType::F64)),
            _ => (dtype.arithmetic() != Arithmetic::None).then_some(Module(dtype)),
        }
    }

    /// The elements' type.
    pub fn dtype(self) -> DType {
        self.0
    }

    /// The bytes of an element, and of a sum of elements where they are averaged.
    pub fn sizes(self) -> (usize, usize) {
        let (element, arithmetic) = (self.0.size(), self.0.arithmetic());
        let sum = match (arithmetic, element) {
            (Arithmetic::Integer, 1) => 4,
            (Arithmetic::Integer, 2 | 4) => 8,
            (Arithmetic::Integer, _) => 16,
            (Arithmetic::Float, 2) => 4,
            _ => element,
        };
        (element, sum)
    }

    /// PyTorch's name of the elements.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// The definition that selects this module of the source.
    pub fn definition(self) -> String {
        let kernels = match self.0.arithmetic() {
            Arithmetic::Bool => "TRUTHS",
            Arithmetic::Integer => "INTEGERS",
            _ => "FLOATS",
        };
        format!("MODULE={kernels}({})", self.name())
    }
}

impl Computation {
    /// The kernel that computes this with elements of `dtype`, where that is defined; see [`ReduceOp::supports`].
    pub fn function(self, dtype: DType) -> Option<Function> {
        let module = Module::of(dtype)?;
        let needs = match self {
            Computation::Fold(op) => op,
            Computation::Scale => ReduceOp::PreMulSum(1.0),
            _ => ReduceOp::Avg,
        };
        let kernel = match self {
            Computation::Fold(op) => format!("fold_{}", operation(op, dtype)),
            Computation::FoldSums => "fold_sums".to_owned(),
            Computation::Widen => "widen".to_owned(),
            Computation::Average => "average".to_owned(),
            Computation::AverageSums => "average_sums".to_owned(),
            Computation::Scale => "scale".to_owned(),
        };
        let name = format!("{kernel}_{}", module.name());
        needs.supports(dtype).then(|| Function { module, name, parts: dtype.size() / module.0.size() })
    }
}

/// The source's name of what is done to two elements.
fn operation(op: ReduceOp, dtype: DType) -> &'static str {
    let of_truths = dtype == DType::Bool;
    match op {
        ReduceOp::Sum | ReduceOp::Max if of_truths => "bor",
        ReduceOp::Product | ReduceOp::Min if of_truths => "band",
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => "sum",
        ReduceOp::Product => "product",
        ReduceOp::Min => "min",
        ReduceOp::Max => "max",
        ReduceOp::BitAnd => "band",
        ReduceOp::BitOr => "bor",
        ReduceOp::BitXor => "bxor",
    }
}
