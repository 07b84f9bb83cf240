// A software HIP: `libamdhip64.so`, the functions of AMD's runtime that the engine calls, as thin as they can be on the software
// CUDA. It has HIP's names, numbers and habits where they are not CUDA's; what they are is in the headers and sources of ROCm 7.1.
#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <map>

// Of CUDA 12, which HIP has too; a header of CUDA 13 only has the one after it.
extern "C" CUresult cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**,
                                              size_t*);

#define HIP extern "C" __attribute__((visibility("default"))) CUresult

#define SAME(hip, cuda, parameters, arguments) \
  HIP hip parameters { return cuda arguments; }

namespace {

// What a device says of itself, by HIP's number.
const std::map<int, CUdevice_attribute> ATTRIBUTES = {
    {6, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE},
    {23, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
    {61, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
    {63, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
    {89, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
    {10013, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS},
};

bool is_set(const char* setting) {
  const char* value = getenv(setting);
  return value && strcmp(value, "1") == 0;
}

}  // namespace

SAME(hipInit, cuInit, (unsigned flags), (flags))
SAME(hipGetDeviceCount, cuDeviceGetCount, (int* count), (count))
SAME(hipDeviceGet, cuDeviceGet, (CUdevice * device, int ordinal), (device, ordinal))
SAME(hipDeviceGetName, cuDeviceGetName, (char* name, int room, CUdevice device), (name, room, device))
SAME(hipDeviceGetUuid, cuDeviceGetUuid, (CUuuid * uuid, CUdevice device), (uuid, device))
SAME(hipDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice peer), (can, device, peer))
SAME(hipDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), (context, device))
SAME(hipDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, (CUdevice device), (device))

HIP hipDriverGetVersion(int* version) {
  *version = 70125424;
  return CUDA_SUCCESS;
}

HIP hipDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  const auto known = ATTRIBUTES.find(attribute);
  return known == ATTRIBUTES.end() ? CUDA_ERROR_INVALID_VALUE : cuDeviceGetAttribute(value, known->second, device);
}

// As much of `hipDeviceProp_tR0600` as anybody looks at.
HIP hipGetDevicePropertiesR0600(void* properties, CUdevice) {
  memset(properties, 0, 1472);
  strcpy(static_cast<char*>(properties) + 1160, "gfx942:sramecc+:xnack-");
  return CUDA_SUCCESS;
}

// A thread always has a device, at first that of number 0, and to set none leaves it as it is.
HIP hipCtxGetCurrent(CUcontext* context) {
  const CUresult result = cuCtxGetCurrent(context);
  if (result != CUDA_SUCCESS || *context) return result;
  // It stays until the process ends, as a device of HIP does.
  const CUresult retained = cuDevicePrimaryCtxRetain(context, 0);
  return retained == CUDA_SUCCESS ? cuCtxSetCurrent(*context) : retained;
}

HIP hipCtxSetCurrent(CUcontext context) { return context ? cuCtxSetCurrent(context) : CUDA_SUCCESS; }

SAME(hipDeviceSynchronize, cuCtxSynchronize, (), ())

SAME(hipMalloc, cuMemAlloc, (CUdeviceptr * memory, size_t bytes), (memory, bytes))
SAME(hipFree, cuMemFree, (CUdeviceptr memory), (memory))
SAME(hipMemGetAllocationGranularity, cuMemGetAllocationGranularity,
     (size_t* bytes, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags kind),
     (bytes, properties, kind))
SAME(hipMemCreate, cuMemCreate,
     (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp* properties,
      unsigned long long flags),
     (handle, bytes, properties, flags))
SAME(hipMemRelease, cuMemRelease, (CUmemGenericAllocationHandle handle), (handle))
SAME(hipMemExportToShareableHandle, cuMemExportToShareableHandle,
     (void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags),
     (shareable, handle, type, flags))
SAME(hipMemImportFromShareableHandle, cuMemImportFromShareableHandle,
     (CUmemGenericAllocationHandle * handle, void* shareable, CUmemAllocationHandleType type),
     (handle, shareable, type))
SAME(hipMemAddressReserve, cuMemAddressReserve,
     (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags),
     (address, bytes, alignment, wanted, flags))
SAME(hipMemAddressFree, cuMemAddressFree, (CUdeviceptr address, size_t bytes), (address, bytes))
SAME(hipMemMap, cuMemMap,
     (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),
     (address, bytes, offset, handle, flags))
SAME(hipMemUnmap, cuMemUnmap, (CUdeviceptr address, size_t bytes), (address, bytes))
SAME(hipMemGetAddressRange, cuMemGetAddressRange, (CUdeviceptr * base, size_t* bytes, CUdeviceptr address),
     (base, bytes, address))
SAME(hipMemRetainAllocationHandle, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void* address),
     (handle, address))
SAME(hipMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle,
     (CUmemAllocationProp * properties, CUmemGenericAllocationHandle handle), (properties, handle))
SAME(hipMemSetAccess, cuMemSetAccess,
     (CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count), (address, bytes, access, count))

SAME(hipHostRegister, cuMemHostRegister, (void* memory, size_t bytes, unsigned flags), (memory, bytes, flags))
SAME(hipHostUnregister, cuMemHostUnregister, (void* memory), (memory))
SAME(hipHostGetDevicePointer, cuMemHostGetDevicePointer, (CUdeviceptr * address, void* memory, unsigned flags),
     (address, memory, flags))
SAME(hipMemcpyHtoD, cuMemcpyHtoD, (CUdeviceptr into, const void* from, size_t bytes), (into, from, bytes))
SAME(hipMemcpyDtoH, cuMemcpyDtoH, (void* into, CUdeviceptr from, size_t bytes), (into, from, bytes))
SAME(hipMemcpyDtoDAsync, cuMemcpyDtoDAsync, (CUdeviceptr into, CUdeviceptr from, size_t bytes, CUstream stream),
     (into, from, bytes, stream))
SAME(hipPointerGetAttribute, cuPointerGetAttribute, (void* value, CUpointer_attribute attribute, CUdeviceptr address),
     (value, attribute, address))

SAME(hipStreamCreateWithPriority, cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority),
     (stream, flags, priority))
SAME(hipStreamDestroy, cuStreamDestroy, (CUstream stream), (stream))
SAME(hipStreamGetId, cuStreamGetId, (CUstream stream, unsigned long long* id), (stream, id))
SAME(hipStreamQuery, cuStreamQuery, (CUstream stream), (stream))
SAME(hipStreamSynchronize, cuStreamSynchronize, (CUstream stream), (stream))
SAME(hipStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), (stream, event, flags))
SAME(hipStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2,
     (CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph, const CUgraphNode** nodes,
      size_t* count),
     (stream, status, id, graph, nodes, count))
SAME(hipThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode), (mode))
SAME(hipUserObjectCreate, cuUserObjectCreate,
     (CUuserObject * object, void* data, CUhostFn destroy, unsigned references, unsigned flags),
     (object, data, destroy, references, flags))
SAME(hipUserObjectRelease, cuUserObjectRelease, (CUuserObject object, unsigned count), (object, count))
SAME(hipGraphRetainUserObject, cuGraphRetainUserObject,
     (CUgraph graph, CUuserObject object, unsigned count, unsigned flags), (graph, object, count, flags))

// Waits are refused unless SOFTHIP_WAITS=1: a real device may run them as kernels, which the engine must not count on.
HIP hipStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags) {
  for (unsigned at = 0; at < count && !is_set("SOFTHIP_WAITS"); ++at) {
    const CUstreamBatchMemOpType operation = operations[at].operation;
    if (operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || operation == CU_STREAM_MEM_OP_WAIT_VALUE_64) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return cuStreamBatchMemOp(stream, count, operations, flags);
}

SAME(hipEventCreateWithFlags, cuEventCreate, (CUevent * event, unsigned flags), (event, flags))
SAME(hipEventDestroy, cuEventDestroy, (CUevent event), (event))
SAME(hipEventRecord, cuEventRecord, (CUevent event, CUstream stream), (event, stream))
SAME(hipEventElapsedTime, cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end),
     (milliseconds, start, end))

SAME(hipModuleLoadData, cuModuleLoadData, (CUmodule * module, const void* image), (module, image))
SAME(hipModuleUnload, cuModuleUnload, (CUmodule module), (module))
SAME(hipModuleGetFunction, cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name),
     (function, module, name))
SAME(hipFuncGetAttribute, cuFuncGetAttribute, (int* value, CUfunction_attribute attribute, CUfunction function),
     (value, attribute, function))
SAME(hipModuleLaunchKernel, cuLaunchKernel,
     (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
      unsigned block_z, unsigned shared, CUstream stream, void** parameters, void** extra),
     (function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra))
