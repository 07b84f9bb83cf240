//! The functions of PyTorch's pluggable allocator: device memory that other processes can map.
//!
//! PyTorch finds them by their names in this module's file, and calls them with or without Python's lock, while it holds
//! locks of its caching allocator. They take no lock but their own, write no log and let no panic out.
#![allow(unsafe_code, reason = "functions that PyTorch finds by their names")]

use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;

use ncclx_rs::device::allocator;

/// Device memory; null if there is none, which the caching allocator reports when it has given back what it keeps.
// SAFETY: no other library defines the name, which has this one's.
#[unsafe(no_mangle)]
extern "C" fn ncclx_rs_cuda_malloc(bytes: usize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let allocate = || allocator::allocate(bytes, u32::try_from(device).ok()?).ok();
    let address = catch_unwind(allocate).ok().flatten();
    address.map_or(std::ptr::null_mut(), |address| std::ptr::without_provenance_mut(address as usize))
}

/// As the other, by the vendor's library that a communicator has set for this process.
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "C" fn ncclx_rs_library_malloc(bytes: usize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let allocate = || allocator::allocate_by_library(bytes, u32::try_from(device).ok()?).ok();
    let address = catch_unwind(allocate).ok().flatten();
    address.map_or(std::ptr::null_mut(), |address| std::ptr::without_provenance_mut(address as usize))
}

/// Gives memory of either back. Nobody hears what does not work.
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "C" fn ncclx_rs_cuda_free(memory: *mut c_void, _bytes: usize, _device: c_int, _stream: *mut c_void) {
    let _ = catch_unwind(|| allocator::free(memory.addr() as u64));
}
