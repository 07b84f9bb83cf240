#include "capture.h"

#include <algorithm>
#include <set>

#include "call.h"
#include "graph.h"
#include "log.h"
#include "stream.h"

namespace softcuda {

namespace {

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* const captures = new std::vector<std::shared_ptr<Capture>>;
  return *captures;
}

// Whether a capture minds an unsafe call of this thread (the table of cuThreadExchangeStreamCaptureMode).
bool minds(const Capture& capture) {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture.mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  if (capture.owner == std::this_thread::get_id()) return true;
  return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult begin(CUstream handle, CUgraph graph, std::vector<CUgraphNode> tail, CUstreamCaptureMode mode) {
  static uint64_t ids = 0;
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->legacy) return breach(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream cannot capture");
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  CUgraph target = graph ? graph : make_graph();
  stream->capture = std::make_shared<Capture>(
      Capture{++ids, target, graph == nullptr, target->nodes.size(), stream, stream->id, mode, std::this_thread::get_id()});
  stream->tail = std::move(tail);
  captures().push_back(stream->capture);
  return CUDA_SUCCESS;
}

// Whether every node of the capture comes before one that the origin is at: no branch was left alone.
bool is_joined(const Capture& capture, const std::vector<CUgraphNode>& tail) {
  std::set<CUgraphNode> reached;
  std::vector<CUgraphNode> pending = tail;
  while (!pending.empty()) {
    CUgraphNode node = pending.back();
    pending.pop_back();
    if (reached.insert(node).second) pending.insert(pending.end(), node->after.begin(), node->after.end());
  }
  const auto& nodes = capture.graph->nodes;
  return std::all_of(nodes.begin() + static_cast<ptrdiff_t>(capture.first_node), nodes.end(),
                     [&](const auto& node) { return reached.count(node.get()); });
}

void close(const std::shared_ptr<Capture>& capture) {
  capture->active = false;
  for (CUstream member : streams()) {
    if (member->capture != capture) continue;
    member->capture = nullptr;
    member->tail.clear();
  }
  captures().erase(std::find(captures().begin(), captures().end(), capture));
}

CUresult end(CUstream handle, CUgraph* graph) {
  Lock lock(state());
  *graph = nullptr;
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const auto capture = stream->capture;
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->owner != std::this_thread::get_id()) {
    return spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "it was ended by another thread");
  }
  const bool joined = is_joined(*capture, stream->tail);
  close(capture);
  if (!capture->spoilt && joined) {
    *graph = capture->graph;
    return CUDA_SUCCESS;
  }
  if (capture->owns_graph) destroy_graph(capture->graph);
  if (capture->spoilt) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  return breach(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capture %lu ended before another stream had joined it again",
                capture->id);
}

CUstreamCaptureStatus status_of(const CUstream_st& stream) {
  if (!stream.capture) return CU_STREAM_CAPTURE_STATUS_NONE;
  return stream.capture->spoilt ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult info(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph, const CUgraphNode** tail,
              size_t* count) {
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *status = status_of(*stream);
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  if (id) *id = stream->capture->id;
  if (graph) *graph = stream->capture->graph;
  if (tail) *tail = stream->tail.data();
  if (count) *count = stream->tail.size();
  return CUDA_SUCCESS;
}

}  // namespace

CUresult refuse_in_capture(const char* call) {
  Lock lock(state());
  CUresult refusal = CUDA_SUCCESS;
  for (const auto& capture : captures()) {
    if (minds(*capture)) refusal = spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, call);
  }
  return refusal;
}

CUresult spoil(Capture& capture, CUresult error, const char* what) {
  capture.spoilt = true;
  return breach(error, "capture %lu of stream %lu is spoilt by %s: %s", capture.id, capture.stream,
                current_call(), what);
}

void leave_capture(CUstream stream) {
  const auto capture = stream->capture;
  if (!capture) return;
  spoil(*capture, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "a stream of it was destroyed");
  if (capture->origin != stream) return;
  close(capture);
  if (capture->owns_graph) destroy_graph(capture->graph);
}

CUresult add_node(CUstream stream, Operation operation) {
  if (stream->capture->spoilt) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  auto node = std::make_shared<CUgraphNode_st>(CUgraphNode_st{std::move(operation), stream->tail});
  stream->tail = {node.get()};
  stream->capture->graph->nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

}  // namespace softcuda

using namespace softcuda;

API cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  ENTER(Plain);
  return begin(stream, nullptr, {}, mode);
}

API cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* tail, const CUgraphEdgeData*,
                                size_t count, CUstreamCaptureMode mode) {
  ENTER(Plain);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  return begin(stream, graph, {tail, tail + count}, mode);
}

API cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  ENTER(Plain);
  return end(stream, graph);
}

API cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  ENTER(Plain);
  return info(stream, status, nullptr, nullptr, nullptr, nullptr);
}

API cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                              const CUgraphNode** tail, size_t* count) {
  ENTER(Plain);
  return info(stream, status, id, graph, tail, count);
}

API cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                              const CUgraphNode** tail, const CUgraphEdgeData** edges, size_t* count) {
  ENTER(Plain);
  if (edges) *edges = nullptr;
  return info(stream, status, id, graph, tail, count);
}

API cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode* nodes, const CUgraphEdgeData*, size_t count,
                                         unsigned flags) {
  ENTER(Plain);
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (flags & CU_STREAM_SET_CAPTURE_DEPENDENCIES) stream->tail.clear();
  stream->tail.insert(stream->tail.end(), nodes, nodes + count);
  return CUDA_SUCCESS;
}

API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  ENTER(Plain);
  std::swap(*mode, thread_mode);
  return CUDA_SUCCESS;
}
