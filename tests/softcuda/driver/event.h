// An event, as event.cpp and what sends it to other processes know it.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace softcuda {

struct Capture;

struct EventState {
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> done{0};
  std::atomic<uint64_t> time{0};  // of the last completion
};

// The state in a file's page; null if it cannot be mapped.
std::shared_ptr<EventState> map_event(int file);

}  // namespace softcuda

struct CUevent_st {
  std::shared_ptr<softcuda::EventState> state;
  unsigned flags = 0;
  int device = 0;
  int file = -1;
  // Recorded in a capture: which, and after what.
  std::shared_ptr<softcuda::Capture> capture;
  std::vector<CUgraphNode> tail;
};
