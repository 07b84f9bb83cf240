// Virtual memory management: addresses and pages apart, pages in files that other processes get as descriptors.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "call.h"
#include "context.h"
#include "leaks.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace softcuda {

namespace {

struct Pages {
  int file;
  size_t bytes;
  int device;
  unsigned shareable;  // the kinds of handles asked for
  bool counted;        // against the device's memory: another process's are not
  int references;
};

struct Space {
  std::map<CUmemGenericAllocationHandle, Pages> pages;
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, CUmemGenericAllocationHandle> mapped;
  CUmemGenericAllocationHandle next = 1;
};

Space& space() {
  static Space* const space = new Space;
  return *space;
}

Pages* find(CUmemGenericAllocationHandle handle) {
  const auto found = space().pages.find(handle);
  if (found != space().pages.end()) return &found->second;
  breach(CUDA_ERROR_INVALID_VALUE, "%s: %llu is no handle of memory, or one released", current_call(), handle);
  return nullptr;
}

CUmemGenericAllocationHandle add(const Pages& pages) {
  const auto handle = space().next++;
  space().pages[handle] = pages;
  note_made(Kind::Handle, handle, pages.bytes);
  return handle;
}

void drop(CUmemGenericAllocationHandle handle) {
  Pages& pages = space().pages.at(handle);
  if (--pages.references) return;
  close(pages.file);
  if (pages.counted) used_memory(pages.device) -= pages.bytes;
  space().pages.erase(handle);
  note_gone(Kind::Handle, handle);
}

bool is_reserved(CUdeviceptr address, size_t bytes) {
  auto after = space().reservations.upper_bound(address);
  if (after == space().reservations.begin()) return false;
  const auto& [start, length] = *std::prev(after);
  return address + bytes <= start + length;
}

bool is_free(CUdeviceptr address, size_t bytes) {
  const auto next = allocations().lower_bound(address);
  return allocation_at(address) == allocations().end() &&
         (next == allocations().end() || next->first >= address + bytes);
}

// What lies mapped in a range: whole mappings, or else nothing.
std::map<CUdeviceptr, CUmemGenericAllocationHandle> mapped_in(CUdeviceptr address, size_t bytes) {
  const auto& mapped = space().mapped;
  return {mapped.lower_bound(address), mapped.lower_bound(address + bytes)};
}

}  // namespace
}  // namespace softcuda

using namespace softcuda;

API cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  ENTER(Plain);
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}

API cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  ENTER(Plain);
  if (!bytes || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state());
  *address = reserve_addresses(bytes);
  if (!*address) return CUDA_ERROR_OUT_OF_MEMORY;
  space().reservations[*address] = bytes;
  note_made(Kind::Addresses, *address, bytes);
  return CUDA_SUCCESS;
}

API cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  ENTER(Plain);
  Lock lock(state());
  const auto found = space().reservations.find(address);
  if (found == space().reservations.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  if (!mapped_in(address, bytes).empty()) {
    return breach(CUDA_ERROR_INVALID_VALUE, "%s: memory is still mapped at %#llx", current_call(), address);
  }
  space().reservations.erase(found);
  return_addresses(address, bytes);
  note_gone(Kind::Addresses, address);
  return CUDA_SUCCESS;
}

API cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* what,
                unsigned long long) {
  ENTER(Plain);
  if (!bytes || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  if (what->type != CU_MEM_ALLOCATION_TYPE_PINNED || what->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const auto shareable = static_cast<unsigned>(what->requestedHandleTypes);
  if (shareable & ~static_cast<unsigned>(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) return CUDA_ERROR_NOT_SUPPORTED;
  const int device = what->location.id;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  Lock lock(state());
  if (used_memory(device) + bytes > settings().memory) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = memfd_create("softcuda-pages", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) {
    if (file >= 0) close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  used_memory(device) += bytes;
  *handle = add({file, bytes, device, shareable, true, 1});
  return CUDA_SUCCESS;
}

API cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER(Plain);
  Lock lock(state());
  if (!find(handle)) return CUDA_ERROR_INVALID_VALUE;
  drop(handle);
  return CUDA_SUCCESS;
}

API cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  ENTER(Plain);
  Lock lock(state());
  Pages* pages = find(handle);
  if (!pages || !bytes || bytes % GRANULARITY || offset + bytes > pages->bytes) return CUDA_ERROR_INVALID_VALUE;
  if (!is_reserved(address, bytes) || !is_free(address, bytes)) {
    return breach(CUDA_ERROR_INVALID_VALUE, "%s: %#llx is not reserved, or in use", current_call(), address);
  }
  if (!map_pages(address, bytes, pages->file, offset)) return CUDA_ERROR_MAP_FAILED;
  ++pages->references;
  space().mapped[address] = handle;
  allocations()[address] = {bytes, pages->device, Origin::Mapped, -1, handle, false, maker_of_this()};
  return CUDA_SUCCESS;
}

API cuMemUnmap(CUdeviceptr address, size_t bytes) {
  ENTER(Plain);
  // Real drivers wait for work on the memory; that of the device is more, and never less.
  if (CUresult failed = wait_for_device(current_device())) return failed;
  Lock lock(state());
  const auto inside = mapped_in(address, bytes);
  if (inside.empty()) return CUDA_ERROR_INVALID_VALUE;
  const CUdeviceptr last = inside.rbegin()->first;
  if (last + allocations()[last].bytes > address + bytes) {
    return breach(CUDA_ERROR_INVALID_VALUE, "%s: a mapping goes as a whole", current_call());
  }
  for (const auto& [start, handle] : inside) {
    unmap_pages(start, allocations()[start].bytes);
    remember_freed(start, allocations()[start]);
    allocations().erase(start);
    space().mapped.erase(start);
    drop(handle);
  }
  return CUDA_SUCCESS;
}

API cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  ENTER(Plain);
  Lock lock(state());
  const auto inside = mapped_in(address, bytes);
  if (inside.empty() || !count) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [start, handle] : inside) {
    allocations()[start].accessible = access->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
  }
  return CUDA_SUCCESS;
}

API cuMemGetAccess(unsigned long long* flags, const CUmemLocation*, CUdeviceptr address) {
  ENTER(Plain);
  Lock lock(state());
  const auto found = allocation_at(address);
  if (found == allocations().end()) return CUDA_ERROR_INVALID_VALUE;
  *flags = found->second.accessible ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

API cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                 unsigned long long) {
  ENTER(Plain);
  Lock lock(state());
  const Pages* pages = find(handle);
  if (!pages) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(pages->shareable & type)) return CUDA_ERROR_NOT_SUPPORTED;
  *static_cast<int*>(out) = fcntl(pages->file, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from, CUmemAllocationHandleType type) {
  ENTER(Plain);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(from)), F_DUPFD_CLOEXEC, 0);
  struct stat status {};
  if (file < 0 || fstat(file, &status)) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state());
  *handle = add({file, static_cast<size_t>(status.st_size), current_device(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                 false, 1});
  return CUDA_SUCCESS;
}

API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* pointer) {
  ENTER(Plain);
  Lock lock(state());
  const auto found = allocation_at(reinterpret_cast<CUdeviceptr>(pointer));
  if (found == allocations().end() || found->second.origin != Origin::Mapped) return CUDA_ERROR_INVALID_VALUE;
  *handle = space().mapped[found->first];
  ++space().pages.at(*handle).references;
  return CUDA_SUCCESS;
}

API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* what, CUmemGenericAllocationHandle handle) {
  ENTER(Plain);
  Lock lock(state());
  const Pages* pages = find(handle);
  if (!pages) return CUDA_ERROR_INVALID_VALUE;
  memset(what, 0, sizeof *what);
  what->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what->requestedHandleTypes = static_cast<CUmemAllocationHandleType>(pages->shareable);
  what->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  what->location.id = pages->device;
  return CUDA_SUCCESS;
}
