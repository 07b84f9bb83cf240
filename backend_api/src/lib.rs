//! The interface of communication backends in shared libraries, which ncclx_rs loads at run time.
//!
//! A crate of type `cdylib` implements [`Backend`] and exports it with [`export_backend!`]. Programs name the built file in
//! `NCCLX_RS_BACKEND_LIB_PATH_<NAME>` and then make communicators with `ncclx_rs.new_comm("<name>", ...)`.
//!
//! Only the C layouts of [`abi`] cross the boundary, so the library and the program may come from different compilers
//! and have different versions of every crate, this one included as long as [`abi::ABI_VERSION`] is the same. A panic of
//! the backend becomes an error of the call.
//!
//! ```
//! use std::time::Duration;
//! use ncclx_rs_backend::{Backend, Error, Join, OpKind, Operation, Tensor, Work, export_backend};
//!
//! /// A backend for a single rank.
//! struct Alone;
//!
//! impl Backend for Alone {
//!     const NAME: &'static str = "alone";
//!     const VERSION: &'static str = "1.0";
//!     const METHODS: &'static [&'static str] = &["double"];
//!
//!     fn join(join: Join) -> Result<Self, Error> {
//!         if join.size == 1 { Ok(Alone) } else { Err(Error::usage("alone: expected one rank")) }
//!     }
//!
//!     fn submit(&self, operation: Operation) -> Result<Box<dyn Work>, Error> {
//!         match operation.kind {
//!             OpKind::Barrier => Ok(Box::new(Done)),
//!             _ => Err(Error::unsupported(&operation.name, Self::NAME)),
//!         }
//!     }
//!
//!     fn call(&self, _method: &str, _arguments: &str, tensors: &mut [Tensor<'_>]) -> Result<String, Error> {
//!         for tensor in tensors {
//!             tensor.as_mut_slice::<f32>()?.iter_mut().for_each(|value| *value *= 2.0);
//!         }
//!         Ok(String::new())
//!     }
//!
//!     fn abort(&self, _reason: &str) {}
//!
//!     fn finalize(&self) -> Result<(), Error> {
//!         Ok(())
//!     }
//! }
//!
//! struct Done;
//!
//! impl Work for Done {
//!     fn wait(&self, _timeout: Duration) -> Option<Result<(), Error>> {
//!         Some(Ok(()))
//!     }
//! }
//!
//! export_backend!(Alone);
//! ```

pub mod abi;
mod check;
mod error;
#[doc(hidden)]
pub mod export;
mod operation;
mod store;
mod tensor;

use std::time::Duration;

pub use error::{Error, ErrorKind};
pub use operation::{Buffer, DType, Mode, OpKind, Operation, ReduceOp};
pub use store::Store;
pub use tensor::{Element, Tensor};

/// One rank's membership in a communicator.
///
/// Methods may be called from any thread; operations are submitted by one thread at a time, in the same order on every
/// rank. Dropping it leaves the communicator: afterwards it must not touch the memory of any operation.
pub trait Backend: Send + Sync + Sized + 'static {
    /// The result of `get_backend`.
    const NAME: &'static str;

    /// The result of `get_backend_version`.
    const VERSION: &'static str;

    /// The names of its own methods, for [`call`](Backend::call).
    const METHODS: &'static [&'static str] = &[];

    /// Joins a communicator: returns once every rank has joined, or fails within the timeout.
    fn join(join: Join) -> Result<Self, Error>;

    /// Starts an operation. Its arguments are valid: counts, element types and ranks have been checked.
    ///
    /// An error means that no operation was started. After success, the backend may use the memory of the operation's
    /// buffers until the work has ended, or until this object is dropped.
    fn submit(&self, operation: Operation) -> Result<Box<dyn Work>, Error>;

    /// Runs one of its own methods, of [`METHODS`](Backend::METHODS), and returns when it is done.
    ///
    /// `arguments` is a JSON object of the arguments by name; `tensors` are the arguments by position. The result is JSON
    /// too, or empty for none.
    fn call(&self, method: &str, _arguments: &str, _tensors: &mut [Tensor<'_>]) -> Result<String, Error> {
        Err(Error::unsupported(method, Self::NAME))
    }

    /// Sets the timeout of later calls of its own methods. Each operation has its own timeout.
    fn set_timeout(&self, _timeout: Duration) {}

    /// Ends every operation in flight with an error, soon. Does not block.
    fn abort(&self, reason: &str);

    /// Waits until operations in flight have ended, and leaves the communicator.
    fn finalize(&self) -> Result<(), Error>;
}

/// An operation in flight or done. The operation continues if this is dropped before its end.
pub trait Work: Send + Sync {
    /// Waits until the operation has ended, and returns its result; `None` if it has not ended within `timeout`. A timeout
    /// of zero only checks. Later calls return the same result.
    fn wait(&self, timeout: Duration) -> Option<Result<(), Error>>;
}

/// The arguments of [`Backend::join`].
#[derive(Debug)]
pub struct Join {
    /// The communicator's name, the same on every rank.
    pub name: String,
    /// The device of tensors, as PyTorch writes it: `cpu`, `cuda:0`. Only buffers on `cpu` are in host memory.
    pub device: String,
    /// This process's rank.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// The timeout of joining, and of the backend's own methods.
    pub timeout: Duration,
    /// Settings by name.
    pub hints: Vec<(String, String)>,
    /// The ranks' store; no other communicator sees its keys.
    pub store: Store,
}

/// Exports a [`Backend`] from a shared library: once in a crate.
#[macro_export]
macro_rules! export_backend {
    ($backend:ty) => {
        const _: () = {
            static TABLE: $crate::abi::RawTable = $crate::export::table::<$backend>();

            /// The function that the loader looks for; its name is `abi::SYMBOL`.
            #[allow(unsafe_code, reason = "the one name that the library gives to the loader")]
            #[unsafe(no_mangle)]
            pub extern "C" fn ncclx_rs_backend_table() -> *const $crate::abi::RawTable {
                &raw const TABLE
            }
        };
    };
}
