#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "call.h"
#include "context.h"
#include "host_memory.h"
#include "leaks.h"
#include "log.h"
#include "queue.h"
#include "settings.h"
#include "stream.h"

namespace softcuda {

namespace {

constexpr uint64_t ARENA = uint64_t{1} << 40;
constexpr size_t POISONED = size_t{64} << 20;  // more would cost the pages of large pools
constexpr int POISON_NEW = 0xcb;
constexpr int POISON_FREED = 0xdd;
constexpr size_t REMEMBERED = 1024;

struct Freed {
  CUdeviceptr address;
  size_t bytes;
  std::string maker;
  std::string freer;
};

struct Arena {
  char* device;
  char* alias;
  uint64_t next = GRANULARITY;
  std::map<uint64_t, size_t> returned;  // offset, bytes; merged with neighbours
  std::map<CUdeviceptr, Allocation> allocations;
  std::deque<Freed> freed;
  std::map<int, uint64_t> used;
  uint64_t ids = 1;
};

char* reserve_arena() {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* start = mmap(nullptr, ARENA, PROT_NONE, flags, -1, 0);
  if (start != MAP_FAILED) return static_cast<char*>(start);
  say("cannot reserve addresses: %m");
  abort();
}

Arena& arena() {
  static Arena* const arena = [] {
    auto* made = new Arena;
    made->device = reserve_arena();
    made->alias = reserve_arena();
    return made;
  }();
  return *arena;
}

uint64_t offset_of(CUdeviceptr address) { return address - reinterpret_cast<CUdeviceptr>(arena().device); }

char* alias_of(CUdeviceptr address) { return arena().alias + offset_of(address); }

void poison(CUdeviceptr address, size_t bytes, int value) {
  if (settings().poison) memset(alias_of(address), value, std::min(bytes, POISONED));
}

char* illegal(CUdeviceptr address, size_t bytes, int device, const char* purpose) {
  const char* history = "never allocated";
  char text[256];
  for (const Freed& freed : arena().freed) {
    if (address < freed.address || address >= freed.address + freed.bytes) continue;
    snprintf(text, sizeof text, "%zu bytes of %s, freed in %s", freed.bytes, freed.maker.c_str(), freed.freer.c_str());
    history = text;
  }
  const auto inside = allocation_at(address);
  if (inside != allocations().end()) {
    const auto& [start, found] = *inside;
    snprintf(text, sizeof text, "%s %zu bytes of %s", found.accessible ? "beyond the end of" : "no access set for",
             found.bytes, found.maker.c_str());
    history = text;
  }
  say("illegal address %#llx (%zu bytes, %s) in %s: %s", address, bytes, purpose, describe_running(), history);
  break_device(device, CUDA_ERROR_ILLEGAL_ADDRESS);
  return nullptr;
}

// Whether pages that may be used lie behind all of the bytes: several mappings in a row will do.
bool is_backed(CUdeviceptr address, size_t bytes) {
  const CUdeviceptr end = address + bytes;
  while (address < end) {
    const auto found = allocation_at(address);
    if (found == allocations().end() || !found->second.accessible) return false;
    address = found->first + found->second.bytes;
  }
  return true;
}

}  // namespace

size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

std::map<CUdeviceptr, Allocation>& allocations() { return arena().allocations; }

std::map<CUdeviceptr, Allocation>::iterator allocation_at(CUdeviceptr address) {
  auto& all = allocations();
  auto after = all.upper_bound(address);
  if (after == all.begin()) return all.end();
  const auto found = std::prev(after);
  return address < found->first + found->second.bytes ? found : all.end();
}

uint64_t& used_memory(int device) { return arena().used[device]; }

std::string maker_of_this() {
  if (running().operation) return describe_running();
  return std::string(current_call()) + " by thread " + thread_name();
}

CUresult allocate(CUdeviceptr* address, size_t bytes, int device) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state());
  const size_t pages = round_up(bytes, PAGE);
  if (used_memory(device) + pages > settings().memory) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUdeviceptr start = reserve_addresses(pages);
  const int file = memfd_create("softcuda-memory", MFD_CLOEXEC);
  if (!start || file < 0 || ftruncate(file, static_cast<off_t>(pages)) || !map_pages(start, pages, file, 0)) {
    say("no pages for %zu bytes: %m", bytes);
    if (file >= 0) close(file);
    if (start) return_addresses(start, pages);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  poison(start, bytes, POISON_NEW);
  used_memory(device) += pages;
  allocations()[start] = {bytes, device, Origin::Allocated, file, arena().ids++, true, maker_of_this()};
  note_made(Kind::DeviceMemory, start, bytes);
  *address = start;
  return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr address) {
  Lock lock(state());
  const auto found = allocations().find(address);
  if (found == allocations().end() || found->second.origin != Origin::Allocated) {
    return breach(CUDA_ERROR_INVALID_VALUE, "%s: %#llx is no allocation", current_call(), address);
  }
  const Allocation allocation = found->second;
  // Processes that still have it open read this.
  poison(address, allocation.bytes, POISON_FREED);
  remember_freed(address, allocation);
  allocations().erase(found);
  note_gone(Kind::DeviceMemory, address);
  const size_t pages = round_up(allocation.bytes, PAGE);
  unmap_pages(address, pages);
  close(allocation.file);
  used_memory(allocation.device) -= pages;
  return_addresses(address, pages);
  return CUDA_SUCCESS;
}

bool is_device_address(CUdeviceptr address) { return offset_of(address) < ARENA; }

CUdeviceptr reserve_addresses(size_t bytes) {
  Arena& all = arena();
  // The gap behind each catches what runs over its end.
  const size_t wanted = round_up(bytes + 1, GRANULARITY);
  const auto base = reinterpret_cast<CUdeviceptr>(all.device);
  if (all.next + wanted <= ARENA) {
    const uint64_t offset = all.next;
    all.next += wanted;
    return base + offset;
  }
  for (auto it = all.returned.begin(); it != all.returned.end(); ++it) {
    const auto [offset, free] = *it;
    if (free < wanted) continue;
    all.returned.erase(it);
    if (free > wanted) all.returned[offset + wanted] = free - wanted;
    return base + offset;
  }
  return 0;
}

void return_addresses(CUdeviceptr address, size_t bytes) {
  auto& returned = arena().returned;
  uint64_t offset = offset_of(address);
  size_t size = round_up(bytes + 1, GRANULARITY);
  auto after = returned.lower_bound(offset);
  if (after != returned.end() && after->first == offset + size) {
    size += after->second;
    after = returned.erase(after);
  }
  if (after != returned.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  returned[offset] = size;
}

bool map_pages(CUdeviceptr address, size_t bytes, int file, size_t offset) {
  return mmap(alias_of(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
              static_cast<off_t>(offset)) != MAP_FAILED;
}

void unmap_pages(CUdeviceptr address, size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(alias_of(address), bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) say("cannot unmap: %m");
}

void remember_freed(CUdeviceptr address, const Allocation& allocation) {
  auto& freed = arena().freed;
  if (freed.size() == REMEMBERED) freed.pop_front();
  freed.push_back({address, allocation.bytes, allocation.maker, maker_of_this()});
}

char* reach(CUdeviceptr address, size_t bytes, int device, const char* purpose) {
  if (void* host = host_behind(address)) return static_cast<char*>(host);
  if (!is_device_address(address)) return reinterpret_cast<char*>(address);
  Lock lock(state());
  return is_backed(address, bytes) ? alias_of(address) : illegal(address, bytes, device, purpose);
}

char* reach_from_device(CUdeviceptr address, size_t bytes, int device, const char* purpose) {
  if (is_device_address(address) && !settings().peers) {
    Lock lock(state());
    const auto found = allocation_at(address);
    const bool is_foreign = found != allocations().end() && found->second.device != device;
    if (is_foreign) return illegal(address, bytes, device, "memory of another device, which this one does not reach");
  }
  const bool is_host = !is_device_address(address) && !host_behind(address);
  if (is_host && (settings().host_pointers_differ ? !is_owned(address, bytes) : !is_pinned(address, bytes))) {
    Lock lock(state());
    return illegal(address, bytes, device, purpose);
  }
  return reach(address, bytes, device, purpose);
}

Suspect suspect(uint64_t fault_address) {
  const auto device = reinterpret_cast<uint64_t>(arena().device);
  const auto alias = reinterpret_cast<uint64_t>(arena().alias);
  if (fault_address - alias < ARENA) return {false, true, fault_address - alias + device};
  return {fault_address - device < ARENA, false, fault_address};
}

}  // namespace softcuda

using namespace softcuda;

// Where the host finds device memory, for what runs operators by CPU kernels.
SOFTCUDA_EXPORT void* softcuda_alias(CUdeviceptr address, size_t bytes) {
  return reach(address, bytes, current_device(), "alias");
}

API cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  ENTER(NotInCapture);
  if (settings().blocking == Blocking::All) {
    if (CUresult failed = wait_for_device(current_device())) return failed;
  }
  return allocate(address, bytes, current_device());
}

API cuMemFree_v2(CUdeviceptr address) {
  ENTER(NotInCapture);
  if (!address) return CUDA_SUCCESS;
  if (CUresult failed = wait_for_device(current_device())) return failed;
  return release(address);
}

API cuMemGetInfo_v2(size_t* unused, size_t* total) {
  ENTER(Plain);
  Lock lock(state());
  *total = settings().memory;
  *unused = settings().memory - used_memory(current_device());
  return CUDA_SUCCESS;
}

API cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
  ENTER(Plain);
  Lock lock(state());
  const auto found = allocation_at(address);
  if (found == allocations().end()) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = found->first;
  if (bytes) *bytes = found->second.bytes;
  return CUDA_SUCCESS;
}
