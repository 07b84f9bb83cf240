//! The driver's functions, looked up by name once.
//!
//! cudarc finds the library and gives the types. Its own functions panic where the library or a symbol is missing, and
//! return an enum, which must not have a value that a later driver invents: so they are looked up here, and return a number.
#![allow(unsafe_code, reason = "looks up functions of a library")]
#![allow(non_snake_case, reason = "functions have the driver's names")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmodule, CUpointer_attribute, CUstream, CUstreamBatchMemOpParams, CUuserObject,
    CUuuid,
};

use super::error::{CudaError, RawCode};
use crate::sync::OnceLock;

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions that are used here.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> RawCode,)*
        }

        impl Functions {
            fn load() -> Result<Functions, CudaError> {
                // SAFETY: this runs the initialisers of a library of the driver's name, which are the driver's.
                if !unsafe { sys::is_culib_present() } {
                    return Err(CudaError::NoDriver);
                }
                // SAFETY: as above; it is there, so this does not panic.
                let library = unsafe { sys::culib() };
                Ok(Functions {
                    $($name: {
                        // SAFETY: the driver's function of this name has these arguments, and returns a number: so says
                        // cuda.h from 12.0 on, and later versions of a function get other names.
                        let function = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> RawCode>(stringify!($name).as_bytes())
                        };
                        *function.map_err(|_| CudaError::NoFunction { function: stringify!($name) })?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuCtxSynchronize();
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
    cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
    cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void);
    cuMemGetAllocationPropertiesFromHandle(*mut CUmemAllocationProp, CUmemGenericAllocationHandle);
    cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemcpyHtoD_v2(CUdeviceptr, *const c_void, usize);
    cuMemcpyDtoH_v2(*mut c_void, CUdeviceptr, usize);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
    cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuStreamDestroy_v2(CUstream);
    cuStreamGetId(CUstream, *mut c_ulonglong);
    cuStreamSynchronize(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamBatchMemOp_v2(CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint);
    cuStreamGetCaptureInfo_v2(CUstream, *mut c_uint, *mut u64, *mut CUgraph, *mut c_void, *mut usize);
    cuThreadExchangeStreamCaptureMode(*mut c_uint);
    cuUserObjectCreate(*mut CUuserObject, *mut c_void, unsafe extern "C" fn(*mut c_void), c_uint, c_uint);
    cuUserObjectRelease(CUuserObject, c_uint);
    cuGraphRetainUserObject(CUgraph, CUuserObject, c_uint, c_uint);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
    cuLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
    );
}

/// The functions of this machine's driver.
pub(super) fn functions() -> Result<&'static Functions, CudaError> {
    static FUNCTIONS: OnceLock<Result<Functions, CudaError>> = OnceLock::new();
    FUNCTIONS.get_or_init(Functions::load).as_ref().map_err(Clone::clone)
}

/// Calls a function of the driver: `call!(cuInit(0))`. An error names it.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::sys::cuda::functions::functions().and_then(|functions| {
            $crate::sys::cuda::error::check(stringify!($name), (functions.$name)($($argument),*))
        })
    };
}
pub(super) use call;
