#include "stores.h"

#include <cstring>

#include "call.h"
#include "memory.h"
#include "settings.h"

namespace softcuda {

void Stores::hold(CUdeviceptr to, std::vector<char> bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_.push_back({to, std::move(bytes)});
}

void Stores::publish() {
  if (!settings().weak) return;
  // Both, in the order of callers that hold the first: what follows looks for memory.
  Lock state_lock(state());
  std::lock_guard<std::mutex> lock(mutex_);
  publish_locked();
}

void Stores::publish_for_read(CUdeviceptr from, size_t bytes) {
  if (!settings().weak) return;
  // Both, in the order of callers that hold the first: what follows looks for memory.
  Lock state_lock(state());
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Store& store : held_) {
    if (store.to < from + bytes && from < store.to + store.bytes.size()) return publish_locked();
  }
}

void Stores::publish_locked() {
  for (const Store& store : held_) {
    char* to = reach(store.to, store.bytes.size(), device_, "store made visible late");
    if (to) memcpy(to, store.bytes.data(), store.bytes.size());
  }
  held_.clear();
}

}  // namespace softcuda
