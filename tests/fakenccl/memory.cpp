// Memory by the library, and memory that is registered with communicators.
#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "communicator.h"
#include "settings.h"

namespace fakenccl {

bool is_device_memory(uintptr_t begin, size_t bytes) {
  for (uintptr_t next = begin; next < begin + bytes;) {
    CUdeviceptr base = 0;
    size_t length = 0;
    unsigned kind = 0;
    if (cuMemGetAddressRange_v2(&base, &length, next) || !length) return false;
    if (cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, next) || kind != CU_MEMORYTYPE_DEVICE) return false;
    next = base + length;
  }
  return true;
}

}  // namespace fakenccl

using namespace fakenccl;

// Absent in libraries that are as old.
#ifndef FAKENCCL_WITHOUT

namespace {

int refuse(int result, const char* why) {
  last_error() = why;
  return result;
}

struct Allocated {
  CUmemGenericAllocationHandle pages;
  size_t bytes;
};

struct All {
  std::mutex mutex;
  std::map<CUdeviceptr, Allocated> memory;
};

All& all() {
  static auto* const all = new All;
  return *all;
}

}  // namespace

API int ncclMemAlloc(void** place, size_t bytes) {
  if (settings().version < 21900) return refuse(InvalidUsage, "this version has no ncclMemAlloc");
  CUdevice device;
  if (cuCtxGetDevice(&device)) return refuse(UnhandledCudaError, "no context");
  CUmemAllocationProp what{};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  what.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  size_t granularity = 0;
  cuMemGetAllocationGranularity(&granularity, &what, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (!bytes || bytes > SIZE_MAX - granularity) return refuse(UnhandledCudaError, "invalid length");
  Allocated made{0, (bytes + granularity - 1) / granularity * granularity};
  CUdeviceptr address = 0;
  if (cuMemCreate(&made.pages, made.bytes, &what, 0)) return refuse(UnhandledCudaError, "out of memory");
  const CUmemAccessDesc access{what.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (cuMemAddressReserve(&address, made.bytes, granularity, 0, 0) ||
      cuMemMap(address, made.bytes, 0, made.pages, 0) || cuMemSetAccess(address, made.bytes, &access, 1)) {
    return refuse(UnhandledCudaError, "the memory cannot be mapped");
  }
  count("allocations");
  std::lock_guard<std::mutex> lock(all().mutex);
  all().memory[address] = made;
  *place = reinterpret_cast<void*>(address);
  return Success;
}

API int ncclMemFree(void* memory) {
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  Allocated freed{};
  {
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto found = all().memory.find(address);
    if (found == all().memory.end()) return refuse(UnhandledCudaError, "the memory is not of ncclMemAlloc");
    if (is_enrolled_somewhere(address, found->second.bytes)) return breach("ncclMemFree of registered memory");
    freed = found->second;
    all().memory.erase(found);
  }
  count("frees");
  const bool is_freed = !cuMemUnmap(address, freed.bytes) && !cuMemAddressFree(address, freed.bytes) &&
                        !cuMemRelease(freed.pages);
  return is_freed ? Success : refuse(UnhandledCudaError, "the memory cannot be given back");
}

API int ncclCommRegister(void* handle, void* memory, size_t bytes, void** registration) {
  const auto comm = find(handle);
  if (!comm) return refuse(InvalidArgument, "no communicator");
  const char* const enabled = getenv("NCCL_LOCAL_REGISTER");
  *registration = nullptr;
  if (enabled && !strcmp(enabled, "0")) return Success;
  if (comm->state == InProgress) return refuse(InvalidArgument, "the communicator is not ready");
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  if (!bytes || !is_device_memory(begin, bytes)) return refuse(InvalidArgument, "what is to be registered is no device memory");
  if (const Result failed = comm->fault(Fault::When::Register, "no room to register memory")) {
    return refuse(failed, comm->failure.c_str());
  }
  count("registrations");
  *registration = comm->enroll(begin, bytes);
  return Success;
}

API int ncclCommDeregister(void* handle, void* registration) {
  const auto comm = find(handle);
  if (!comm) return refuse(InvalidArgument, "no communicator");
  if (!registration) return Success;
  // Undefined there: what is on a stream may use it.
  if (!comm->is_idle()) breach("ncclCommDeregister while something of the communicator is on a stream");
  if (!comm->dismiss(registration)) return refuse(InvalidUsage, "Deregister: Could not find handle");
  count("deregistrations");
  return Success;
}

#endif
