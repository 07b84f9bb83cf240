//! The functions of the library that are called, looked up by name once, and the structures that they take.
#![allow(unsafe_code, reason = "looks up functions of a library")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::FILE;

use crate::sys::library::functions;

/// `ucs_status_t`: a number, so that one that a later library invents is no undefined behaviour.
pub(super) type Status = c_int;

/// `ucs_status_ptr_t`: a status, or a request that goes on.
pub(super) type StatusPtr = *mut c_void;

pub(super) type RawContext = *mut c_void;
pub(super) type RawWorker = *mut c_void;
pub(super) type RawEndpoint = *mut c_void;
pub(super) type RawMemory = *mut c_void;
pub(super) type RawKey = *mut c_void;
pub(super) type RawConfig = *mut c_void;

/// `UCS_OK`.
pub(super) const OK: Status = 0;
/// `UCS_INPROGRESS`.
pub(super) const IN_PROGRESS: Status = 1;
/// `UCS_ERR_BUSY`.
pub(super) const BUSY: Status = -15;
/// `UCS_ERR_LAST`: no status is below it.
const LAST: isize = -100;

/// A status, or a request that goes on.
pub(super) fn status_of(pointer: StatusPtr) -> Result<Status, *mut c_void> {
    let number = pointer.addr().cast_signed();
    // As UCS_PTR_IS_PTR.
    if number == 0 || (LAST..0).contains(&number) { Ok(number as Status) } else { Err(pointer) }
}

/// `ucp_request_init_callback_t`.
pub(super) type RequestInit = unsafe extern "C" fn(*mut c_void);

/// `ucp_params_t`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Params {
    pub(super) field_mask: u64,
    pub(super) features: u64,
    pub(super) request_size: usize,
    pub(super) request_init: Option<RequestInit>,
    pub(super) request_cleanup: usize,
    pub(super) tag_sender_mask: u64,
    pub(super) mt_workers_shared: c_int,
    pub(super) estimated_num_eps: usize,
    pub(super) estimated_num_ppn: usize,
    pub(super) name: usize,
    pub(super) node_local_id: usize,
}

/// `UCS_CONFIG_PRINT_CONFIG`: names and values.
pub(super) const PRINT_CONFIG: c_uint = 1;

/// `UCP_PARAM_FIELD_FEATURES`.
pub(super) const PARAM_FEATURES: u64 = 1;
/// `UCP_PARAM_FIELD_REQUEST_INIT`.
pub(super) const PARAM_REQUEST_INIT: u64 = 1 << 2;
/// `UCP_PARAM_FIELD_MT_WORKERS_SHARED`.
pub(super) const PARAM_MT_WORKERS_SHARED: u64 = 1 << 5;
/// `UCP_FEATURE_RMA`.
pub(super) const FEATURE_RMA: u64 = 1 << 1;
/// `UCP_FEATURE_WAKEUP`.
pub(super) const FEATURE_WAKEUP: u64 = 1 << 4;
/// `UCP_FEATURE_AM`.
pub(super) const FEATURE_AM: u64 = 1 << 6;

/// `ucp_context_attr_t`.
#[repr(C)]
pub(super) struct ContextAttributes {
    pub(super) field_mask: u64,
    pub(super) request_size: usize,
    pub(super) thread_mode: c_int,
    /// A bit for each type of memory that it reaches: those of [`HOST`] and [`CUDA`], and others.
    pub(super) memory_types: u64,
    /// What later versions fill if asked.
    rest: [u64; 15],
}

impl ContextAttributes {
    /// Asks for the size of a request, the thread mode and the types of memory.
    pub(super) fn asked() -> ContextAttributes {
        let asked = 0b111; // UCP_ATTR_FIELD_REQUEST_SIZE, _THREAD_MODE, _MEMORY_TYPES
        ContextAttributes { field_mask: asked, request_size: 0, thread_mode: 0, memory_types: 0, rest: [0; 15] }
    }
}

/// `UCS_MEMORY_TYPE_HOST`.
pub(super) const HOST: c_int = 0;
/// `UCS_MEMORY_TYPE_CUDA`.
pub(super) const CUDA: c_int = 1;

/// `UCS_THREAD_MODE_SERIALIZED`: many threads, one at a time.
pub(super) const THREAD_MODE_SERIALIZED: c_int = 1;
/// `UCS_THREAD_MODE_MULTI`.
pub(super) const THREAD_MODE_MULTI: c_int = 2;

/// `ucp_worker_params_t`, whose other fields are left out by the mask.
#[repr(C)]
pub(super) struct WorkerParams {
    pub(super) field_mask: u64,
    pub(super) thread_mode: c_int,
    rest: [u64; 23],
}

impl WorkerParams {
    pub(super) fn serialized() -> WorkerParams {
        WorkerParams { field_mask: 1, thread_mode: THREAD_MODE_SERIALIZED, rest: [0; 23] }
    }
}

/// `ucp_err_handler_cb_t`.
pub(super) type ErrorHandler = unsafe extern "C" fn(*mut c_void, RawEndpoint, Status);

/// `ucp_ep_params_t`, whose other fields are left out by the mask.
#[repr(C)]
pub(super) struct EndpointParams {
    pub(super) field_mask: u64,
    pub(super) address: *const c_void,
    pub(super) error_mode: c_int,
    pub(super) error_handler: Option<ErrorHandler>,
    pub(super) error_argument: *mut c_void,
    rest: [u64; 8],
}

impl EndpointParams {
    /// An endpoint to an address, whose failures are told to a handler.
    pub(super) fn to(address: *const c_void, handler: ErrorHandler, argument: *mut c_void) -> EndpointParams {
        EndpointParams {
            field_mask: 0b111, // UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, _ERR_HANDLING_MODE, _ERR_HANDLER
            address,
            error_mode: 1, // UCP_ERR_HANDLING_MODE_PEER
            error_handler: Some(handler),
            error_argument: argument,
            rest: [0; 8],
        }
    }
}

/// `ucp_mem_map_params_t`.
#[repr(C)]
pub(super) struct MemoryParams {
    field_mask: u64,
    pub(super) address: *mut c_void,
    pub(super) length: usize,
    flags: c_uint,
    protection: c_uint,
    memory_type: c_int,
    exported: usize,
}

impl MemoryParams {
    /// Memory of a type that this process reads and writes, and others read. UCX passes the protection over, as of 1.22: others may
    /// write, too (`ucp_mem_map_params2uct_flags`).
    pub(super) fn readable(address: *mut c_void, length: usize, memory_type: c_int) -> MemoryParams {
        MemoryParams {
            field_mask: 0b11011, // UCP_MEM_MAP_PARAM_FIELD_ADDRESS, _LENGTH, _PROT, _MEMORY_TYPE
            address,
            length,
            flags: 0,
            protection: 0x103, // UCP_MEM_MAP_PROT_LOCAL_READ, _LOCAL_WRITE, _REMOTE_READ
            memory_type,
            exported: 0,
        }
    }
}

/// `ucp_request_param_t`.
#[repr(C)]
pub(super) struct RequestParams {
    mask: u32,
    flags: u32,
    request: usize,
    callback: usize,
    datatype: u64,
    user_data: usize,
    reply_buffer: usize,
    memory_type: c_int,
    recv_info: usize,
    memory: RawMemory,
    rest: [u64; 3],
}

impl RequestParams {
    const NONE: RequestParams = RequestParams {
        mask: 0,
        flags: 0,
        request: 0,
        callback: 0,
        datatype: 0,
        user_data: 0,
        reply_buffer: 0,
        memory_type: 0,
        recv_info: 0,
        memory: std::ptr::null_mut(),
        rest: [0; 3],
    };

    /// For bytes of memory that is registered, of this type.
    pub(super) fn of_memory(memory: RawMemory, memory_type: c_int) -> RequestParams {
        // UCP_OP_ATTR_FIELD_MEMORY_TYPE, _MEMH
        RequestParams { mask: 1 << 6 | 1 << 8, memory_type, memory, ..RequestParams::NONE }
    }

    /// For no more than the library's own choice.
    pub(super) fn plain() -> RequestParams {
        RequestParams::NONE
    }

    /// For an active message of the host's memory that travels at once, and not only once its receiver asks for it. Otherwise UCX
    /// would ask the driver of CUDA where each message lies.
    pub(super) fn eager() -> RequestParams {
        // UCP_OP_ATTR_FIELD_FLAGS, _MEMORY_TYPE, UCP_AM_SEND_FLAG_EAGER
        RequestParams { mask: 1 << 4 | 1 << 6, flags: 1 << 1, memory_type: HOST, ..RequestParams::NONE }
    }

    /// For the end of an endpoint that waits for no peer.
    pub(super) fn forced() -> RequestParams {
        // UCP_OP_ATTR_FIELD_FLAGS, UCP_EP_CLOSE_FLAG_FORCE
        RequestParams { mask: 1 << 4, flags: 1, ..RequestParams::NONE }
    }
}

/// `ucp_am_recv_callback_t`: its argument, the header and its length, the data and their length, and what they are.
pub(super) type MessageHandler =
    unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void, usize, *const MessageAttributes) -> Status;

/// `ucp_am_handler_param_t`.
#[repr(C)]
pub(super) struct MessageHandlerParams {
    field_mask: u64,
    id: c_uint,
    flags: u32,
    pub(super) handler: Option<MessageHandler>,
    pub(super) argument: *mut c_void,
}

impl MessageHandlerParams {
    /// A handler of the active messages of one number, which may keep the data of each.
    pub(super) fn keeping(id: c_uint, handler: MessageHandler, argument: *mut c_void) -> MessageHandlerParams {
        MessageHandlerParams {
            field_mask: 0b1111, // UCP_AM_HANDLER_PARAM_FIELD_ID, _FLAGS, _CB, _ARG
            id,
            flags: 1 << 1, // UCP_AM_FLAG_PERSISTENT_DATA
            handler: Some(handler),
            argument,
        }
    }
}

/// `ucp_am_recv_param_t`.
#[repr(C)]
pub(super) struct MessageAttributes {
    pub(super) attributes: u64,
    pub(super) reply_endpoint: RawEndpoint,
}

/// `UCP_AM_RECV_ATTR_FLAG_DATA`: the handler may keep the data.
pub(super) const MESSAGE_HAS_DATA: u64 = 1 << 16;

/// `ucp_transport_entry_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct TransportEntry {
    pub(super) transport: *const c_char,
    pub(super) device: *const c_char,
}

/// `ucp_ep_attr_t`, of which the transports are asked for.
#[repr(C)]
pub(super) struct EndpointAttributes {
    field_mask: u64,
    name: [c_char; 32],
    addresses: [u64; 32],
    pub(super) entries: *mut TransportEntry,
    pub(super) num_entries: c_uint,
    entry_size: usize,
    rest: [u64; 9],
}

impl EndpointAttributes {
    /// Asks for the transports, which `entries` has room for.
    pub(super) fn transports(entries: &mut [TransportEntry]) -> EndpointAttributes {
        EndpointAttributes {
            field_mask: 1 << 3, // UCP_EP_ATTR_FIELD_TRANSPORTS
            name: [0; 32],
            addresses: [0; 32],
            entries: entries.as_mut_ptr(),
            num_entries: entries.len() as c_uint,
            entry_size: size_of::<TransportEntry>(),
            rest: [0; 9],
        }
    }
}

// As ucp.h of 1.22 has them on 64-bit systems; where ours is longer, the end is room for later fields.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Params>() == 88 && offset_of!(Params, mt_workers_shared) == 48);
    assert!(offset_of!(ContextAttributes, thread_mode) == 16);
    assert!(size_of::<WorkerParams>() == 200 && offset_of!(WorkerParams, thread_mode) == 8);
    assert!(size_of::<EndpointParams>() == 104 && offset_of!(EndpointParams, error_handler) == 24);
    assert!(size_of::<MemoryParams>() == 48 && offset_of!(MemoryParams, protection) == 28);
    assert!(size_of::<RequestParams>() == 96 && offset_of!(RequestParams, memory) == 64);
    assert!(size_of::<MessageHandlerParams>() == 32 && offset_of!(MessageHandlerParams, handler) == 16);
    assert!(size_of::<MessageAttributes>() == 16);
    assert!(size_of::<EndpointAttributes>() >= 328 && offset_of!(EndpointAttributes, entries) == 296);
};

// As ucp.h declares them since 1.14.
functions! {
    needed {
        get_version = "ucp_get_version"(*mut c_uint, *mut c_uint, *mut c_uint) -> ();
        // Of libucs, which the library brings.
        status_string = "ucs_status_string"(Status) -> *const c_char;
        config_read = "ucp_config_read"(*const c_char, *const c_char, *mut RawConfig) -> Status;
        config_print = "ucp_config_print"(RawConfig, *mut FILE, *const c_char, c_uint) -> ();
        config_modify = "ucp_config_modify"(RawConfig, *const c_char, *const c_char) -> Status;
        config_release = "ucp_config_release"(RawConfig) -> ();
        init = "ucp_init_version"(c_uint, c_uint, *const Params, RawConfig, *mut RawContext) -> Status;
        cleanup = "ucp_cleanup"(RawContext) -> ();
        context_query = "ucp_context_query"(RawContext, *mut ContextAttributes) -> Status;
        mem_map = "ucp_mem_map"(RawContext, *const MemoryParams, *mut RawMemory) -> Status;
        mem_unmap = "ucp_mem_unmap"(RawContext, RawMemory) -> Status;
        rkey_pack = "ucp_rkey_pack"(RawContext, RawMemory, *mut *mut c_void, *mut usize) -> Status;
        rkey_buffer_release = "ucp_rkey_buffer_release"(*mut c_void) -> ();
        rkey_unpack = "ucp_ep_rkey_unpack"(RawEndpoint, *const c_void, *mut RawKey) -> Status;
        rkey_destroy = "ucp_rkey_destroy"(RawKey) -> ();
        worker_create = "ucp_worker_create"(RawContext, *const WorkerParams, *mut RawWorker) -> Status;
        worker_destroy = "ucp_worker_destroy"(RawWorker) -> ();
        worker_get_address = "ucp_worker_get_address"(RawWorker, *mut *mut c_void, *mut usize) -> Status;
        worker_release_address = "ucp_worker_release_address"(RawWorker, *mut c_void) -> ();
        worker_get_efd = "ucp_worker_get_efd"(RawWorker, *mut c_int) -> Status;
        worker_arm = "ucp_worker_arm"(RawWorker) -> Status;
        worker_progress = "ucp_worker_progress"(RawWorker) -> c_uint;
        ep_create = "ucp_ep_create"(RawWorker, *const EndpointParams, *mut RawEndpoint) -> Status;
        ep_close = "ucp_ep_close_nbx"(RawEndpoint, *const RequestParams) -> StatusPtr;
        get = "ucp_get_nbx"(RawEndpoint, *mut c_void, usize, u64, RawKey, *const RequestParams) -> StatusPtr;
        request_check_status = "ucp_request_check_status"(*mut c_void) -> Status;
        request_free = "ucp_request_free"(*mut c_void) -> ();
        ep_flush = "ucp_ep_flush_nbx"(RawEndpoint, *const RequestParams) -> StatusPtr;
        set_message_handler = "ucp_worker_set_am_recv_handler"(RawWorker, *const MessageHandlerParams) -> Status;
        send_message =
            "ucp_am_send_nbx"(RawEndpoint, c_uint, *const c_void, usize, *const c_void, usize, *const RequestParams)
            -> StatusPtr;
        release_message = "ucp_am_data_release"(RawWorker, *mut c_void) -> ();
        ep_query = "ucp_ep_query"(RawEndpoint, *mut EndpointAttributes) -> Status;
    }
    optional {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_is_a_status_or_a_request() {
        let pointer = |number: isize| std::ptr::without_provenance_mut::<c_void>(number.cast_unsigned());
        assert_eq!(status_of(pointer(0)), Ok(OK));
        assert_eq!(status_of(pointer(-25)), Ok(-25));
        assert_eq!(status_of(pointer(-100)), Ok(-100));
        for number in [-101, 4096, 1, isize::MAX] {
            assert_eq!(status_of(pointer(number)), Err(pointer(number)), "{number}");
        }
    }
}
