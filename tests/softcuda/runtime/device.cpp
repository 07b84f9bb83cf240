#include <cstring>
#include <unordered_map>

#include "runtime.h"

namespace softcuda_runtime {

namespace {
thread_local cudaError_t last = cudaSuccess;
}

cudaError_t remember(cudaError_t error) {
  // That something is not done yet is an answer, not an error.
  if (error != cudaSuccess && error != cudaErrorNotReady) last = error;
  return error;
}

cudaError_t result(CUresult error) { return remember(static_cast<cudaError_t>(error)); }

int device_count() {
  int count = 0;
  return cuInit(0) == CUDA_SUCCESS && cuDeviceGetCount(&count) == CUDA_SUCCESS ? count : 0;
}

int device() {
  CUdevice device = 0;
  if (cuCtxGetDevice(&device) == CUDA_SUCCESS) return device;
  cudaSetDevice(0);
  return 0;
}

namespace {

// A runtime needs a driver of its own major version or a later one.
bool is_driver_old() {
  int version = 0;
  cuDriverGetVersion(&version);
  return version / 1000 < CUDART_VERSION / 1000;
}

int attribute(CUdevice_attribute attribute, int device) {
  int value = 0;
  cuDeviceGetAttribute(&value, attribute, device);
  return value;
}

const char* error_name(cudaError_t error) {
  static const auto* const names = new std::unordered_map<int, const char*>{
#include "runtime_errors.inc"
  };
  const auto found = names->find(error);
  return found == names->end() ? "unrecognized error code" : found->second;
}

}  // namespace
}  // namespace softcuda_runtime

using namespace softcuda_runtime;

API cudaGetDeviceCount(int* count) {
  *count = 0;
  if (is_driver_old()) return remember(cudaErrorInsufficientDriver);
  if (CUresult failed = cuInit(0)) return result(failed);
  if (CUresult failed = cuDeviceGetCount(count)) return result(failed);
  return remember(*count ? cudaSuccess : cudaErrorNoDevice);
}

API cudaGetDevice(int* current) {
  CUdevice device = 0;
  *current = cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : 0;
  return cudaSuccess;
}

API cudaSetDevice(int device) {
  if (CUresult failed = cuInit(0)) return result(failed);
  CUcontext context = nullptr;
  if (CUresult failed = cuDevicePrimaryCtxRetain(&context, device)) return result(failed);
  return result(cuCtxSetCurrent(context));
}

API cudaDriverGetVersion(int* version) { return result(cuDriverGetVersion(version)); }

API cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  memset(properties, 0, sizeof *properties);
  cudaDeviceProp& to = *properties;
  cuDeviceGetName(to.name, sizeof to.name, device);
  cuDeviceTotalMem_v2(&to.totalGlobalMem, device);
  CUuuid uuid;
  cuDeviceGetUuid_v2(&uuid, device);
  memcpy(&to.uuid, &uuid, sizeof uuid);
  const auto ask = [device](CUdevice_attribute what) { return attribute(what, device); };
  const auto size = [&](CUdevice_attribute what) { return static_cast<size_t>(ask(what)); };
  to.major = ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  to.minor = ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  to.warpSize = ask(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  to.maxThreadsPerBlock = ask(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  to.maxThreadsDim[0] = ask(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
  to.maxThreadsDim[1] = ask(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
  to.maxThreadsDim[2] = ask(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
  to.maxGridSize[0] = ask(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
  to.maxGridSize[1] = ask(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
  to.maxGridSize[2] = ask(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
  to.multiProcessorCount = ask(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  to.maxThreadsPerMultiProcessor = ask(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  to.maxBlocksPerMultiProcessor = ask(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
  to.regsPerBlock = ask(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  to.regsPerMultiprocessor = ask(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  to.sharedMemPerBlock = size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  to.sharedMemPerBlockOptin = size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  to.sharedMemPerMultiprocessor = size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  to.totalConstMem = size(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  to.textureAlignment = size(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  to.l2CacheSize = ask(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  to.asyncEngineCount = ask(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
  to.pciBusID = ask(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
  to.unifiedAddressing = ask(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
  to.canMapHostMemory = ask(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
  to.concurrentKernels = ask(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS);
  to.streamPrioritiesSupported = ask(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED);
  to.cooperativeLaunch = ask(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
  to.hostRegisterSupported = ask(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
  to.canUseHostPointerForRegisteredMem = ask(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
  to.memoryPoolsSupported = ask(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
  to.ipcEventSupported = ask(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
  return cudaSuccess;
}

API cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return result(cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device));
}

API cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return result(cuDeviceGetPCIBusId(text, length, device));
}

API cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return result(cuDeviceCanAccessPeer(can, device, peer));
}

API cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  CUcontext context = nullptr;
  device();
  if (CUresult failed = cuDevicePrimaryCtxRetain(&context, peer)) return result(failed);
  return result(cuCtxEnablePeerAccess(context, flags));
}

API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return with_context([&] { return cuCtxGetStreamPriorityRange(least, greatest); });
}

API cudaDeviceSynchronize() {
  return with_context([] { return cuCtxSynchronize(); });
}

API cudaGetLastError() {
  const cudaError_t error = last;
  last = cudaSuccess;
  const auto sticky = static_cast<cudaError_t>(softcuda_sticky_error());
  return sticky ? sticky : error;
}

API cudaPeekAtLastError() { return last; }

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(cudaError_t error) {
  return error_name(error);
}

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(cudaError_t error) {
  return error_name(error);
}

API cudaProfilerStart() { return cudaSuccess; }
API cudaProfilerStop() { return cudaSuccess; }

API cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags,
                                     cudaDriverEntryPointQueryResult* found) {
  const bool failed = cuGetProcAddress_v2(name, function, static_cast<int>(version), flags, nullptr);
  if (found) *found = failed ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

API cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                            cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, found);
}
