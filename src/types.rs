//! Basic types: ranks, tags, element types, reduce operations.

use std::fmt;

use serde::Serialize;

/// A process's position in a communicator, from 0 to the world size minus one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index into per-rank tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl From<usize> for Rank {
    /// # Panics
    /// When `index` is beyond 32 bits, which no communicator reaches.
    fn from(index: usize) -> Self {
        Rank(u32::try_from(index).expect("a rank fits in 32 bits"))
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The tag of a point-to-point message: a receive matches messages with an equal tag. The seven greatest are reserved, for
/// [`Communicator::split`](crate::Communicator::split), and for the first operations and the windows on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u32);

impl Tag {
    /// The tag of the messages of a split.
    pub(crate) const SPLIT: Tag = Tag(u32::MAX);

    /// The tag of the messages by which ranks set up what operations on a device need.
    pub(crate) const DEVICE: Tag = Tag(u32::MAX - 1);

    /// The tag of the messages by which two ranks set up what messages between their devices need.
    pub(crate) const PAIR: Tag = Tag(u32::MAX - 2);

    /// The tags of the messages by which two ranks begin anew after a disagreement: on messages from the lower rank to the
    /// higher one, and from the higher to the lower.
    pub(crate) const ANEW: [Tag; 2] = [Tag(u32::MAX - 3), Tag(u32::MAX - 4)];

    /// The tag of the messages by which ranks split the communicator of a vendor's library.
    pub(crate) const PART: Tag = Tag(u32::MAX - 5);

    /// The tag of the messages by which ranks register windows on devices.
    pub(crate) const WINDOW: Tag = Tag(u32::MAX - 6);
}

/// A frame of the stack that a call came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Frame {
    /// The function.
    pub name: String,
    /// The source file.
    pub filename: String,
    /// The line in it.
    pub line: u32,
}

/// Which messages a receive accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Only those of this rank.
    Rank(Rank),
    /// The first that arrives, from any rank.
    Any,
}

impl From<Rank> for Source {
    fn from(rank: Rank) -> Self {
        Source::Rank(rank)
    }
}

/// The arithmetic that a [`DType`] supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Two's complement integers: every reduce operation.
    Integer,
    /// IEEE-like floating point: all but the bitwise operations.
    Float,
    /// Complex numbers: sums only.
    Complex,
    /// Booleans: logical operations, with SUM as "or" and PRODUCT as "and".
    Bool,
    /// Types that are moved, never reduced.
    None,
}

macro_rules! dtypes {
    ($($variant:ident, $name:literal, $size:literal, $kind:ident;)*) => {
        /// The element type of a buffer. Every type can be moved; [`DType::arithmetic`] says what can be reduced.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DType {
            $(#[doc = concat!("`", $name, "`, ", stringify!($size), " bytes")] $variant,)*
        }

        impl DType {
            /// Every element type, in the order of its discriminants.
            pub const ALL: &[DType] = &[$(DType::$variant),*];

            /// PyTorch's name for the type.
            pub fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }

            /// Bytes per element.
            pub const fn size(self) -> usize {
                match self { $(DType::$variant => $size,)* }
            }

            /// The arithmetic that the type supports.
            pub fn arithmetic(self) -> Arithmetic {
                match self { $(DType::$variant => Arithmetic::$kind,)* }
            }
        }
    };
}

dtypes! {
    Bool, "bool", 1, Bool;
    U8, "uint8", 1, Integer;
    I8, "int8", 1, Integer;
    U16, "uint16", 2, Integer;
    I16, "int16", 2, Integer;
    U32, "uint32", 4, Integer;
    I32, "int32", 4, Integer;
    U64, "uint64", 8, Integer;
    I64, "int64", 8, Integer;
    F16, "float16", 2, Float;
    BF16, "bfloat16", 2, Float;
    F32, "float32", 4, Float;
    F64, "float64", 8, Float;
    C32, "complex32", 4, Complex;
    C64, "complex64", 8, Complex;
    C128, "complex128", 16, Complex;
    F8E4M3FN, "float8_e4m3fn", 1, None;
    F8E4M3FNUZ, "float8_e4m3fnuz", 1, None;
    F8E5M2, "float8_e5m2", 1, None;
    F8E5M2FNUZ, "float8_e5m2fnuz", 1, None;
    F8E8M0FNU, "float8_e8m0fnu", 1, None;
    F4E2M1FNX2, "float4_e2m1fn_x2", 1, None;
    Opaque1, "1-byte elements", 1, None;
    Opaque2, "2-byte elements", 2, None;
    Opaque4, "4-byte elements", 4, None;
    Opaque8, "8-byte elements", 8, None;
    Opaque16, "16-byte elements", 16, None;
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type of the elements of safe methods, such as [`Communicator::all_reduce`].
///
/// Every bit pattern is a value of each of these types, so received bytes are always valid.
///
/// [`Communicator::all_reduce`]: crate::Communicator::all_reduce
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {
    /// The element type in the engine's list.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty => $dtype:ident,)*) => {
        $(
            const _: () = assert!(size_of::<$element>() == DType::$dtype.size());
            impl sealed::Sealed for $element {}
            impl Element for $element {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

elements! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    half::f16 => F16, half::bf16 => BF16, f32 => F32, f64 => F64,
}

/// How a reduction combines the ranks' elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the world size, rounded once: the sum of integers is exact, that of 16-bit floats is computed in
    /// single precision. Integers truncate toward zero.
    Avg,
    /// The product.
    Product,
    /// The minimum; -0 is less than 0, and a NaN wins.
    Min,
    /// The maximum; 0 is greater than -0, and a NaN wins.
    Max,
    /// Bitwise and.
    BitAnd,
    /// Bitwise or.
    BitOr,
    /// Bitwise exclusive or.
    BitXor,
    /// Every rank's elements times its own factor, then the sum.
    PreMulSum(f64),
}

impl ReduceOp {
    /// PyTorch's name for the operation.
    pub fn name(self) -> &'static str {
        ReduceOp::NAMES[self.index()]
    }

    /// Every operation once, the last with this factor.
    pub const fn all(factor: f64) -> [ReduceOp; 9] {
        [
            ReduceOp::Sum,
            ReduceOp::Avg,
            ReduceOp::Product,
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::BitAnd,
            ReduceOp::BitOr,
            ReduceOp::BitXor,
            ReduceOp::PreMulSum(factor),
        ]
    }

    /// The names, by [`ReduceOp::index`].
    pub(crate) const NAMES: [&'static str; 9] =
        ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"];

    /// A number for the operation, independent of its factor.
    pub(crate) fn index(self) -> usize {
        match self {
            ReduceOp::Sum => 0,
            ReduceOp::Avg => 1,
            ReduceOp::Product => 2,
            ReduceOp::Min => 3,
            ReduceOp::Max => 4,
            ReduceOp::BitAnd => 5,
            ReduceOp::BitOr => 6,
            ReduceOp::BitXor => 7,
            ReduceOp::PreMulSum(_) => 8,
        }
    }

    /// Whether the operation is defined on elements of `dtype`.
    pub fn supports(self, dtype: DType) -> bool {
        let bitwise = matches!(self, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor);
        match dtype.arithmetic() {
            Arithmetic::Integer => true,
            Arithmetic::Float => !bitwise,
            Arithmetic::Complex => matches!(self, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_)),
            Arithmetic::Bool => !matches!(self, ReduceOp::Avg | ReduceOp::PreMulSum(_)),
            Arithmetic::None => false,
        }
    }
}
