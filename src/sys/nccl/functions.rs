//! The functions of a library that are called, looked up by name once.
#![allow(unsafe_code, reason = "looks up functions of a library")]

use std::ffi::{c_char, c_int, c_void};

use super::config::Config;
use crate::sys::library::functions;

/// `ncclResult_t`: a number, so that one that a later library invents is no undefined behaviour.
pub(super) type Code = c_int;

/// `ncclComm_t`.
pub(super) type RawComm = *mut c_void;

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawId(pub(super) [u8; 128]);

/// Memory of a device, of which the host only knows the address.
pub(super) type Address = *mut c_void;

/// What a library knows a registration by.
pub(super) type RawHandle = *mut c_void;

/// `cudaStream_t`, which the driver calls `CUstream`.
pub(super) type RawStream = *mut c_void;

// As nccl.h declares them in every version since the oldest known one; the optional ones, in every version that has them.
functions! {
    needed {
        get_version = "ncclGetVersion"(*mut c_int) -> Code;
        get_error_string = "ncclGetErrorString"(Code) -> *const c_char;
        get_last_error = "ncclGetLastError"(RawComm) -> *const c_char;
        get_unique_id = "ncclGetUniqueId"(*mut RawId) -> Code;
        comm_init = "ncclCommInitRankConfig"(*mut RawComm, c_int, RawId, c_int, *mut Config) -> Code;
        comm_async_error = "ncclCommGetAsyncError"(RawComm, *mut Code) -> Code;
        comm_abort = "ncclCommAbort"(RawComm) -> Code;
        comm_destroy = "ncclCommDestroy"(RawComm) -> Code;
        all_reduce = "ncclAllReduce"(Address, Address, usize, c_int, c_int, RawComm, RawStream) -> Code;
        reduce = "ncclReduce"(Address, Address, usize, c_int, c_int, c_int, RawComm, RawStream) -> Code;
        broadcast = "ncclBroadcast"(Address, Address, usize, c_int, c_int, RawComm, RawStream) -> Code;
        all_gather = "ncclAllGather"(Address, Address, usize, c_int, RawComm, RawStream) -> Code;
        reduce_scatter = "ncclReduceScatter"(Address, Address, usize, c_int, c_int, RawComm, RawStream) -> Code;
        send = "ncclSend"(Address, usize, c_int, c_int, RawComm, RawStream) -> Code;
        recv = "ncclRecv"(Address, usize, c_int, c_int, RawComm, RawStream) -> Code;
        group_start = "ncclGroupStart"() -> Code;
        group_end = "ncclGroupEnd"() -> Code;
    }
    optional {
        pre_mul_sum = "ncclRedOpCreatePreMulSum"(*mut c_int, *mut c_void, c_int, c_int, RawComm) -> Code;
        comm_init_scalable =
            "ncclCommInitRankScalable"(*mut RawComm, c_int, c_int, c_int, *mut RawId, *mut Config) -> Code;
        comm_split = "ncclCommSplit"(RawComm, c_int, c_int, *mut RawComm, *mut Config) -> Code;
        red_op_destroy = "ncclRedOpDestroy"(c_int, RawComm) -> Code;
        mem_alloc = "ncclMemAlloc"(*mut Address, usize) -> Code;
        mem_free = "ncclMemFree"(Address) -> Code;
        comm_register = "ncclCommRegister"(RawComm, Address, usize, *mut RawHandle) -> Code;
        comm_deregister = "ncclCommDeregister"(RawComm, RawHandle) -> Code;
    }
}

const _: () = assert!(size_of::<RawId>() == 128 && align_of::<RawId>() == 1);
