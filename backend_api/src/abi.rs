//! The C layouts that cross the boundary between a backend's library and the program that loads it.
//!
//! A backend's author does not need them: [`export_backend!`](crate::export_backend) uses them.
//!
//! # Contract
//! - [`SYMBOL`] is a function without arguments that returns a [`RawTable`] which lives as long as the process. Its first
//!   two fields are the same in every version, so that a loader can refuse a table.
//! - Functions return a status: [`OK`], [`PENDING`] (of `work_wait` alone), or the number of an
//!   [`ErrorKind`](crate::ErrorKind), with a text in the [`RawError`]. None unwinds.
//! - Arguments live for the call. Texts are UTF-8.
//! - `join` always takes ownership of the store, and calls its `release` once. Until then, any thread may call the store's
//!   other functions.
//! - `join` and `submit` return an object by their last argument but one. It goes back once, to `destroy` or
//!   `work_release`, in any order. Nothing is called with it afterwards.
//! - The library may use an operation's memory from `submit` until `work_wait` has returned its end, or until `destroy`
//!   returns; not at all if `submit` failed. After a panic of either function, it may use it until `destroy` returns.
//! - The library may use the memory of tensors during `call`; they do not overlap.

use std::ffi::c_void;

/// The version of these layouts and of their contract. Different versions do not work together.
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

/// The bytes of a text or of a value; `ptr` may be null if there are none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawBytes {
    /// The address of the first.
    pub ptr: *const u8,
    /// The number of them.
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
    /// The bytes live as long as the result.
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

/// The size of a [`RawError`].
pub const ERROR_BYTES: usize = 4096;

/// A buffer for the text of an error.
#[repr(C)]
#[derive(Debug)]
pub struct RawError {
    /// UTF-8 up to the first zero.
    pub text: [u8; ERROR_BYTES],
}

impl RawError {
    /// A buffer without a text.
    pub const EMPTY: RawError = RawError { text: [0; ERROR_BYTES] };

    /// Writes a text, truncated to the buffer.
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

/// Writes bytes, which live for the call, to `sink`.
pub type WriteBytes = unsafe extern "C" fn(sink: *mut c_void, bytes: RawBytes);

/// The [`WriteBytes`] that appends to a `Vec<u8>`, its sink.
///
/// # Safety
/// `sink` is a `Vec<u8>` that nothing else uses during the call, and the bytes live for the call.
#[allow(unsafe_code, reason = "memory of the other side")]
pub unsafe extern "C" fn append_bytes(sink: *mut c_void, bytes: RawBytes) {
    // SAFETY: the caller's promise.
    let sink = unsafe { &mut *sink.cast::<Vec<u8>>() };
    // SAFETY: the caller's promise.
    sink.extend_from_slice(unsafe { bytes.bytes() });
}

/// Elements in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawBuffer {
    /// The address of the first.
    pub ptr: *mut u8,
    /// The number of them.
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
    /// The timeout in milliseconds.
    pub timeout_ms: u64,
    /// The root, receiver or sender.
    pub peer: u32,
    /// Whether the caller waits next: 1 or 0.
    pub blocking: u32,
    /// The buffers that it reads.
    pub inputs: *const RawBuffer,
    /// The number of them.
    pub inputs_len: u64,
    /// The buffers that it writes.
    pub outputs: *const RawBuffer,
    /// The number of them.
    pub outputs_len: u64,
    /// For all_to_all, the number of elements for each rank.
    pub send_counts: *const u64,
    /// For all_to_all, the number of elements from each rank.
    pub recv_counts: *const u64,
    /// The length of both.
    pub counts_len: u64,
}

/// The store for the rendezvous of the ranks.
#[repr(C)]
#[derive(Debug)]
pub struct RawStore {
    /// The first argument of the functions.
    pub context: *mut c_void,
    /// Sets a key to a value.
    pub set: unsafe extern "C" fn(*mut c_void, key: RawBytes, value: RawBytes, *mut RawError) -> i32,
    /// Returns a key's value; waits for it.
    pub get: unsafe extern "C" fn(
        *mut c_void,
        key: RawBytes,
        timeout_ms: u64,
        WriteBytes,
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

/// The arguments of a join.
#[repr(C)]
#[derive(Debug)]
pub struct RawJoin {
    /// The communicator's name.
    pub name: RawBytes,
    /// The device of tensors.
    pub device: RawBytes,
    /// This process's rank.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// The timeout in milliseconds.
    pub timeout_ms: u64,
    /// Names and values in turn.
    pub hints: *const RawBytes,
    /// The number of pairs.
    pub hints_len: u64,
    /// The ranks' store.
    pub store: RawStore,
}

/// A backend: its constants, and its functions on the object of `join`.
#[repr(C)]
#[derive(Debug)]
pub struct RawTable {
    /// The [`ABI_VERSION`] that the library was built with.
    pub abi_version: u32,
    /// The size of the table that the library was built with. Tables of one version number only grow at the end.
    pub size: u32,
    /// The backend's name.
    pub name: RawBytes,
    /// The backend's version.
    pub version: RawBytes,
    /// Returns the names of the backend's own methods.
    pub methods: unsafe extern "C" fn(WriteBytes, sink: *mut c_void),
    /// Joins a communicator.
    pub join: unsafe extern "C" fn(*const RawJoin, made: *mut *mut c_void, *mut RawError) -> i32,
    /// Leaves the communicator.
    pub destroy: unsafe extern "C" fn(*mut c_void),
    /// Starts an operation.
    pub submit: unsafe extern "C" fn(*mut c_void, *const RawOperation, made: *mut *mut c_void, *mut RawError) -> i32,
    /// Runs one of the backend's own methods.
    pub call: unsafe extern "C" fn(
        *mut c_void,
        method: RawBytes,
        arguments: RawBytes,
        tensors: *const RawBuffer,
        tensors_len: u64,
        WriteBytes,
        sink: *mut c_void,
        *mut RawError,
    ) -> i32,
    /// Sets the timeout in milliseconds.
    pub set_timeout: unsafe extern "C" fn(*mut c_void, timeout_ms: u64, *mut RawError) -> i32,
    /// Ends the operations in flight.
    pub abort: unsafe extern "C" fn(*mut c_void, reason: RawBytes, *mut RawError) -> i32,
    /// Waits until operations in flight have ended, and leaves.
    pub finalize: unsafe extern "C" fn(*mut c_void, *mut RawError) -> i32,
    /// Waits for an operation, up to a number of milliseconds.
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
