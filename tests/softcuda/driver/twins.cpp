#include "twins.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "call.h"
#include "context.h"
#include "host_memory.h"
#include "log.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace softcuda {

namespace {

constexpr unsigned LARGEST_BLOCK = 1024;
constexpr size_t POINTER = sizeof(CUdeviceptr);

const std::vector<void*>& libraries() {
  static const auto* const libraries = [] {
    auto* opened = new std::vector<void*>;
    for (const std::string& path : split(settings().twins, ':')) {
      void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (!library) say("SOFTCUDA_TWINS: %s", dlerror());
      if (library) opened->push_back(library);
    }
    return opened;
  }();
  return *libraries;
}

using Bytes = std::vector<char>;

// Buffers of what has run on this thread before: fresh memory for each launch would take longer than the copies.
class Spares {
 public:
  // One with room for so many bytes, if there is one; else one without memory.
  Bytes take(size_t bytes) {
    const auto found = spares_.lower_bound(bytes);
    if (found == spares_.end()) return {};
    Bytes spare = std::move(found->second);
    kept_ -= found->first;
    spares_.erase(found);
    return spare;
  }

  void give_back(Bytes bytes) {
    const size_t room = bytes.capacity();
    if (kept_ + room > MOST) return;
    kept_ += room;
    spares_.emplace(room, std::move(bytes));
  }

 private:
  static constexpr size_t MOST = size_t{96} << 20;
  std::multimap<size_t, Bytes> spares_;
  size_t kept_ = 0;
};

thread_local Spares spares;

// A weak machine's kernel works on a copy: what it changed there becomes the stream's held stores.
class Copies {
 public:
  Copies() = default;
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  ~Copies() {
    for (auto& entry : copies_) {
      spares.give_back(std::move(entry.second.before));
      spares.give_back(std::move(entry.second.now));
    }
  }

  // Where a copy has the byte of an address; null for what is not device memory.
  char* place(CUdeviceptr address) {
    Lock lock(state());
    const auto found = allocation_at(address);
    if (found == allocations().end()) return nullptr;
    const auto [start, bytes] = std::pair(found->first, found->second.bytes);
    auto& copy = copies_[start];
    if (copy.now.empty()) {
      Progress& progress = *running().progress;
      const char* source = reach(start, bytes, progress.device, "read");
      if (!source) return nullptr;
      copy.before = spares.take(bytes);
      copy.now = spares.take(bytes);
      copy.before.assign(source, source + bytes);
      copy.now = copy.before;
    }
    return copy.now.data() + (address - start);
  }

  void hold_changes(Stores& stores) const {
    for (const auto& [start, copy] : copies_) {
      const size_t size = copy.now.size();
      for (size_t i = 0; i < size; i += BLOCK) {
        const size_t end = std::min(size, i + BLOCK);
        if (memcmp(&copy.now[i], &copy.before[i], end - i)) hold_changes(stores, start, copy, i, end);
      }
    }
  }

 private:
  struct Copy {
    Bytes before;
    Bytes now;
  };
  // What has not changed is found to be so by as many bytes at once.
  static constexpr size_t BLOCK = 4096;

  static void hold_changes(Stores& stores, CUdeviceptr start, const Copy& copy, size_t i, size_t last) {
    while (i < last) {
      size_t end = i;
      while (end < last && copy.now[end] != copy.before[end]) ++end;
      if (end > i) stores.hold(start + i, {copy.now.begin() + ptrdiff_t(i), copy.now.begin() + ptrdiff_t(end)});
      i = end + 1;
    }
  }

  std::map<CUdeviceptr, Copy> copies_;
};

bool is_known(CUdeviceptr address) {
  Lock lock(state());
  return allocation_at(address) != allocations().end();
}

// The host's address for a pointer that a parameter holds, or 0 to leave it as it is. One past the end of memory is
// a pointer too.
CUdeviceptr translate(CUdeviceptr pointer, bool whole, Copies* copies) {
  const int device = running().progress->device;
  if (void* host = host_behind(pointer)) return reinterpret_cast<CUdeviceptr>(host);
  if (!is_device_address(pointer)) return 0;
  const bool is_end = !is_known(pointer) && is_known(pointer - 1);
  // What a structure holds beside its pointers may look like one. A fault will tell if it is used.
  if (!whole && !is_end && !is_known(pointer)) return 0;
  const CUdeviceptr inside = pointer - is_end;
  const char* place = reach_from_device(inside, 1, device, "a kernel's parameter");
  if (place && copies) place = copies->place(inside);
  return place ? reinterpret_cast<CUdeviceptr>(place) + is_end : 0;
}

using Parameters = std::vector<std::vector<char>>;

void run(const Twin& twin, const std::vector<unsigned>& dims, Parameters parameters) {
  Progress& progress = *running().progress;
  Copies copies;
  progress.stores.publish();
  std::vector<void*> pointers;
  for (auto& bytes : parameters) {
    for (size_t i = 0; i + POINTER <= bytes.size(); i += POINTER) {
      CUdeviceptr value;
      memcpy(&value, &bytes[i], POINTER);
      const bool whole = bytes.size() == POINTER;
      const CUdeviceptr host = translate(value, whole, settings().weak ? &copies : nullptr);
      if (host) memcpy(&bytes[i], &host, POINTER);
    }
    pointers.push_back(bytes.data());
  }
  if (sticky_error(progress.device)) return;
  twin.run(pointers.data(), dims.data());
  copies.hold_changes(progress.stores);
}

}  // namespace

const Twin* find_twin(const char* kernel) {
  for (void* library : libraries()) {
    void* found = dlsym(library, (std::string("softcuda_twin_") + kernel).c_str());
    if (found) return reinterpret_cast<const Twin* (*)()>(found)();
  }
  static auto* const said = new std::set<std::string>;
  Lock lock(state());
  if (said->insert(kernel).second) say("kernel %s has no twin on the host", kernel);
  return nullptr;
}

std::weak_ptr<const void> lasting_code() {
  static const auto code = std::make_shared<const char>();
  return code;
}

CUresult launch(CUstream handle, const Twin& twin, std::weak_ptr<const void> code, const unsigned* dims,
                void** parameters) {
  int device = 0;
  {
    Lock lock(state());
    CUstream stream = resolve(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->device != current_device()) {
      return breach(CUDA_ERROR_INVALID_HANDLE, "%s: the stream is of device %d, and the thread works on device %d",
                    current_call(), stream->device, current_device());
    }
    device = stream->device;
  }
  const unsigned threads = dims[3] * dims[4] * dims[5];
  if (!dims[0] || !dims[1] || !dims[2] || !threads || threads > LARGEST_BLOCK) return CUDA_ERROR_INVALID_VALUE;
  Parameters copied;
  for (size_t i = 0; i < twin.count; ++i) {
    const char* bytes = static_cast<const char*>(parameters[i]);
    copied.emplace_back(bytes, bytes + twin.sizes[i]);
  }
  return submit(handle, CU_GRAPH_NODE_TYPE_KERNEL,
                [&twin, code, device, dims = std::vector<unsigned>(dims, dims + 6), copied] {
                  // A graph does not keep the module of its kernels.
                  if (!code.lock()) return break_device(device, CUDA_ERROR_ILLEGAL_INSTRUCTION);
                  run(twin, dims, copied);
                });
}

}  // namespace softcuda
