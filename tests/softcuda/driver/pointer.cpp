// What CUDA knows of an address.
#include "call.h"
#include "context.h"
#include "host_memory.h"
#include "memory.h"

using namespace softcuda;

namespace {

// A value of the type that the attribute has.
template <class Value>
CUresult give(void* out, Value value) {
  *static_cast<Value*>(out) = value;
  return CUDA_SUCCESS;
}

CUresult of_device(void* out, CUpointer_attribute attribute, CUdeviceptr address, CUdeviceptr start,
                   const Allocation& allocation) {
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return give(out, primary_context(allocation.device));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return give<unsigned>(out, CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return give(out, address);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return give<unsigned long long>(out, allocation.id);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return give(out, allocation.device);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return give(out, start);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return give(out, allocation.bytes);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return give<unsigned>(out, allocation.origin == Origin::Allocated);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return give<unsigned char>(out, 0);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return give<unsigned char>(out, 0);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult of_host(void* out, CUpointer_attribute attribute, CUdeviceptr host) {
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return give(out, primary_context(current_device()));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return give<unsigned>(out, CU_MEMORYTYPE_HOST);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return give(out, device_address_of(reinterpret_cast<void*>(host)));
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return give(out, host);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return give(out, current_device());
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return give<unsigned long long>(out, 0);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return give<unsigned char>(out, 0);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult answer(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  Lock lock(state());
  const auto found = allocation_at(address);
  if (found != allocations().end()) return of_device(out, attribute, address, found->first, found->second);
  if (void* host = host_behind(address)) return of_host(out, attribute, reinterpret_cast<CUdeviceptr>(host));
  if (is_pinned(address, 1)) return of_host(out, attribute, address);
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

API cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  ENTER(Plain);
  return answer(out, attribute, address);
}

API cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** outs, CUdeviceptr address) {
  ENTER(Plain);
  // An address that is not CUDA's is no error here: its attributes stay as they are.
  for (unsigned i = 0; i < count; ++i) answer(outs[i], attributes[i], address);
  return CUDA_SUCCESS;
}

API cuPointerSetAttribute(const void*, CUpointer_attribute attribute, CUdeviceptr) {
  ENTER(Plain);
  // All that is done here is synchronous enough for it.
  return attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
