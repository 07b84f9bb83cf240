#include <cstring>

#include "runtime.h"

using namespace softcuda_runtime;

namespace {

CUdeviceptr* as_address(void** pointer) { return reinterpret_cast<CUdeviceptr*>(pointer); }

// Unknown to the driver: memory that the caller got elsewhere.
unsigned memory_type(const void* pointer) {
  unsigned type = 0;
  const CUresult failed = cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address(pointer));
  return failed ? 0 : type;
}

template <class Value>
Value ask(CUpointer_attribute attribute, const void* pointer) {
  Value value{};
  cuPointerGetAttribute(&value, attribute, address(pointer));
  return value;
}

CUDA_MEMCPY2D rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height) {
  CUDA_MEMCPY2D copy{};
  copy.dstMemoryType = copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.dstDevice = address(to);
  copy.dstPitch = to_pitch;
  copy.srcDevice = address(from);
  copy.srcPitch = from_pitch;
  copy.WidthInBytes = width;
  copy.Height = height;
  return copy;
}

}  // namespace

API cudaMalloc(void** pointer, size_t bytes) {
  return with_context([&] { return cuMemAlloc_v2(as_address(pointer), bytes); });
}

API cudaFree(void* pointer) {
  return with_context([&] { return cuMemFree_v2(address(pointer)); });
}

API cudaMallocHost(void** pointer, size_t bytes) {
  return with_context([&] { return cuMemHostAlloc(pointer, bytes, 0); });
}

API cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return with_context([&] { return cuMemHostAlloc(pointer, bytes, flags); });
}

// Memory that host and device both touch is the host's here.
API cudaMallocManaged(void** pointer, size_t bytes, unsigned) {
  return with_context([&] { return cuMemHostAlloc(pointer, bytes, 0); });
}

API cudaFreeHost(void* pointer) {
  return with_context([&] { return cuMemFreeHost(pointer); });
}

API cudaHostRegister(void* pointer, size_t bytes, unsigned flags) {
  return with_context([&] { return cuMemHostRegister_v2(pointer, bytes, flags); });
}

API cudaHostUnregister(void* pointer) {
  return with_context([&] { return cuMemHostUnregister(pointer); });
}

API cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  return with_context([&] { return cuMemHostGetDevicePointer_v2(as_address(device), host, flags); });
}

API cudaMemGetInfo(size_t* unused, size_t* total) {
  return with_context([&] { return cuMemGetInfo_v2(unused, total); });
}

API cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return with_context([&] { return cuMemcpy(address(to), address(from), bytes); });
}

API cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return with_context([&] { return cuMemcpyAsync(address(to), address(from), bytes, stream); });
}

API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return with_context([&] { return cuMemcpyAsync(address(to), address(from), bytes, stream); });
}

API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      cudaMemcpyKind, cudaStream_t stream) {
  const CUDA_MEMCPY2D copy = rows(to, to_pitch, from, from_pitch, width, height);
  return with_context([&] { return cuMemcpy2DAsync_v2(&copy, stream); });
}

API cudaMemset(void* to, int value, size_t bytes) {
  return with_context([&] { return cuMemsetD8_v2(address(to), static_cast<unsigned char>(value), bytes); });
}

API cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return with_context([&] { return cuMemsetD8Async(address(to), static_cast<unsigned char>(value), bytes, stream); });
}

API cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  device();
  attributes->device = cudaInvalidDeviceId;
  const unsigned type = memory_type(pointer);
  if (!type) return cudaSuccess;
  attributes->type = type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = ask<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
  attributes->devicePointer = ask<void*>(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, pointer);
  attributes->hostPointer = ask<void*>(CU_POINTER_ATTRIBUTE_HOST_POINTER, pointer);
  return cudaSuccess;
}
