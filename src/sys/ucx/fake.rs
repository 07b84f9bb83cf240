//! A library of UCX within this process, for tests: its workers pass each other what they send. A test says when requests end and
//! endpoints fail, and sees what was not given back.
#![allow(unsafe_code, reason = "has the functions of a library in C")]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{null, null_mut, without_provenance_mut};

use libc::FILE;
use rustix::event::{EventfdFlags, eventfd};

use super::configuration::Reach;
use super::context::Context;
use super::functions::{
    BUSY, ContextAttributes, EndpointAttributes, EndpointParams, ErrorHandler, Functions, IN_PROGRESS,
    MESSAGE_HAS_DATA, MemoryParams, MessageAttributes, MessageHandler, MessageHandlerParams, OK, PRINT_CONFIG, Params,
    RawConfig, RawContext, RawEndpoint, RawKey, RawMemory, RawWorker, RequestInit, RequestParams, Status, StatusPtr,
    THREAD_MODE_MULTI, WorkerParams,
};
use super::library::{Ucx, Version};
use crate::sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering, lock};

/// One context of it.
#[derive(Debug)]
pub(crate) struct Fake {
    context: Arc<Context>,
}

impl Fake {
    /// A new context, whose requests end in the call that makes them.
    pub(crate) fn context() -> (Arc<Context>, Fake) {
        Fake::of_version(Version::READS_BY_CMA)
    }

    /// The same of such a version.
    pub(crate) fn of_version(version: Version) -> (Arc<Context>, Fake) {
        let context = Arc::new(Context::new(Arc::new(Ucx::with(FUNCTIONS, version)), Reach::Host).unwrap());
        (context.clone(), Fake { context })
    }

    fn number(&self) -> usize {
        self.context.raw().addr()
    }

    fn change(&self, change: impl FnOnce(&mut ContextState)) {
        change(state().contexts.get_mut(&self.number()).unwrap());
    }

    /// From now on the memory of a message is needed for so many turns of progress.
    pub(crate) fn sends_take(&self, turns: u32) {
        self.change(|context| context.send_turns = turns);
    }

    /// From now on a flush takes so many turns of progress.
    pub(crate) fn flushes_take(&self, turns: u32) {
        self.change(|context| context.flush_turns = turns);
    }

    /// From now on a read takes so many turns of progress.
    pub(crate) fn gets_take(&self, turns: u32) {
        self.change(|context| context.get_turns = turns);
    }

    /// From now on reads end so, and those that are begun fail at once where `at_once`.
    pub(crate) fn gets_fail(&self, at_once: bool) {
        self.change(|context| context.failing = Some(at_once));
    }

    /// From now on no memory is registered.
    pub(crate) fn refuse_memory(&self) {
        self.change(|context| context.refuses_memory = true);
    }

    /// From now on endpoints go through what UCX calls so.
    pub(crate) fn go_through(&self, way: &'static CStr) {
        self.change(|context| context.way = way);
    }

    /// How many registrations have not ended.
    pub(crate) fn registered(&self) -> usize {
        state().memory.values().filter(|memory| memory.context == self.number()).count()
    }

    /// How many keys were unpacked and not destroyed, of all contexts of this thread's test.
    pub(crate) fn keys(&self) -> usize {
        state().keys.values().filter(|key| key.context == self.number()).count()
    }

    /// Has all endpoints fail in the next progress of their workers.
    pub(crate) fn fail_endpoints(&self) {
        let state = &mut *state();
        for endpoint in state.endpoints.values_mut().filter(|endpoint| endpoint.context == self.number()) {
            endpoint.is_failing = true;
        }
    }

    /// How many endpoints are open.
    pub(crate) fn endpoints(&self) -> usize {
        state().endpoints.values().filter(|endpoint| endpoint.context == self.number()).count()
    }

    /// How many requests were not freed.
    pub(crate) fn requests(&self) -> usize {
        state().requests.values().filter(|request| request.context == self.number()).count()
    }

    /// Of how many of these the library's part was all zeros when it was made, and the rest as it had been.
    pub(crate) fn clean_requests(&self) -> usize {
        let is_clean = |request: &&Request| request.context == self.number() && request.is_clean;
        state().requests.values().filter(is_clean).count()
    }

    /// How many flushes have begun.
    pub(crate) fn flushes(&self) -> usize {
        state().contexts[&self.number()].flushes
    }

    /// How often an endpoint was closed that had failed, before progress told so. Then UCX crashes.
    pub(crate) fn crashes(&self) -> usize {
        state().contexts[&self.number()].crashes
    }

    /// Of how many messages the memory was kept and not given back.
    pub(crate) fn kept(&self) -> usize {
        state().kept.values().filter(|(context, _)| *context == self.number()).count()
    }
}

/// What contexts are set to, otherwise than the library has it.
pub(crate) fn settings() -> BTreeMap<String, String> {
    state().settings.clone()
}

/// How many calls of the library there were, of all contexts.
pub(crate) fn calls() -> usize {
    CALLS.load(Ordering::Relaxed)
}

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// What all contexts have, by the numbers that stand for pointers.
struct State {
    settings: BTreeMap<String, String>,
    contexts: BTreeMap<usize, ContextState>,
    workers: BTreeMap<usize, WorkerState>,
    endpoints: BTreeMap<usize, EndpointState>,
    memory: BTreeMap<usize, Memory>,
    keys: BTreeMap<usize, Key>,
    /// These two by the address of their memory.
    requests: BTreeMap<usize, Request>,
    /// With the context.
    kept: BTreeMap<usize, (usize, Box<[u8]>)>,
}

struct ContextState {
    request_init: RequestInit,
    send_turns: u32,
    flush_turns: u32,
    get_turns: u32,
    /// Whether reads fail, and when.
    failing: Option<bool>,
    refuses_memory: bool,
    way: &'static CStr,
    flushes: usize,
    crashes: usize,
}

/// Memory that is registered.
struct Memory {
    context: usize,
    address: usize,
    len: usize,
}

/// An unpacked key: to which memory.
#[derive(Clone, Copy)]
struct Key {
    context: usize,
    memory: usize,
}

/// What a read copies once it ends.
#[derive(Clone, Copy)]
struct Copy {
    key: Key,
    from: usize,
    into: usize,
    len: usize,
}

struct WorkerState {
    context: usize,
    events: OwnedFd,
    handler: Option<(MessageHandler, Argument)>,
    mail: VecDeque<Box<[u8]>>,
}

struct EndpointState {
    context: usize,
    worker: usize,
    to: usize,
    on_error: (ErrorHandler, Argument),
    is_failing: bool,
    has_failed: bool,
}

struct Request {
    context: usize,
    endpoint: usize,
    worker: usize,
    turns: u32,
    status: Status,
    is_clean: bool,
    copy: Option<Copy>,
    _memory: Vec<u8>,
}

/// What a handler is given.
#[derive(Clone, Copy)]
struct Argument(*mut c_void);

// SAFETY: it is only passed on.
unsafe impl Send for Argument {}

static STATE: Mutex<State> = Mutex::new(State {
    settings: BTreeMap::new(),
    contexts: BTreeMap::new(),
    workers: BTreeMap::new(),
    endpoints: BTreeMap::new(),
    memory: BTreeMap::new(),
    keys: BTreeMap::new(),
    requests: BTreeMap::new(),
    kept: BTreeMap::new(),
});

fn state() -> MutexGuard<'static, State> {
    lock(&STATE)
}

/// The state, for a call of the library.
fn called() -> MutexGuard<'static, State> {
    CALLS.fetch_add(1, Ordering::Relaxed);
    state()
}

/// A number that stands for a pointer, and for no status.
fn number() -> usize {
    static LAST: AtomicUsize = AtomicUsize::new(1 << 12);
    LAST.fetch_add(1, Ordering::Relaxed)
}

/// Sets a result.
///
/// # Safety
/// A value may be written to `place`.
unsafe fn put<T>(place: *mut T, value: T) {
    // SAFETY: as the caller says.
    unsafe { place.write(value) };
}

fn status(status: Status) -> StatusPtr {
    without_provenance_mut((status as isize).cast_unsigned())
}

unsafe extern "C" fn get_version(major: *mut c_uint, minor: *mut c_uint, patch: *mut c_uint) {
    for (place, value) in [(major, 1), (minor, 22), (patch, 0)] {
        // SAFETY: the caller's.
        unsafe { put(place, value) };
    }
}

extern "C" fn status_string(_: Status) -> *const c_char {
    c"it fails".as_ptr()
}

unsafe extern "C" fn config_read(_: *const c_char, _: *const c_char, config: *mut RawConfig) -> Status {
    // SAFETY: the caller's.
    unsafe { put(config, without_provenance_mut(number())) };
    OK
}

/// As the library prints it, where a file excludes `tcp`.
unsafe extern "C" fn config_print(_: RawConfig, stream: *mut FILE, title: *const c_char, flags: c_uint) {
    assert!(title.is_null() && flags == PRINT_CONFIG);
    let printed = c"UCX_NET_DEVICES=all\nUCX_TLS=^tcp\nUCX_SOCKADDR_TLS_PRIORITY=tcp\n";
    // SAFETY: the caller's stream.
    unsafe { libc::fputs(printed.as_ptr(), stream) };
}

unsafe extern "C" fn config_modify(_: RawConfig, key: *const c_char, value: *const c_char) -> Status {
    // SAFETY: the caller's.
    let [key, value] = [key, value].map(|text| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned());
    called().settings.insert(key, value);
    OK
}

extern "C" fn config_release(_: RawConfig) {}

unsafe extern "C" fn init(_: c_uint, _: c_uint, params: *const Params, _: RawConfig, raw: *mut RawContext) -> Status {
    // SAFETY: the caller's.
    let request_init = unsafe { &*params }.request_init.unwrap();
    let number = number();
    let context = ContextState {
        request_init,
        send_turns: 0,
        flush_turns: 0,
        get_turns: 0,
        failing: None,
        refuses_memory: false,
        way: WAY,
        flushes: 0,
        crashes: 0,
    };
    called().contexts.insert(number, context);
    // SAFETY: the caller's.
    unsafe { put(raw, without_provenance_mut(number)) };
    OK
}

extern "C" fn cleanup(context: RawContext) {
    called().contexts.remove(&context.addr());
}

unsafe extern "C" fn context_query(_: RawContext, attributes: *mut ContextAttributes) -> Status {
    // SAFETY: the caller's.
    let attributes = unsafe { &mut *attributes };
    (attributes.request_size, attributes.thread_mode) = (REQUEST_BYTES, THREAD_MODE_MULTI);
    OK
}

unsafe extern "C" fn worker_create(context: RawContext, _: *const WorkerParams, raw: *mut RawWorker) -> Status {
    let number = number();
    let events = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
    let worker = WorkerState { context: context.addr(), events, handler: None, mail: VecDeque::new() };
    called().workers.insert(number, worker);
    // SAFETY: the caller's.
    unsafe { put(raw, without_provenance_mut(number)) };
    OK
}

extern "C" fn worker_destroy(worker: RawWorker) {
    called().workers.remove(&worker.addr());
}

/// An address is the worker's number, and lies in a box of it.
unsafe extern "C" fn worker_get_address(worker: RawWorker, address: *mut *mut c_void, len: *mut usize) -> Status {
    // SAFETY: the caller's.
    unsafe { put(address, Box::into_raw(Box::new(worker.addr())).cast()) };
    // SAFETY: the caller's.
    unsafe { put(len, size_of::<usize>()) };
    OK
}

unsafe extern "C" fn worker_release_address(_: RawWorker, address: *mut c_void) {
    // SAFETY: made above.
    drop(unsafe { Box::from_raw(address.cast::<usize>()) });
}

unsafe extern "C" fn worker_get_efd(worker: RawWorker, events: *mut c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { put(events, called().workers[&worker.addr()].events.as_raw_fd()) };
    OK
}

extern "C" fn worker_arm(worker: RawWorker) -> Status {
    let state = called();
    let is_failing = |endpoint: &EndpointState| endpoint.worker == worker.addr() && endpoint.is_failing;
    if !state.workers[&worker.addr()].mail.is_empty() || state.endpoints.values().any(is_failing) {
        return BUSY;
    }
    // There is nothing to read where it is silent already.
    let _ = rustix::io::read(&state.workers[&worker.addr()].events, &mut [0; 8]);
    OK
}

extern "C" fn worker_progress(worker: RawWorker) -> c_uint {
    let (mut held, worker) = (called(), worker.addr());
    let State { workers, endpoints, requests, memory, contexts, .. } = &mut *held;
    let WorkerState { context, handler, mail, .. } = workers.get_mut(&worker).unwrap();
    let (context, handler, mail) = (*context, *handler, std::mem::take(mail));
    for request in requests.values_mut().filter(|request| request.worker == worker && request.status == IN_PROGRESS) {
        request.turns -= 1;
        if request.turns == 0 {
            let fails = contexts[&request.context].failing.is_some();
            request.status = request.copy.map_or(OK, |copy| if fails { IO_ERROR } else { run(memory, copy) });
        }
    }
    let mut failed = Vec::new();
    for (number, endpoint) in endpoints.iter_mut().filter(|(_, endpoint)| endpoint.worker == worker) {
        if std::mem::take(&mut endpoint.is_failing) {
            endpoint.has_failed = true;
            failed.push((*number, endpoint.on_error));
        }
    }
    // Handlers may call the library.
    drop(held);
    let count = mail.len() + failed.len();
    for (number, (handler, argument)) in failed {
        // SAFETY: as the library promises, in progress and with the endpoint's argument.
        unsafe { handler(argument.0, without_provenance_mut(number), CONNECTION_RESET) };
    }
    for mut message in mail {
        let Some((handler, argument)) = handler else { continue };
        let attributes = MessageAttributes { attributes: MESSAGE_HAS_DATA, reply_endpoint: null_mut() };
        let (data, len) = (message.as_mut_ptr(), message.len());
        // SAFETY: as the library promises, in progress; the data stay until they are given back.
        let answer = unsafe { handler(argument.0, null(), 0, data.cast(), len, &raw const attributes) };
        if answer == IN_PROGRESS {
            state().kept.insert(data.addr(), (context, message));
        }
    }
    count as c_uint
}

unsafe extern "C" fn ep_create(worker: RawWorker, params: *const EndpointParams, raw: *mut RawEndpoint) -> Status {
    // SAFETY: the caller's.
    let params = unsafe { &*params };
    // SAFETY: an address that was given out above.
    let to = unsafe { params.address.cast::<usize>().read_unaligned() };
    let mut state = called();
    if !state.workers.contains_key(&to) {
        return UNREACHABLE;
    }
    let (number, context) = (number(), state.workers[&worker.addr()].context);
    let on_error = (params.error_handler.unwrap(), Argument(params.error_argument));
    let worker = worker.addr();
    let endpoint = EndpointState { context, worker, to, on_error, is_failing: false, has_failed: false };
    state.endpoints.insert(number, endpoint);
    // SAFETY: the caller's.
    unsafe { put(raw, without_provenance_mut(number)) };
    OK
}

extern "C" fn ep_close(endpoint: RawEndpoint, _: *const RequestParams) -> StatusPtr {
    let mut state = called();
    let closed = state.endpoints.remove(&endpoint.addr()).expect("an endpoint is closed once");
    state.contexts.get_mut(&closed.context).unwrap().crashes += usize::from(closed.is_failing);
    for request in state.requests.values_mut().filter(|request| request.endpoint == endpoint.addr()) {
        if request.status == IN_PROGRESS {
            request.status = CANCELED;
        }
    }
    status(OK)
}

extern "C" fn request_check_status(request: *mut c_void) -> Status {
    called().requests.get(&request.addr()).expect("a request that was not freed").status
}

extern "C" fn request_free(request: *mut c_void) {
    let freed = called().requests.remove(&request.addr()).expect("a request is freed once");
    assert_ne!(freed.status, IN_PROGRESS, "only what has ended is freed");
}

/// A request of this endpoint that ends after so many turns; none if that is at once.
fn request(state: &mut State, endpoint: usize, turns: u32, copy: Option<Copy>) -> StatusPtr {
    let EndpointState { context, worker, .. } = state.endpoints[&endpoint];
    if turns == 0 {
        return status(copy.map_or(OK, |copy| run(&state.memory, copy)));
    }
    let mut memory = vec![DIRT; 2 * REQUEST_BYTES];
    let pointer = memory[REQUEST_BYTES..].as_mut_ptr().cast::<c_void>();
    // SAFETY: before and behind the pointer is as much memory as the library has said.
    unsafe { (state.contexts[&context].request_init)(pointer) };
    let (library, user) = memory.split_at(REQUEST_BYTES);
    let is_clean = library.iter().all(|byte| *byte == 0) && user.iter().all(|byte| *byte == DIRT);
    let request = Request { context, endpoint, worker, turns, status: IN_PROGRESS, is_clean, copy, _memory: memory };
    state.requests.insert(pointer.addr(), request);
    pointer
}

extern "C" fn ep_flush(endpoint: RawEndpoint, _: *const RequestParams) -> StatusPtr {
    let (mut state, endpoint) = (called(), endpoint.addr());
    if state.endpoints[&endpoint].has_failed {
        return status(CONNECTION_RESET);
    }
    let context = state.endpoints[&endpoint].context;
    let context = state.contexts.get_mut(&context).unwrap();
    context.flushes += 1;
    let turns = context.flush_turns;
    request(&mut state, endpoint, turns, None)
}

unsafe extern "C" fn set_message_handler(worker: RawWorker, params: *const MessageHandlerParams) -> Status {
    // SAFETY: the caller's.
    let params = unsafe { &*params };
    let handler = params.handler.map(|handler| (handler, Argument(params.argument)));
    called().workers.get_mut(&worker.addr()).unwrap().handler = handler;
    OK
}

unsafe extern "C" fn send_message(
    endpoint: RawEndpoint,
    _: c_uint,
    _: *const c_void,
    _: usize,
    data: *const c_void,
    len: usize,
    _: *const RequestParams,
) -> StatusPtr {
    let (mut state, endpoint) = (called(), endpoint.addr());
    let EndpointState { context, to, has_failed, .. } = state.endpoints[&endpoint];
    if has_failed {
        return status(CONNECTION_RESET);
    }
    // SAFETY: the caller's.
    let message = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) };
    if let Some(receiver) = state.workers.get_mut(&to) {
        receiver.mail.push_back(message.into());
        // It is readable already where it is full.
        let _ = rustix::io::write(&receiver.events, &1u64.to_ne_bytes());
    }
    let turns = state.contexts[&context].send_turns;
    request(&mut state, endpoint, turns, None)
}

extern "C" fn release_message(_: RawWorker, data: *mut c_void) {
    called().kept.remove(&data.addr()).expect("a message is given back once");
}

unsafe extern "C" fn ep_query(endpoint: RawEndpoint, attributes: *mut EndpointAttributes) -> Status {
    // SAFETY: the caller's.
    let attributes = unsafe { &mut *attributes };
    // SAFETY: there is room for one.
    let entry = unsafe { &mut *attributes.entries };
    let state = state();
    let way = state.contexts[&state.endpoints[&endpoint.addr()].context].way;
    (entry.transport, entry.device) = (way.as_ptr(), c"fake".as_ptr());
    attributes.num_entries = 1;
    OK
}

unsafe extern "C" fn mem_map(context: RawContext, params: *const MemoryParams, raw: *mut RawMemory) -> Status {
    // SAFETY: the caller's.
    let params = unsafe { &*params };
    let (mut state, number, context) = (called(), number(), context.addr());
    if state.contexts[&context].refuses_memory {
        return UNSUPPORTED;
    }
    state.memory.insert(number, Memory { context, address: params.address.expose_provenance(), len: params.length });
    // SAFETY: the caller's.
    unsafe { put(raw, without_provenance_mut(number)) };
    OK
}

extern "C" fn mem_unmap(_: RawContext, memory: RawMemory) -> Status {
    called().memory.remove(&memory.addr()).expect("memory is unmapped once");
    OK
}

/// A key is the memory's number, and lies in a box of it.
unsafe extern "C" fn rkey_pack(_: RawContext, memory: RawMemory, packed: *mut *mut c_void, len: *mut usize) -> Status {
    // SAFETY: the caller's.
    unsafe { put(packed, Box::into_raw(Box::new(memory.addr())).cast()) };
    // SAFETY: the caller's.
    unsafe { put(len, size_of::<usize>()) };
    OK
}

unsafe extern "C" fn rkey_buffer_release(packed: *mut c_void) {
    // SAFETY: made above.
    drop(unsafe { Box::from_raw(packed.cast::<usize>()) });
}

unsafe extern "C" fn rkey_unpack(endpoint: RawEndpoint, packed: *const c_void, raw: *mut RawKey) -> Status {
    // SAFETY: a key that was given out above, or as many bytes of another.
    let memory = unsafe { packed.cast::<usize>().read_unaligned() };
    let (mut state, number) = (called(), number());
    let context = state.endpoints[&endpoint.addr()].context;
    state.keys.insert(number, Key { context, memory });
    // SAFETY: the caller's.
    unsafe { put(raw, without_provenance_mut(number)) };
    OK
}

extern "C" fn rkey_destroy(key: RawKey) {
    called().keys.remove(&key.addr()).expect("a key is destroyed once");
}

extern "C" fn get(
    endpoint: RawEndpoint,
    into: *mut c_void,
    len: usize,
    address: u64,
    key: RawKey,
    _: *const RequestParams,
) -> StatusPtr {
    let (mut state, endpoint) = (called(), endpoint.addr());
    let EndpointState { context, has_failed, .. } = state.endpoints[&endpoint];
    let (failing, turns) = (state.contexts[&context].failing, state.contexts[&context].get_turns);
    if has_failed || failing == Some(true) {
        return status(CONNECTION_RESET);
    }
    let key = state.keys[&key.addr()];
    let copy = Copy { key, from: address as usize, into: into.expose_provenance(), len };
    request(&mut state, endpoint, turns, Some(copy))
}

/// Copies, as a device would that knows which memory is registered.
fn run(memory: &BTreeMap<usize, Memory>, Copy { key, from, into, len }: Copy) -> Status {
    let is_inside = |memory: &Memory| from >= memory.address && from + len <= memory.address + memory.len;
    if !memory.get(&key.memory).is_some_and(is_inside) {
        return IO_ERROR;
    }
    let (from, into) =
        (std::ptr::with_exposed_provenance::<u8>(from), std::ptr::with_exposed_provenance_mut::<u8>(into));
    // SAFETY: both are registered, so they live.
    unsafe { std::ptr::copy(from, into, len) };
    OK
}

const FUNCTIONS: Functions = Functions {
    get_version,
    status_string,
    config_read,
    config_print,
    config_modify,
    config_release,
    init,
    cleanup,
    context_query,
    mem_map,
    mem_unmap,
    rkey_pack,
    rkey_buffer_release,
    rkey_unpack,
    rkey_destroy,
    worker_create,
    worker_destroy,
    worker_get_address,
    worker_release_address,
    worker_get_efd,
    worker_arm,
    worker_progress,
    ep_create,
    ep_close,
    get,
    request_check_status,
    request_free,
    ep_flush,
    set_message_handler,
    send_message,
    release_message,
    ep_query,
};

/// How much of a request is the library's.
const REQUEST_BYTES: usize = 48;

/// What fresh memory has.
const DIRT: u8 = 0xdb;

/// A way that is software, which is taken unless a test says otherwise.
const WAY: &CStr = c"tcp";

/// `UCS_ERR_UNREACHABLE`, and so on.
const UNREACHABLE: Status = -6;
const IO_ERROR: Status = -3;
const CANCELED: Status = -16;
const UNSUPPORTED: Status = -22;
const CONNECTION_RESET: Status = -25;
