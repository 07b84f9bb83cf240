#include "stream.h"

#include <algorithm>

#include "call.h"
#include "capture.h"
#include "context.h"
#include "leaks.h"
#include "log.h"
#include "settings.h"

namespace softcuda {

namespace {

// What a stream that was destroyed still has to do.
struct Rest {
  Point last;
  bool blocking;
};

struct Streams {
  std::vector<CUstream> living;
  std::vector<Rest> rests;
  std::vector<CUstream> legacy;  // by device
  uint64_t ids = 1;
};

Streams& all() {
  static Streams* const streams = new Streams;
  return *streams;
}

CUstream make(int device, unsigned flags, int priority) {
  auto* stream = new CUstream_st;
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  stream->id = all().ids++;
  stream->progress = std::make_shared<Progress>(stream->id, device);
  stream->queue = queue_for(stream->id);
  return stream;
}

CUstream legacy_stream(int device) {
  auto& legacy = all().legacy;
  while (static_cast<int>(legacy.size()) <= device) {
    legacy.push_back(make(static_cast<int>(legacy.size()), 0, 0));
    legacy.back()->legacy = true;
  }
  return legacy[static_cast<size_t>(device)];
}

// The rests that are left.
const std::vector<Rest>& rests() {
  auto& all_rests = all().rests;
  const auto is_over = [](const Rest& rest) {
    if (!rest.last.is_reached()) return false;
    rest.last.progress->stores.publish();
    return true;
  };
  all_rests.erase(std::remove_if(all_rests.begin(), all_rests.end(), is_over), all_rests.end());
  return all_rests;
}

bool is_blocking(CUstream stream) { return !(stream->flags & CU_STREAM_NON_BLOCKING); }

}  // namespace

std::string Point::describe() const {
  return "operation " + std::to_string(number) + " of stream " + std::to_string(progress->stream) + ", of which " +
         std::to_string(progress->done) + " are done";
}

CUstream resolve(CUstream handle) {
  if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) return legacy_stream(current_device());
  const auto& living = all().living;
  if (std::find(living.begin(), living.end(), handle) != living.end()) return handle;
  const auto& legacy = all().legacy;
  if (std::find(legacy.begin(), legacy.end(), handle) != legacy.end()) return handle;
  breach(CUDA_ERROR_INVALID_HANDLE, "%s: %p is no stream, or one destroyed", current_call(), static_cast<void*>(handle));
  return nullptr;
}

CUstream create_stream(int device, unsigned flags, int priority) {
  Lock lock(state());
  CUstream stream = make(device, flags, priority);
  all().living.push_back(stream);
  return stream;
}

void destroy_stream(CUstream stream) {
  Lock lock(state());
  leave_capture(stream);
  auto& living = all().living;
  living.erase(std::find(living.begin(), living.end(), stream));
  if (!settings().queues) stream->queue->close();
  rests();
  all().rests.push_back({last_of(stream), is_blocking(stream)});
  delete stream;
}

const std::vector<CUstream>& streams() { return all().living; }

CUresult submit(CUstream handle, CUgraphNodeType type, std::function<void()> run,
                std::function<std::function<void()>()> at_launch) {
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult sticky = sticky_error(stream->device)) return sticky;
  Operation operation{type, current_call(), std::move(run), std::move(at_launch)};
  if (stream->capture) return add_node(stream, std::move(operation));
  if (CUresult refused = order_with_default(stream)) return refused;
  push(stream, std::move(operation));
  return CUDA_SUCCESS;
}

void push(CUstream stream, Operation operation) {
  ++stream->submitted;
  stream->queue->push(std::move(operation), stream->progress);
}

void push_wait(CUstream stream, const Point& point) {
  if (point.is_reached() || point.progress == stream->progress) return;
  push(stream, {CU_GRAPH_NODE_TYPE_WAIT_EVENT, current_call(), [point, device = stream->device] {
                  wait_until(
                      device, [&] { return point.is_reached(); }, [&] { return point.describe(); });
                  point.progress->stores.publish();
                }});
}

CUresult order_with_default(CUstream stream) {
  if (!stream->legacy) {
    if (is_blocking(stream)) push_wait(stream, last_of(legacy_stream(stream->device)));
    return CUDA_SUCCESS;
  }
  for (CUstream other : all().living) {
    if (!is_blocking(other) || other->device != stream->device) continue;
    if (other->capture) return spoil(*other->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the default stream was used");
    push_wait(stream, last_of(other));
  }
  for (const Rest& rest : rests()) {
    if (rest.blocking && rest.last.progress->device == stream->device) push_wait(stream, rest.last);
  }
  return CUDA_SUCCESS;
}

Point last_of(CUstream stream) { return {stream->progress, stream->submitted}; }

CUresult wait_for(int device, const Point& point) {
  wait_until(
      device, [&] { return point.is_reached(); }, [&] { return point.describe(); });
  point.progress->stores.publish();
  return sticky_error(device);
}

CUresult wait_for_stream(CUstream handle) {
  Point point;
  int device;
  {
    Lock lock(state());
    CUstream stream = resolve(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) return spoil(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "it was waited for");
    point = last_of(stream);
    device = stream->device;
  }
  return wait_for(device, point);
}

CUresult wait_for_device(int device) {
  std::vector<Point> points;
  {
    Lock lock(state());
    for (CUstream stream : all().living) {
      if (stream->device == device) points.push_back(last_of(stream));
    }
    points.push_back(last_of(legacy_stream(device)));
    for (const Rest& rest : rests()) {
      if (rest.last.progress->device == device) points.push_back(rest.last);
    }
  }
  for (const Point& point : points) wait_for(device, point);
  return sticky_error(device);
}

}  // namespace softcuda

using namespace softcuda;

API cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  ENTER(Plain);
  *stream = create_stream(current_device(), flags, priority);
  note_made(Kind::Stream, key_of(*stream));
  return CUDA_SUCCESS;
}

API cuStreamCreate(CUstream* stream, unsigned flags) {
  ENTER(Plain);
  *stream = create_stream(current_device(), flags, 0);
  note_made(Kind::Stream, key_of(*stream));
  return CUDA_SUCCESS;
}

API cuStreamDestroy_v2(CUstream handle) {
  ENTER(Plain);
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream || stream->legacy) return CUDA_ERROR_INVALID_HANDLE;
  note_gone(Kind::Stream, key_of(stream));
  destroy_stream(stream);
  return CUDA_SUCCESS;
}

API cuStreamSynchronize(CUstream stream) {
  ENTER(NotInCapture);
  return wait_for_stream(stream);
}

API cuStreamQuery(CUstream handle) {
  ENTER(NotInCapture);
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture) return spoil(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "it was queried");
  if (!last_of(stream).is_reached()) return CUDA_ERROR_NOT_READY;
  stream->progress->stores.publish();
  return CUDA_SUCCESS;
}

namespace {

// What a question about a stream has in common: it needs one that lives.
template <class Answer>
CUresult ask(CUstream handle, Answer answer) {
  Lock lock(state());
  CUstream stream = resolve(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  answer(*stream);
  return CUDA_SUCCESS;
}

}  // namespace

API cuStreamGetPriority(CUstream handle, int* priority) {
  ENTER(Plain);
  return ask(handle, [&](const CUstream_st& stream) { *priority = stream.priority; });
}

API cuStreamGetFlags(CUstream handle, unsigned* flags) {
  ENTER(Plain);
  return ask(handle, [&](const CUstream_st& stream) { *flags = stream.flags; });
}

API cuStreamGetId(CUstream handle, unsigned long long* id) {
  ENTER(Plain);
  return ask(handle, [&](const CUstream_st& stream) { *id = stream.id; });
}

API cuStreamGetCtx(CUstream handle, CUcontext* context) {
  ENTER(Plain);
  return ask(handle, [&](const CUstream_st& stream) { *context = primary_context(stream.device); });
}

API cuStreamGetDevice(CUstream handle, CUdevice* device) {
  ENTER(Plain);
  return ask(handle, [&](const CUstream_st& stream) { *device = stream.device; });
}

namespace {

// A callback sees all that came before, and must not call CUDA.
template <class Function>
CUresult submit_callback(CUstream handle, Function function) {
  return submit(handle, CU_GRAPH_NODE_TYPE_HOST, [function] {
    running().progress->stores.publish();
    const Callback scope("a callback of the host");
    function();
  });
}

}  // namespace

API cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  ENTER(Plain);
  return submit_callback(stream, [=] { function(data); });
}

API cuStreamAddCallback(CUstream stream, CUstreamCallback function, void* data, unsigned) {
  ENTER(Plain);
  return submit_callback(stream, [=] { function(stream, CUDA_SUCCESS, data); });
}
