//! What crosses the boundary between a backend's library and the program that loads it: C layouts, and nothing else.
//!
//! A backend's author needs none of this; [`export_backend!`](crate::export_backend) makes it.
//!
//! # Contract
//! - [`SYMBOL`] is a function without arguments that returns a [`RawTable`] which lives as long as the process. Its first
//!   two fields stay where they are in every version, so that a loader can refuse the rest.
//! - Functions return a status: [`OK`], [`PENDING`] (of `work_wait` alone), or the number of an
//!   [`ErrorKind`](crate::ErrorKind), with a text in the [`RawError`]. None unwinds.
//! - Arguments live for the call. Texts are UTF-8.
//! - `join` takes the store over in every case, and calls its `release` once. The other functions of the store may be
//!   called until then, by any thread.
//! - What `join` and `submit` put into their last place but one is theirs, and goes back once, to `destroy` and
//!   `work_release`, in any order. Nothing else is called with it afterwards.
//! - The memory of an operation is lent from `submit` until `work_wait` has told the end, or until `destroy` returns; not
//!   at all if `submit` failed. A panic of either function tells nothing: the memory is lent until `destroy` returns.
//! - The memory of tensors is lent for the length of `call`; they do not overlap.

use std::ffi::c_void;

pub use crate::export::table;

/// Counts the versions of these layouts and of their contract that do not fit together.
pub const ABI_VERSION: u32 = 1;

/// The function that a backend's library exports, a [`TableFunction`].
pub const SYMBOL: &str = "ncclx_rs_backend_table";

/// The type of [`SYMBOL`].
pub type TableFunction = extern "C" fn() -> *const RawTable;

/// The call succeeded.
pub const OK: i32 = 0;
/// The operation is still in flight.
pub const PENDING: i32 = 1;

/// The kinds of operations, by their numbers; the names of [`OpKind`](crate::OpKind)'s variants.
pub const KINDS: [&str; 11] = [
    "send",
    "recv",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
];

/// The reduce operations, by their numbers.
pub const REDUCE_OPS: [&str; 9] = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"];

/// Bytes of a text or of a value; may be null where there are none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawBytes {
    /// The first.
    pub ptr: *const u8,
    /// How many.
    pub len: u64,
}

impl RawBytes {
    /// The bytes of a text, which must outlive the result's use.
    pub const fn of(text: &str) -> RawBytes {
        RawBytes::of_bytes(text.as_bytes())
    }

    /// Bytes, which must outlive the result's use.
    pub const fn of_bytes(bytes: &[u8]) -> RawBytes {
        RawBytes { ptr: bytes.as_ptr(), len: bytes.len() as u64 }
    }

    /// The bytes.
    ///
    /// # Safety
    /// They live as long as the result.
    #[allow(unsafe_code, reason = "memory of the other side")]
    pub const unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len as usize) }
    }

    /// A copy of the text.
    ///
    /// # Safety
    /// The bytes live for the call.
    #[allow(unsafe_code, reason = "memory of the other side")]
    pub unsafe fn text(self) -> String {
        // SAFETY: the caller's promise.
        String::from_utf8_lossy(unsafe { self.bytes() }).into_owned()
    }
}

/// The room of a [`RawError`].
pub const ERROR_BYTES: usize = 4096;

/// A place for the text of an error.
#[repr(C)]
#[derive(Debug)]
pub struct RawError {
    /// UTF-8 up to the first zero.
    pub text: [u8; ERROR_BYTES],
}

impl RawError {
    /// A place without a text.
    pub const EMPTY: RawError = RawError { text: [0; ERROR_BYTES] };

    /// Writes a text, cut off where the room ends.
    pub fn write(&mut self, text: &str) {
        let mut end = text.len().min(ERROR_BYTES - 1);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.text[..end].copy_from_slice(&text.as_bytes()[..end]);
        self.text[end] = 0;
    }

    /// The text.
    pub fn read(&self) -> String {
        let end = self.text.iter().position(|byte| *byte == 0).unwrap_or(ERROR_BYTES);
        String::from_utf8_lossy(&self.text[..end]).into_owned()
    }
}

/// Takes bytes that live for the call into what `sink` is.
pub type Take = unsafe extern "C" fn(sink: *mut c_void, bytes: RawBytes);

/// The [`Take`] whose sink is a `Vec<u8>`.
///
/// # Safety
/// `sink` is one, lent for the call, and the bytes live for the call.
#[allow(unsafe_code, reason = "memory of the other side")]
pub unsafe extern "C" fn take_bytes(sink: *mut c_void, bytes: RawBytes) {
    // SAFETY: the caller's promise.
    let sink = unsafe { &mut *sink.cast::<Vec<u8>>() };
    // SAFETY: the caller's promise.
    sink.extend_from_slice(unsafe { bytes.bytes() });
}

/// Elements in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawBuffer {
    /// The first.
    pub ptr: *mut u8,
    /// How many.
    pub len: u64,
    /// The position in [`DType::ALL`](crate::DType::ALL).
    pub dtype: u32,
    /// Zero.
    pub reserved: u32,
}

/// An operation.
#[repr(C)]
#[derive(Debug)]
pub struct RawOperation {
    /// The method that was called.
    pub name: RawBytes,
    /// The position in [`KINDS`].
    pub kind: u32,
    /// The position in [`REDUCE_OPS`].
    pub reduce: u32,
    /// The factor of PREMUL_SUM.
    pub factor: f64,
    /// Milliseconds.
    pub timeout_ms: u64,
    /// The root, receiver or sender.
    pub peer: u32,
    /// Whether the caller waits next: 1 or 0.
    pub blocking: u32,
    /// Memory that is read.
    pub inputs: *const RawBuffer,
    /// How many.
    pub inputs_len: u64,
    /// Memory that is written.
    pub outputs: *const RawBuffer,
    /// How many.
    pub outputs_len: u64,
    /// Of all_to_all: elements for each rank.
    pub send_counts: *const u64,
    /// Of all_to_all: elements from each rank.
    pub recv_counts: *const u64,
    /// The length of both.
    pub counts_len: u64,
}

/// The store in which ranks find each other.
#[repr(C)]
#[derive(Debug)]
pub struct RawStore {
    /// The first argument of the functions.
    pub context: *mut c_void,
    /// Binds a key to a value.
    pub set: unsafe extern "C" fn(*mut c_void, key: RawBytes, value: RawBytes, *mut RawError) -> i32,
    /// Gives a key's value, which it waits for.
    pub get: unsafe extern "C" fn(
        *mut c_void,
        key: RawBytes,
        timeout_ms: u64,
        Take,
        sink: *mut c_void,
        *mut RawError,
    ) -> i32,
    /// Waits for a key.
    pub wait: unsafe extern "C" fn(*mut c_void, key: RawBytes, timeout_ms: u64, *mut RawError) -> i32,
    /// Ends its use.
    pub release: unsafe extern "C" fn(*mut c_void),
    /// The host that serves it, if known.
    pub host: RawBytes,
}

/// What a backend joins with.
#[repr(C)]
#[derive(Debug)]
pub struct RawJoin {
    /// The communicator's name.
    pub name: RawBytes,
    /// Where tensors are.
    pub device: RawBytes,
    /// This process's rank.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// Milliseconds.
    pub timeout_ms: u64,
    /// Names and values in turn.
    pub hints: *const RawBytes,
    /// How many pairs.
    pub hints_len: u64,
    /// Where the ranks find each other.
    pub store: RawStore,
}

/// A backend: its constants, and its functions on what `join` made.
#[repr(C)]
#[derive(Debug)]
pub struct RawTable {
    /// [`ABI_VERSION`] as the library was built.
    pub abi_version: u32,
    /// The table's bytes as the library was built. Later versions of an equal number only append.
    pub size: u32,
    /// The backend's name.
    pub name: RawBytes,
    /// The backend's version.
    pub version: RawBytes,
    /// Tells the names of the backend's own methods.
    pub methods: unsafe extern "C" fn(Take, sink: *mut c_void),
    /// Joins a communicator.
    pub join: unsafe extern "C" fn(*const RawJoin, made: *mut *mut c_void, *mut RawError) -> i32,
    /// Leaves it.
    pub destroy: unsafe extern "C" fn(*mut c_void),
    /// Begins an operation.
    pub submit: unsafe extern "C" fn(*mut c_void, *const RawOperation, made: *mut *mut c_void, *mut RawError) -> i32,
    /// Runs one of the backend's own methods.
    pub call: unsafe extern "C" fn(
        *mut c_void,
        method: RawBytes,
        arguments: RawBytes,
        tensors: *const RawBuffer,
        tensors_len: u64,
        Take,
        sink: *mut c_void,
        *mut RawError,
    ) -> i32,
    /// Sets the time limit, in milliseconds.
    pub set_timeout: unsafe extern "C" fn(*mut c_void, timeout_ms: u64, *mut RawError) -> i32,
    /// Ends what is in flight.
    pub abort: unsafe extern "C" fn(*mut c_void, reason: RawBytes, *mut RawError) -> i32,
    /// Finishes.
    pub finalize: unsafe extern "C" fn(*mut c_void, *mut RawError) -> i32,
    /// Waits for an operation, for so many milliseconds.
    pub work_wait: unsafe extern "C" fn(*mut c_void, timeout_ms: u64, *mut RawError) -> i32,
    /// Ends the use of an operation's handle.
    pub work_release: unsafe extern "C" fn(*mut c_void),
}

#[allow(unsafe_code, reason = "a table is a static")]
// SAFETY: its pointers are to constants and functions.
unsafe impl Sync for RawTable {}

#[allow(unsafe_code, reason = "as for Sync")]
// SAFETY: as for Sync.
unsafe impl Send for RawTable {}

// The layouts of ABI_VERSION 1.
const _: () = assert!(size_of::<RawBuffer>() == 24);
const _: () = assert!(size_of::<RawOperation>() == 104);
const _: () = assert!(size_of::<RawStore>() == 56);
const _: () = assert!(size_of::<RawJoin>() == 120);
const _: () = assert!(size_of::<RawTable>() == 120);
