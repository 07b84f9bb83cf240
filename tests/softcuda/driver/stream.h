// Streams: what is submitted, in order, and what waits for it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "queue.h"

namespace softcuda {
struct Capture;
}

struct CUstream_st {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  bool legacy = false;  // the default stream, which streams that are not non-blocking wait for, and it for them
  uint64_t submitted = 0;
  std::shared_ptr<softcuda::Progress> progress;
  std::shared_ptr<softcuda::Queue> queue;
  // While it captures: into what, and what the next node comes after.
  std::shared_ptr<softcuda::Capture> capture;
  std::vector<CUgraphNode> tail;
};

namespace softcuda {

// A point in a stream's order.
struct Point {
  std::shared_ptr<Progress> progress;
  uint64_t number;
  bool is_reached() const { return progress->done >= number; }
  std::string describe() const;
};

// The stream behind a handle, also of the default stream; null, and a word about it, if there is none.
CUstream resolve(CUstream handle);

CUstream create_stream(int device, unsigned flags, int priority);
void destroy_stream(CUstream stream);

// All that live, without the default ones.
const std::vector<CUstream>& streams();

// Puts an operation into the stream, or into the graph that it captures.
CUresult submit(CUstream handle, CUgraphNodeType type, std::function<void()> run,
                std::function<std::function<void()>()> at_launch = nullptr);

// The same without regard to captures and default streams, under the lock of the state.
void push(CUstream stream, Operation operation);
void push_wait(CUstream stream, const Point& point);

// Orders what comes next against the default stream; a capture that would have to be waited for is an error.
CUresult order_with_default(CUstream stream);

Point last_of(CUstream stream);

// Blocks the caller. The lock of the state must not be held.
CUresult wait_for(int device, const Point& point);
CUresult wait_for_stream(CUstream handle);
CUresult wait_for_device(int device);

}  // namespace softcuda
