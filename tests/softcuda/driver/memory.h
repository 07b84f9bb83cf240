// Device memory: pages of memfds that are mapped twice. What CUDA calls the device address cannot be touched by the
// host; workers use the other mapping, its alias, at a fixed distance.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace softcuda {

constexpr size_t GRANULARITY = size_t{2} << 20;  // of addresses, as of real devices
constexpr size_t PAGE = 4096;

enum class Origin { Allocated, Mapped, Imported };

struct Allocation {
  size_t bytes;
  int device;
  Origin origin;
  int file;  // of the pages; not of mappings, whose handles have it
  uint64_t id;
  bool accessible;
  std::string maker;  // call and thread
};

size_t round_up(size_t bytes, size_t multiple);

// The allocations by address; under the lock of the state.
std::map<CUdeviceptr, Allocation>& allocations();

// The one that an address lies in, or the end.
std::map<CUdeviceptr, Allocation>::iterator allocation_at(CUdeviceptr address);

// Bytes of a device's memory in use.
uint64_t& used_memory(int device);

CUresult allocate(CUdeviceptr* address, size_t bytes, int device);
CUresult release(CUdeviceptr address);

bool is_device_address(CUdeviceptr address);

// Addresses without pages behind them. They are not reused as long as there are others, so that a use after free shows.
CUdeviceptr reserve_addresses(size_t bytes);
void return_addresses(CUdeviceptr address, size_t bytes);

// Puts pages of a file behind addresses, and takes them away.
bool map_pages(CUdeviceptr address, size_t bytes, int file, size_t offset);
void unmap_pages(CUdeviceptr address, size_t bytes);

// Remembers what was there, for messages.
void remember_freed(CUdeviceptr address, const Allocation& allocation);

// "call by thread" of the caller, or what its queue runs.
std::string maker_of_this();

// Where the host finds the bytes behind an address: the alias of device memory; registered and other host memory itself.
// Nothing is there: says who did what, breaks the device as an illegal address does, and gives null.
char* reach(CUdeviceptr address, size_t bytes, int device, const char* purpose);

// The same for what a device touches by itself: host memory must be pinned.
char* reach_from_device(CUdeviceptr address, size_t bytes, int device, const char* purpose);

// For the handler of SIGSEGV, which must not wait: what an address belongs to.
struct Suspect {
  bool is_device;
  bool is_alias;
  CUdeviceptr address;
};
Suspect suspect(uint64_t fault_address);

}  // namespace softcuda
