//! What a backend is asked to do.

use std::time::Duration;

macro_rules! dtypes {
    ($($variant:ident, $name:literal, $size:literal;)*) => {
        /// The element type of a buffer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        #[non_exhaustive]
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
        }
    };
}

// New ones go to the end: the position is what crosses the boundary.
dtypes! {
    Bool, "bool", 1;
    U8, "uint8", 1;
    I8, "int8", 1;
    U16, "uint16", 2;
    I16, "int16", 2;
    U32, "uint32", 4;
    I32, "int32", 4;
    U64, "uint64", 8;
    I64, "int64", 8;
    F16, "float16", 2;
    BF16, "bfloat16", 2;
    F32, "float32", 4;
    F64, "float64", 8;
    C32, "complex32", 4;
    C64, "complex64", 8;
    C128, "complex128", 16;
    F8E4M3FN, "float8_e4m3fn", 1;
    F8E4M3FNUZ, "float8_e4m3fnuz", 1;
    F8E5M2, "float8_e5m2", 1;
    F8E5M2FNUZ, "float8_e5m2fnuz", 1;
    F8E8M0FNU, "float8_e8m0fnu", 1;
    F4E2M1FNX2, "float4_e2m1fn_x2", 1;
}

/// How a reduction combines the ranks' elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks; integers truncate toward zero.
    Avg,
    /// The product.
    Product,
    /// The least.
    Min,
    /// The greatest.
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

/// What is done, with its parameters. `name` in [`Operation`] tells variants of one kind apart, such as `all_gather_v`.
#[derive(Clone, Debug, PartialEq)]
pub enum OpKind {
    /// The input goes to a rank.
    Send {
        /// The receiver.
        to: u32,
    },
    /// The output is filled by a rank's next message.
    Recv {
        /// The sender.
        from: u32,
    },
    /// The root's buffer, which is input and output at once, is copied into everybody's.
    Broadcast {
        /// Whose data it is.
        root: u32,
    },
    /// Every rank's buffer, input and output at once, becomes the reduction of all.
    AllReduce(ReduceOp),
    /// As AllReduce, for the root alone.
    Reduce {
        /// How elements combine.
        op: ReduceOp,
        /// Who gets the result.
        root: u32,
    },
    /// Every rank gets all ranks' inputs: in one output a rank, each of its own length, or in one of equal blocks.
    AllGather,
    /// Rank r gets the reduction of all ranks' r-th block: of the r-th input, or of one input of equal blocks.
    ReduceScatter(ReduceOp),
    /// Blocks lie end to end in the inputs and outputs (one each, or one a rank); block r goes to and comes from rank r.
    AllToAll {
        /// Elements for each rank.
        send: Vec<usize>,
        /// Elements from each rank.
        recv: Vec<usize>,
    },
    /// The root gets all ranks' inputs, in one output a rank or in one of equal blocks; others have no output.
    Gather {
        /// Who gets the data.
        root: u32,
    },
    /// Every rank gets its part of the root's inputs, of which there is one a rank; others have none.
    Scatter {
        /// Whose data it is.
        root: u32,
    },
    /// Ends once every rank has come.
    Barrier,
}

/// Memory that an operation reads or writes: contiguous elements of one type.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

#[allow(unsafe_code, reason = "an address and a length; who dereferences it relies on the contract of `submit`")]
// SAFETY: nothing is dereferenced here, and the memory's lifetime does not depend on the thread.
unsafe impl Send for Buffer {}

#[allow(unsafe_code, reason = "as for Send")]
// SAFETY: a shared Buffer only gives out its address.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// The first byte; may dangle where there are no elements. Inputs must not be written to.
    pub fn ptr(self) -> *mut u8 {
        self.ptr
    }

    /// The number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The element type.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The number of bytes.
    ///
    /// # Panics
    /// When a `usize` cannot hold it, which is refused before a backend gets the buffer.
    pub fn bytes(self) -> usize {
        self.len.checked_mul(self.dtype.size()).expect("a buffer of a length that memory can have")
    }
}

/// Whether the caller goes on at once or waits for the work next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The operation makes progress by itself.
    Async,
    /// The caller waits next, and its thread may be used for progress.
    Blocking,
}

/// An operation of a communicator.
#[derive(Clone, Debug)]
pub struct Operation {
    /// The method of the communicator that was called, for messages.
    pub name: String,
    /// What is done.
    pub kind: OpKind,
    /// Memory that is read.
    pub inputs: Vec<Buffer>,
    /// Memory that is written. For operations in place the same as the inputs.
    pub outputs: Vec<Buffer>,
    /// The time limit, which begins with `submit`. The caller gives up some time after it, whatever the backend does.
    pub timeout: Duration,
    /// How the caller waits.
    pub mode: Mode,
}
