// Stores of a stream that others do not see yet (SOFTCUDA_WEAK): they become visible at a fence of the stream, never
// before. The stream itself sees them.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace softcuda {

class Stores {
 public:
  explicit Stores(int device) : device_(device) {}

  // Keeps a store back.
  void hold(CUdeviceptr to, std::vector<char> bytes);

  // Makes all visible, in their order: at a word written with a fence, an event, the end of a wait by the host.
  void publish();

  // The same if one of them touches these bytes, which the stream is about to read.
  void publish_for_read(CUdeviceptr from, size_t bytes);

 private:
  struct Store {
    CUdeviceptr to;
    std::vector<char> bytes;
  };
  void publish_locked();

  const int device_;
  std::mutex mutex_;
  std::deque<Store> held_;
};

}  // namespace softcuda
