// Streams that capture: what may be done meanwhile, and who spoilt a capture.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <thread>

#include "queue.h"

namespace softcuda {

struct Capture {
  uint64_t id;
  CUgraph graph;
  bool owns_graph;    // made for it, rather than given by the caller
  size_t first_node;  // of its own in the graph
  CUstream origin;
  uint64_t stream;  // its number
  CUstreamCaptureMode mode;
  std::thread::id owner;
  bool active = true;
  bool spoilt = false;
};

// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED if a capture forbids this thread a call that may wait; it is spoilt then.
CUresult refuse_in_capture(const char* call);

// Ends a capture's chance to become a graph: says who did what, and gives the error back.
CUresult spoil(Capture& capture, CUresult error, const char* what);

// A stream that goes away takes its capture along.
void leave_capture(CUstream stream);

// Puts an operation into the graph that a stream captures.
CUresult add_node(CUstream stream, Operation operation);

}  // namespace softcuda
