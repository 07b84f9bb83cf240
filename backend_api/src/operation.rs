//! The operations of a communicator.

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

// New types go to the end: their position crosses the boundary.
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

/// The kind of an operation, with its parameters. `name` in [`Operation`] distinguishes variants of a kind, such as
/// `all_gather_v`.
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
    /// The root's buffer is copied into every rank's. The buffer is input and output at once.
    Broadcast {
        /// The rank whose data it is.
        root: u32,
    },
    /// Every rank's buffer, input and output at once, becomes the reduction of all.
    AllReduce(ReduceOp),
    /// As AllReduce, but only the root gets the result.
    Reduce {
        /// How elements combine.
        op: ReduceOp,
        /// The rank that gets the result.
        root: u32,
    },
    /// Every rank gets all ranks' inputs: in one output for each rank, which may differ in length, or in one output of
    /// equal blocks.
    AllGather,
    /// Rank r gets the reduction of all ranks' r-th block, which is the r-th input, or a block of one input of equal
    /// blocks.
    ReduceScatter(ReduceOp),
    /// Block r goes to rank r and comes from rank r. The blocks lie end to end in one input and one output, or in one of
    /// each for every rank.
    AllToAll {
        /// Elements for each rank.
        send: Vec<usize>,
        /// Elements from each rank.
        recv: Vec<usize>,
    },
    /// The root gets all ranks' inputs, in one output for each rank or in one of equal blocks. Other ranks have no output.
    Gather {
        /// The rank that gets the data.
        root: u32,
    },
    /// Every rank gets one of the root's inputs, of which there is one for each rank. Other ranks have no input.
    Scatter {
        /// The rank whose data it is.
        root: u32,
    },
    /// Ends once every rank has called it.
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
// SAFETY: a shared Buffer only returns its address.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// The address of the first byte; it may dangle if there are no elements. Inputs must not be written.
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
    /// If a `usize` cannot hold it. No backend gets such a buffer: the operation is refused before.
    pub fn bytes(self) -> usize {
        self.len.checked_mul(self.dtype.size()).expect("a buffer of a length that memory can have")
    }
}

/// Whether the caller continues at once or waits for the work next.
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
    /// The kind, with its parameters.
    pub kind: OpKind,
    /// The buffers that it reads.
    pub inputs: Vec<Buffer>,
    /// The buffers that it writes. For operations in place, they are the inputs.
    pub outputs: Vec<Buffer>,
    /// The timeout, which begins with `submit`. Some time after it, the caller gives up, whatever the backend does.
    pub timeout: Duration,
    /// How the caller waits.
    pub mode: Mode,
}
