// Memory in a stream's order: taken at once, given back when the stream gets there. One pool a device; nothing is kept.
#include <cstring>

#include "call.h"
#include "context.h"
#include "memory.h"
#include "stream.h"

// A pool is no more than its device.
struct CUmemPoolHandle_st {
  int device;
};

using namespace softcuda;

namespace {

CUmemoryPool pool_of(int device) {
  static auto* const pools = [] {
    auto* made = new CUmemPoolHandle_st[16];
    for (int i = 0; i < 16; ++i) made[i].device = i;
    return made;
  }();
  return &pools[device];
}

CUresult allocate_in_order(CUdeviceptr* address, size_t bytes, int device, CUstream handle) {
  {
    Lock lock(state());
    CUstream stream = resolve(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
      return breach(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s: nodes that allocate are not done here", current_call());
    }
  }
  return allocate(address, bytes, device);
}

}  // namespace

API cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream) {
  ENTER(Plain);
  return allocate_in_order(address, bytes, current_device(), stream);
}

API cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, CUmemoryPool pool, CUstream stream) {
  ENTER(Plain);
  return allocate_in_order(address, bytes, pool->device, stream);
}

API cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  ENTER(Plain);
  return submit(stream, CU_GRAPH_NODE_TYPE_MEM_FREE, [address] {
    running().progress->stores.publish();
    release(address);
  });
}

API cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  ENTER(Plain);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *pool = pool_of(device);
  return CUDA_SUCCESS;
}

API cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
  ENTER(Plain);
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *pool = pool_of(device);
  return CUDA_SUCCESS;
}

API cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  ENTER(Plain);
  Lock lock(state());
  const bool is_size = attribute >= CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
  const bool is_current =
      attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT || attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
  if (is_size) {
    *static_cast<cuuint64_t*>(value) = is_current ? used_memory(pool->device) : 0;
  } else {
    *static_cast<int*>(value) = 1;
  }
  return CUDA_SUCCESS;
}

// Nothing is kept, so that these have nothing to change.
API cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void*) {
  ENTER(Plain);
  return CUDA_SUCCESS;
}

API cuMemPoolTrimTo(CUmemoryPool, size_t) {
  ENTER(Plain);
  return CUDA_SUCCESS;
}

// Every device reaches the memory of every other.
API cuMemPoolSetAccess(CUmemoryPool, const CUmemAccessDesc*, size_t) {
  ENTER(Plain);
  return CUDA_SUCCESS;
}
