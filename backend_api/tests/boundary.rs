//! A backend behind its table, called as a loader calls it. Miri runs this too, with both sides of the boundary.
#![allow(unsafe_code, reason = "calls the table's functions")]

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::time::Duration;

use ncclx_rs_backend::abi::{self, OK, PENDING, RawBuffer, RawBytes, RawError, RawJoin, RawOperation, RawStore};
use ncclx_rs_backend::{
    Backend, Buffer, DType, Error, ErrorKind, Join, OpKind, Operation, Store, Tensor, Work, export,
};

// ---- the backend ----

/// Halves the input of a reduction at the first wait.
struct Halving {
    store: Store,
    hints: Vec<(String, String)>,
}

impl Backend for Halving {
    const NAME: &'static str = "halving";
    const VERSION: &'static str = "0.1";
    const METHODS: &'static [&'static str] = &["negate", "remember"];

    fn join(join: Join) -> Result<Self, Error> {
        assert_ne!(join.name, "panic", "it was checked to");
        if join.device != "cpu" {
            return Err(Error::usage("halving: expected the device cpu"));
        }
        join.store.set("joined", b"yes").map_err(Error::failure)?;
        Ok(Halving { store: join.store, hints: join.hints })
    }

    fn submit(&self, operation: Operation) -> Result<Box<dyn Work>, Error> {
        match operation.kind {
            OpKind::AllReduce(_) => Ok(Box::new(Half(Mutex::new(Some(operation.outputs))))),
            _ => Err(Error::unsupported(&operation.name, Self::NAME)),
        }
    }

    fn call(&self, method: &str, arguments: &str, tensors: &mut [Tensor<'_>]) -> Result<String, Error> {
        match method {
            "negate" => {
                for tensor in tensors {
                    tensor.as_mut_slice::<f32>()?.iter_mut().for_each(|value| *value = -*value);
                }
                Ok(format!("[{arguments}, {:?}]", self.hints))
            }
            _ => {
                let known = self.store.get("joined", Duration::from_secs(1)).map_err(Error::failure)?;
                Ok(String::from_utf8_lossy(&known).into_owned())
            }
        }
    }

    fn abort(&self, reason: &str) {
        panic!("aborted: {reason}");
    }

    fn finalize(&self) -> Result<(), Error> {
        self.store.wait("nothing", Duration::from_millis(5)).map_err(|text| Error::new(ErrorKind::Timeout, text))
    }
}

struct Half(Mutex<Option<Vec<Buffer>>>);

impl Work for Half {
    fn wait(&self, timeout: Duration) -> Option<Result<(), Error>> {
        let mut lent = self.0.lock().expect("no panic");
        if timeout.is_zero() && lent.is_some() {
            return None;
        }
        for buffer in lent.take().into_iter().flatten() {
            // SAFETY: the memory is valid until the end has been returned, and holds that many elements.
            let data = unsafe { std::slice::from_raw_parts_mut(buffer.ptr().cast::<f32>(), buffer.len()) };
            data.iter_mut().for_each(|value| *value /= 2.0);
        }
        Some(Ok(()))
    }
}

// ---- a store of the loader's ----

#[derive(Default)]
struct Shelf {
    joined: Mutex<Vec<u8>>,
}

unsafe extern "C" fn set(shelf: *mut c_void, _key: RawBytes, value: RawBytes, _: *mut RawError) -> i32 {
    // SAFETY: the shelf of `join`, which is not yet released.
    let shelf = unsafe { &*shelf.cast::<Shelf>() };
    // SAFETY: bytes that live for the call.
    *shelf.joined.lock().expect("no panic") = unsafe { value.bytes() }.to_vec();
    OK
}

unsafe extern "C" fn get(
    shelf: *mut c_void,
    _key: RawBytes,
    _timeout_ms: u64,
    write: abi::WriteBytes,
    sink: *mut c_void,
    _: *mut RawError,
) -> i32 {
    // SAFETY: the shelf of `join`, which is not yet released.
    let shelf = unsafe { &*shelf.cast::<Shelf>() };
    // SAFETY: the library's function with its sink.
    unsafe { write(sink, RawBytes::of_bytes(&shelf.joined.lock().expect("no panic"))) };
    OK
}

unsafe extern "C" fn wait(_: *mut c_void, key: RawBytes, timeout_ms: u64, error: *mut RawError) -> i32 {
    // SAFETY: a text that lives for the call.
    let key = unsafe { key.text() };
    // SAFETY: the library's place for a text.
    unsafe { &mut *error }.write(&format!("no key {key} after {timeout_ms} ms"));
    ErrorKind::Timeout as i32
}

unsafe extern "C" fn release(shelf: *mut c_void) {
    // SAFETY: made by `join` below, released once: Miri tells of a second time and of a leak.
    drop(unsafe { Box::from_raw(shelf.cast::<Shelf>()) });
}

// ---- the loader's calls ----

static TABLE: abi::RawTable = export::table::<Halving>();

/// A member, or the status and text of the failure.
fn join(name: &str, device: &str) -> Result<*mut c_void, (i32, String)> {
    let hints = [RawBytes::of("speed"), RawBytes::of("great")];
    let context = Box::into_raw(Box::new(Shelf::default())).cast();
    let raw = RawJoin {
        name: RawBytes::of(name),
        device: RawBytes::of(device),
        rank: 0,
        size: 1,
        timeout_ms: 1000,
        hints: hints.as_ptr(),
        hints_len: 1,
        store: RawStore { context, set, get, wait, release, host: RawBytes::of("") },
    };
    let mut made = null_mut();
    // SAFETY: complete, and alive for the call; the store is handed over.
    checked(|error| unsafe { (TABLE.join)(&raw const raw, &raw mut made, error) }).map(|_| made)
}

fn operation(kind: &str, inputs: &[RawBuffer], outputs: &[RawBuffer]) -> RawOperation {
    RawOperation {
        name: RawBytes::of("the_call"),
        kind: abi::KINDS.iter().position(|known| *known == kind).expect("a kind") as u32,
        reduce: 0,
        factor: 0.0,
        timeout_ms: 1000,
        peer: 0,
        blocking: 0,
        inputs: inputs.as_ptr(),
        inputs_len: inputs.len() as u64,
        outputs: outputs.as_ptr(),
        outputs_len: outputs.len() as u64,
        send_counts: std::ptr::null(),
        recv_counts: std::ptr::null(),
        counts_len: 0,
    }
}

fn submit(member: *mut c_void, raw: &RawOperation) -> Result<*mut c_void, (i32, String)> {
    let mut made = null_mut();
    // SAFETY: a member that lives, and an operation that is complete.
    checked(|error| unsafe { (TABLE.submit)(member, raw, &raw mut made, error) }).map(|_| made)
}

fn call(member: *mut c_void, method: &str, tensors: &[RawBuffer]) -> Result<String, (i32, String)> {
    let mut answer = Vec::<u8>::new();
    let (method, arguments, sink) = (RawBytes::of(method), RawBytes::of("{}"), (&raw mut answer).cast());
    let (list, len) = (tensors.as_ptr(), tensors.len() as u64);
    // SAFETY: a member that lives, memory that is lent, and the function that fits the sink.
    checked(|error| unsafe { (TABLE.call)(member, method, arguments, list, len, abi::append_bytes, sink, error) })?;
    Ok(String::from_utf8(answer).expect("a text"))
}

fn checked(call: impl FnOnce(*mut RawError) -> i32) -> Result<i32, (i32, String)> {
    let mut error = RawError::EMPTY;
    match call(&raw mut error) {
        status @ (OK | PENDING) => Ok(status),
        status => Err((status, error.read())),
    }
}

fn buffer(data: &mut [f32]) -> RawBuffer {
    let dtype = DType::ALL.iter().position(|dtype| dtype.name() == "float32").expect("known") as u32;
    RawBuffer { ptr: data.as_mut_ptr().cast(), len: data.len() as u64, dtype, reserved: 0 }
}

// ---- the tests ----

#[test]
fn operations_and_methods_reach_the_lent_memory() {
    let member = join("main", "cpu").expect("it joins");
    let mut data = [2.0_f32, 4.0, 6.0];
    let lent = [buffer(&mut data)];
    let work = submit(member, &operation("all_reduce", &lent, &lent)).expect("it begins");
    // SAFETY: a work that lives.
    assert_eq!(checked(|error| unsafe { (TABLE.work_wait)(work, 0, error) }), Ok(PENDING));
    for _ in 0..2 {
        // SAFETY: a work that lives.
        assert_eq!(checked(|error| unsafe { (TABLE.work_wait)(work, 1000, error) }), Ok(OK));
    }
    // SAFETY: given back once.
    unsafe { (TABLE.work_release)(work) };
    assert_eq!(data, [1.0, 2.0, 3.0]);

    let lent = [buffer(&mut data)];
    let answer = call(member, "negate", &lent);
    assert_eq!(answer, Ok(r#"[{}, [("speed", "great")]]"#.to_owned()));
    assert_eq!(data, [-1.0, -2.0, -3.0]);
    assert_eq!(call(member, "remember", &[]), Ok("yes".to_owned()));

    let mut methods = Vec::<u8>::new();
    // SAFETY: the function that fits the sink.
    unsafe { (TABLE.methods)(abi::append_bytes, (&raw mut methods).cast()) };
    assert_eq!(methods, b"negateremember");
    // SAFETY: given back once.
    unsafe { (TABLE.destroy)(member) };
}

#[test]
fn failures_come_with_their_kind_and_text() {
    let failed = |kind: ErrorKind, text: &str| Err((kind as i32, text.to_owned()));
    assert_eq!(join("main", "cuda:0").map(drop), failed(ErrorKind::Usage, "halving: expected the device cpu"));
    let member = join("main", "cpu").expect("it joins");
    let text = "the_call: the backend halving does not have it";
    assert_eq!(submit(member, &operation("barrier", &[], &[])).map(drop), failed(ErrorKind::Unsupported, text));
    let unknown = RawOperation { kind: 99, ..operation("barrier", &[], &[]) };
    assert_eq!(submit(member, &unknown).map(drop), failed(ErrorKind::Unsupported, "operation 99 is not known"));
    let mut data = [1.0];
    let strange = RawBuffer { dtype: 99, ..buffer(&mut data) };
    assert_eq!(
        call(member, "negate", &[strange]).map(drop),
        failed(ErrorKind::Unsupported, "element type 99 is not known")
    );
    // SAFETY: a member that lives.
    let finalized = checked(|error| unsafe { (TABLE.finalize)(member, error) }).map(drop);
    assert_eq!(finalized, failed(ErrorKind::Timeout, "no key nothing after 5 ms"));
    // SAFETY: given back once.
    unsafe { (TABLE.destroy)(member) };
}

#[test]
fn panics_stay_on_their_side() {
    let (status, text) = join("panic", "cpu").expect_err("it panics");
    assert_eq!((status, text.contains("it was checked to")), (ErrorKind::Panic as i32, true), "{text}");
    let member = join("main", "cpu").expect("it joins");
    // SAFETY: a member that lives.
    let aborted = checked(|error| unsafe { (TABLE.abort)(member, RawBytes::of("the test"), error) });
    assert_eq!(aborted, Err((ErrorKind::Panic as i32, "the backend panicked: aborted: the test".to_owned())));
    // SAFETY: given back once.
    unsafe { (TABLE.destroy)(member) };
}
