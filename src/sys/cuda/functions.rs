//! The driver's functions, looked up by name once.
//!
//! cudarc gives the types. Its own functions panic where the library or a symbol is missing, and return an enum, which must not
//! have a value that a later driver invents: so they are looked up here, and return a number.
//!
//! HIP has each of them too, with the same parameters: pointers where CUDA has numbers of the same size, and structures and
//! constants alike but for those that the modules beside this one name. Sources: cuda.h of CUDA 12 and 13; hip_runtime_api.h of
//! ROCm 6.3 and 7.1.
#![allow(unsafe_code, reason = "looks up functions of a library")]
#![allow(non_snake_case, reason = "functions have the driver's names")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use std::mem::ManuallyDrop;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp, CUmemGenericAllocationHandle,
    CUmodule, CUpointer_attribute, CUstream, CUstreamBatchMemOpParams, CUuserObject, CUuuid,
};

use libloading::os::unix::Library;

use super::error::{CudaError, RawCode, check};
use super::provider::{self, Provider};
use crate::sync::OnceLock;

macro_rules! functions {
    ($($name:ident = $hip:ident($($argument:ty),*);)*) => {
        /// The functions that are used here, by CUDA's names.
        #[derive(Debug)]
        pub(super) struct Functions {
            pub(super) provider: Provider,
            /// `hipGetDevicePropertiesR0600`, which only HIP has.
            pub(super) properties: Option<unsafe extern "C" fn(*mut c_void, c_int) -> RawCode>,
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> RawCode,)*
        }

        impl Functions {
            /// What a provider calls the function that CUDA calls so.
            fn name(provider: Provider, cuda: &'static str) -> &'static str {
                if provider == Provider::Cuda {
                    return cuda;
                }
                $(if cuda == stringify!($name) {
                    return stringify!($hip);
                })*
                unreachable!("{cuda} is one of these")
            }

            fn of(provider: Provider, library: &Library) -> Result<Functions, CudaError> {
                // SAFETY: as below; this one only HIP has.
                let properties = unsafe { library.get("hipGetDevicePropertiesR0600") };
                Ok(Functions {
                    provider,
                    properties: properties.ok().map(|found| *found),
                    $($name: {
                        let name = Functions::name(provider, stringify!($name));
                        // SAFETY: the library's function of this name has these arguments, and returns a number: so says
                        // cuda.h from 12.0 on, and hip_runtime_api.h from 7.1 on. Where a later version of CUDA has other
                        // arguments it has another name. Arguments that HIP has as pointers, or as other enums, are passed alike.
                        let function = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> RawCode>(name.as_bytes())
                        };
                        *function.map_err(|_| CudaError::NoFunction { function: name })?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuInit = hipInit(c_uint);
    cuDriverGetVersion = hipDriverGetVersion(*mut c_int);
    cuDeviceGetCount = hipGetDeviceCount(*mut c_int);
    cuDeviceGet = hipDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName = hipDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2 = hipDeviceGetUuid(*mut CUuuid, CUdevice);
    cuDeviceGetAttribute = hipDeviceGetAttribute(*mut c_int, c_int, CUdevice);
    cuDeviceCanAccessPeer = hipDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain = hipDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2 = hipDevicePrimaryCtxRelease(CUdevice);
    cuCtxGetCurrent = hipCtxGetCurrent(*mut CUcontext);
    cuCtxSetCurrent = hipCtxSetCurrent(CUcontext);
    cuCtxSynchronize = hipDeviceSynchronize();
    cuMemAlloc_v2 = hipMalloc(*mut CUdeviceptr, usize);
    cuMemFree_v2 = hipFree(CUdeviceptr);
    cuMemGetAllocationGranularity = hipMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
    cuMemCreate = hipMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    cuMemRelease = hipMemRelease(CUmemGenericAllocationHandle);
    cuMemExportToShareableHandle = hipMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
    cuMemImportFromShareableHandle = hipMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
    cuMemAddressReserve = hipMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree = hipMemAddressFree(CUdeviceptr, usize);
    cuMemMap = hipMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap = hipMemUnmap(CUdeviceptr, usize);
    cuMemGetAddressRange_v2 = hipMemGetAddressRange(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuMemRetainAllocationHandle = hipMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void);
    cuMemGetAllocationPropertiesFromHandle = hipMemGetAllocationPropertiesFromHandle(*mut CUmemAllocationProp, CUmemGenericAllocationHandle);
    cuMemSetAccess = hipMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    cuMemHostRegister_v2 = hipHostRegister(*mut c_void, usize, c_uint);
    cuMemHostUnregister = hipHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2 = hipHostGetDevicePointer(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemcpyHtoD_v2 = hipMemcpyHtoD(CUdeviceptr, *const c_void, usize);
    cuMemcpyDtoH_v2 = hipMemcpyDtoH(*mut c_void, CUdeviceptr, usize);
    cuMemcpyDtoDAsync_v2 = hipMemcpyDtoDAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuPointerGetAttribute = hipPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
    cuStreamCreateWithPriority = hipStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuStreamDestroy_v2 = hipStreamDestroy(CUstream);
    cuStreamGetId = hipStreamGetId(CUstream, *mut c_ulonglong);
    cuStreamQuery = hipStreamQuery(CUstream);
    cuStreamSynchronize = hipStreamSynchronize(CUstream);
    cuStreamWaitEvent = hipStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamBatchMemOp_v2 = hipStreamBatchMemOp(CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint);
    cuStreamGetCaptureInfo_v2 = hipStreamGetCaptureInfo_v2(CUstream, *mut c_uint, *mut u64, *mut CUgraph, *mut c_void, *mut usize);
    cuThreadExchangeStreamCaptureMode = hipThreadExchangeStreamCaptureMode(*mut c_uint);
    cuUserObjectCreate = hipUserObjectCreate(*mut CUuserObject, *mut c_void, unsafe extern "C" fn(*mut c_void), c_uint, c_uint);
    cuUserObjectRelease = hipUserObjectRelease(CUuserObject, c_uint);
    cuGraphRetainUserObject = hipGraphRetainUserObject(CUgraph, CUuserObject, c_uint, c_uint);
    cuEventCreate = hipEventCreateWithFlags(*mut CUevent, c_uint);
    cuEventDestroy_v2 = hipEventDestroy(CUevent);
    cuEventRecord = hipEventRecord(CUevent, CUstream);
    cuEventElapsedTime = hipEventElapsedTime(*mut f32, CUevent, CUevent);
    cuModuleLoadData = hipModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleUnload = hipModuleUnload(CUmodule);
    cuModuleGetFunction = hipModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuFuncGetAttribute = hipFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
    cuLaunchKernel = hipModuleLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
    );
}

/// The functions of this process's devices.
pub(super) fn functions() -> Result<&'static Functions, CudaError> {
    static FUNCTIONS: OnceLock<Result<Functions, CudaError>> = OnceLock::new();
    let load = || {
        let (provider, library) = provider::find().ok_or(CudaError::NoDriver)?;
        // Never unloaded: it has threads of its own.
        Functions::of(provider, &ManuallyDrop::new(library))
    };
    FUNCTIONS.get_or_init(load).as_ref().map_err(Clone::clone)
}

impl Functions {
    /// An error if `raw` says so, of the function that CUDA calls so.
    pub(super) fn check(&self, cuda: &'static str, raw: RawCode) -> Result<(), CudaError> {
        check(raw, || Functions::name(self.provider, cuda))
    }
}

/// Calls a function of the driver: `call!(cuInit(0))`. An error names it.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::sys::cuda::functions::functions()
            .and_then(|functions| functions.check(stringify!($name), (functions.$name)($($argument),*)))
    };
}
pub(super) use call;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_provider_has_its_own_names() {
        let names = |cuda| [Provider::Cuda, Provider::Hip].map(|provider| Functions::name(provider, cuda));
        assert_eq!(names("cuMemAlloc_v2"), ["cuMemAlloc_v2", "hipMalloc"]);
        assert_eq!(names("cuLaunchKernel"), ["cuLaunchKernel", "hipModuleLaunchKernel"]);
    }
}
