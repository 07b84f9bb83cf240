#include "host_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <string>

#include "call.h"
#include "context.h"
#include "leaks.h"
#include "log.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace softcuda {

namespace {

struct Pinned {
  size_t bytes;
  bool owned;
  CUdeviceptr device;  // differs from the key only for registered memory, and only if the settings say so
};

constexpr uint64_t WINDOW = uint64_t{1} << 40;

std::map<CUdeviceptr, Pinned>& pinned() {
  static auto* const pinned = new std::map<CUdeviceptr, Pinned>;
  return *pinned;
}

// Addresses for registered memory, which nobody can touch.
CUdeviceptr window() {
  static const CUdeviceptr start = [] {
    void* reserved = mmap(nullptr, WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) abort();
    return reinterpret_cast<CUdeviceptr>(reserved);
  }();
  return start;
}

CUdeviceptr window_address(CUdeviceptr host, size_t bytes) {
  static uint64_t next = GRANULARITY;
  if (!settings().host_pointers_differ) return host;
  const CUdeviceptr start = window() + next + host % PAGE;
  next += round_up(bytes + 2 * PAGE, GRANULARITY);
  return start;
}

const std::pair<const CUdeviceptr, Pinned>* find(CUdeviceptr address, size_t bytes) {
  auto after = pinned().upper_bound(address);
  if (after == pinned().begin()) return nullptr;
  const auto& found = *std::prev(after);
  return address + bytes <= found.first + found.second.bytes ? &found : nullptr;
}

CUresult allocate_host(void** address, size_t bytes) {
  if (settings().blocking == Blocking::All) {
    if (CUresult failed = wait_for_device(current_device())) return failed;
  }
  const size_t pages = round_up(bytes ? bytes : 1, PAGE);
  void* start = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  Lock lock(state());
  const auto key = reinterpret_cast<CUdeviceptr>(start);
  pinned()[key] = {bytes, true, key};
  note_made(Kind::HostMemory, key, bytes);
  *address = start;
  return CUDA_SUCCESS;
}

}  // namespace

bool is_pinned(CUdeviceptr address, size_t bytes) {
  Lock lock(state());
  return find(address, bytes);
}

bool is_owned(CUdeviceptr address, size_t bytes) {
  Lock lock(state());
  const auto* found = find(address, bytes);
  return found && found->second.owned;
}

void* host_behind(CUdeviceptr address) {
  if (!settings().host_pointers_differ || address - window() >= WINDOW) return nullptr;
  Lock lock(state());
  for (const auto& [host, memory] : pinned()) {
    const uint64_t offset = address - memory.device;
    if (!memory.owned && offset < memory.bytes) return reinterpret_cast<void*>(host + offset);
  }
  return nullptr;
}

CUdeviceptr device_address_of(void* host) {
  const auto address = reinterpret_cast<CUdeviceptr>(host);
  Lock lock(state());
  const auto* found = find(address, 1);
  return found ? found->second.device + (address - found->first) : 0;
}

}  // namespace softcuda

using namespace softcuda;

API cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  ENTER(NotInCapture);
  return allocate_host(address, bytes);
}

API cuMemAllocHost_v2(void** address, size_t bytes) {
  ENTER(NotInCapture);
  return allocate_host(address, bytes);
}

API cuMemFreeHost(void* address) {
  ENTER(NotInCapture);
  if (CUresult failed = wait_for_device(current_device())) return failed;
  Lock lock(state());
  const auto found = pinned().find(reinterpret_cast<CUdeviceptr>(address));
  if (found == pinned().end() || !found->second.owned) {
    return breach(CUDA_ERROR_INVALID_VALUE, "%s: %p is no allocation", current_call(), address);
  }
  munmap(address, round_up(found->second.bytes ? found->second.bytes : 1, PAGE));
  note_gone(Kind::HostMemory, found->first);
  pinned().erase(found);
  return CUDA_SUCCESS;
}

API cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
  ENTER(NotInCapture);
  if (!address || !bytes) return CUDA_ERROR_INVALID_VALUE;
  if (settings().blocking == Blocking::All) {
    if (CUresult failed = wait_for_device(current_device())) return failed;
  }
  Lock lock(state());
  const auto key = reinterpret_cast<CUdeviceptr>(address);
  // Registrations must not overlap.
  const auto after = pinned().lower_bound(key);
  if (find(key, 1) || (after != pinned().end() && after->first < key + bytes)) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  pinned()[key] = {bytes, false, window_address(key, bytes)};
  note_made(Kind::Registration, key, bytes);
  return CUDA_SUCCESS;
}

API cuMemHostUnregister(void* address) {
  ENTER(NotInCapture);
  if (CUresult failed = wait_for_device(current_device())) return failed;
  Lock lock(state());
  const auto found = pinned().find(reinterpret_cast<CUdeviceptr>(address));
  if (found == pinned().end() || found->second.owned) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  note_gone(Kind::Registration, found->first);
  pinned().erase(found);
  return CUDA_SUCCESS;
}

API cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* host, unsigned) {
  ENTER(Plain);
  *device = device_address_of(host);
  return *device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuMemHostGetFlags(unsigned* flags, void* host) {
  ENTER(Plain);
  *flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
  return device_address_of(host) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
