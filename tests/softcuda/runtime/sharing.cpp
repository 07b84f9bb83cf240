// Memory and events between processes, and pools.
#include <cstring>

#include "runtime.h"

using namespace softcuda_runtime;

namespace {

CUdeviceptr* as_address(void** pointer) { return reinterpret_cast<CUdeviceptr*>(pointer); }

CUmemoryPool as_pool(cudaMemPool_t pool) { return reinterpret_cast<CUmemoryPool>(pool); }

template <class Driver, class Runtime>
Driver same_bytes(const Runtime& handle) {
  static_assert(sizeof(Driver) == sizeof(Runtime));
  Driver copy;
  memcpy(&copy, &handle, sizeof copy);
  return copy;
}

}  // namespace

API cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  return with_context([&] { return cuIpcGetMemHandle(reinterpret_cast<CUipcMemHandle*>(handle), address(pointer)); });
}

API cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  return with_context([&] {
    return cuIpcOpenMemHandle_v2(as_address(pointer), same_bytes<CUipcMemHandle>(handle), flags);
  });
}

API cudaIpcCloseMemHandle(void* pointer) {
  return with_context([&] { return cuIpcCloseMemHandle(address(pointer)); });
}

API cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  return with_context([&] { return cuIpcGetEventHandle(reinterpret_cast<CUipcEventHandle*>(handle), event); });
}

API cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  return with_context([&] { return cuIpcOpenEventHandle(event, same_bytes<CUipcEventHandle>(handle)); });
}

API cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  return with_context([&] { return cuMemAllocAsync(as_address(pointer), bytes, stream); });
}

API cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return with_context([&] { return cuMemFreeAsync(address(pointer), stream); });
}

API cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return with_context([&] { return cuDeviceGetDefaultMemPool(reinterpret_cast<CUmemoryPool*>(pool), device); });
}

API cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return with_context([&] {
    return cuMemPoolGetAttribute(as_pool(pool), static_cast<CUmemPool_attribute>(attribute), value);
  });
}

API cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return with_context([&] {
    return cuMemPoolSetAttribute(as_pool(pool), static_cast<CUmemPool_attribute>(attribute), value);
  });
}

API cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc*, size_t count) {
  return with_context([&] { return cuMemPoolSetAccess(as_pool(pool), nullptr, count); });
}

API cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
  return with_context([&] { return cuMemPoolTrimTo(as_pool(pool), bytes); });
}

// Graphs allocate nothing here.
API cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  *static_cast<cuuint64_t*>(value) = 0;
  return cudaSuccess;
}
